"""Start runs as users do, for tests: configurations, launchers, and the files that a run leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import yaml
from safetensors.torch import load_file

from forked import COMMANDS, PATIENCE, Command, until
from held import file_of, hold, release
from sagetrain.cluster.launcher import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STEPS = 40


def ended(code: int) -> SimpleNamespace:
    """Return a process that has ended, in the place of a run of `sagetrain compare`."""
    return SimpleNamespace(poll=lambda: code)


def write_metrics(run_dir: Path, tokens: int, loss: float) -> None:
    """Write the numbers of a run that has come to so many tokens."""
    run_dir.mkdir(parents=True, exist_ok=True)
    row = {"step": 1, "tokens": tokens, "train/loss": loss, "train/tokens_per_step": 256, "valid/loss": loss}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row | {"perf/tokens_per_second": 10.0}) + "\n")


def write_config(
    path: Path, corpus: Path, run_dir: Path, tp_size: int = 1, steps: int = STEPS, **sections: dict
) -> Path:
    """Write the configuration of a run of so many steps, with a ramp of tokens per step and a checkpoint about every 10
    steps."""
    # A sequence has 32 tokens: one half of the steps has 8 sequences each, the other half 16.
    ramp = steps // 2 * 256
    tokens = ramp + steps // 2 * 512
    tree = {
        "model": {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
        "attention": {"backend": "sage"},
        "parallel": {"tensor_parallel_size": tp_size, "zero_stage": 1},
        "data": {
            "train": [{"path": str(corpus / "train")}],
            "valid": [{"path": str(corpus / "valid")}],
            "seq_length": 32,
            "micro_batch_size": 4 * tp_size,  # A replica gets as many sequences, in fewer and larger pieces.
        },
        "tokens_per_step": {
            "schedule": "stages",
            "stages": [{"from_tokens": 0, "tokens": 256}, {"from_tokens": ramp, "tokens": 512}],
        },
        "optimizer": {"lr": 3e-3},
        "lr_schedule": {"warmup_tokens": 1024},
        "training": {"run_dir": str(run_dir), "total_tokens": tokens, "dtype": "fp32"},
        "evaluation": {"num_sequences": 8},
        "checkpoint": {"every_tokens": 2560},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    path.write_text(yaml.safe_dump(tree))
    return path


def command(launcher: str) -> list[str]:
    """Return a launcher's command: one process by `sagetrain`, two by `deepspeed` and `torchrun`, and by `ranks`, which
    stands in where no launcher is tested."""
    port, script = str(free_port()), str(ROOT / "launch/train.py")
    return {
        "sagetrain": ["sagetrain", "train"],
        "ranks": ["ranks", "2", port, "train"],
        "deepspeed": ["deepspeed", "--num_accelerators", "2", "--master_port", port, script],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", script],
    }[launcher]


def start(launcher: str | list[str], config: Path) -> Command | subprocess.Popen:
    """Start training by a launcher's name, or by its whole command up to launch/train.py."""
    words = command(launcher) if isinstance(launcher, str) else [*launcher, str(ROOT / "launch/train.py")]
    words += ["--config", str(config)]
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    if (held := file_of(config)).exists():
        env["HELD"] = str(held)
    log = config.with_suffix(".log")
    if words[0] in COMMANDS:
        return Command(words, env, log, config.parent)
    return subprocess.Popen(
        words, env=env, stdout=log.open("a"), stderr=subprocess.STDOUT, cwd=config.parent, start_new_session=True
    )


def finish(launcher: str | list[str], config: Path) -> None:
    code = start(launcher, config).wait(PATIENCE)
    assert code == 0, log_of(config)[-3000:]


def sagetrain(*words: object) -> subprocess.CompletedProcess[str]:
    """Run `sagetrain WORDS` to its end and return the result."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = (Path(folder, name) for name in ("output", "errors"))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = Command(["sagetrain", *map(str, words)], env, output, Path.cwd(), errors)
        code = command.wait(PATIENCE)
        return subprocess.CompletedProcess(command.args, code, output.read_text(), errors.read_text())


def run_dir_of(config: Path) -> Path:
    return Path(yaml.safe_load(config.read_text())["training"]["run_dir"])


def log_of(config: Path) -> str:
    return config.with_suffix(".log").read_text()


def when(launcher: str | list[str], config: Path, ready: Callable[[], bool], act: Callable[[Command], None]) -> int:
    """Start a run, do `act` as soon as `ready`, and return the launcher's exit code. Until then the run waits before
    its last step, or before the step that `hold` has named."""
    if not file_of(config).exists():
        hold(config)
    process = start(launcher, config)
    wait_for(process, config, ready)
    act(process)
    release(config)
    return process.wait(PATIENCE)


def wait_for(process: Command | subprocess.Popen, config: Path, ready: Callable[[], bool]) -> None:
    """Wait until a run has come so far that `ready`. If it ends before, the test fails with the end of its log."""
    until(ready, lambda: process.poll() is None, lambda: log_of(config)[-3000:])


def reached(config: Path, step: int) -> Callable[[], bool]:
    """Return a function that says whether the run has reported `step`."""
    metrics = run_dir_of(config) / "metrics.jsonl"
    return lambda: metrics.exists() and f'"step": {step},' in metrics.read_text()


def at_step(launcher: str | list[str], config: Path, step: int, act: Callable[[Command], None]) -> int:
    """Start a run, do `act` once metrics.jsonl shows `step`, and return the launcher's exit code."""
    return when(launcher, config, reached(config, step), act)


def ranks_of(launcher: Command) -> list[psutil.Process]:
    """Return the processes that train, in the order of their ranks, without the launcher's own."""
    ranks = {rank_of(process): process for process in psutil.Process(launcher.pid).children(recursive=True)}
    return [ranks[rank] for rank in sorted(ranks.keys() - {None})]


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank that a forked process has in its name, any other in its environment; None for a launcher."""
    words = process.name().split()
    rank = words[1] if words[0] == "rank" else process.environ().get("RANK")
    return None if rank is None else int(rank)


def kill_all(process: Command) -> None:
    """Kill the launcher and every rank with SIGKILL, youngest first."""
    launcher = psutil.Process(process.pid)
    children = launcher.children(recursive=True)
    for child in reversed([launcher, *children]):
        with contextlib.suppress(psutil.NoSuchProcess):  # A rank may end by itself when another one is gone.
            child.send_signal(signal.SIGKILL)
    psutil.wait_procs(children, timeout=PATIENCE)  # The ranks hold the run's folder until they have ended.


def final_tensors(run_dir: Path, steps: int) -> dict:
    folder = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    assert folder.name == f"step-{steps:08d}"
    return {f"{file.name}|{k}": v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def rows_of(run_dir: Path | str, name: str = "metrics") -> list[dict]:
    """Return what a run has written into metrics.jsonl, or into the file of another name."""
    return [json.loads(line) for line in Path(run_dir, f"{name}.jsonl").read_text().splitlines()]


def check_scored(run_dir: Path, *words: str) -> dict:
    """Check that `sagetrain eval` measures the loss of the run's last evaluation, and return what it says."""
    *_, last = (row["valid/loss"] for row in rows_of(run_dir) if "valid/loss" in row)
    scored = json.loads(sagetrain("eval", run_dir, *words, "--json").stdout)
    assert abs(scored["all"]["loss"] - last) < 2e-3 * last, (scored, last)
    return scored


def training_rows(run_dir: Path) -> list[dict]:
    return [{k: row[k] for k in ("step", "tokens", "train/loss", "train/lr", "train/tokens_per_step")}
            for row in rows_of(run_dir) if "train/loss" in row]  # fmt: skip


def check_same(run_dir: Path, reference: Path, steps: int = STEPS) -> None:
    ours, theirs = final_tensors(run_dir, steps), final_tensors(reference, steps)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not ours[key].equal(theirs[key])] == []
    assert training_rows(run_dir) == training_rows(reference)
    assert [row["step"] for row in training_rows(run_dir)] == list(range(1, steps + 1))


def check_killed(
    folder: Path, corpus: Path, steps: int, killed_at: int, sections: dict, launcher: str = "ranks"
) -> None:
    """Train a run to its end, and another one that is killed on the way and continued, with the same bits. They are
    `whole` and `cut` in `folder`. The first one is started by `launcher`."""
    whole = write_config(folder / "whole.yaml", corpus, folder / "whole", steps=steps, **sections)
    finish(launcher, whole)
    # With a save after every step, one is being written when the kill comes.
    every_step = {"every_tokens": 256}
    cut = write_config(folder / "cut.yaml", corpus, folder / "cut", steps=steps, **sections, checkpoint=every_step)
    assert when("ranks", cut, reached(cut, killed_at), kill_all) != 0
    finish("ranks", cut)
    assert "resumed from step-" in log_of(cut)
    check_same(folder / "cut", folder / "whole", steps)

"""benchmarks/layouts.py runs as a user starts it, on the cores of this machine."""

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from forked import PATIENCE, Command
from layout_run import Layout, deepspeed
from runs import BIN, ROOT, write_config
from sagetrain.config.load import load_config
from sagetrain.storage.local import read_rows

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def words(config: Path, layouts: str, steps: int, *overrides: str) -> list[str]:
    program = [str(ROOT / "benchmarks/layouts.py"), "--config", str(config)]
    return [*program, "--layouts", layouts, *overrides, "--steps", str(steps), "--output", str(config.parent / "out")]


def start(folder: Path, *words: str) -> Command:
    """Start the benchmark with these words in this folder. Its output goes to output.txt there."""
    env = {**os.environ, **ENVIRONMENT, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return Command(["python", *words], env, folder / "output.txt", folder)


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *what: object) -> str:
    """Return the message of the benchmark, run in this process, when it starts nothing."""
    monkeypatch.setattr(sys, "argv", words(*what))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert left.value.code
    return f"{capsys.readouterr().err}{left.value.code}"


def runs_left(folder: Path) -> list[psutil.Process]:
    """Return the processes that write to the log of a run."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):  # The process has ended.
            if Path(os.readlink(f"/proc/{process.pid}/fd/1")).is_relative_to(folder / "out"):
                found.append(process)
    return found


def test_table_of_two_layouts_on_random_tokens(corpus: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "unused", checkpoint={"every_tokens": 10**9})
    random = "--random-tokens", "--tokens-per-step", "512", "model.vocab_size=300", "training.total_tokens=1000000000"
    process = start(tmp_path, *words(config, "tp1,tp2-sp", 1, *random))
    code, text = process.wait(PATIENCE), (tmp_path / "output.txt").read_text()
    assert code == 0, text
    rows = {line.split("│")[1].strip(): line.split("│") for line in text.splitlines() if line.startswith("│")}
    assert rows["tp1"][2].strip() == "1" and rows["tp1"][6].strip() == "1.000"
    assert rows["tp1"][4].strip() == "-"  # Speed is not predicted for a CPU.
    assert rows["tp2-sp"][2].strip() == "2" and 0 < float(rows["tp2-sp"][6]) < 5
    assert not runs_left(tmp_path)
    assert not list(tmp_path.glob("out/*/checkpoints"))
    written = json.loads((tmp_path / "out/results.json").read_text())["layouts"]
    assert [(row["name"], row["gpus"], row["error"]) for row in written] == [("tp1", 1, ""), ("tp2-sp", 2, "")]
    for row in written:
        (line,) = re.findall(rf"^\| {row['name']} \| .*", (tmp_path / "out/results.md").read_text(), re.M)
        assert line.startswith(f"| {row['name']} | {row['gpus']} | {row['rate']:,.0f} |")
        assert line.endswith(f" | {row['losses'][-1]:.5g} | {row['norms'][-1]:.5g} |")
        assert row["losses"][0] == pytest.approx(math.log(300), abs=0.2)
        steps = read_rows(tmp_path / "out" / row["name"] / "metrics.jsonl")
        assert [step["train/tokens_per_step"] for step in steps[:3]] == [256, 256, 512]  # Two micro-steps warm up.
    kept = (tmp_path / "out/tp2-sp/metrics.jsonl").read_bytes()
    # The second layout would give the first one's figures as its own.
    text = refusal(monkeypatch, capsys, config, "tp1-dp2,tp2-sp", 1)
    assert f"{tmp_path}/out/tp2-sp holds an earlier measurement; name another" in text and text.endswith("2")
    assert not (tmp_path / "out/tp1-dp2").exists() and (tmp_path / "out/tp2-sp/metrics.jsonl").read_bytes() == kept


def test_relative_config_fresh_folder_and_exit_code(corpus: Path, tmp_path: Path) -> None:
    """The benchmark starts from another folder, where paths are as the caller means them. The run reads its
    configuration, then fails."""
    write_config(tmp_path / "run.yaml", corpus, tmp_path / "unused")
    program = [str(ROOT / "benchmarks/layouts.py"), "--config", "run.yaml", "--layouts", "tp1"]
    overrides = ["--steps", "100", "training.total_tokens=2048"]  # These are too few tokens for the steps.
    assert start(tmp_path, *program, *overrides).wait(PATIENCE) == 1, (tmp_path / "output.txt").read_text()
    (log,) = (tmp_path / "runs/layouts").glob("????????-??????/tp1/log.txt")
    assert "cannot be read" not in log.read_text()
    assert (log.parent / "metrics.jsonl").exists()


def test_bad_layouts_are_refused_before_anything_starts(corpus: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "unused")
    for layouts, steps, said in (
        ("tp1,xp2", 1, "'xp2' is not one of tpN"),
        ("tp1,tp4096", 1, "needs 4096 GPUs"),
        ("z9", 1, "zero_stage"),
        ("tp1,dp2,tp1", 1, "names a layout twice"),
        ("tp1", 0, "--steps 0: at least 1"),
    ):
        assert said in refusal(monkeypatch, capsys, config, layouts, steps)
        assert not (tmp_path / "out").exists()


def test_flags_of_a_layout_are_settings_of_its_run(corpus: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "unused")
    for name, sequence, reduction in (
        ("dp2", False, "fp32"),
        ("tp2-sp-g16", True, "bf16"),
        ("dp2-z2-g16", False, "bf16"),
    ):
        layout = Layout.parse(name)
        cfg = load_config(config, layout.settings(load_config(config), tmp_path, 2))
        assert layout.world_size == 2 and cfg.parallel.zero_stage == (2 if "z2" in name else 1)
        assert (cfg.parallel.sequence_parallel, cfg.parallel.gradient_reduction) == (sequence, reduction)
    layout = Layout.parse("dp2-pp4-v2-fsdp-moments16")
    cfg = load_config(config, layout.settings(load_config(config), tmp_path, 2))
    assert layout.world_size == 8 and (cfg.parallel.engine, cfg.optimizer.moments) == ("fsdp", "bf16")
    assert (cfg.parallel.pipeline_parallel_size, cfg.parallel.pipeline_chunks) == (4, 2)


def test_a_layout_names_its_micro_batch_and_its_arithmetic(corpus: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "unused", training={"dtype": "bf16"})
    layout = Layout.parse("dp2-m2-full-noqk-fp8-scores")
    cfg = load_config(config, layout.settings(load_config(config), tmp_path, 4, tokens=1024))
    assert (cfg.data.micro_batch_size, cfg.training.activation_checkpointing) == (2, "full")
    assert cfg.linear.precision == "fp8"
    assert (cfg.attention.backend, cfg.attention.recipe, cfg.attention.qk_norm) == ("sage", "scores", "none")
    assert [stage.tokens for stage in cfg.tokens_per_step.stages] == [2 * 2 * 2 * 32, 1024]
    parse = Layout.parse
    assert layout.arithmetic == parse("tp2-scores-fp8-noqk-sp").arithmetic != parse("tp2-fp8").arithmetic


@pytest.mark.parametrize(("losses", "tokens", "said"), [
    ([6.3, 6.3, 6.2], [256, 256, 512], ""), ([6.3, math.nan, 6.2], [256, 256, 512], "wrong: the loss of step 2 is nan"),
    ([4.0, 6.3, 6.2], [256, 256, 512], "wrong: the first loss is 4.000, not near 6.238"),
    ([6.3, 6.3, 6.2], [256, 256, 256], "wrong: step 3 had 256 tokens, not 512"),
    ([6.3, 6.3], [256, 256], "2 of 3 steps in 9 s"),
])  # fmt: skip
def test_wrong_and_late_runs_are_not_timed(losses, tokens, said, corpus: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "unused")
    layout = Layout.parse("dp1")
    cfg = load_config(config, layout.settings(load_config(config), tmp_path / "dp1", 4, tokens=512))
    (tmp_path / "dp1").mkdir()
    with (tmp_path / "dp1/metrics.jsonl").open("w") as file:
        for i, (loss, size) in enumerate(zip(losses, tokens, strict=True)):
            row = {"step": i + 1, "tokens": sum(tokens[: i + 1]), "train/loss": loss, "train/tokens_per_step": size}
            file.write(json.dumps({**row, "perf/tokens_per_second": 7.0, "perf/memory_gib": 1.0}) + "\n")
    layout.process, layout.started = subprocess.Popen(["sleep", "60"], start_new_session=True), time.monotonic() - 10
    assert layout.finished(cfg, 512, 1, 9)
    assert layout.process.returncode == -signal.SIGKILL
    assert (layout.error, layout.rate, layout.rates) == (said, 0.0 if said else 7.0, [7.0] * len(losses))


def test_sigterm_ends_the_runs_too(corpus: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "unused", checkpoint={"every_tokens": 10**9})
    process = start(tmp_path, *words(config, "tp1", 10**6, "training.total_tokens=1000000000"))
    log = tmp_path / "out/tp1/log.txt"
    deadline = time.monotonic() + PATIENCE
    while not (log.exists() and "parameters" in log.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail((tmp_path / "output.txt").read_text())
        time.sleep(0.05)
    assert runs_left(tmp_path)
    process.terminate()
    assert process.wait(PATIENCE)
    while runs_left(tmp_path):  # A process that was killed is listed until the system has taken it down.
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_runs_stay_on_the_gpus_that_are_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 of this process may be GPU 5 of a shared host."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks/layouts.py"))
    launcher = tmp_path / "bin" / "deepspeed"
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES: $*"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{launcher.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,7")
    assert benchmark["devices"]() == ["5", "2", "7"]
    layout = Layout.parse("tp2")
    layout.start(["5", "7"], "run.yaml", [], tmp_path / "tp2")
    layout.process.wait()
    said = (tmp_path / "tp2" / "log.txt").read_text()
    assert said.startswith("5,7: --hostfile /dev/null ") and "--include" not in said
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert benchmark["devices"]() == ["0", "1", "2"]


def test_the_launcher_beside_python_is_found_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = deepspeed()
    assert Path(found) == Path(sys.executable).with_name("deepspeed") and os.access(found, os.X_OK)

"""Everything that watches and steers a run, at once on a GPU, in two small compiled runs, one of which is killed.

It is one test, so that processes side by side do not repeat its runs. The test ends with the first run that fails.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml

from on_gpu import needs_gpu
from probed import changes, run_with_room
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.manifest import read_manifest
from sagetrain.config.schema import DataSource, NoiseAwareTokens
from sagetrain.corpus.token_writer import TokenFileWriter
from streams import stream_of

pytestmark = [*needs_gpu(), pytest.mark.long]
SEQ, VOCAB, STEP = 256, 512, 8 * 256
TOKENS, PROBED = 56 * STEP, 2
SCHEDULE = {
    "schedule": "noise_aware",
    "start": STEP,
    "floor": STEP,
    "ceiling": 2 * STEP,
    "hold_tokens": 2 * STEP,
    "margin": 1000.0,
    "max_factor": 2.0,
}
EXPECTED = run_with_room(NoiseAwareTokens.model_validate(SCHEDULE), PROBED, TOKENS)
BAD = 22
SPOILED = range(sum(EXPECTED.sizes[: BAD - 1]) // SEQ, sum(EXPECTED.sizes[:BAD]) // SEQ)
"""The samples of step BAD, which hold one token again and again."""
SECONDS = 1200.0


def make_data(folder: Path) -> None:
    """Write a token file of random walks over half of the vocabulary, which are easy to learn. Spoiled samples hold one
    token of the other half."""
    draw = np.random.default_rng(0)
    for name, windows in (("order", None), ("train", SPOILED)):
        tokens = np.cumsum(draw.integers(0, 3, size=2_000 * SEQ)) % (VOCAB // 2)
        if windows:
            stream = stream_of([DataSource(path=str(folder / "order"))], SEQ, 0)
            for sample in windows:
                _, window = stream.locate(sample)
                tokens[window * SEQ : (window + 1) * SEQ] = VOCAB - 1
        writer = TokenFileWriter(folder / name).begin(VOCAB)
        writer.add(tokens.astype(np.uint16), np.full(len(tokens) // 100, 100))
        writer.finish()
        writer.publish({})
        (folder / f"{name}.json").unlink()  # Megatron's files come without a tokenizer too.


def write_config(folder: Path, policy: str) -> Path:
    tree = {
        "model": {
            "num_layers": 3,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "num_attention_heads": 2,
            "vocab_size": VOCAB,
        },
        "attention": {"backend": "sage", "recipe": "paper"},
        "data": {"train": [{"path": str(folder / "train")}], "seq_length": SEQ, "micro_batch_size": 2},
        "tokens_per_step": SCHEDULE,
        "optimizer": {"lr": 3e-3},
        "lr_schedule": {"shape": "constant"},
        "training": {"run_dir": str(folder / policy), "total_tokens": TOKENS, "dtype": "bf16", "compile": "on"},
        "checkpoint": {"every_tokens": 8 * STEP, "keep_last": 4},
        "stability": {
            "monitor": {"every_steps": 2},
            "noise_scale": {"every_steps": 1},
            "quant_noise": {"every_steps": PROBED},
            "spikes": {"policy": policy, "window": 16, "grace_steps": 6},
        },
    }
    path = folder / f"{policy}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


PROGRAM = """
import shlex, sys
import sagetrain.cli.main, sagetrain.training.trainer
sys.argv[1:] = shlex.split(sys.stdin.readline())
from sagetrain.__main__ import program
program()
"""


class Process:
    """A `sagetrain` process that imports at once and waits for its words, so that it imports while others compile. Its
    output goes to NAME.out, and its stderr to NAME.log."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log, (folder / f"{name}.out").open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=out, stderr=log, start_new_session=True
            )

    def begin(self, *words: object) -> None:
        self._process.stdin.write(f"{shlex.join(map(str, words))}\n".encode())
        self._process.stdin.close()

    def running(self) -> bool:
        code = self._process.poll()
        assert not code, f"exit code {code}: {self._log.read_text()[-3000:]}"
        return code is None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for(ready: Callable[[], bool], *processes: Process) -> None:
    deadline = time.monotonic() + SECONDS
    while not ready():
        running = [process.running() for process in processes]
        assert any(running) or ready(), "the runs have ended before"
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


def rows_of(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()] if (run / name).exists() else []


def steps_of(run: Path) -> dict[int, dict]:
    return {row["step"]: row for row in rows_of(run) if "train/loss" in row}


def events_of(run: Path, kinds: Sequence[str]) -> list[tuple]:
    keys = "step", "kind", "action", "weights_of", "layers", "from", "to", "first_step"
    return [tuple(map(row.get, keys)) for row in rows_of(run, "events.jsonl") if row["kind"] in kinds]


def test_runs_are_watched_and_steered(tmp_path: Path) -> None:
    """The run `skip` goes through. The run `rewind`, equal up to the spoiled step, is killed before that step and
    continued."""
    make_data(tmp_path)
    train = {policy: ("train", "--config", write_config(tmp_path, policy)) for policy in ("skip", "rewind")}
    skip, rewind, again = processes = [Process(tmp_path, name) for name in ("skip", "rewind", "rewind")]
    try:
        skip.begin(*train["skip"])
        rewind.begin(*train["rewind"])
        wait_for(lambda: max(steps_of(tmp_path / "rewind"), default=0) >= 12, skip, rewind)
        rewind.kill()
        again.begin(*train["rewind"])
        wait_for(lambda: not skip.running(), skip, again)
        check_skip(tmp_path / "skip")
        wait_for(lambda: not again.running(), again)
        check_rewind(tmp_path / "rewind", tmp_path / "skip")
    finally:
        for process in processes:
            process.kill()


def state_of(run: Path) -> dict:
    return read_manifest(on_disk.newest(run / "checkpoints"))["state"]


def check_skip(run: Path) -> None:
    steps, log = steps_of(run), run.with_suffix(".log").read_text()
    assert "quant/1/dS/rel_l2" in steps[2] and "quant/1/K/gain_max" in steps[2] and "quant/1/dS/rel_l2" not in steps[3]
    assert 0 < steps[2]["quant/1/dS/rel_l2"] < 0.5 < steps[2]["quant/1/dS/cosine"]
    assert all(row["noise/all/variance"] > 0 for row in steps.values())
    assert steps[2]["quant_noise/all/error_square"] > 0 and steps[2]["quant_noise/all/ratio"] > 0
    assert [event[-3:] for event in events_of(run, ["tokens_per_step"])] == changes(EXPECTED.events)
    sizes = {step: size for step, size in enumerate(EXPECTED.sizes, 1) if step != BAD}
    assert {step: row["train/tokens_per_step"] for step, row in steps.items()} == sizes
    assert "recompile_limit" not in log
    last = max(steps)
    assert steps[last]["perf/memory_gib"] < 1.05 * steps[last // 2]["perf/memory_gib"] + 0.01
    assert [event[:4] for event in events_of(run, ["spike"])] == [(BAD, "spike", "skip", BAD - 1)]
    assert state_of(run)["ledger"]["dropped"] == [BAD]


def check_rewind(run: Path, other: Path) -> None:
    """Check that the killed run equals the other run before the spoiled step. Losses are as near as INT8 codes allow,
    because a GPU adds in another order each time."""
    assert "resumed from step-" in run.with_suffix(".log").read_text()
    ((step, _, action, weights_of, *_),) = events_of(run, ["spike"])
    assert (step, action) == (BAD, "rewind") and weights_of < BAD - 1
    assert state_of(run)["ledger"]["dropped"] == list(range(weights_of + 1, BAD + 1))
    before = [[event for event in events_of(each, ["tokens_per_step"]) if event[0] < BAD] for each in (run, other)]
    assert before[0] == before[1] and before[0]
    ours, theirs = ({n: row for n, row in steps_of(each).items() if n < BAD} for each in (run, other))
    assert sorted(ours) == sorted(theirs) == list(range(1, BAD))
    for number, row in theirs.items():
        assert ours[number]["train/tokens_per_step"] == row["train/tokens_per_step"]
        assert ours[number]["train/loss"] == pytest.approx(row["train/loss"], abs=0.1), number

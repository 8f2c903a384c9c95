"""What watches and steers a run, on a GPU: all of it at once in small compiled runs, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from sagetrain.config.schema import DataSource
from sagetrain.data.loader import SampleStream
from sagetrain.data.token_file import TokenFileWriter
from sagetrain.model.norm import is_qk_gain
from sagetrain.train import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-gpu"),
]
SEQ, VOCAB, STEP = 256, 512, 8 * 256
CAP = 1.02
BAD = 22
SPOILED = range(3 * 8 + (BAD - 4) * 16, 3 * 8 + (BAD - 3) * 16)
"""Samples of one token, again and again: those of step BAD, as steps have 8 samples before the fourth, then 16."""
SECONDS = 300.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file of random walks over half of the vocabulary, easy to learn; one token of the other half where it is
    spoiled."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for name, windows in (("order", None), ("train", SPOILED)):
        tokens = np.cumsum(draw.integers(0, 3, size=2_000 * SEQ)) % (VOCAB // 2)
        if windows:
            stream = SampleStream([DataSource(path=str(folder / "order"))], SEQ, 0)
            for sample in windows:
                _, window = stream.locate(sample)
                tokens[window * SEQ : (window + 1) * SEQ] = VOCAB - 1
        writer = TokenFileWriter(folder / name, VOCAB)
        writer.add(tokens.astype(np.uint16), np.full(len(tokens) // 100, 100))
        writer.finish()
        writer.publish({})
        (folder / f"{name}.json").unlink()  # as files of Megatron's, which come without a tokenizer
    return folder


def write_config(folder: Path, data: Path, name: str, policy: str) -> Path:
    tree = {
        "model": {
            "num_layers": 3,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "num_attention_heads": 2,
            "vocab_size": VOCAB,
        },
        "attention": {"backend": "sage", "recipe": "paper"},
        "data": {"train": [{"path": str(data / "train")}], "seq_length": SEQ, "micro_batch_size": 2},
        "tokens_per_step": {
            "schedule": "noise_aware",
            "start": STEP,
            "floor": STEP,
            "ceiling": 2 * STEP,
            "hold_tokens": 2 * STEP,
            "margin": 1000.0,
            "max_factor": 2.0,
        },
        "optimizer": {"lr": 3e-3},
        "lr_schedule": {"shape": "constant"},
        "training": {"run_dir": str(folder / name), "total_tokens": 56 * STEP, "dtype": "bf16", "compile": "on"},
        "checkpoint": {"every_tokens": 8 * STEP, "keep_last": 4},
        "stability": {
            "monitor": {"every_steps": 2},
            "noise_scale": {"every_steps": 1},
            "quant_noise": {"every_steps": 2},
            "spikes": {"policy": policy, "window": 16, "grace_steps": 6},
            "qk_gain": {"cap": CAP},
            "precision": {
                "rungs": ["fine", "gradients", "sdpa"],
                "floors": [{"rung": "fine", "first_layers": 1}, {"rung": "sdpa", "last_fraction": 0.1}],
                "threshold": {"metric": "quant/*/dQ/rel_l2", "above": 1e-4, "cooldown_tokens": 28 * STEP},
                "spike_tokens": 4 * STEP,
            },
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(folder: Path, *words: object) -> subprocess.Popen[bytes]:
    with (folder / f"{Path(words[-1]).stem}.log").open("ab") as log:
        command = [sys.executable, "-m", "sagetrain", *map(str, words)]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def rows_of(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()] if (run / name).exists() else []


def steps_of(run: Path) -> dict[int, dict]:
    return {row["step"]: row for row in rows_of(run) if "train/loss" in row}


def events_of(run: Path, kinds: Sequence[str]) -> list[tuple]:
    keys = "step", "kind", "action", "weights_of", "layers", "from", "to", "first_step"
    return [tuple(map(row.get, keys)) for row in rows_of(run, "events.jsonl") if row["kind"] in kinds]


def kill_after(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    deadline = time.monotonic() + SECONDS
    while max(steps_of(run), default=0) < step:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Folder of the runs `skip`, `killed` (the same, killed behind the spoiled steps and continued) and `rewind`."""
    folder = tmp_path_factory.mktemp("runs")
    policies = {"skip": "skip", "killed": "skip", "rewind": "rewind"}
    configs = {name: write_config(folder, data, name, policy) for name, policy in policies.items()}
    processes = {name: start(folder, "train", "--config", path) for name, path in configs.items()}
    try:
        kill_after(processes["killed"], folder / "killed", BAD + 1)
        processes["killed"] = start(folder, "train", "--config", configs["killed"])
        for name, process in processes.items():
            assert process.wait(SECONDS) == 0, (folder / f"{name}.log").read_text()[-3000:]
    finally:
        for process in processes.values():
            process.kill()
    return folder


def test_everything_is_measured_and_moves_what_it_should(runs: Path) -> None:
    run = runs / "skip"
    steps, log = steps_of(run), (runs / "skip.log").read_text()
    assert "quant/1/dS/rel_l2" in steps[2] and "quant/1/K/gain_max" in steps[2] and "quant/1/dS/rel_l2" not in steps[3]
    assert 0 < steps[2]["quant/1/dS/rel_l2"] < 0.5 < steps[2]["quant/1/dS/cosine"]
    assert all(row["noise/all/variance"] > 0 for row in steps.values())
    assert steps[2]["quant_noise/all/error_square"] > 0 and steps[2]["quant_noise/all/ratio"] > 0
    (raised,) = events_of(run, ["tokens_per_step"])
    assert raised[0] == 2 and raised[-3:] == (STEP, 2 * STEP, 4)
    assert [steps[step]["train/tokens_per_step"] for step in (3, 4)] == [STEP, 2 * STEP]
    causes = [row["cause"].split()[0] for row in rows_of(run, "events.jsonl") if row["kind"] == "precision"]
    assert {"quant/*/dQ/rel_l2", "a", "no", "schedule"} <= set(causes)
    assert "layer 0" in log and "recompile_limit" not in log
    capped = [row["qk_gain/capped_share"] for row in steps.values()]
    assert 0 < max(capped) <= 1
    (file,) = checkpoint.newest(run / "checkpoints").glob("*.safetensors")
    gains = {name: values for name, values in load_file(file).items() if is_qk_gain(name.removesuffix("|weight"))}
    assert len(gains) == 6 and all(values.abs().max() <= torch.tensor(CAP) for values in gains.values())
    last = max(steps)
    assert steps[last]["perf/memory_gib"] < 1.05 * steps[last // 2]["perf/memory_gib"] + 0.01


def test_a_spoiled_step_is_left_out_or_gone_back_from(runs: Path) -> None:
    for name, weights_of in (("skip", BAD - 1), ("rewind", None)):
        (spike,) = events_of(runs / name, ["spike"])
        assert spike[:3] == (BAD, "spike", name)
        assert spike[3] == weights_of if weights_of else spike[3] < BAD - 1
        state = checkpoint.read_manifest(checkpoint.newest(runs / name / "checkpoints"))["state"]
        assert state["ledger"]["dropped"] == list(range(spike[3] + 1, BAD + 1))


def test_a_killed_run_decides_as_one_that_was_not(runs: Path) -> None:
    """Losses are as near as INT8 codes let them be: sums of a GPU come in another order each time."""
    whole, killed = steps_of(runs / "skip"), steps_of(runs / "killed")
    assert "resumed from step-" in (runs / "killed.log").read_text()
    assert whole.keys() == killed.keys()
    assert all(whole[step]["train/tokens_per_step"] == killed[step]["train/tokens_per_step"] for step in whole)
    kinds = "tokens_per_step", "precision", "spike"
    assert events_of(runs / "skip", kinds) == events_of(runs / "killed", kinds)
    for step, row in whole.items():
        assert killed[step]["train/loss"] == pytest.approx(row["train/loss"], abs=0.1), step


def test_a_bundle_is_replayed(runs: Path) -> None:
    (bundle, *_) = sorted((runs / "rewind" / "spikes").iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "sagetrain", "replay", bundle, "--attention", "sdpa", "--json"],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["cause"] == "data" and found["drift"] < 0.05

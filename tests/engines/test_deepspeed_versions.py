"""The newest DeepSpeed of the registry takes the same steps in our engines as the pinned one.

Run as a script, this file prints the results of the steps of every ZeRO stage with the DeepSpeed that it finds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from runs import ROOT
from sagetrain.engines.protocol import Observers
from sagetrain.stability.spikes import Verdict

CASES = [(0, "fp32"), *((stage, dtype) for stage in (1, 2) for dtype in ("fp32", "bf16"))]


def steps() -> dict[str, Any]:
    """Take two steps at each stage, and a refused step between them. Return losses and norms, and a hash of the tensors
    that the engine keeps, or the error."""
    groups, found = tiny.join(1), {}
    refuse = Observers(judge=lambda metrics: Verdict(apply=False))
    for stage, dtype in CASES:
        try:
            by_deepspeed = {"parallel": {"engine": "deepspeed"}, "optimizer": {"clip_grad": 0.5}}
            engine = tiny.engine(tiny.config(stage, dtype, **by_deepspeed), groups)
            taken = [tiny.global_step(engine, n, observers=refuse if n == 1 else None) for n in range(3)]
            kept = [tensor.numpy().tobytes() for own in engine.owned() for tensor in map(own.read, own.kinds)]
            numbers = {
                "loss": [step.loss for step in taken],
                "norm": [step.grad_norm for step in taken],
                "applied": [step.applied for step in taken],
                "kept": hashlib.sha256(b"".join(kept)).hexdigest(),
                "error": "",
            }
        except Exception as error:  # noqa: BLE001 - whatever it is, the version did it
            numbers = {"error": f"{type(error).__name__}: {error}"}
        found.update((f"ZeRO {stage} in {dtype}: {name}", value) for name, value in numbers.items())
    return found


def with_deepspeed_at(folder: Path | None) -> dict[str, Any]:
    """Return the results of `steps` in a process that finds DeepSpeed in a folder. None: the installed DeepSpeed."""
    path = [*([str(folder)] if folder else []), *(str(ROOT / place) for place in ("tests", ".", "kernels"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def changes(version: str, folder: Path) -> tuple[list[str], list[str]]:
    """Install a version into a folder and compare the results of its steps with those of the installed version. Return
    the numbers that differ by rounding, and all other differences."""
    how = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, f"deepspeed=={version}"], check=True, timeout=300)
    ours, theirs = with_deepspeed_at(None), with_deepspeed_at(folder)
    rounded, wrong = list[str](), list[str]()
    for name, value in ours.items():
        if (other := theirs.get(name)) != value:
            # A hash says no more than the numbers beside it, and steps in bf16 have 8 bits.
            near = name.endswith("kept") or (
                name.endswith(("loss", "norm")) and other == pytest.approx(value, rel=2**-8)
            )
            (rounded if near and other else wrong).append(f"{name} {value} is now {other}")
    return rounded, wrong


def test_the_newest_deepspeed_takes_the_steps_of_the_pinned_one(tmp_path: Path) -> None:
    pinned = re.search(r"^deepspeed==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    ask = [sys.executable, "-m", "pip", "index", "versions", "deepspeed", "--disable-pip-version-check"]
    asked = subprocess.run([*ask, "--retries", "0", "--timeout", "10"], capture_output=True, text=True, timeout=60)
    newest = re.match(r"deepspeed \((\S+)\)", asked.stdout)
    if newest is None:
        pytest.skip(f"the registry does not answer: {asked.stderr.strip()[-200:]}")
    if newest[1] == pinned:
        print(f"DeepSpeed {pinned} is pinned, and the newest")
        return
    rounded, wrong = changes(newest[1], tmp_path)
    print(f"DeepSpeed {newest[1]} beside {pinned}, which is pinned:", *(rounded or ["the same bits"]), sep="\n")
    assert wrong == [], f"DeepSpeed {newest[1]} does not take the steps of {pinned}"


if __name__ == "__main__":
    print(json.dumps(steps()))

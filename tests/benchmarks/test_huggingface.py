"""The benchmark of transformers' Trainer compares before it times, and names what fails or is not run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import sagekernels.huggingface

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("benchmark_huggingface", ROOT / "benchmarks/huggingface.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)
SMALL = ["--layers=1", "--hidden=64", "--heads=4", "--inner=96", "--vocab=64", "--tokens=48", "--batch=2", "--steps=6"]


def test_a_table_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main([*SMALL, "--cases=sdpa,sage+int8,nothing", "--seconds=300"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    found = {row[0].removeprefix("| "): row[1:] for row in rows}
    assert found["sdpa"][1] == "1.000" and float(found["sage+int8"][1]) > 0
    assert found["nothing"][0].startswith("ValueError: Specified `attn_implementation=")


def test_late_cases_and_wrong_attention_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "timed", lambda asked, case: (1.0, 0.0, 0.0))
    benchmark.main([*SMALL, "--cases=sdpa,sage", "--seconds=0"])
    assert "| sage | not run: out of time" in capsys.readouterr().out
    right = sagekernels.huggingface.sage_attention
    monkeypatch.setattr(sagekernels.huggingface, "sage_attention", lambda *args, **how: 1.2 * right(*args, **how))
    with pytest.raises(SystemExit, match="nothing is timed: whole: logits"):
        benchmark.main(SMALL)
    with pytest.raises(SystemExit, match="--steps 5: the first 4 steps are not timed"):
        benchmark.main(["--steps=5"])
    assert torch.is_grad_enabled()

"""Noise and what follows from it in runs as users start them: what is logged, and what a resumed run does."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from runs import at_step, finish, write_config


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def noise_of(run_dir: Path, prefix: str = "noise/") -> dict[int, dict[str, float]]:
    found = [(row["step"], {k: v for k, v in row.items() if k.startswith(prefix)}) for row in rows(run_dir)]
    return {step: values for step, values in found if values}


def test_the_noise_of_a_run_is_logged_and_a_resumed_run_goes_on_with_its_averages(tmp_path, corpus) -> None:
    stability = {"noise_scale": {"every_steps": 3}, "quant_noise": {"every_steps": 9}}
    sections = {"training": {"total_tokens": 18 * 256}, "stability": stability}
    whole = write_config(tmp_path / "whole.yaml", corpus, tmp_path / "whole", **sections)
    finish("sagetrain", whole)
    logged = noise_of(tmp_path / "whole")
    assert sorted(logged) == [3, 6, 9, 12, 15, 18]
    layers = {"embedding", "0", "1", "head", "all"}
    assert {tuple(key.split("/")) for key in logged[18]} == {
        ("noise", layer, what) for layer in layers for what in ("scale_tokens", "variance", "gradient_square")
    }
    probes = noise_of(tmp_path / "whole", "quant_noise/")
    assert sorted(probes) == [9, 18]
    assert {tuple(key.split("/")) for key in probes[9]} == {
        ("quant_noise", layer, what)
        for layer in layers
        for what in ("error_square", "bias_square", "ratio", "bias_ratio")
    }
    assert 0 < probes[9]["quant_noise/all/ratio"] < 1
    cut = write_config(tmp_path / "cut.yaml", corpus, tmp_path / "cut", **sections, logging={"every_steps": 2})
    assert at_step("sagetrain", cut, 8, lambda process: process.send_signal(signal.SIGTERM)) == 0
    finish("sagetrain", cut)
    # Rows of even steps: what was measured between them is in the next one, and the averages are the same to the bit.
    assert {step: v for step, v in noise_of(tmp_path / "cut").items() if step > 12} == {16: logged[15], 18: logged[18]}
    assert noise_of(tmp_path / "cut", "quant_noise/")[18] == probes[18]

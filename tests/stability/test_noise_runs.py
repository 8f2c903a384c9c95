"""Noise, and the decisions that follow from it, in runs as users start them: the log, and the steps after a resume."""

import json
from pathlib import Path

import pytest
import yaml

from probed import changes, run_with_room
from runs import finish, log_of, rows_of, write_config
from sagetrain.config.earlier_run import critical_in_words, critical_tokens, ratios_of
from sagetrain.config.load import load_config
from sagetrain.report.read import read_runs


def noise_of(run_dir: Path, prefix: str = "noise/") -> dict[int, dict[str, float]]:
    found = [(row["step"], {k: v for k, v in row.items() if k.startswith(prefix)}) for row in rows_of(run_dir)]
    return {step: values for step, values in found if values}


def test_the_noise_of_a_run_is_logged_and_resumed(tmp_path, corpus) -> None:
    stability = {"noise_scale": {"every_steps": 3}, "quant_noise": {"every_steps": 9}}
    single = {"stages": [{"from_tokens": 0, "tokens": 128}, {"from_tokens": 4 * 128, "tokens": 256}]}
    sections = {"lr_schedule": {"shape": "constant"}, "logging": {"every_steps": 1}, "stability": stability}

    def write(name: str, steps: int, **changes: dict) -> Path:
        tokens = steps * 256 - 4 * 128
        changed = {**sections, "tokens_per_step": single, "training": {"total_tokens": tokens}, **changes}
        return write_config(tmp_path / f"{name}.yaml", corpus, tmp_path / name, **changed)

    finish("sagetrain", write("whole", 18))
    logged = noise_of(tmp_path / "whole")
    assert sorted(logged) == [6, 9, 12, 15, 18]  # The third step has one micro-batch, and no measurement.
    layers = {"embedding", "0", "1", "head", "all"}
    assert {tuple(key.split("/")) for key in logged[18]} == {
        ("noise", layer, what) for layer in layers for what in ("scale_tokens", "variance", "gradient_square")
    }
    probes = noise_of(tmp_path / "whole", "quant_noise/")
    assert sorted(probes) == [9, 18]
    assert {tuple(key.split("/")) for key in probes[9]} == {
        ("quant_noise", layer, what)
        for layer in layers
        for what in ("error_square", "bias_square", "ratio", "bias_ratio", "bias_to_gradient")
    }
    assert 0 < probes[9]["quant_noise/all/ratio"] < 1
    told = json.loads((tmp_path / "whole/stability.json").read_text())
    critical = told["critical_tokens_per_step"]
    assert critical == critical_tokens(ratios_of(told["metrics"]), 0.1) and critical["layer"] in layers
    assert critical_in_words(critical) in log_of(tmp_path / "whole.yaml")
    (run,) = read_runs([tmp_path / "whole"])
    assert critical_in_words(critical) in run.summary.values()
    for steps in (8, 18):  # The run is stopped at the eighth step and continued. Even steps have rows.
        finish("sagetrain", write("cut", steps, logging={"every_steps": 2}))
    # A measurement between two rows is in the next row, and the averages are the same to the last bit.
    next_row = {6: 6, 9: 10, 12: 12, 15: 16, 18: 18}
    assert noise_of(tmp_path / "cut") == {next_row[step]: values for step, values in logged.items()}
    assert noise_of(tmp_path / "cut", "quant_noise/") == {10: probes[9], 18: probes[18]}


# -- tokens_per_step.schedule: noise_aware -------------------------------------------------------------------------


def write_noise_aware(path: Path, corpus: Path, run_dir: Path, tokens: int = 32 * 256) -> Path:
    """Write a run that begins with 256 tokens per step and may have up to 1,024. INT8 costs next to nothing in it."""
    write_config(
        path,
        corpus,
        run_dir,
        stability={"noise_scale": {"every_steps": 2}, "quant_noise": {"every_steps": 2}},
        lr_schedule={"batch_rule": "sqrt", "reference_tokens_per_step": 256, "shape": "constant", "warmup_tokens": 0},
        training={"total_tokens": tokens},
        checkpoint={"every_tokens": 1024},
    )
    tree = yaml.safe_load(path.read_text())
    tree["tokens_per_step"] = {
        "schedule": "noise_aware", "start": 256, "floor": 256, "ceiling": 1024, "multiple": 256, "hold_tokens": 512,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(tree))
    return path


def steps_of(run_dir: Path) -> list[tuple[int, int, float]]:
    return [
        (row["step"], row["train/tokens_per_step"], row["train/lr"]) for row in rows_of(run_dir) if "train/lr" in row
    ]


def decisions_of(run_dir: Path) -> list[dict]:
    events = rows_of(run_dir, "events")
    return [{**event, "wall_time": 0} for event in events if event["kind"] == "tokens_per_step"]


def where_of(decisions: list[dict]) -> list[tuple[int, int, int]]:
    return [(event["from"], event["to"], event["first_step"]) for event in decisions]


def test_a_noise_aware_run_decides_alike_when_interrupted(tmp_path, corpus) -> None:
    """A second run by one process makes the same decisions to the last bit. Two data-parallel ranks, whose sums differ,
    make them in the same steps."""
    whole = write_noise_aware(tmp_path / "whole.yaml", corpus, tmp_path / "whole")
    finish("sagetrain", whole)
    steps, decisions = steps_of(tmp_path / "whole"), decisions_of(tmp_path / "whole")
    sizes, where = [size for _, size, _ in steps], where_of(decisions)
    assert sizes == [256] * 7 + [512] * 2 + [768] * 2 + [1024] * 4
    assert where == [(256, 512, 8), (512, 768, 10), (768, 1024, 12)]
    cfg = load_config(whole)
    expected = run_with_room(cfg.tokens_per_step, cfg.stability.quant_noise.every_steps, cfg.training.total_tokens)
    assert (expected.sizes, changes(expected.events)) == (sizes, where)
    assert all("quantization adds" in event["text"] for event in decisions)
    assert [lr for *_, lr in steps] == pytest.approx([3e-3 * (size / 256) ** 0.5 for size in sizes])
    assert "tokens per step from 256 to 512 as of step 8" in log_of(whole)
    # The first run stops right after a decision, and the second after two of 3 probes.
    for launcher, tokens in (("sagetrain", 2304), ("ranks", 1280)):
        cut = tmp_path / f"{launcher}.yaml"
        finish("sagetrain", write_noise_aware(cut, corpus, tmp_path / launcher, tokens))
        finish(launcher, write_noise_aware(cut, corpus, tmp_path / launcher))
        assert f"resumed from step-{8 if tokens == 2304 else 5:08d}" in log_of(cut)
        assert f"noise_aware: {512 if tokens == 2304 else 256} tokens per step\n" in log_of(cut)
        assert steps_of(tmp_path / launcher) == steps
        found = decisions_of(tmp_path / launcher)
        if launcher == "sagetrain":
            assert found == decisions
        assert where_of(found) == where

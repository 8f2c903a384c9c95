"""A mixture of experts trains, stops, continues and is evaluated as a dense model is."""

import pytest

from runs import check_killed, check_scored, rows_of, sagetrain, write_config
from sagetrain import api
from sagetrain.report.page import render
from sagetrain.report.read import read_runs

EXPERTS = {"number": 6, "per_token": 2, "ffn_size": 16, "dense_layers": 1}
SECTIONS: dict[str, dict] = {
    "model": {"experts": {**EXPERTS, "balance": {"bias_rate": 0.001}}, "num_layers": 3},
    "attention": {"backend": "sage", "recipe": "scores"},
    "linear": {"precision": "int8", "keep_first_fraction": 0.25, "keep_last_fraction": 0.3},
    "data": {"micro_batch_size": 2},
    "parallel": {"expert_parallel_size": 2, "expert_room": 1},
    "training": {"dtype": "bf16"},
    "evaluation": {
        "every_tokens": 2560,
        "samples_every_tokens": 1024,
        "samples_prompts": ["def ", "a"],
        "samples_tokens": 6,
    },
    "stability": {name: {"every_steps": 4} for name in ("monitor", "noise_scale", "quant_noise")},
}


def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path, corpus) -> None:
    """Two ranks have the experts between them, the router is fp32, its states move, and evaluation in between is no
    load. Rows of experts lack room in the first step of each process. `eval` and `generate` take the checkpoint in one
    process."""
    check_killed(tmp_path, corpus, 8, 4, SECTIONS)
    events = rows_of(tmp_path / "whole", "events")
    assert [(event["step"], event["room"]) for event in events if event["kind"] == "room"] == [(0, 2.0)]
    rows = rows_of(tmp_path / "whole")
    trained = [row for row in rows if "train/loss" in row]
    numbers = {"moe/max_load", *(f"moe/{layer}/{x}" for layer in (1, 2) for x in ("max_load", "min_load", "entropy"))}
    flips = {"moe/1/flips", "moe/2/flips"}
    for row in trained:
        measured = flips if row["step"] % 4 == 0 else set()
        assert {name for name in row if name.startswith("moe/")} == numbers | measured
    assert {row["step"] for row in trained if row.get("quant_noise/2/ratio", 0) > 0} == {4, 8}
    texts, again = (
        [(row["step"], row["text"]) for row in rows_of(tmp_path / run, "samples")] for run in ("whole", "cut")
    )
    assert texts == again and [step for step, _ in texts] == [4, 4, 6, 6, 8, 8]
    assert trained[-1]["train/loss"] < trained[0]["train/loss"]
    shares = check_scored(tmp_path / "whole")["all"]["experts"]
    assert [*shares] == ["1", "2"] and all(len(of) == 6 and sum(of) == pytest.approx(1) for of in shares.values())
    assert "choices of experts" in sagetrain("eval", tmp_path / "whole").stdout
    (run,) = read_runs([tmp_path / "whole"])
    assert run.loads_step == 8 and list(run.loads) == [1, 2]
    assert max(run.loads[2]) == pytest.approx(trained[-1]["moe/2/max_load"])
    assert "Loads of experts over the mean, step 8" in render([run])
    assert sagetrain("generate", tmp_path / "whole", "the", "--max-tokens", "4").returncode == 0


def test_errors_of_a_mixture_with_sinks_are_measured(tmp_path, corpus) -> None:
    """The attention beside which choices and gradients are compared has the sinks too."""
    sections = {name: SECTIONS[name] for name in ("data", "stability", "attention")}
    sections["model"] = {"experts": EXPERTS | {"dense_layers": 0}, "num_layers": 1, "sinks": True}
    assert api.train(write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", steps=4, **sections)).finished
    (row,) = (row for row in rows_of(tmp_path / "run") if row["step"] == 4 and "train/loss" in row)
    assert "moe/0/flips" in row and row["quant_noise/0/ratio"] > 0

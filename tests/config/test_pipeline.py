"""A pipeline that cannot run is refused before a run begins, with the key, the rule and the fix."""

import pytest

from checked_config import check_found, only, run_config
from sagetrain.config.check import check

PIPE = {"engine": "fsdp", "pipeline_parallel_size": 2}

CASES = [
    ({"parallel": {**PIPE, "engine": "deepspeed"}}, "pipeline_of_engine", "parallel.pipeline_parallel_size",
     "is for parallel.engine fsdp, and parallel.engine is deepspeed", "set parallel.engine: fsdp"),
    ({"parallel": {**PIPE, "zero_stage": 3}}, "pipeline_at_zero_3", "parallel.zero_stage", "for every micro-batch",
     "use zero_stage 1 or 2"),
    ({"parallel": {**PIPE, "pipeline_parallel_size": 3}}, "world_size", "parallel.pipeline_parallel_size",
     "does not divide the 2 ranks", "start a multiple of 3"),
    ({"parallel": PIPE, "model": {"num_layers": 1}}, "pipeline_split", "parallel.pipeline_parallel_size",
     "makes 2 chunks of model.num_layers 1", "use at most 1"),
    ({"parallel": {**PIPE, "pipeline_chunks": 2}, "model": {"num_layers": 3}}, "pipeline_split",
     "parallel.pipeline_chunks", "makes 4 chunks of model.num_layers 3", "use at most 1"),
    ({"parallel": {**PIPE, "pipeline_blocks": [1, 1, 1]}}, "pipeline_split", "parallel.pipeline_blocks",
     "has 3 numbers", "give 2 numbers, or auto"),
    ({"parallel": {**PIPE, "pipeline_blocks": [1, 9]}, "model": {"num_layers": 4}}, "pipeline_split",
     "parallel.pipeline_blocks", "adds up to 10 blocks", "add up to 4"),
]  # fmt: skip


WATCHED = {
    "model": {"num_layers": 4, "tie_embeddings": True},
    "attention": {"backend": "sage"},
    "stability": {
        "quant_noise": {"every_steps": 10},
        "noise_scale": {"every_steps": 10},
        "monitor": {"every_steps": 10},
        "spikes": {"policy": "rewind"},
    },
    "evaluation": {"samples_every_tokens": 1000, "tasks": ["arc"]},
}


def test_what_watches_a_run_is_not_refused() -> None:
    found = [{str(f) for f in check(run_config(parallel=parallel, **WATCHED), 2, files=False) if f.level == "error"}
             for parallel in (PIPE, {"engine": "fsdp"})]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize(("sections", "rule", "key", "says", "fix"), CASES)
def test_what_cannot_run_is_refused(sections, rule, key, says, fix) -> None:
    check_found(sections, 2, rule, "error", key, says, fix)


def test_fewer_micro_batches_than_stages_is_a_warning() -> None:
    parallel, steps = {"engine": "fsdp", "pipeline_parallel_size": 4}, {"schedule": "constant", "tokens": 4096}
    cfg = run_config(parallel=parallel, model={"num_layers": 4}, tokens_per_step=steps)
    finding = only([f for f in check(cfg, 4, files=False) if f.rule == "pipeline_idle"])
    assert finding.level == "warning" and "2 micro-batches a step for 4 pipeline stages, which then idle 60%" in str(
        finding
    )


def test_settings_of_a_pipeline_have_no_effect_without_one() -> None:
    found = check(run_config(parallel={"pipeline_chunks": 2}), 1, files=False)
    assert only([f for f in found if f.key == "parallel.pipeline_chunks"]).rule == "no_effect"

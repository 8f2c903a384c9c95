"""A run that continues keeps the engine that `auto` was when it began, unless it has been given what that engine
lacks."""

from typing import Any

import pytest

import tiny
from sagetrain.auto.kept import Kept, kept_engine
from sagetrain.config.layout import Layout

OLD: tuple[None, dict[str, Any]] = None, {}
"""The state and the configuration of a checkpoint of the time when `auto` was DeepSpeed."""


@pytest.mark.parametrize(("recorded", "parallel", "engine", "rule"), [
    (OLD, {}, "deepspeed", "engine_kept"),
    (OLD, {"zero_stage": 0}, "deepspeed", "engine_kept"),
    (OLD, {"engine": "fsdp"}, "fsdp", None),
    (OLD, {"offload": "optimizer"}, "fsdp", "engine_changed"),
    (OLD, {"shard_size": 1}, "fsdp", "engine_changed"),
    (OLD, {"gradient_reduction": "bf16"}, "deepspeed", None),
    ((None, {"parallel": {"engine": "fsdp"}}), {}, "fsdp", None),
    (("deepspeed", {}), {}, "deepspeed", "engine_kept"),
    (("fsdp", {}), {}, "fsdp", None),
    (("fsdp", {}), {"gradient_reduction": "bf16"}, "deepspeed", "engine_changed"),
    (("fsdp", {}), {"engine": "deepspeed"}, "deepspeed", None),
])  # fmt: skip
def test_auto_is_the_engine_that_the_run_had(recorded, parallel, engine, rule) -> None:
    state, asked = recorded
    cfg, found = kept_engine(tiny.config(1, "bf16", parallel=parallel), Kept.of(tiny.run_state(engine=state), asked))
    assert Layout.of(cfg).engine == engine
    assert (found and (found.rule, found.level, found.key)) == (rule and (rule, "info", "parallel.engine"))

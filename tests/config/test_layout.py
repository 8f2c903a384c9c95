"""A layout has the facts about ranks and engine that everything else reads."""

from typing import Any

import pytest

from checked_config import run_config
from sagetrain.config.layout import Layout

FIELDS = "engine", "zero_stage", "replicas", "shards", "copies", "gathered", "reduced", "hooks"
EVERY = "every micro-step"
NEVER, ONCE, PASS, MICRO = "never", "once a step", "in every pass", "in every micro-step"


@pytest.mark.parametrize(("world", "parallel", "dtype", "fields"), [
    (1, {}, "bf16", ("fsdp", 1, 1, 1, 1, ONCE, NEVER, NEVER)),
    (1, {"offload": "optimizer"}, "bf16", ("fsdp", 1, 1, 1, 1, ONCE, ONCE, NEVER)),
    (1, {"zero_stage": 2}, "bf16", ("fsdp", 2, 1, 1, 1, ONCE, NEVER, NEVER)),
    (1, {"zero_stage": 3}, "bf16", ("fsdp", 3, 1, 1, 1, PASS, MICRO, EVERY)),
    (8, {}, "bf16", ("fsdp", 1, 8, 8, 1, ONCE, ONCE, NEVER)),
    (8, {"zero_stage": 0}, "bf16", ("fsdp", 0, 8, 1, 8, NEVER, ONCE, NEVER)),
    (8, {"zero_stage": 0, "shard_size": 2}, "bf16", ("fsdp", 0, 8, 1, 8, NEVER, ONCE, NEVER)),
    (8, {"zero_stage": 2}, "fp32", ("fsdp", 2, 8, 8, 1, ONCE, MICRO, NEVER)),
    (8, {"zero_stage": 2, "shard_size": 4}, "bf16", ("fsdp", 2, 8, 4, 2, ONCE, MICRO, EVERY)),
    (8, {"zero_stage": 2, "offload": "all"}, "bf16", ("fsdp", 2, 8, 8, 1, ONCE, MICRO, EVERY)),
    (8, {"zero_stage": 3}, "bf16", ("fsdp", 3, 8, 8, 1, PASS, MICRO, NEVER)),
    (8, {"zero_stage": 3, "offload": "all"}, "bf16", ("fsdp", 3, 8, 8, 1, PASS, MICRO, EVERY)),
    (8, {"zero_stage": 3, "shard_size": 4}, "bf16", ("fsdp", 3, 8, 4, 2, PASS, MICRO, EVERY)),
    (8, {"tensor_parallel_size": 2, "context_parallel_size": 2}, "bf16", ("fsdp", 1, 4, 4, 1, ONCE, ONCE, NEVER)),
    (8, {"pipeline_parallel_size": 4}, "bf16", ("fsdp", 1, 2, 2, 1, ONCE, ONCE, NEVER)),
    (8, {"pipeline_parallel_size": 8}, "bf16", ("fsdp", 1, 1, 1, 1, ONCE, NEVER, NEVER)),
    (8, {"pipeline_parallel_size": 4, "zero_stage": 2}, "bf16", ("fsdp", 2, 2, 2, 1, ONCE, MICRO, EVERY)),
    (8, {"tensor_parallel_size": 8}, "bf16", ("fsdp", 1, 1, 1, 1, ONCE, NEVER, NEVER)),
    (8, {"gradient_reduction": "bf16"}, "bf16", ("deepspeed", 1, 8, 8, 1, ONCE, ONCE, EVERY)),
    (8, {"engine": "deepspeed", "zero_stage": 0}, "bf16", ("deepspeed", 1, 8, 8, 1, ONCE, ONCE, EVERY)),
    (8, {"engine": "deepspeed", "zero_stage": 3}, "bf16", ("deepspeed", 2, 8, 8, 1, ONCE, MICRO, EVERY)),
    (8, {"engine": "deepspeed", "zero_stage": 0}, "fp32", ("deepspeed", 0, 8, 1, 8, NEVER, ONCE, EVERY)),
    (None, {"tensor_parallel_size": 2, "context_parallel_size": 2}, "bf16", ("fsdp", 1, 2, 2, 1, ONCE, ONCE, NEVER)),
])  # fmt: skip
def test_layouts(world: int | None, parallel: dict[str, Any], dtype: str, fields: tuple[Any, ...]) -> None:
    cfg = run_config(parallel={"zero_stage": 1, **parallel}, training={"dtype": dtype})
    layout = Layout.of(cfg, world)
    assert tuple(getattr(layout, name) for name in FIELDS) == fields
    assert layout.data * layout.context * layout.tensor * layout.stages == layout.world_size and layout.even
    assert layout.micro_step == 2 * 1024 * layout.data
    assert layout.whole_between_passes == (layout.zero_stage < 3)
    assert layout.recorded == (layout.not_recorded is None)


def test_settings_that_override_a_layout() -> None:
    apart = Layout.of(run_config(parallel={"zero_stage": 3, "shard_size": 1}), 4)
    assert (apart.whole_between_passes, apart.shards, apart.copies) == (True, 1, 4)
    assert not Layout.of(run_config(training={"cuda_graphs": "off"})).recorded
    assert not Layout.of(run_config(parallel={"tensor_parallel_size": 4}), 6).even


@pytest.mark.parametrize(("tensor", "context", "words"), [
    (1, 1, ""),
    (1, 2, " x context parallel 2"),
    (2, 2, " x context parallel 2 (each key head 2 times)"),
    (1, 8, " x context parallel 8 (Ulysses 4 x gather 2, each key head 2 times)"),
    (2, 6, " x context parallel 6 (Ulysses 2 x gather 3, each key head 2 times)"),
    (2, 3, " x context parallel 3 (Ulysses 1 x gather 3)"),
])  # fmt: skip
def test_shared_sequences_in_words(tensor: int, context: int, words: str) -> None:
    """The model has four query heads and two key heads."""
    parallel = {"tensor_parallel_size": tensor, "context_parallel_size": context}
    layout = Layout.of(run_config(parallel=parallel, model={"num_key_value_heads": 2}))
    assert layout.sharing == words
    assert layout.recorded


@pytest.mark.parametrize(("parallel", "words"), [
    ({"zero_stage": 1, "engine": "deepspeed"}, "ZeRO 1 by DeepSpeed"),
    ({"zero_stage": 3, "shard_size": 8}, "ZeRO 3 by FSDP2 over 8 of 64 replicas"),
    ({"zero_stage": 3}, "ZeRO 3 by FSDP2"),
])  # fmt: skip
def test_sharding_in_words(parallel: dict[str, Any], words: str) -> None:
    assert Layout.of(run_config(parallel=parallel), 64).sharding == words

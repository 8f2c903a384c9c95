"""Families of models train alike on every layout: tensor, context, pipeline and data parallelism change no number."""

from __future__ import annotations

import pytest

import tiny
from distributed import run_distributed

SHAPE = {"num_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, tuple[dict, str]] = {
    "qwen2.5": ({"qkv_bias": True}, "none"),
}
"""The section model and attention.qk_norm of each family."""
LAYOUTS: dict[str, dict] = {
    "one": {},
    "dp2-z1": {"zero_stage": 1},
    "dp2-z3": {"zero_stage": 3},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-sp": {"tensor_parallel_size": 2, "sequence_parallel": True, "tensor_parallel_overlap": "on"},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


def losses_of(layouts: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Return the (loss, gradient norm) pairs of 3 steps, keyed by family and layout."""
    found, groups = {}, {}
    for name, (shape, qk_norm) in FAMILIES.items():
        for layout in layouts:
            parallel = LAYOUTS[layout]
            sizes = tuple(parallel.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "context", "pipeline"))
            groups[sizes] = groups.get(sizes) or tiny.join(*sizes)
            # With an eps of 1e-8, Adam takes a full step of lr on a gradient that is nothing but rounding.
            optimizer = {"eps": 1e-6, "clip_grad": 0.5}
            sections = {"model": SHAPE | shape, "attention": {"qk_norm": qk_norm}, "optimizer": optimizer}
            engine = tiny.engine(tiny.config(0, **sections, parallel=parallel), groups[sizes])
            steps = [tiny.global_step(engine, step) for step in range(3)]
            found[f"{name} {layout}"] = [(step.loss, step.grad_norm) for step in steps]
    return found


def test_layouts_change_no_number() -> None:
    (alone,) = run_distributed(losses_of, 1, ["one"])
    for rank in run_distributed(losses_of, 2, [layout for layout in LAYOUTS if layout != "one"]):
        for name, steps in rank.items():
            expected = alone[f"{name.split()[0]} one"]
            assert steps == [pytest.approx(pair, rel=1e-4) for pair in expected], name

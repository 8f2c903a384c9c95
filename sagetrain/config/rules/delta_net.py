"""Rules for layers with a gated delta net: their sizes, and what was proven to work with them."""

from __future__ import annotations

from collections.abc import Iterator

from sagetrain.config.errors import Finding
from sagetrain.config.layer_specs import layers
from sagetrain.config.rules.findings import About, neighbours, no_effect, not_proven
from sagetrain.config.schema import RunConfig

_MULTIPLE, _WIDEST = 16, 256
"""fla's kernels multiply tiles of this many columns at least, and keep a state of this many rows at most."""

PROVEN: dict[str, tuple[object, ...]] = {
    "model.windows": (None,),
    "model.experts": (None,),
    "model.sinks": (False,),
    "model.qkv_bias": (False,),
    "model.conventions": ("llama",),
    "parallel.tensor_parallel_size": (1,),
    "parallel.context_parallel_size": (1,),
    "parallel.pipeline_parallel_size": (1,),
    "parallel.engine": ("auto", "fsdp"),
    "parallel.gradient_reduction": ("fp32",),
    "parallel.offload": ("none",),
    "training.activation_offload": (False,),
}
"""The values that were proven with gated delta nets, of each key that asks for it. Other values are errors."""


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Check the sizes of gated delta nets, and that everything else in the configuration was proven with them."""
    if (delta := cfg.model.delta_net) is None:
        return
    key = "model.delta_net"
    if delta.value_heads % delta.key_heads:
        yield About("delta_net_heads", f"{key}.value_heads", delta.value_heads).error(
            f"is not a multiple of key_heads {delta.key_heads}: every head of q and k serves equally many heads of v",
            f"use {neighbours(delta.value_heads, delta.key_heads)}",
        )
    for name in ("key_dim", "value_dim"):
        width = getattr(delta, name)
        if width % _MULTIPLE or width > _WIDEST:
            yield About("delta_net_width", f"{key}.{name}", width).error(
                f"is not a multiple of {_MULTIPLE} up to {_WIDEST}, which the kernels of fla take", "use 64 or 128"
            )
    kinds = {layer.delta_net is None for layer in layers(cfg.model)}
    if len(kinds) == 1 and cfg.model.windows is None:
        lacking, count = "D" if kinds == {True} else "F", cfg.model.num_layers
        ways = ["a pattern with D and F among these letters"] * (count > 1)
        ways += [f"model.num_layers {delta.pattern.index(lacking) + 1} or more"] * (lacking in delta.pattern)
        yield About("delta_net_pattern", f"{key}.pattern", delta.pattern).error(
            f"has no {lacking} in the first {f'{count} letters' if count > 1 else 'letter'}, one a layer: a hybrid has "
            "both",
            f"use {', or '.join([*ways, f'{key}: null'])}",
        )
    if cfg.model.value_embeddings and not any(layer.value_embeddings for layer in layers(cfg.model)):
        why = f"a gated delta net in every second layer from the last one back ({key}.pattern {delta.pattern})"
        yield no_effect("model.value_embeddings", True, why)
    if (again := cfg.training.activation_checkpointing) in ("selective", "attention", "auto"):
        yield About("not_proven_with_delta_net", "training.activation_checkpointing", again).error(
            f"was not proven with {key} yet: torch does not see the operators of fla",
            f"use none, full or a number of blocks, or {key}: null",
        )
    yield from not_proven(cfg, PROVEN, "not_proven_with_delta_net", key, f"layers with attention ({key}: null)")

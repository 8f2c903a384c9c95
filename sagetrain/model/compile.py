"""torch.compile of a model: the graphs that it makes, and the options that it makes them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sagetrain.model.norm import normalize
from sagetrain.model.transformer import Transformer

# The two halves of a micro-batch keep out of each other's way only in the order in which the model calls them.
ORDERED: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "score_fusion_memory_threshold": 2**16,  # bytes: two norms must not be fused because both read one gain
    # The input of a collective may not be written before the collective is finished, possibly in the next graph.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}
"""The options of torch.compile under tensor parallelism."""

UNCHECKED: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
"""The options of torch.compile where weights stay in memory. They skip the check of sizes and strides of all inputs and
buffers at every call, because guards have checked the inputs."""

_GRAPHS = 256
"""The limit for the graphs of one function. It is torch's own limit for the graphs of one code object in all."""


def compile_blocks(
    model: Transformer,
    backend: str | Callable[..., Any] = "inductor",
    *,
    hooks: bool = False,
    inner_hooks: bool = False,
    blocks_alone: bool = False,
    dynamic: bool | None = None,
) -> None:
    """Compile every block of a model, the norms outside of the blocks, and the loss kernels.

    Blocks that have the same attention function and the same matmuls share one graph.

    Args:
        hooks: leave the hooks of modules outside of the graphs, because they gather the weights of a block.
        inner_hooks: let graphs end at modules inside of a block that have hooks of their own (Layout.calls_experts).
        blocks_alone: compile nothing outside of the blocks.
        dynamic: False: a graph is for the sizes that it was made for. None: from the second size of an input on, torch
            makes a graph for any size, which differs from those of single sizes.
    """
    options: dict[str, Any] | None = None
    if backend == "inductor":
        options = {**UNCHECKED, **(ORDERED if model.groups.tp_size > 1 else {})}
    # By default torch makes 8 graphs, then ends the run. Several causes multiply: linear layers in 8 and 16 bits,
    # the form that the next block's norm gathers, documents and their largest lengths, and calls with and without
    # gradients.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    traceable = all(function.traceable for function in model.functions)
    fullgraph = traceable and not inner_hooks
    how: dict[str, Any] = {"fullgraph": fullgraph, "backend": backend, "options": options, "dynamic": dynamic}
    for block in model.blocks:
        if hooks:
            block.forward = torch.compile(block.forward, **how)
        else:
            block.compile(**how)
    if blocks_alone:
        return
    model.normalize = torch.compile(normalize, fullgraph=True, backend=backend, options=options)
    model.compiled = backend == "inductor"
    if model.chunks[-1].last:
        model.head.compiled = model.compiled

"""torch.compile of a model: what becomes a graph, and with which options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sagetrain.model.backends import AttentionFunction
from sagetrain.model.norm import normalize
from sagetrain.model.transformer import Transformer

# The two halves of a micro-batch keep out of each other's way only in the order in which the model calls them.
ORDERED: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "score_fusion_memory_threshold": 2**16,  # bytes: a gain that both halves read is no reason to fuse their norms
    # What a collective reads may not be written before it is finished, in the next graph maybe.
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}
"""torch.compile's options under tensor parallelism."""

UNCHECKED: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
"""torch.compile's options where weights stay: no look at sizes and strides of all inputs and buffers at every call.
Guards have looked at the inputs. (A weight that ZeRO-3 has taken away by the backward pass would pass them.)"""

_GRAPHS = 256
"""The limit for the graphs of one function: torch's own limit for all that it makes of one."""


def compile_blocks(
    model: Transformer, backend: str = "inductor", *, whole: bool = False, later: Iterable[AttentionFunction] = ()
) -> None:
    """Compile every block of a model (one graph for all that have the same attention function and the same matmul), the
    norms outside of the blocks, and the loss kernels.

    Args:
        whole: leave the hooks of modules outside of the graphs. ZeRO-3 gathers weights in the hooks, those of a block
            together (engines/deepspeed.py), so blocks run alone (`whole_blocks`) and the final norm is not compiled.
        later: functions that layers may get while training.
    """
    options: dict[str, Any] | None = None
    if backend == "inductor":
        options = {**({} if whole else UNCHECKED), **(ORDERED if model.groups.tp_size > 1 else {})}
    # By default torch makes 8, then ends the run. Rungs of a ladder, linear layers in 8 and 16 bits, what the next
    # block's norm gathers, documents and their largest lengths, with gradients and without: all multiply.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    traceable = all(function.traceable for function in (*later, *model.functions))
    model.whole_blocks = whole
    for block in model.blocks:
        if whole:
            block.forward = torch.compile(block.forward, fullgraph=traceable, backend=backend, options=options)
        else:
            block.compile(fullgraph=traceable, backend=backend, options=options)
    if not whole:
        model.normalize = torch.compile(normalize, fullgraph=True, backend=backend, options=options)
    model.head.compiled = backend == "inductor"

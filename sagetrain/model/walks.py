"""The order in which the tokens of a micro-batch go through the stages of the blocks.

The computation of a block is written in block.Block. The stages of all blocks form one string:

    normalize  project  attend  out  normalize  gate_up  down  normalize  project  ...

Where outputs of attention and MLP are normalized, a stage behind `out` and `down` finishes the sum and does that.

There are three ways to walk this string.

whole       All tokens go together: without tensor parallelism, or with too few tokens to halve.

staggered   Under tensor parallelism the tokens go in two halves, the second one step behind the first. The collectives
            of each half then run beside the work of the other, forward and backward:

    first   project    attend, out  normalize    gate_up      down       normalize
    second  normalize  project      attend, out  normalize    gate_up    down

            `out` and `down` start a sum. `normalize` finishes it and starts a gather, and the stage after it finishes
            the gather. Halves are whole sequences. A micro-batch of one sequence has no such halves: the second half
            catches up, attention takes both at once, and the second half falls behind again.

recomputed  Every block goes by itself, from residual stream to residual stream, so that little is kept for the
            backward pass. The backward pass computes the whole block once more. With `selective` it computes only the
            cheap part again, and the results of matmuls and of attention are kept. With `attention` those of attention
            alone are. The first blocks may go in this
            way, and the others in one of the ways above.

Whole and staggered walk one stretch at a time, from the `project` of a block to the `normalize` of the next one.
torch.compile makes one graph of a stretch, and all blocks share the graph. The second half enters the stretch one stage
earlier, while the sum of the block before is still on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from sagetrain.model.activation_offload import ActivationOffload
from sagetrain.model.backends import TokenLayout
from sagetrain.model.norm import RMSNorm


class Half(NamedTuple):
    """Half of a micro-batch's tokens, or all of them, on their way through the blocks."""

    stream: Tensor
    """The residual stream, [tokens (/ tp with sequence parallelism), hidden]."""
    made: Any
    """The output of the last stage: a tensor to be added to the stream, one made of the stream, or None."""


class Part(NamedTuple):
    """The inputs of a stage beside the tokens."""

    layout: TokenLayout
    """The layout of all tokens that go through attention together with these."""
    cos: Tensor
    """The cosines of the rotation angles, fp32 [tokens, 1, head_dim / 2]."""
    sin: Tensor
    """The sines of the rotation angles, fp32 [tokens, 1, head_dim / 2]."""
    tokens: Tensor | None
    """The tokens themselves, int64 [tokens] (TokenLayout.tokens)."""
    gains: dict[RMSNorm, Tensor]
    """The gains of the block's norms, as norm.enter_gains returns them."""
    parts: int = 1
    """The number of parts of the micro-batch."""


BlockStage = Callable[[Tensor, Any, Part], Half]

Stretch = tuple[Sequence[BlockStage], BlockStage, Sequence[BlockStage]]
"""Stages in a row: the stages before attention, attention itself, and the stages after it. Attention is the only stage
that sees more than one token at a time. The first half has done the first stage in the stretch before."""


def idle(x: Tensor, y: Any, part: Part) -> Half:
    """Return x and y as they are. This stage stands where a stretch begins or ends apart from others."""
    return Half(x, y)


def split(layouts: Sequence[TokenLayout], gains: Sequence[dict[RMSNorm, Tensor]]) -> list[Part]:
    """Return as many parts as there are gains. Two parts of one layout go through attention together."""
    count = len(gains) // len(layouts)
    tables = [
        (x, *own)
        for x in layouts
        for own in zip(
            x.cos.chunk(count),
            x.sin.chunk(count),
            [None] * count if x.tokens is None else x.tokens.chunk(count),
            strict=True,
        )
    ]
    return [Part(*table, own, len(gains)) for table, own in zip(tables, gains, strict=True)]


def whole(stretch: Stretch, tokens: Half, part: Part) -> Half:
    """Take all tokens together through a stretch."""
    before, attend, after = stretch
    for stage in before[1:]:
        tokens = stage(*tokens, part)
    # Attention stands outside of the loops. Where it has no code for torch.compile, a loop around it would end the
    # graphs at every stage, and stages of different widths would share one graph for any size.
    tokens = attend(*tokens, part)
    for stage in after:
        tokens = stage(*tokens, part)
    return tokens


def staggered(
    stretch: Stretch, halves: Sequence[Half], parts: Sequence[Part], *, attend_together: bool
) -> tuple[Half, Half]:
    """Take the first half through all stages but the first. The second half stays one step behind, so it goes through
    all stages but the last."""
    before, attend, (out, *after) = stretch
    (first, second), (one, two) = halves, parts
    if attend_together:
        second = before[0](*second, two)
        for stage in before[1:]:
            first, second = stage(*first, one), stage(*second, two)
        qkv = [torch.cat(pair) for pair in zip(first.made, second.made, strict=True)]
        o = attend(first.stream, qkv, one).made.chunk(2)
        first, second = Half(first.stream, o[0]), Half(second.stream, o[1])
        steps = (idle, out, *after)
    # `out` starts the sum, so attention comes right before it. Attention alone would only hold up the other half.
    else:
        steps = (*before, lambda x, y, part: out(*attend(x, y, part), part), *after)
    for behind, ahead in pairwise(steps):
        first, second = ahead(*first, one), behind(*second, two)
    return first, second


# Operators are found by the beginnings of their names, because not every torch has all of them.
_GROUPED = "sagekernels.grouped_product", "sagekernels.grouped_codes_product"
_ATTENTION = "aten._scaled_dot_product_", "torch_attn.", "sagekernels.forward"
DEAR: dict[object, tuple[str, ...]] = {
    "selective": ("aten.mm.", "aten._scaled_mm", "sagekernels.int8_product", *_GROUPED, *_ATTENTION),
    "attention": _ATTENTION,
}
"""The operators whose results blocks keep, by the setting of activation checkpointing. In the others, blocks keep
everything or nothing."""

_MARKS = torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction


def dear_of(activation_checkpointing: object) -> tuple[str, ...]:
    """Return the operators whose results blocks keep and do not compute again."""
    # The hooks with which FSDP gathers experts mark spans of time for profilers. In the second pass of a block they may
    # mark one more, because no forward pass has begun, and torch 2.13 refuses operators that the first pass lacked.
    SAC_IGNORED_OPS.update(_MARKS)
    return DEAR.get(activation_checkpointing, ())


def _policy(dear: tuple[str, ...], ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = str(operator).startswith(dear)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(dear: tuple[str, ...], block: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
    """Run a block, and keep only its inputs and the results of `dear` operators for the backward pass.

    Call it inside of the code that torch.compile traces, because outside of it single operators would not be visible.
    FlashAttention's own package is not visible even there, so it runs again in the backward pass.
    """
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, dear))
    made: tuple[Tensor, ...] = checkpoint(
        block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    return made


def recomputed(
    blocks: Iterable[tuple[int, Callable[..., tuple[Tensor, ...]], Sequence[TokenLayout]]],
    streams: tuple[Tensor, ...],
    *,
    again: int,
    stop_early: bool,
    seen: Callable[[int, Tensor], None],
    offload: ActivationOffload | None = None,
) -> tuple[Tensor, ...]:
    """Take residual streams through every block by itself.

    Args:
        blocks: each block with its number, and the layout of each half, or of all tokens.
        again: compute blocks with a smaller number once more in the backward pass. In the others only the parts that
            blocks recompute themselves (`selective`) are computed twice.
        stop_early: end the second pass with the last tensor that the backward pass needs.
        seen: called with each block's number and the first of its output streams.
        offload: has what the blocks keep in the host's memory. None: it stays on the GPU.
    """
    # Blocks draw no random numbers.
    twice: Callable[..., tuple[Tensor, ...]] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with set_checkpoint_early_stop(stop_early):
        for number, block, layouts in blocks:
            run = partial(twice, block) if number < again else block
            with offload.block(number) if offload else nullcontext():
                streams = run(layouts, None, *streams)
            seen(number, streams[0])
    return streams

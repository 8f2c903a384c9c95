"""RMSNorm, for the residual stream and for the heads of q and k."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sagekernels.matmul import Matmul, Pending
from sagetrain.parallel.collectives import finish_enter, finish_leave, start_enter
from sagetrain.parallel.topology import ParallelGroups


class RMSNorm(nn.Module):
    """RMSNorm over the last dim: x / rms(x) * gain. The norm is computed in fp32 and returned in x's dtype.

    The gain is replicated over the tensor-parallel group. Where the ranks apply it to different data (their heads, or
    their tokens under sequence parallelism), `split_input` makes autograd sum its gradient over the group.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        groups: ParallelGroups,
        *,
        split_input: bool,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.reader: Matmul | None = None
        """The Matmul of the layers that read the result, where it decides in which form the result is gathered."""
        self.eps = eps
        self.groups = groups
        self.split_input = split_input
        self.gain = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """Normalize x [..., size] and return it in its shape. `gain` is the entry of this norm from enter_gains, if
        that was called."""
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return (x_fp32 * scale * self.entered(gain).float()).to(x.dtype)

    def entered(self, gain: Tensor | None) -> Tensor:
        """Return the gain to compute with: the entry of this norm from enter_gains, if that was called, else its
        own."""
        if gain is None:
            gain = enter_gains(self)[0].get(self)
        return self.gain if gain is None else gain


def enter_gains(*norms: RMSNorm | None, parts: int = 1) -> list[dict[RMSNorm, Tensor]]:
    """Return the gains for all calls of the norms whose gradients are summed over the group, keyed by norm.

    The tokens come in `parts` parts. Each part has a dictionary of its own, because the gradients of the parts are
    separate until they are summed. The sums travel together, in one collective, at the end of the backward pass of all
    these calls.
    """
    split = [norm for norm in norms if norm is not None and norm.split_input and norm.groups.tp_size > 1]
    if not split:
        return [{}] * parts
    groups = split[0].groups
    gains: list[Tensor] = [norm.gain for norm in split]
    together = torch.cat(gains * parts)
    entered = finish_enter(start_enter(together, groups, False), groups, False)
    sizes = [len(norm.gain) for norm in split]
    return [dict(zip(split, part.split(sizes), strict=True)) for part in entered.chunk(parts)]


def normalize(
    x: Tensor,
    y: Tensor | Pending | None,
    norm: RMSNorm,
    gain: Tensor | None,
    groups: ParallelGroups,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor | Pending]:
    """Return the residual stream x with y added, and its normalized form on its way to the next column-parallel
    layer."""
    if y is not None:
        x = x + finish_leave(y, groups, sequence_parallel)
    pack = None if norm.reader is None else norm.reader.pack
    return x, start_enter(norm(x, gain), groups, sequence_parallel, pack)

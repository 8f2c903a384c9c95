"""RMSNorm, for the residual stream and for the heads of q and k."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sagekernels.matmul import Matmul, Pending
from sagetrain.parallel.collectives import Region, finish_enter, finish_leave, reduce_from_region, start_enter


class RMSNorm(nn.Module):
    """RMSNorm over the last dim: x / rms(x) * gain. The norm is computed in fp32 and returned in x's dtype.

    The gain is replicated over the tensor-parallel group, unless the last dim itself is `spread` over it, as all heads
    of q are. Then the ranks add up their squares. Where the ranks apply it to different data (their heads, or
    their tokens under sequence parallelism), `split_input` makes autograd sum its gradient over the group.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        region: Region,
        *,
        split_input: bool = False,
        spread: bool = False,
        of_one: bool = False,
    ) -> None:
        super().__init__()
        self.reader: Matmul | None = None
        """The Matmul of the layers that read the result, where it decides in which form the result is gathered."""
        self.eps = eps
        self.groups = groups = region.groups
        self.split_input = split_input
        self.of_one = of_one
        """If set, the norm multiplies by 1 + its gain."""
        self.spread = spread and groups.tp_size > 1
        self._size = size
        own = size // groups.tp_size if spread else size
        self.gain = region.parameter(own)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """Normalize x [..., size] and return it in its shape. `gain` is the entry of this norm from enter_gains, if
        that was called."""
        x_fp32 = x.float()
        squares = x_fp32.square()
        mean = self._sum(squares.sum(-1, keepdim=True)) / self._size if self.spread else squares.mean(-1, keepdim=True)
        scale = torch.rsqrt(mean + self.eps)
        return (x_fp32 * scale * self.entered(gain).float()).to(x.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the group, which every rank uses for its own part of the result."""
        region = Region(self.groups)
        return finish_enter(start_enter(reduce_from_region(x, self.groups), region), region)

    def entered(self, gain: Tensor | None) -> Tensor:
        """Return the gain to compute with: the entry of this norm from enter_gains, if that was called, else its
        own."""
        if gain is None:
            gain = enter_gains(self)[0].get(self)
        gain = self.gain if gain is None else gain
        return 1 + gain.float() if self.of_one else gain


class NoNorm(nn.Module):
    """The place of a norm in a model that has none there."""

    def __init__(self) -> None:
        super().__init__()
        self.reader: Matmul | None = None
        """See RMSNorm."""

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """Return x."""
        return x


def enter_gains(*norms: RMSNorm | NoNorm | None, parts: int = 1) -> list[dict[RMSNorm, Tensor]]:
    """Return the gains for all calls of the norms whose gradients are summed over the group, keyed by norm.

    The tokens come in `parts` parts. Each part has a dictionary of its own, because the gradients of the parts are
    separate until they are summed. The sums travel together, in one collective, at the end of the backward pass of all
    these calls.
    """
    own = [norm for norm in norms if isinstance(norm, RMSNorm)]
    split = [norm for norm in own if norm.split_input and norm.groups.tp_size > 1]
    if not split:
        return [{}] * parts
    region = Region(split[0].groups)
    gains: list[Tensor] = [norm.gain for norm in split]
    together = torch.cat(gains * parts)
    entered = finish_enter(start_enter(together, region), region)
    sizes = [len(norm.gain) for norm in split]
    return [dict(zip(split, part.split(sizes), strict=True)) for part in entered.chunk(parts)]


def complete(y: Tensor | Pending, region: Region) -> Tensor:
    """Return what is to be added to the residual stream, with its sum over the group finished."""
    return y if isinstance(y, Tensor) else finish_leave(y, region)


def normalize(
    x: Tensor, y: Tensor | Pending | None, norm: RMSNorm | NoNorm, gain: Tensor | None, region: Region
) -> tuple[Tensor, Tensor | Pending]:
    """Return the residual stream x with y added, and its normalized form on its way to the next column-parallel
    layer."""
    if y is not None:
        x = x + complete(y, region)
    pack = None if norm.reader is None else norm.reader.pack
    return x, start_enter(norm(x, gain), region, pack)

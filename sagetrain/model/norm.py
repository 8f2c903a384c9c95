"""RMSNorm, for the residual stream and for the heads of q and k."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sagetrain.parallel.collectives import Pending, finish_enter, start_enter
from sagetrain.parallel.layers import annotate
from sagetrain.parallel.topology import ParallelGroups


class RMSNorm(nn.Module):
    """x / rms(x) * gain over the last dim, computed in fp32 and returned in x's dtype.

    The gain is replicated over the tensor-parallel group. Where the ranks apply it to different data (their heads,
    or their tokens under sequence parallelism), `split_input` makes autograd sum its gradient over the group.
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
        self.eps = eps
        self.groups = groups
        self.split_input = split_input
        gain = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.gain = annotate(gain, groups, tp_dim=None, no_weight_decay=True)

    def open(self) -> Pending | None:
        """The gain for one later call, if its gradient is summed: backward waits for the sum here, not in the call,
        where other collectives may be under way."""
        split = self.split_input and self.groups.tp_size > 1
        return start_enter(self.gain, self.groups, False) if split else None

    def forward(self, x: Tensor, opened: Pending | None = None) -> Tensor:
        """[..., size] -> same."""
        opened = self.open() if opened is None else opened
        gain = self.gain if opened is None else finish_enter(opened, self.groups, False)
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return (x_fp32 * scale * gain.float()).to(x.dtype)

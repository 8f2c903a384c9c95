"""The 8-bit weights that the blocks of an engine keep from one update to the next, renewed in place by CUDA graphs."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from sagekernels.graphs import Pool, Recording
from sagekernels.matmul import Matmul
from sagetrain.parallel.layers import keep_weights, linear_layers


class _Renewal(NamedTuple):
    """The renewal of a block's tensors, for as long as its layers multiply in the same way."""

    matmuls: list[Matmul]
    kept: list[tuple[Tensor, ...]]
    """The tensors of each layer, which stay in the same memory."""
    graph: Recording | None


class KeptWeights:
    """The tensors that the linear layers of blocks keep of their weights.

    On a GPU a CUDA graph of each block renews them. The host needs a fifth of a millisecond a layer to launch what the
    graph does, behind an update that the GPU has already ended.

    Args:
        in_place: the blocks are on a GPU, and their weights stay in the same memory.
    """

    def __init__(self, in_place: bool) -> None:
        self._pool = Pool() if in_place else None
        self._renewals: dict[nn.Module, _Renewal] = {}

    def renew(self, block: nn.Module) -> None:
        """Make the tensors of a block from its weights as they are now."""
        layers = list(linear_layers(block))
        renewal, matmuls = self._renewals.pop(block, None), [layer.matmul for layer in layers]
        if renewal is None or renewal.matmuls != matmuls:
            keep_weights(block)  # Triton compiles its kernels here, which it cannot while a graph is captured.
            if not any(layer.kept for layer in layers):
                return
            graph = self._pool.record_aside(partial(keep_weights, block)) if self._pool else None
            renewal = _Renewal(matmuls, [layer.kept for layer in layers], graph)
        elif renewal.graph is None:
            keep_weights(block)
            for layer, kept in zip(layers, renewal.kept, strict=True):
                for old, new in zip(kept, layer.kept, strict=True):
                    old.copy_(new)
        self._renewals[block] = renewal
        for layer, kept in zip(layers, renewal.kept, strict=True):
            layer.kept = kept  # A layer that has multiplied in another way for a while has none.
        if renewal.graph is not None:
            renewal.graph.replay()

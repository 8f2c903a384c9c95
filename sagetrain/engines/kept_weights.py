"""The 8-bit weights that the blocks of an engine keep from one update to the next, renewed in place by CUDA graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sagekernels.matmul import Matmul
from sagetrain.parallel.layers import keep_weights, linear_layers


class _Renewal(NamedTuple):
    """The renewal of a block's tensors, for as long as its layers multiply in the same way."""

    matmuls: list[Matmul]
    kept: list[tuple[Tensor, ...]]
    """The tensors of each layer, into which the graph writes."""
    graph: torch.cuda.CUDAGraph


class KeptWeights:
    """The tensors that the linear layers of blocks keep of their weights.

    On a GPU a CUDA graph of each block renews them. The host needs a fifth of a millisecond a layer to launch what the
    graph does, behind an update that the GPU has already ended.

    Args:
        in_place: the blocks are on a GPU, and their weights stay in the same memory.
    """

    def __init__(self, in_place: bool) -> None:
        self._pool = torch.cuda.graph_pool_handle() if in_place else None
        self._stream = torch.cuda.Stream() if in_place else None
        self._renewals: dict[nn.Module, _Renewal] = {}

    def renew(self, block: nn.Module) -> None:
        """Make the tensors of a block from its weights as they are now."""
        if self._stream is None:
            keep_weights(block)
            return
        layers = list(linear_layers(block))
        renewal, matmuls = self._renewals.pop(block, None), [layer.matmul for layer in layers]
        if renewal is None or renewal.matmuls != matmuls:
            keep_weights(block)  # Triton compiles its kernels here, which it cannot while a graph is captured.
            if not any(layer.kept for layer in layers):
                return
            graph = self._captured(block, self._stream)
            renewal = _Renewal(matmuls, [layer.kept for layer in layers], graph)
        self._renewals[block] = renewal
        for layer, kept in zip(layers, renewal.kept, strict=True):
            layer.kept = kept  # A layer that has multiplied in another way for a while has none.
        renewal.graph.replay()

    def _captured(self, block: nn.Module, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Threads of loaders and of NCCL may go on meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                keep_weights(block)
            finally:
                graph.capture_end()
        return graph

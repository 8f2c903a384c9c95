"""Activations in the host's memory change no bit, however late their copies are, and leave the GPU's memory free."""

import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from sagetrain.config.schema import AttentionConfig, LinearConfig, ModelConfig
from sagetrain.model.activation_offload import ActivationOffload, HostCopies
from sagetrain.model.block import Block
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import matmuls_of
from sagetrain.parallel.layers import keep_weights
from sagetrain.parallel.topology import ParallelGroups

SHAPE = ModelConfig(num_layers=6, hidden_size=32, ffn_hidden_size=48, num_attention_heads=2)


class LateCopies(HostCopies):
    """Copies that are made when somebody waits for them, in their order. Memory that a copy reads or writes must live
    until then."""

    def __init__(self) -> None:
        super().__init__(None)
        self._under_way: deque[tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = deque()
        self._begun = 0
        self.on_host: list[Tensor] = []
        self.on_gpu: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def memory(self, like: Tensor) -> Tensor:
        self.on_host.append(super().memory(like))
        return self.on_host[-1]

    def copy(self, target: Tensor, source: Tensor) -> int:
        leaves = any(target is place for place in self.on_host)
        self.on_gpu.add(source if leaves else target.fill_(torch.nan))
        self.most = max(self.most, len(self.on_gpu))
        self._under_way.append((weakref.ref(target), weakref.ref(source)))
        self._begun += 1
        return self._begun

    def wait(self, event: int) -> None:
        while self._begun - len(self._under_way) < event:
            target, source = (reference() for reference in self._under_way.popleft())
            assert target is not None and source is not None, "memory was given back before its copy had ended"
            target.copy_(source)


def gradients(copies: HostCopies | None, again: str, precision: str, seed: int = 0) -> list[Tensor]:
    """Return losses and gradients of three micro-batches, whose gradients are added up. Blocks make the codes of their
    weights when they are first entered, as an engine lets them."""
    attention, place = AttentionConfig(backend="sdpa"), {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    matmuls, _ = matmuls_of(LinearConfig(precision=precision), SHAPE, tensor_parallel_size=1, **place)
    how = {"vocab_size": 128, "groups": ParallelGroups.single(), "seed": 5, "matmuls": matmuls, **place}
    model = tiny.transformer(SHAPE, attention, activation_checkpointing=again, **how)
    if again == "attention":  # Without a compiler the results would be where saved_tensors_hooks do not come.
        compile_blocks(model, "aot_eager_decomp_partition", hooks=True)
    model.offload = copies and ActivationOffload(copies, 0)

    def call(block: Block, *inputs: Any) -> Any:
        if not block.attention.out.kept:
            keep_weights(block)
        return block.forward(*inputs)

    model.without_hooks = call
    draw, losses = torch.Generator().manual_seed(seed), []
    for _ in range(3):
        tokens = torch.randint(0, 128, (2, 17), generator=draw)
        losses.append(model(tokens[:, :-1], tokens[:, 1:]))
        losses[-1].backward()
    return [*(loss.detach() for loss in losses), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(("again", "precision"), [("full", "bf16"), ("attention", "int8")])
def test_late_copies_change_no_bit(again: str, precision: str) -> None:
    expected, late = gradients(None, again, precision), LateCopies()
    for copies in (late, HostCopies(None)):
        for one, other in zip(gradients(copies, again, precision), expected, strict=True):
            assert one.equal(other)
    # Micro-batches share the host's memory, and codes of weights stay. The GPU has what two blocks keep at most: the
    # stream, and what attention returned with its log-sum-exp.
    each = {"full": 1, "attention": 3}[again]
    assert len(late.on_host) == each * SHAPE.num_layers and late.most <= 2 * each


def test_views_of_weights_stay() -> None:
    """A weight loses its memory behind its block at ZeRO 3, and a copy that is under way would read what comes there.
    A product saves its weight transposed."""
    layer, late = torch.nn.Linear(16, 16, bias=False), LateCopies()
    offload = ActivationOffload(late, 0).begun(torch.nn.ModuleList([layer]), [])
    x = torch.randn(4, 16, requires_grad=True)
    with offload.block(0):
        y = layer(x)
    y.sum().backward()
    assert [place.shape for place in late.on_host] == [x.shape]
    assert x.grad is not None and x.grad.equal(torch.ones(4, 16) @ layer.weight)

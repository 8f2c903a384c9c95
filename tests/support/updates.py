"""Updates of AdamW by the kernel, and by the twin in torch, with memory around all tensors that must stay as it was."""

import torch
from torch import Tensor

from sagekernels.adamw import BLOCK, Factors, Master, adamw, adamw_twin, encode_twin, tables
from sagetrain.model.tensors import TensorSpec
from sagetrain.optim.pieces import TensorPiece
from sagetrain.optim.states import state_of
from sagetrain.optim.weights import KahanWeights, weights_of

KINDS = [
    (moments, master)
    for moments in ("int8", "bf16", "fp32")
    for master in ("fp32", "bf16_chance", "bf16_kahan")
    if (moments, master) != ("fp32", "fp32")
]
"""The settings optimizer.moments and optimizer.master that the kernel is for."""
GUARD = 64


def gradients(count: int, update: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return gradients of nine decades in each block, some of which are zero. Every second update goes back."""
    draw = torch.Generator().manual_seed((update + 1) // 2)
    found = torch.randn(count, generator=draw) * scale * 10.0 ** -(torch.rand(count, generator=draw) * 9)
    found[::5] *= update % 2
    found *= 1 - 2 * ((update + 1) % 2)
    found[2 * BLOCK : 3 * BLOCK] = 0
    return found.to(dtype)


def guarded(values: Tensor, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Return a copy of the values in the midst of other memory, and all of it."""
    memory = torch.full((len(values) + 2 * GUARD,), 77, dtype=values.dtype, device=values.device)
    part = memory[GUARD + shift :][: len(values)]
    part.copy_(values)
    return part, memory


class Updates:
    """One piece of a tensor. Each call takes a gradient into it.

    Args:
        kernel: whether the kernel makes the updates.
        shift: how many values later than at a multiple of 16 bytes its memory begins.
    """

    def __init__(
        self, count: int, moments: str, master: str, kernel: bool, device: str = "cpu", shift: int = 0, dim: int = 1
    ) -> None:
        self.kernel, self.device, self.update, self.shift = kernel, device, 0, shift
        weight = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(device)
        weight, whole = guarded(weight.to(torch.float32 if master == "fp32" else torch.bfloat16), shift)
        self.memory = [whole]
        spec = TensorSpec("weight", (64, 2 * (count // 64 + 1)), "tensor", dim, "matrix", 0)
        piece = TensorPiece(spec, 1, 2, 5, 5 + count, weight)
        self.weights = weights_of(master, piece, 2**40 + 5)
        self.state = [state_of(moments, weight, signed) for signed in (True, False)]
        for owner, name in self._tensors():
            part, whole = guarded(getattr(owner, name), shift)
            setattr(owner, name, part)
            self.memory.append(whole)

    def _tensors(self) -> list[tuple[object, str]]:
        found = [
            (state, name) for state in self.state for name in vars(state) if name in ("_codes", "_values", "_largest")
        ]
        return found + [(self.weights, "_rest")] * isinstance(self.weights, KahanWeights)

    def __call__(self, gradient: Tensor) -> None:
        self.update += 1
        of = Factors.of(2e-3, (0.9, 0.95), 1e-8, 0.1, self.update, 0.7)
        gradient = guarded(gradient.to(self.device), self.shift)[0]
        if self.kernel:
            adamw(self.weights.master(self.update), gradient, *(state.moment() for state in self.state), of)
            return
        values, average, squares = self.weights.read().clone(), *(state.read().clone() for state in self.state)
        adamw_twin(values, gradient, average, squares, of)
        self.weights.write(values, 0, self.update)
        for state, found in zip(self.state, (average, squares), strict=True):
            state.write(found)


def assert_same_bits(
    count: int, moments: str, master: str, dtype: torch.dtype = torch.float32, scale: float = 1.0, device: str = "cpu"
) -> list[Tensor]:
    """Check all memory after three updates, with what lies around the tensors. Return the kernel's."""
    how = {"device": device, "shift": count % 3, "dim": count % 2}
    ours, twin = (Updates(count, moments, master, kernel, **how) for kernel in (True, False))
    for update in range(1, 4):
        for each in (ours, twin):
            each(gradients(count, update, scale, dtype))
        for number, (found, expected) in enumerate(zip(ours.memory, twin.memory, strict=True)):
            differ = (found.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
            assert not len(differ), f"memory {number} at update {update}: {len(differ)} bytes, first {differ[0]}"
    return ours.memory


def assert_levels_are_the_nearest(device: str = "cpu") -> None:
    """Check the codes of each middle of two levels, and of the numbers beside it. The moments are the gradient and its
    square."""
    of = Factors.of(1e-3, (0.0, 0.0), 1e-8, 0.0, 1)
    for signed in (True, False):
        middles = tables(torch.device("cpu"))[1 if signed else 3, :255]
        beside = [middles, *(middles.nextafter(torch.tensor(end)) for end in (-2.0, 2.0))]
        gradient = torch.cat([torch.cat((torch.ones(1), each if signed else each.sqrt())) for each in beside]).to(
            device
        )
        state = [state_of("int8", gradient, signed) for signed in (True, False)]
        adamw(Master(torch.zeros_like(gradient)), gradient, *(each.moment() for each in state), of)
        for each, values in zip(state, (gradient, gradient.square()), strict=True):
            codes, largest = encode_twin(values, each._signed)
            assert torch.equal(each._codes, codes) and torch.equal(each._largest, largest)

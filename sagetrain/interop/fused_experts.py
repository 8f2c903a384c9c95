"""The experts of a layer as GPT-OSS's folders keep them: one tensor for each product, transposed, with gate and up in
turns. Released folders have them in MXFP4: blocks of 32 numbers in 4 bits, and the exponent of each block."""

from __future__ import annotations

import torch
from torch import Tensor

from sagetrain.model.tensors import TensorSpec

BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the names of the two tensors that one in MXFP4 is."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes 0 to 7. The codes 8 to 15 are their negatives."""
_BIAS = 127
"""A block's scale less this is its power of two."""


def stored_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of experts' weights or biases in a folder."""
    experts, *each = spec.shape
    return (experts, *reversed(each))


def from_folder(spec: TensorSpec, tensor: Tensor) -> Tensor:
    """Return weights or biases of experts as our model has them."""
    ours = tensor.mT if tensor.dim() == 3 else tensor
    return _turned(ours, (-1, 2)) if "gate_up" in spec.name else ours


def for_folder(spec: TensorSpec, tensor: Tensor) -> Tensor:
    """Return weights or biases of experts as a folder has them."""
    theirs = _turned(tensor, (2, -1)) if "gate_up" in spec.name else tensor
    return theirs.mT if theirs.dim() == 3 else theirs


def _turned(tensor: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Exchange the two dims that the rows of each expert have by these sizes."""
    turned: Tensor = tensor.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return turned


def unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor in MXFP4 by that of its blocks, [experts, outputs, blocks of an output, 16]."""
    experts, outputs, number, each = blocks
    return experts, number * each * 2, outputs


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return numbers in MXFP4 as bf16 [experts, inputs, outputs], which holds each of them exactly.

    Args:
        blocks: uint8 [experts, outputs, blocks of an output, 16]: two codes a byte, the first in the lower bits.
        scales: uint8 [experts, outputs, blocks of an output].
    """
    values = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    found = torch.empty(unpacked_shape(tuple(blocks.shape)), dtype=torch.bfloat16)
    for out, codes, exponents in zip(found, blocks, scales, strict=True):  # An expert at a time bounds the memory.
        pairs = torch.stack((codes & 15, codes >> 4), -1).int()
        numbers = values[pairs].flatten(2) * torch.exp2(exponents.float() - _BIAS).unsqueeze(-1)
        out.copy_(numbers.flatten(1).t())
    return found

"""Gradients in 16 bits are added to sums in float32 with the bits of torch."""

import itertools

import torch

from on_gpu import needs_gpu
from sagekernels.sums import add_to

pytestmark = needs_gpu()
SHAPES = [(16,), (4096,), (1000, 336), (5,), (3, 7), (1, 0)]


def test_the_bits_are_those_of_torch() -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.bfloat16, torch.float32)):
        total, gradient = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda").to(dtype)
        expected = total + gradient
        for odd in (gradient, torch.cat([gradient.flatten()[:1], gradient.flatten()])[1:].view(shape)):
            found = total.clone()
            add_to(found, odd)
            assert torch.equal(found, expected), (shape, dtype)

"""Gradients in 16 bits are added to sums in float32 with the bits of torch, and hashes have those of a CPU."""

import itertools

import torch

from on_gpu import needs_gpu
from sagekernels.sums import add_parts, add_parts_twin, add_to
from sagetrain.parallel.digest import digest

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


def test_parts_are_added_with_the_bits_of_the_twin() -> None:
    for count, size, dtype in itertools.product((2, 3, 8), (1, 4096, 100_003), (torch.bfloat16, torch.float32)):
        parts, found = torch.randn(count, size, device="cuda").to(dtype), torch.randn(size, device="cuda")
        expected = found.clone()
        add_parts_twin(expected, parts, 1 / count)
        add_parts(found, parts, 1 / count)
        assert torch.equal(found, expected), (count, size, dtype)


def test_a_hash_is_that_of_the_cpu() -> None:
    for shape, dtype in itertools.product([*SHAPES[:-1], (3, 1_000_001)], (torch.bfloat16, torch.float32)):
        values = torch.randn(shape, device="cuda").to(dtype)
        for part in (values, values.flatten()[1:], values.flatten()[4:]):
            assert int(digest(part)) == int(digest(part.cpu())), (shape, dtype)

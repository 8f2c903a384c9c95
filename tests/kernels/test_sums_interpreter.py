"""Sums of gradients on a GPU are those of the twin, on Triton's interpreter.

test_sage_interpreter.py starts the process that interprets.
"""

import torch
import triton

from interpreted import INSIDE, find

if INSIDE:
    from sagekernels import sums

    def assert_parts_are_added() -> None:
        for count, size in ((2, 1), (3, 5000), (8, 4096)):
            parts = torch.randn(count, size).bfloat16()
            expected, found = torch.full((2, size + 1), 3.0)
            sums.add_parts_twin(expected[:size], parts, 1 / count)
            exact = 3 + parts.double().sum(0) / count
            torch.testing.assert_close(expected[:size].double(), exact, rtol=1e-5, atol=1e-6)
            grid = (triton.cdiv(size, sums.BLOCK),)
            sums._add_parts_kernel[grid](found, parts, size, 1 / count, COUNT=count, BLOCK=sums.BLOCK)
            assert torch.equal(found, expected), (count, size)

    def test_parts_are_added_as_by_the_twin(monkeypatch) -> None:
        assert_parts_are_added()
        find(monkeypatch, assert_parts_are_added, sums, [
            ("_add_parts_kernel", "place < size", "place < size - 1"), ("_add_parts_kernel", "found * share", "found"),
            ("_add_parts_kernel", "PARTS += size", "PARTS += size - 1"),
        ])  # fmt: skip

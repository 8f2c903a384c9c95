"""The sum of words that a GPU makes for a hash is that of torch, on Triton's interpreter.

test_sage_interpreter.py starts the process that interprets.
"""

import torch

from interpreted import INSIDE, find

if INSIDE:
    from sagekernels import hashing
    from sagetrain.parallel import digest

    def assert_same() -> None:
        factors = 2 * digest._ODD[0], 2 * digest._ODD[1]
        for size in (1, 1023, 1025, 4097):
            words = torch.randint(-(2**63), 2**63 - 1, (size,))
            found = hashing.word_sum(words, digest.ROW // 8, *factors)
            assert int(found) == int(digest.word_sum(words)), size

    def test_the_sum_is_that_of_torch() -> None:
        assert_same()

    def test_mistakes_are_found(monkeypatch) -> None:
        find(monkeypatch, assert_same, hashing, [
            ("_word_sum_kernel", "place < size", "place < size - 1"), ("_word_sum_kernel", "+ 1", "+ 2"),
            ("_word_sum_kernel", "(place // COLUMNS) * OF_ROW", "(place // COLUMNS)"),
        ])  # fmt: skip

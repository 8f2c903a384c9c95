"""The sum of words that a GPU makes for a hash is that of torch, on Triton's interpreter.

test_sage_interpreter.py starts the process that interprets.
"""

from functools import partial

import torch

from interpreted import INSIDE, find

if INSIDE:
    from sagekernels import hashing
    from sagetrain.parallel import digest

    def assert_same(monkeypatch) -> None:
        factors = 2 * digest._ODD[0], 2 * digest._ODD[1]
        for size in (1, 1023, 1025, 4097):
            words = torch.randint(-(2**63), 2**63 - 1, (size,))
            found = hashing.word_sum(words, digest.ROW // 8, *factors)
            assert int(found) == int(digest.word_sum(words)), size
        # Two files of vectors of odd lengths behind zeros.
        files = [torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32) for size in (2**15, 2050)]
        cuts = [(0, 5, 7), (0, 12, 4099), (0, 4111, 2**15 - 4111), (1, 1, 2049)]
        vectors = [files[file][first : first + size].view(torch.float32) for file, first, size in cuts]
        files[0][:5], files[1][:1] = 0, 0
        with monkeypatch.context() as few:
            few.setattr(hashing, "PROGRAMS", 3)
            sums = digest.file_sums(vectors, [(file, first) for file, first, _ in cuts], 2)
        assert sums.tolist() == [int(digest.word_sum(file)) for file in files]

    def test_the_sum_is_that_of_torch(monkeypatch) -> None:
        assert_same(monkeypatch)

    def test_mistakes_are_found(monkeypatch) -> None:
        find(monkeypatch, partial(assert_same, monkeypatch), hashing, [
            ("_word_sum_kernel", "place < size", "place < size - 1"), ("_word_sum_kernel", "+ 1", "+ 2"),
            ("_word_sum_kernel", "(place // COLUMNS) * OF_ROW", "(place // COLUMNS)"),
            ("_file_sums_kernel", "place % 2 * 32", "(place - first) % 2 * 32"),
            ("_file_sums_kernel", "at < size", "at <= size"),
            ("_file_sums_kernel", "PROGRAMS * BLOCK", "2 * PROGRAMS * BLOCK"),
            ("_file_sums_kernel", "SUMS + tl.load(row + 3)", "SUMS"),
            ("_file_sums_kernel", "(word // COLUMNS) * OF_ROW", "(first // COLUMNS) * OF_ROW"),
            ("_file_sums_kernel", "factors += FURTHER", "factors += OF_ROW"),
        ])  # fmt: skip

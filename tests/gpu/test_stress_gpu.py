"""The stress test of `sagetrain doctor --stress` on a GPU: no false alarm, and a wrong bit is found."""

import pytest
import torch

from sagetrain import stress

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-gpu"),
]


def test_a_gpu_has_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests use the same GPU.
    monkeypatch.setattr(stress, "_SHARE", 0.02)
    for check in stress.stress_host(1.0):
        assert check.verdict in ("ok", "look") and "no wrong bit" in check.found, check
    multiply, calls = torch._int_mm, []

    def flips(*pair: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        product = multiply(*pair)
        product[5, 5] ^= int(len(calls) == 9)
        return product

    monkeypatch.setattr(torch, "_int_mm", flips)
    found = [check.found for check in stress.stress_host(0.5)]
    assert ["wrong bits: 1 of INT8 products" in each for each in found].count(True) == 1, found

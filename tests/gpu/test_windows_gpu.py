"""Windows of tokens on a real GPU, in every backend: `make test-gpu`.

Uninitialized memory is poisoned, so an element that no kernel writes cannot pass.
"""

import pytest
import torch

from sagekernels import backends, document_bounds, sage_attention
from sagekernels.testing import Shape, random_inputs, results_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
BACKENDS = [one.name for one in reversed(backends.BACKENDS) if one.serves(CAPABILITY) and one.name != "twin"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)  # This setting fills torch.empty with NaN and largest integers.
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_gives_the_same_bits_again(backend):
    inputs = random_inputs(Shape(2, 700, 700, 4, 2, 64), k_mean=2.0, device="cuda")
    for recipe in ("fine", "scores"):
        found = [results_of(sage_attention, *inputs, recipe=recipe, window=100, backend=backend) for _ in range(3)]
        assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


def test_bounds_are_those_of_the_twin():
    row = torch.device("cuda", torch.cuda.current_device())
    for window in (None, 1, 100, 5000):
        for documents in ((1000,), (1, 0, 63, 64, 872), (1,) * 1000):
            cu_seqlens = Shape(documents=documents).cu_seqlens()
            found = document_bounds(cu_seqlens.cuda(), 1000, window)
            assert torch.equal(found.cpu(), document_bounds(cu_seqlens, 1000, window))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # The host neither waits nor copies.
            found = document_bounds(None, 1000, window, row)
        graph.replay()
        assert torch.equal(found.cpu(), document_bounds(None, 1000, window))

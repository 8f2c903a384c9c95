"""Windows of tokens and sinks on a real GPU, in every backend: `make test-gpu`.

Uninitialized memory is poisoned, so an element that no kernel writes cannot pass.
"""

import itertools

import pytest
import torch

from kernel_inputs import takes
from on_gpu import backends_here, needs_gpu, poisoned_memory  # noqa: F401
from sagekernels import document_bounds, sage_attention
from sagekernels.call import RECIPES
from sagekernels.testing import Shape, errors, exact_results, random_inputs, random_sinks, results_of

pytestmark = needs_gpu()
BACKENDS = backends_here()


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


@pytest.mark.parametrize(("backend", "recipe", "shape"), [
    pytest.param(
        backend, recipe, shape, id=f"{shape}-{recipe}-{backend}",
        # Sinks know nothing of recipes, and each of these compiles kernels of its own.
        marks=[pytest.mark.long]
        * (recipe not in ("fine", "scores") or (backend != BACKENDS[-1] and (shape.head_dim, recipe) != (192, "fine"))),
    )
    for backend, recipe, shape in itertools.product(BACKENDS, RECIPES, (
        Shape(1, 1000, 1000, 4, 2, 64, documents=(200, 1, 0, 799), window=128, sinks=True),
        Shape(2, 333, 333, 2, 1, 128, sinks=True),
        Shape(2, 200, 300, 2, 2, 192, causal=False, sinks=True),
    ))
    if takes(backend, shape, torch.bfloat16, recipe)
])  # fmt: skip
def test_sinks_agree_with_the_twin_and_with_float64(shape, recipe, backend):
    """Sinks have the same bits from call to call, beside windows and documents and without. Each case compiles its own
    kernels, so the first pass takes some of them, in several processes."""
    inputs = random_inputs(shape, k_mean=2.0, device="cuda")
    options = {"causal": shape.causal, "cu_seqlens": shape.cu_seqlens("cuda"), "window": shape.window}
    options["sinks"] = random_sinks(shape, device="cuda")
    exact = exact_results(*inputs, **options)
    ours, again, twin = (
        results_of(sage_attention, *inputs, **options, recipe=recipe, backend=name)
        for name in (backend, backend, "twin")
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    judged, expected = errors(ours, exact), errors(twin, exact)
    assert all(judged[name] < 1.1 * expected[name] + 3e-3 for name in judged), (judged, expected)


def test_a_sink_of_minus_infinity_is_none():
    inputs = random_inputs(Shape(2, 700, 700, 4, 2, 64), k_mean=2.0, device="cuda")
    none = results_of(sage_attention, *inputs, window=100)
    *found, of_sinks = results_of(
        sage_attention, *inputs, window=100, sinks=torch.full((4,), -torch.inf, device="cuda")
    )
    assert all(map(torch.equal, none, found)) and not of_sinks.any()

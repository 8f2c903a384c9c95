"""The backends of sagekernels on a real GPU: `make test-gpu`.

Every case is judged twice. The twin shows that the kernel computes the specification, and float64 shows that the
specification is attention. Uninitialized memory is poisoned, so an element that no kernel writes cannot pass.
"""

import itertools
import time

import pytest
import torch

from kernel_inputs import chunk_bounds, takes
from on_gpu import backends_here, needs_gpu, poisoned_memory  # noqa: F401
from sagekernels import backends, nvrtc, sage_attention
from sagekernels.admission import median_seconds
from sagekernels.call import RECIPES
from sagekernels.testing import Shape, errors, exact_results, random_inputs, results_of

pytestmark = needs_gpu()
BACKENDS = backends_here()
"""The backends of this GPU. The last one is the GPU's own."""
OWN_FIRST = [pytest.param(name, marks=[pytest.mark.long] * (name != BACKENDS[-1])) for name in BACKENDS]
"""The first pass takes the GPU's own backend alone to its edges. A backend compiles for 20 seconds there."""

SHAPES = [
    Shape(2, 1024, 1024, 4, 4, 64),
    Shape(1, 1000, 1000, 4, 2, 64, causal=False),
    Shape(1, 777, 777, 7, 1, 128),
    Shape(2, 512, 512, 2, 2, 128, causal=False),
    Shape(1, 333, 333, 3, 3, 80),
    Shape(1, 300, 300, 2, 1, 96),
    Shape(1, 200, 200, 2, 1, 192),
    Shape(1, 321, 321, 2, 2, 256, causal=False),
    Shape(1, 130, 130, 2, 2, 16, documents=(60, 1, 0, 69)),
    Shape(1, 130, 130, 2, 1, 32, causal=False, documents=(100, 30), window=20),
    Shape(1, 100, 1000, 2, 1, 64),
    Shape(1, 1, 333, 2, 2, 64),
    Shape(1, 1, 1, 2, 2, 64),
    Shape(1, 2000, 2000, 2, 1, 64, documents=(1, 0, 63, 64, 65, 700, 1, 1, 1105, 0, 0)),
    Shape(1, 2000, 2000, 2, 2, 128, causal=False, documents=(500, 1, 499, 1000, 0, 0)),
    Shape(1, 100, 100, 2, 2, 64, documents=(1,) * 100),
    Shape(2, 700, 700, 4, 2, 64, window=100),
    Shape(1, 1000, 1000, 2, 1, 128, documents=(200, 1, 0, 799), window=300),
    Shape(1, 500, 500, 2, 2, 64, causal=False, documents=(130, 370), window=33),
    Shape(1, 333, 333, 2, 1, 80, window=1),
]


CASES = [
    pytest.param(
        *case,
        id=f"{shape}-{str(dtype)[6:]}-{recipe}-{backend}",
        # The first pass takes the backends of this GPU's runs. Kernels for heads of 192 are those for 256, and heads of
        # 16 are as narrow as those of 32.
        marks=[pytest.mark.long] * (backend not in (BACKENDS[0], BACKENDS[-1]) or shape.head_dim in (16, 192)),
    )
    for backend, recipe, dtype, shape in itertools.product(BACKENDS, RECIPES, (torch.bfloat16, torch.float16), SHAPES)
    if takes(*(case := (backend, shape, dtype, recipe)))
]


@pytest.mark.long
def test_queries_and_keys_of_different_tokens():
    """Ranks that gather keys call attention so. The portable kernels take it."""
    inputs = random_inputs(Shape(1, 512, 1600, 4, 2, 128), sigma=1.5, k_mean=1.0, do_scale=1e-2, device="cuda")
    bounds = chunk_bounds(256, 800, ((300, 400, 1, 99), (500, 300)), "cuda")
    for recipe in RECIPES:
        options = {"causal": False, "bounds": bounds, "recipe": recipe}
        ours, twin = (results_of(sage_attention, *inputs, **options, backend=one) for one in (None, "twin"))
        between = errors(ours, twin)
        assert max(between.values()) < 2e-2, (recipe, between)


@pytest.mark.parametrize(("backend", "shape", "dtype", "recipe"), CASES)
def test_agrees_with_the_twin_and_with_float64(backend, shape, dtype, recipe):
    inputs = random_inputs(shape, sigma=1.5, k_mean=1.0, do_scale=1e-2, dtype=dtype, device="cuda")
    options = {"causal": shape.causal, "cu_seqlens": shape.cu_seqlens("cuda"), "window": shape.window}
    exact = exact_results(*inputs, **options)
    twin = results_of(sage_attention, *inputs, **options, recipe=recipe, backend="twin")
    ours = results_of(sage_attention, *inputs, **options, recipe=recipe, backend=backend)
    between = errors(ours, twin)
    judged, expected = errors(ours, exact), errors(twin, exact)
    vanishing = 0.03 * exact.dv.norm().item()  # With one key per query, dS is only the rounding of O in delta.
    for name in between:
        value, truth = getattr(ours, name), getattr(exact, name)
        assert torch.isfinite(value).all(), name
        if truth.norm().item() < 1e-6 * vanishing:
            assert value.double().norm().item() < vanishing, name
            continue
        assert between[name] < (0.012 if name in ("dq", "dk") else 0.006), (name, between)
        assert judged[name] < 1.1 * expected[name] + 2e-3, (name, judged, expected)


def test_triton_computes_what_others_do_not_take():
    inputs = random_inputs(Shape(), device="cuda")
    ours, *others = (results_of(sage_attention, *inputs, recipe="paper", backend=backend) for backend in BACKENDS)
    assert BACKENDS[0] == "triton"
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, ours, strict=True))


def gradients_of_any_size(backend):
    for do_scale in (1e-20, 1e-7, 1e4):
        inputs = random_inputs(Shape(1, 512, 512, 2, 2, 64), do_scale=do_scale, device="cuda")
        judged = errors(results_of(sage_attention, *inputs, recipe="fine", backend=backend), exact_results(*inputs))
        assert max(judged.values()) < 0.03, (do_scale, judged)


def zero_gradient_is_zero(backend):
    q, k, v, do = random_inputs(Shape(), device="cuda")
    grads = results_of(sage_attention, q, k, v, torch.zeros_like(do), recipe="fine", backend=backend)
    assert all((x == 0).all() for x in grads[1:])


def strided_inputs_and_gradients(backend):
    q, k, v, do = random_inputs(Shape(2, 300, 300, 4, 4, 64), device="cuda")
    expected = results_of(sage_attention, q, k, v, do, recipe="fine", backend=backend)
    packed = torch.stack((q, k, v), 2)  # The projection is [B, N, 3, H, D].
    heads_first = do.transpose(1, 2).contiguous().transpose(1, 2)
    got = results_of(sage_attention, *packed.unbind(2), heads_first, recipe="fine", backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    odd = [x.mT.contiguous().mT for x in (q, k, v)]  # head_dim is not contiguous here.
    got = results_of(sage_attention, *odd, do[:1, :1].expand_as(do), recipe="fine", backend=backend)
    assert all(torch.isfinite(x).all() for x in got)


def non_finite_values_propagate(backend):
    for where, bad in itertools.product(("q", "k", "v", "do"), (float("nan"), float("inf"))):
        inputs = random_inputs(Shape(1, 300, 300, 2, 2, 64), device="cuda")
        inputs[["q", "k", "v", "do"].index(where)][0, 170, 1, 3] = bad
        got = results_of(sage_attention, *inputs, smooth_k=False, recipe="fine", backend=backend)
        finite = {name: torch.isfinite(x).all(-1) for name, x in zip(got._fields, got, strict=True)}
        assert all(x[:, :, 0].all() for x in finite.values()), (where, bad)  # The other head stays finite.
        assert not finite["dq"][0, 170, 1], (where, bad)
        assert not finite["dk" if where != "do" else "dv"][0, :171, 1].any(), (where, bad)
        if where != "do":
            assert not finite["o"][0, 170, 1] and finite["o"][0, :64, 1].all(), (where, bad)


def same_bits_from_run_to_run(backend):
    shape = Shape(1, 3000, 3000, 8, 2, 64, documents=(1000, 1999, 1, 0, 0))
    inputs = random_inputs(shape, device="cuda")
    runs = [
        results_of(sage_attention, *inputs, cu_seqlens=shape.cu_seqlens("cuda"), recipe="fine", backend=backend)
        for _ in range(3)
    ]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize(("shape", "dtype"), [
    pytest.param(Shape(1, 777, 777, 7, 1, 128), torch.bfloat16, marks=pytest.mark.long),
    pytest.param(Shape(1, 777, 777, 7, 1, 128), torch.float16, marks=pytest.mark.long),
    (Shape(2, 512, 512, 2, 2, 64, causal=False), torch.bfloat16),
    pytest.param(Shape(2, 512, 512, 2, 2, 64, causal=False), torch.float16, marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_sums_in_float16_cost_no_accuracy(shape, dtype, monkeypatch):
    """GeForce cards sum in float16, and the test does so on any card. V has values that float16 does not hold, and dO
    has values of 1e-7."""
    inputs = random_inputs(
        shape, k_mean=1.0, do_scale=1e-7 if dtype == torch.bfloat16 else 1e-3, dtype=dtype, device="cuda"
    )
    if dtype == torch.bfloat16:
        inputs[2].mul_(1e6)
    exact = exact_results(*inputs, causal=shape.causal)
    usual, halves = [], []
    for found, half in ((usual, False), (halves, True)):
        for module in ("forward", "backward"):
            monkeypatch.setattr(f"sagekernels.{module}.half_sums", lambda device, half=half: half)
        judged = errors(results_of(sage_attention, *inputs, causal=shape.causal, backend="triton"), exact)
        found.extend(judged.values())
    assert all(b < 1.03 * a + 2e-4 for a, b in zip(usual, halves, strict=True)), (usual, halves)


@pytest.mark.parametrize("recipe", ["fine", "scores"])
def test_the_default_is_the_backend_of_this_gpu(recipe):
    inputs = random_inputs(Shape(1, 300, 300, 2, 1, 64), device="cuda")
    named, default = (results_of(sage_attention, *inputs, recipe=recipe, backend=x) for x in (BACKENDS[-1], None))
    assert all(torch.equal(a, b) for a, b in zip(default, named, strict=True))


def test_a_host_that_launches_slowly_is_not_timed():
    x = torch.randn(256, 256, device="cuda")

    def action():
        x.mul(2)
        time.sleep(0.01)  # The pause lies between two kernels.
        x.mul(2)

    assert median_seconds(action, "cuda") < 0.002


@pytest.mark.skipif("hopper" not in BACKENDS, reason="needs an H100 or H200")
def test_only_a_backend_by_name_fails_to_compile(monkeypatch):
    def fails(*_):
        raise nvrtc.CompilationError("does not compile")

    monkeypatch.setattr("sagekernels.hopper_forward.load", fails)
    monkeypatch.setattr(backends, "_failed", set())
    q, k, v, _ = random_inputs(Shape(1, 300, 300, 2, 1, 64), device="cuda")
    with pytest.raises(nvrtc.CompilationError, match="does not compile"):
        sage_attention(q, k, v, backend="hopper")
    with pytest.warns(RuntimeWarning, match="slower ones take over: does not compile") as warned:
        outputs = [sage_attention(q, k, v, backend=x) for x in (None, None, "mma")]
    assert len(warned) == 1 and all(torch.equal(o, outputs[-1]) for o in outputs)


@pytest.mark.skipif("hopper" not in BACKENDS, reason="needs an H100 or H200")
def test_the_recipe_that_is_not_named_is_the_fast_one():
    q, k, v, do = random_inputs(Shape(1, 1024, 1024, 4, 2, 128), device="cuda")
    named, default = (results_of(sage_attention, q, k, v, do, **how) for how in ({"recipe": "scores"}, {}))
    assert all(torch.equal(a, b) for a, b in zip(named, default, strict=True))


def compiles_into_one_graph(backend, recipe="fine"):
    q, k, v, do = random_inputs(Shape(2, 300, 300, 4, 2, 64), device="cuda")

    def block(q, k, v):
        return sage_attention(q * 1.5, k, v, recipe=recipe, backend=backend) * 2

    expected = results_of(block, q, k, v, do)
    got = results_of(torch.compile(block, fullgraph=True), q, k, v, do)
    assert max(errors(got, expected).values()) < 5e-3


def test_the_default_compiles_into_one_graph():
    compiles_into_one_graph(None, "scores")


def captured_by_a_cuda_graph(backend):
    shape = Shape(1, 600, 600, 4, 2, 64, documents=(100, 500, 0, 0))
    q, k, v, do = random_inputs(shape, device="cuda")
    cu_seqlens = shape.cu_seqlens("cuda")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step():
        o = sage_attention(*leaves, cu_seqlens=cu_seqlens, recipe="fine", backend=backend)
        return o, *torch.autograd.grad(o, leaves, do)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.use_deterministic_algorithms(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    fresh = random_inputs(shape, device="cuda", seed=1)
    other = Shape(1, 600, 600, 4, 2, 64, documents=(300, 299, 1, 0)).cu_seqlens("cuda")
    with torch.no_grad():
        for leaf, x in zip(leaves, fresh[:3], strict=True):
            leaf.copy_(x)
    do.copy_(fresh[3])
    cu_seqlens.copy_(other)
    graph.replay()
    expected = results_of(sage_attention, *fresh, cu_seqlens=other, recipe="fine", backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("backend", OWN_FIRST)
def test_edges_of_a_backend(backend):
    """The checks have the recipe `fine` and heads of 64, so that one process compiles the kernels for all of them."""
    for check in (
        gradients_of_any_size, zero_gradient_is_zero, strided_inputs_and_gradients, non_finite_values_propagate,
        same_bits_from_run_to_run, compiles_into_one_graph, captured_by_a_cuda_graph,
    ):  # fmt: skip
        check(backend)


@pytest.mark.parametrize("backend", OWN_FIRST)
def test_more_than_two_to_the_31_elements(backend):
    """Addresses exceed 2^31 elements: the last head of a long row is compared with the same head alone."""
    n, heads = 1 << 18, 132
    packed = torch.randn(1, n, heads, 64, device="cuda", dtype=torch.bfloat16)
    assert packed.numel() > 1 << 31
    far = packed[:, -512:, -2:]
    near = far.contiguous()
    ours = sage_attention(far, far, far, backend=backend)
    assert torch.equal(ours, sage_attention(near, near, near, backend=backend))

"""The Hopper backward on an H100 or H200, against the twin and against float64: `make test-gpu`."""

import pytest
import torch

from sagekernels.hopper_backward import hopper_backward, supported
from sagekernels.reference import twin_backward, twin_forward
from sagekernels.testing import Shape, exact_results, random_inputs, rel_l2

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA H100 or H200")]

SHAPES = [
    Shape(2, 1024, 1024, 4, 2, 64),
    Shape(2, 1024, 1024, 4, 2, 128),
    Shape(2, 1000, 1000, 2, 2, 128, causal=False),
    Shape(1, 333, 777, 7, 1, 128),
    Shape(1, 333, 777, 7, 1, 64, causal=False),
    Shape(3, 200, 200, 2, 2, 64),
    Shape(1, 1, 129, 2, 1, 64),
    Shape(1, 5001, 5001, 8, 8, 128),
    Shape(2, 4096, 4096, 8, 8, 64, causal=False),
    Shape(1, 2000, 2000, 2, 1, 64, documents=(1, 0, 63, 64, 65, 700, 1, 1, 1105, 0, 0)),
    Shape(1, 2000, 2000, 2, 2, 128, causal=False, documents=(500, 1, 499, 1000, 0, 0)),
    Shape(1, 700, 700, 2, 2, 128, documents=(7,) * 100),
]
NAMES = ("dq", "dk", "dv")


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN and largest integers
    yield
    torch.use_deterministic_algorithms(False)


def saved_by_forward(q, k, v, options):
    return twin_forward(q, k, v, smooth_k=True, smooth_q=False, **options)


def options_of(shape):
    return {
        "causal": shape.causal,
        "scale": shape.head_dim**-0.5,
        "bounds": shape.bounds("cuda"),
        "recipe": "scores",
    }


@pytest.mark.parametrize("deterministic", [True, False], ids=["", "any_order"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_twin_and_with_float64(shape, dtype, deterministic):
    q, k, v, do = random_inputs(shape, sigma=1.5, k_mean=1.0, do_scale=1e-2, dtype=dtype, device="cuda")
    options = options_of(shape)
    o, saved = saved_by_forward(q, k, v, options)
    assert supported(do, v, saved, recipe="scores")
    ours = hopper_backward(do, None, v, o, saved, deterministic=deterministic, **options)
    twin = twin_backward(do, None, v, o, saved, **options)
    exact = exact_results(q, k, v, do, causal=shape.causal, cu_seqlens=shape.cu_seqlens("cuda"))
    for name, x, y in zip(NAMES, ours, twin, strict=True):
        assert rel_l2(x, y) < 4e-3, name
        assert rel_l2(x, getattr(exact, name)) < 1.05 * rel_l2(y, getattr(exact, name)) + 1e-3, name
    if deterministic:
        again = hopper_backward(do, None, v, o, saved, **options)
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("do_scale", [1e-20, 1e-7, 1e4])
def test_gradients_of_any_size(do_scale):
    shape = Shape(1, 512, 512, 2, 2, 128)
    q, k, v, do = random_inputs(shape, do_scale=do_scale, device="cuda")
    o, saved = saved_by_forward(q, k, v, options_of(shape))
    ours = hopper_backward(do, None, v, o, saved, **options_of(shape))
    exact = exact_results(q, k, v, do)
    assert all(rel_l2(x, getattr(exact, name)) < 0.02 for name, x in zip(NAMES, ours, strict=True))


def test_slices_and_broadcast_gradients():
    shape = Shape(2, 500, 500, 3, 3, 64)
    packed = torch.randn(2, 500, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    o, saved = saved_by_forward(q, k, v, options_of(shape))
    heads_first = torch.randn(2, 3, 500, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for do in (heads_first, heads_first[:1, :1, :1, :1].expand_as(o)):
        ours = hopper_backward(do, None, v, o, saved, **options_of(shape))
        expected = hopper_backward(do.contiguous(), None, v.contiguous(), o, saved, **options_of(shape))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("token", [3, 170])  # the third stands where the last tile of the other batch ends
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_non_finite_values_propagate(where, token):
    shape = Shape(2, 300, 300, 2, 2, 128)
    inputs = random_inputs(shape, device="cuda")
    inputs[["q", "k", "v", "do"].index(where)][1, token, 1, 3] = float("nan")
    q, k, v, do = inputs
    o, saved = twin_forward(q, k, v, smooth_k=False, smooth_q=False, **options_of(shape))
    ours = hopper_backward(do, None, v, o, saved, **options_of(shape))
    finite = {name: torch.isfinite(x).all(-1) for name, x in zip(NAMES, ours, strict=True)}
    assert all(x[0].all() and x[1, :, 0].all() for x in finite.values())  # the other batch, the other head
    assert not finite["dq"][1, token, 1] and not finite["dk" if where != "do" else "dv"][1, : token + 1, 1].any()

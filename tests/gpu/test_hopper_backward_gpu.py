"""The Hopper backward on an H100 or H200 agrees with the twin and with float64: `make test-gpu`."""

from types import SimpleNamespace

import pytest
import torch

from kernel_inputs import call_of
from on_gpu import poisoned_memory  # noqa: F401
from qk_inputs import random_qk
from sagekernels import hopper_backward as of_backward
from sagekernels import normed_attention, qk_norm_rope, sage_attention
from sagekernels.hopper import HOPPER
from sagekernels.hopper_backward import hopper_backward
from sagekernels.observe import observed
from sagekernels.reference import twin_backward, twin_forward
from sagekernels.testing import Shape, exact_results, random_inputs, rel_l2

SERVED = torch.cuda.is_available() and HOPPER.serves(torch.cuda.get_device_capability())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SERVED, reason="needs an NVIDIA H100 or H200")]

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
    Shape(1, 2048, 2048, 16, 4, 128),
    Shape(2, 500, 500, 6, 2, 64, causal=False),
    Shape(1, 450, 450, 16, 2, 128, documents=(3, 200, 0, 247)),
]
CASES = [(shape, together) for shape in SHAPES for together in (False, True)[shape.heads == shape.kv_heads :]]
"""Shapes, and whether one program walks over all query heads of a key head, where they are more than one."""
NAMES = ("dq", "dk", "dv")


def backward_call(shape, q, k, v, do, *, smooth_k=True):
    """Return the call of the backward pass for a forward pass by the twin."""
    call = call_of(shape, q, k, v, "scores", smooth_k=smooth_k)
    return call.backward(do, *twin_forward(call))


@pytest.mark.parametrize("deterministic", [True, False], ids=["", "any_order"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("shape", "together"), CASES, ids=str)
def test_agrees_with_the_twin_and_with_float64(shape, together, dtype, deterministic, monkeypatch):
    monkeypatch.setattr(of_backward, "ENOUGH", dict.fromkeys(of_backward.ENOUGH, 0 if together else 1000))
    q, k, v, do = random_inputs(shape, sigma=1.5, k_mean=1.0, do_scale=1e-2, dtype=dtype, device="cuda")
    call = backward_call(shape, q, k, v, do)
    assert HOPPER.takes(call)
    ours, twin = hopper_backward(call, deterministic=deterministic), twin_backward(call)
    exact = exact_results(q, k, v, do, causal=shape.causal, cu_seqlens=shape.cu_seqlens("cuda"))
    for name, x, y in zip(NAMES, ours, twin, strict=True):
        assert rel_l2(x, y) < 4e-3, name
        assert rel_l2(x, getattr(exact, name)) < 1.05 * rel_l2(y, getattr(exact, name)) + 1e-3, name
    again = hopper_backward(call, deterministic=deterministic)
    assert all(map(torch.equal, ours[not deterministic :], again[not deterministic :]))


@pytest.mark.parametrize("shape", [Shape(1, 1000, 1000, 16, 4, 128), Shape(1, 1000, 1000, 12, 4, 64)], ids=str)
def test_heads_apart_err_no_more_than_heads_together(shape, monkeypatch):
    """dQ in order has the same bits, and so do the sums of dK and dV up to their order."""
    inputs = random_inputs(shape, sigma=1.5, k_mean=1.0, device="cuda")
    call, exact = backward_call(shape, *inputs), exact_results(*inputs)
    apart = hopper_backward(call, deterministic=True)
    monkeypatch.setattr(of_backward, "ENOUGH", dict.fromkeys(of_backward.ENOUGH, 0))
    together = hopper_backward(call, deterministic=True)
    assert torch.equal(apart[0], together[0])
    for name, x, y in zip(NAMES, apart, together, strict=True):
        assert rel_l2(x, y) < 1e-3, name
        assert rel_l2(x, getattr(exact, name)) < 1.001 * rel_l2(y, getattr(exact, name)), name


@pytest.mark.parametrize("do_scale", [1e-20, 1e-7, 1e4])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_gradients_of_any_size(do_scale, kv_heads):
    shape = Shape(1, 512, 512, 2, kv_heads, 128)
    q, k, v, do = random_inputs(shape, do_scale=do_scale, device="cuda")
    ours = hopper_backward(backward_call(shape, q, k, v, do))
    exact = exact_results(q, k, v, do)
    assert all(rel_l2(x, getattr(exact, name)) < 0.02 for name, x in zip(NAMES, ours, strict=True))


def test_slices_and_broadcast_gradients():
    shape = Shape(2, 500, 500, 3, 3, 64)
    packed = torch.randn(2, 500, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    heads_first = torch.randn(2, 3, 500, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for do in (heads_first, heads_first[:1, :1, :1, :1].expand_as(q)):
        call = backward_call(shape, q, k, v, do)
        ours = hopper_backward(call)
        expected = hopper_backward(call._replace(do=do.contiguous(), v=v.contiguous()))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("token", [3, 170])  # The third token stands where the last tile of the other batch ends.
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_non_finite_values_propagate(where, token):
    shape = Shape(2, 300, 300, 2, 2, 128)
    inputs = random_inputs(shape, device="cuda")
    inputs[["q", "k", "v", "do"].index(where)][1, token, 1, 3] = float("nan")
    ours = hopper_backward(backward_call(shape, *inputs, smooth_k=False))
    finite = {name: torch.isfinite(x).all(-1) for name, x in zip(NAMES, ours, strict=True)}
    # The other batch and the other head stay finite.
    assert all(x[0].all() and x[1, :, 0].all() for x in finite.values())
    assert not finite["dq"][1, token, 1] and not finite["dk" if where != "do" else "dv"][1, : token + 1, 1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("batch", "tokens", "heads", "head_dim", "documents"), [
    (3, 333, (7, 1), 64, ()), (1, 1000, (2, 2), 128, (1, 0, 63, 64, 65, 807)), (1, 20, (3, 3), 64, ()),
    *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 1024, (4, 2), 128, ()), (2, 500, (32, 8), 64, ()))),
])  # fmt: skip
def test_the_gradient_of_a_projection(batch, tokens, heads, head_dim, documents, dtype):
    """The call is behind QK-norm and rotary embedding. It is compared with two steps and the twin, and an observer is
    told dQ as it is without them."""
    x = random_qk(batch * tokens, heads, head_dim, 1.0, dtype, "cuda")
    v = torch.randn_like(x.k)
    bounds = Shape(1, tokens, tokens, documents=documents).bounds("cuda") if documents else None
    leaves = [each.detach().requires_grad_() for each in (x.q, x.k, v, x.q_gain, x.k_gain)]
    do = 1e-2 * torch.randn(batch, tokens, heads[0], head_dim, device="cuda").to(dtype)

    def gradients(inputs, backend):
        o = normed_attention(*inputs, x.cos, x.sin, x.eps, batch=batch, bounds=bounds, recipe="scores", backend=backend)
        return torch.autograd.grad(o, inputs, do)

    torch.full((2**26,), torch.nan, device="cuda")  # The next allocation holds NaN.
    ours, twin = gradients(leaves, "hopper"), gradients(leaves, "twin")
    q, k, of_v = qk_norm_rope(*leaves, x.cos, x.sin, x.eps)
    apart = sage_attention(*(y.unflatten(0, (batch, -1)) for y in (q, k, of_v)), bounds=bounds, recipe="scores")
    in_two_steps = torch.autograd.grad(apart, leaves, do)
    for name, a, b, c in zip(("q", "k", "v", "q_gain", "k_gain"), ours, in_two_steps, twin, strict=True):
        assert max(rel_l2(a, b), rel_l2(a, c)) < 1e-2, name
    assert torch.equal(ours[2], in_two_steps[2])
    again = gradients(leaves, "hopper")
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    told = []
    with observed(SimpleNamespace(forward=lambda *_: None, backward=lambda call, grads: told.append(grads[0].clone()))):
        assert all(torch.equal(a, b) for a, b in zip(ours, gradients(leaves, "hopper"), strict=True))
    assert rel_l2(told[0], hopper_dq(leaves, x, batch, bounds, do)) == 0


def hopper_dq(leaves, x, batch, bounds, do):
    """Compute dQ of the attention alone."""
    with torch.no_grad():
        q, k, v = (y.unflatten(0, (batch, -1)) for y in qk_norm_rope(*leaves, x.cos, x.sin, x.eps))
    q.requires_grad_()
    return torch.autograd.grad(sage_attention(q, k, v, bounds=bounds, recipe="scores"), q, do)[0]

"""Attention behind QK-norm and rotary embedding as one node: the results of its two functions, and the kernels that
compute them."""

import pytest
import torch
from torch import Tensor

from qk_inputs import QKInputs, random_qk
from sagekernels import backends, hopper, normed_attention, qk_norm_rope, sage_attention
from sagekernels.call import RECIPES, BackwardCall, Gradients
from sagekernels.normed import NORMED_BACKWARD
from sagekernels.observe import observed
from sagekernels.qk_norm_rope import projection_gradients
from sagekernels.reference import twin_backward, twin_forward

Inputs = tuple[list[Tensor], list]
HEADS = (4, 2)


def inputs(tokens: int, head_dim: int = 16, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Return q, k, v and the gains, which get gradients, and the tables and eps."""
    x = random_qk(tokens, HEADS, head_dim, 1.0, dtype)
    whole = torch.cat((x.q, x.k, torch.randn_like(x.k)), 1)
    parts = whole.split([HEADS[0] * head_dim, *[HEADS[1] * head_dim] * 2], 1)
    return [each.detach().requires_grad_() for each in (*parts, x.q_gain, x.k_gain)], [x.cos, x.sin, x.eps]


def results(leaves: list[Tensor], o: Tensor) -> tuple[Tensor, ...]:
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(o.dtype)
    return o, *torch.autograd.grad(o, leaves, do)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_its_two_functions(recipe: str) -> None:
    """The results are equal to the last bit for sequences, packed documents and in autocast. Gradients that one
    operator makes lie side by side."""
    options = {"recipe": recipe}
    documents = torch.tensor([0, 3, 3, 40, 66], dtype=torch.int32)
    other = {"cu_seqlens": documents, "causal": False, "scale": 0.3, "window": 9}
    for batch, more in ((3, {"smooth_k": False}), (1, other)):
        leaves, tables = inputs(66)
        found = results(leaves, normed_attention(*leaves, *tables, batch=batch, **options, **more))
        rows = [x.unflatten(0, (batch, -1)) for x in qk_norm_rope(*leaves, *tables)]
        assert all(map(torch.equal, found, results(leaves, sage_attention(*rows, **options, **more))))
        assert len({x.untyped_storage().data_ptr() for x in found[1:4]}) == 1
    leaves, tables = inputs(66, dtype=torch.float32)
    with torch.autocast("cpu"):
        o = normed_attention(*leaves, *tables, batch=2, **options)
    assert o.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in results(leaves, o)[1:])


class Told:
    """An observer that keeps all that it is told."""

    def __init__(self) -> None:
        self.grads: list[Gradients] = []

    def forward(self, *_: object) -> None:
        pass

    def backward(self, call: BackwardCall, grads: Gradients) -> None:
        self.grads.append(tuple(x.clone() for x in grads))


def test_observers_are_told_the_gradients_of_q_k_and_v() -> None:
    leaves, tables = inputs(40)
    alone = results(leaves, normed_attention(*leaves, *tables))
    told = Told()
    with observed(told):
        assert all(map(torch.equal, alone, results(leaves, normed_attention(*leaves, *tables))))
        rows = [x[None] for x in qk_norm_rope(*leaves, *tables)]
        results(leaves, sage_attention(*rows))
    ours, apart = told.grads
    assert all(map(torch.equal, ours, apart))


@pytest.mark.parametrize(("capability", "recipe", "expected"), [
    ((9, 0), "scores", ["gradient of the projection"]), ((9, 0), "fine", ["triton"]), ((8, 9), "scores", ["triton"]),
])  # fmt: skip
def test_a_backend_with_kernels_computes_the_gradient(
    capability: tuple[int, int], recipe: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def backward(call: BackwardCall) -> Gradients:
        ran.append("triton")
        return twin_backward(call)

    def projection(call: BackwardCall, made_from: object) -> tuple[Tensor, Tensor]:
        ran.append("gradient of the projection")
        return projection_gradients(twin_backward(call), made_from)

    triton = backends.TRITON._replace(forward=twin_forward, backward=backward)
    monkeypatch.setattr(hopper, "triton_backward", backward)
    here = hopper.HOPPER._replace(forward=twin_forward, projection=projection)
    monkeypatch.setattr(backends, "BACKENDS", (here, triton))
    leaves, tables = inputs(40, 64)
    expected_results = results(leaves, normed_attention(*leaves, *tables, recipe=recipe, backend="twin"))
    monkeypatch.setattr(backends, "capability", lambda device: capability)
    assert all(map(torch.equal, results(leaves, normed_attention(*leaves, *tables, recipe=recipe)), expected_results))
    assert ran == expected


def test_the_operator_keeps_its_promises() -> None:
    leaves, (cos, sin, eps) = inputs(20)
    q, k, v, q_gain, k_gain = (x.detach() for x in leaves)
    rows = [x[None] for x in qk_norm_rope(q, k, v, q_gain, k_gain, cos, sin, eps)]
    for recipe in ("scores", "fine"):
        o, *saved = torch.ops.sagekernels.forward(*rows, None, True, 0.25, True, recipe, None)
        arguments = (torch.randn_like(o), rows[2], o, *saved, None, True, 0.25, recipe, None)
        arguments += (q, k, q_gain, k_gain, cos, sin, eps)
        torch.library.opcheck(NORMED_BACKWARD, arguments, test_utils=("test_schema", "test_faketensor"))


def test_no_tokens_are_no_trouble() -> None:
    x: QKInputs = random_qk(1, HEADS, 16, 1.0, torch.bfloat16)
    leaves = [each.detach().requires_grad_() for each in (x.q[:0], x.k[:0], x.k[:0], x.q_gain, x.k_gain)]
    o, *grads = results(leaves, normed_attention(*leaves, x.cos[:0], x.sin[:0], x.eps, batch=1))
    assert o.shape == (1, 0, 4, 16) and not torch.stack(grads[3:]).any()


@pytest.mark.parametrize(("options", "message"), [
    ({"batch": 3}, "20 tokens are not 3 sequences"), ({"recipe": "plain"}, "recipe 'plain'"),
    ({"backend": "cutlass"}, "backend 'cutlass'"), ({"scale": -1.0}, "scale must be positive"),
])  # fmt: skip
def test_mistakes_say_what_is_supported(options: dict, message: str) -> None:
    leaves, tables = inputs(20)
    with pytest.raises(ValueError, match=message):
        normed_attention(*leaves, *tables, **options)

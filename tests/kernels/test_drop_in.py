"""INT8 attention under the signatures of torch and flash-attn: the same results, and refusals by name."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sagekernels


def tensors(*shape: int, number: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(number)]


def close(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> bool:
    """Whether values and gradients agree to INT8's error."""
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    pairs = [(found, expected), *zip(*(torch.autograd.grad(y, inputs, grad) for y in (found, expected)), strict=True)]
    return all(0 < (a - b).norm() / b.norm() < 0.03 for a, b in pairs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
def test_it_computes_what_torch_computes(causal: bool, heads: int) -> None:
    (q,), (k, v) = tensors(2, 4, 40, 16, number=1), tensors(2, heads, 40, 16, number=2)
    options = {"is_causal": causal, "scale": 0.3, "enable_gqa": True}
    found = sagekernels.scaled_dot_product_attention(q, k, v, **options)
    assert close(found, F.scaled_dot_product_attention(q, k, v, **options), [q, k, v])
    by_rows = [x.transpose(1, 2) for x in (q, k, v)]
    flash = sagekernels.flash_attn_func(*by_rows, softmax_scale=0.3, causal=causal)
    assert torch.equal(flash, found.transpose(1, 2))


def test_packed_documents_and_windows_that_leave_out_nothing() -> None:
    q, k, v = tensors(40, 4, 16)
    bounds = torch.tensor([0, 12, 12, 40], dtype=torch.int32)
    found = sagekernels.flash_attn_varlen_func(q, k, v, bounds, bounds.clone(), 28, 28, causal=True)
    expected = [
        F.scaled_dot_product_attention(*(x[first:last].transpose(0, 1) for x in (q, k, v)), is_causal=True)
        for first, last in ((0, 12), (12, 40))
    ]
    assert close(found, torch.cat([x.transpose(0, 1) for x in expected]), [q, k, v])
    causal = sagekernels.flash_attn_func(q[None], k[None], v[None], causal=True)
    for window in ((-1, 0), (None, 0), (40, 0), (39, 0)):
        assert torch.equal(sagekernels.flash_attn_func(q[None], k[None], v[None], window_size=window), causal)


@pytest.mark.parametrize(
    ("window", "causal"),
    [((9, 0), True), ((9, -1), True), ((9, None), True), ((9, 0), False), ((9, 9), False)],
)
def test_windows_and_sinks(window: tuple[int, int | None], causal: bool) -> None:
    """(left, 0) is causal whatever `causal` says, None is -1, and a sink is a key of its own without a value."""
    q, k, v = tensors(40, 4, 16)
    sinks = torch.tensor([0.0, 1.0, 2.0, 3.0], requires_grad=True)
    i = torch.arange(40)
    far = (i[:, None] - i[None, :]).abs() >= 10
    mask = far | (i[None, :] > i[:, None]) if 0 in window or causal else far
    documents = torch.tensor([0, 12, 40], dtype=torch.int32)
    apart = (i[:, None] < 12) != (i[None, :] < 12)
    flash_func = lambda *x, **more: sagekernels.flash_attn_func(*(y[None] for y in x), **more)[0]  # noqa: E731
    varlen_func = lambda *x, **more: sagekernels.flash_attn_varlen_func(*x, documents, documents, 28, 28, **more)  # noqa: E731
    for function, hidden in ((flash_func, mask), (varlen_func, mask | apart)):
        for own in (None, sinks):
            scores = torch.einsum("nhd,mhd->hnm", q, k) / 4
            scores = scores.masked_fill(hidden, -torch.inf)
            column = torch.full((4, 40, 1), -torch.inf) if own is None else own[:, None, None].expand(4, 40, 1)
            p = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
            expected = torch.einsum("hnm,mhd->nhd", p, v)
            found = function(q, k, v, causal=causal, window_size=window, learnable_sink=own)
            assert close(found, expected, [q, k, v] if own is None else [q, k, v, own])


def flash(**options: object) -> Callable[[], Tensor]:
    return lambda: sagekernels.flash_attn_func(*(x[None] for x in tensors(40, 4, 16)), **options)


def sdpa(keys: int = 40, heads: int = 4, **options: object) -> Callable[[], Tensor]:
    (q,), (k, v) = tensors(1, 4, 40, 16, number=1), tensors(1, heads, keys, 16, number=2)
    return lambda: sagekernels.scaled_dot_product_attention(q, k, v, **options)


def varlen(second: list[int], **options: object) -> Callable[[], Tensor]:
    bounds = [torch.tensor(each, dtype=torch.int32) for each in ([0, 12, 40], second)]
    return lambda: sagekernels.flash_attn_varlen_func(*tensors(40, 4, 16), *bounds, 28, 28, **options)


@pytest.mark.parametrize(("call", "message"), [
    (flash(window_size=(20, 5)), r"window_size \(20, 5\) over 40 keys; take \(20, 0\) or the same on both sides"),
    (flash(window_size=(-1, 7)), r"window_size \(-1, 7\) over 40 keys"),
    (flash(softcap=30.0), "softcap 30"),
    (flash(dropout_p=0.1), r"dropout_p 0\.1"),
    (flash(deterministic=True), r"deterministic=True by itself; call torch\.use_deterministic"),
    (varlen([0, 12, 40], window_size=(10, 4)), r"window_size \(10, 4\) over 28 keys"),
    (flash(learnable_sink=torch.zeros(3)), r"sinks must be \[4\]"),
    (varlen([0, 40]), "documents of other keys than queries"),
    (varlen([0, 13, 40]), "cu_seqlens_k is not cu_seqlens_q"),
    (sdpa(attn_mask=torch.ones(40, 40, dtype=torch.bool)), "attn_mask; documents are cu_seqlens"),
    (sdpa(dropout_p=0.5), r"dropout_p 0\.5"),
    (sdpa(keys=50, is_causal=True), "is_causal with other keys than queries"),
    (sdpa(heads=2), "4 heads of query and 2 of key need enable_gqa=True"),
])  # fmt: skip
def test_what_it_does_not_compute_is_refused_by_name(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=message):
        call()

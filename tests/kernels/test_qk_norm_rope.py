"""QK-norm and rotary embedding in one pass each way: the twin agrees with float64, and in a model with two steps."""

import pytest
import torch
from torch import Tensor, nn

from backward_graph import backward_calls
from qk_inputs import qk_norm_rope_errors, random_qk
from sagekernels.lowbit import LOW_BIT
from sagekernels.matmul import Matmul
from sagekernels.qk_norm_rope import (
    QK_NORM_ROPE,
    QK_NORM_ROPE_GRADIENTS,
    qk_norm_rope,
    qk_norm_rope_gradients_twin,
    qk_norm_rope_twin,
)
from sagetrain.config.layer_specs import layers
from sagetrain.model import attention
from sagetrain.model.backends import AttentionFunction, Sage, Sdpa, TokenLayout
from sagetrain.model.norm import RMSNorm
from sagetrain.model.rotary import apply_rotary, rotary_tables
from sagetrain.parallel.collectives import Region
from small_model import SHAPE, SINGLE, loss_and_gradients, small_model

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = ((1, (1, 1), 2, 1.0), (3, (4, 2), 64, 1e4), (17, (5, 1), 80, 1e-3), (129, (6, 3), 128, 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_is_within_one_rounding_of_float64(dtype: torch.dtype) -> None:
    for tokens, heads, head_dim, magnitude in SIZES:
        x = random_qk(tokens, heads, head_dim, magnitude, dtype)
        results, gradients = qk_norm_rope_twin(*x[3:]), qk_norm_rope_gradients_twin(*x)
        assert all(y.dtype == dtype for y in (*results, *gradients))
        assert max(qk_norm_rope_errors(results, gradients, x)) <= 1
        more = 1 + max(8 * torch.finfo(dtype).eps, 1e-3)
        wrong = [y * more for y in results], [y * more for y in gradients]
        assert min(qk_norm_rope_errors(*wrong, x)) > 1


def test_the_twin_is_the_derivative() -> None:
    """The derivative confirms the float64 formulas above."""
    x = random_qk(5, (3, 1), 8, 1.0, torch.float64)
    inputs = [each.detach().requires_grad_() for each in x[3:7]]
    results = qk_norm_rope_twin(*inputs, *x[7:])
    expected = torch.autograd.grad(results, inputs, x[:2])
    found, of_gains = qk_norm_rope_gradients_twin(*x)
    torch.testing.assert_close(found, torch.cat((*expected[:2], x.of_v.flatten(1)), 1))
    torch.testing.assert_close(of_gains, torch.stack(expected[2:]))


def in_two_steps(
    q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply RMSNorm, then the rotary embedding, as separate modules of the model do."""
    norm = RMSNorm(len(q_gain), eps, Region(SINGLE, dtype=q.dtype), split_input=False)
    q, k, v = (x.unflatten(1, (-1, len(q_gain))) for x in (q, k, v))
    return apply_rotary(norm(q, q_gain), cos, sin), apply_rotary(norm(k, k_gain), cos, sin), v


def test_it_is_the_norm_and_the_rotation_of_the_model() -> None:
    """The model's own tables are used, also those of documents."""
    x = random_qk(11, (4, 2), 16, 1.0, torch.float32)
    tables = rotary_tables(torch.tensor([*range(4), *range(7)]), 16, 10_000.0, None)
    y = torch.cat((x.q, x.k, 2 * x.k), 1).requires_grad_()
    gains = [gain.clone().requires_grad_() for gain in x[5:7]]
    found, expected = (
        (results, torch.autograd.grad(results, (y, *gains), x[:3]))
        for results in (way(*y.split([64, 32, 32], 1), *gains, *tables, 1e-6) for way in (qk_norm_rope, in_two_steps))
    )
    for ours, theirs in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_between_the_steps_nothing_is_rounded() -> None:
    """In bf16 the result is therefore nearer to float64 than the two steps are."""
    x = random_qk(64, (4, 2), 64, 1.0, torch.bfloat16)
    ours, _, _ = qk_norm_rope(x.q, x.k, x.k, *x[5:])
    theirs, _, _ = in_two_steps(x.q, x.k, x.k, *x[5:])
    exact, _ = qk_norm_rope_twin(*(each.double() for each in x[3:9]), x.eps)
    assert (ours - exact).norm() < 0.8 * (theirs - exact).norm()


def test_gradients_are_side_by_side_and_little_is_kept() -> None:
    x = random_qk(9, (4, 2), 16, 1.0, torch.bfloat16)
    y = torch.cat((x.q, x.k, x.k), 1)
    qkv = [part.requires_grad_() for part in y.split([64, 32, 32], 1)]
    gains, kept = [gain.detach().requires_grad_() for gain in x[5:7]], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        results = qk_norm_rope(*qkv, *gains, *x[7:])
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (*qkv[:2], *gains, *x[7:9])]
    assert results[2].data_ptr() == qkv[2].data_ptr()
    *of_qkv, of_q_gain, of_k_gain = torch.autograd.grad(results, (*qkv, *gains), x[:3])
    assert len({t.untyped_storage().data_ptr() for t in of_qkv}) == 1
    expected, of_gains = qk_norm_rope_gradients_twin(*x)
    assert torch.equal(torch.cat(of_qkv, 1), expected)
    assert torch.equal(torch.stack((of_q_gain, of_k_gain)), of_gains)


def test_the_operators_keep_their_promises() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = random_qk(9, (4, 2), 16, 1.0, dtype)
        torch.library.opcheck(QK_NORM_ROPE, x[3:], test_utils=("test_schema", "test_faketensor"))
        torch.library.opcheck(QK_NORM_ROPE_GRADIENTS, tuple(x), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"q": torch.zeros(4, 32).int()}, TypeError, r"got q in torch\.int32"),
    ({"cos": torch.zeros(4, 1, 8).bfloat16()}, TypeError, r"tables in torch\.bfloat16 and torch\.float32"),
    ({"k": torch.zeros(4, 16).bfloat16()}, ValueError, r"k \(4, 16\) in torch\.bfloat16"),
    ({"k_gain": torch.zeros(16).half()}, ValueError, r"k_gain \(16,\) in torch\.float16"),
    ({"v": torch.zeros(4, 32)}, ValueError, r"v \(4, 32\)"),
    ({"q": torch.zeros(4, 24)}, ValueError, r"q \(4, 24\)"),
    ({"q": torch.zeros(2, 2, 32)}, ValueError, r"q \(2, 2, 32\)"),
    ({"k_gain": torch.zeros(8)}, ValueError, r"k_gain \(8,\)"),
    ({"sin": torch.zeros(1, 1, 8)}, ValueError, r"sin \(1, 1, 8\)"),
])  # fmt: skip
def test_what_it_does_not_take_it_refuses(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    fitting = {"q": torch.zeros(4, 32), "k": torch.zeros(4, 16), "v": torch.zeros(4, 16)}
    fitting |= {"q_gain": torch.zeros(16), "k_gain": torch.zeros(16)}
    fitting |= {"cos": torch.zeros(4, 1, 8), "sin": torch.zeros(4, 1, 8)}
    qk_norm_rope(**fitting, eps=1e-6)
    with pytest.raises(error, match=message):
        qk_norm_rope(**{**fitting, **change}, eps=1e-6)


# -- in a model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("matmul", "functions"), [
    (LOW_BIT["fp8"], (Sdpa(), Sage())), (Matmul(joined=True), (Sage(),)), (Matmul(), (Sdpa(),)),
], ids=str)  # fmt: skip
def test_joined_gradients_are_not_copied(matmul: Matmul, functions: tuple[AttentionFunction, ...]) -> None:
    """Nothing is copied behind the operator, nor behind attention that normalizes itself."""
    region = Region(SINGLE, dtype=torch.bfloat16)
    tables = rotary_tables(torch.arange(32), 16, 10_000.0, None)
    for function in functions:
        operator = "normed_backward" if function.normalizes else "qk_norm_rope_gradients"
        how = {"matmuls": {"qkv": matmul}, "vocab_size": 1}
        layer = attention.Attention(layers(SHAPE, "before_rope")[0], function, region, **how)
        for weight in layer.parameters():
            nn.init.normal_(weight)

        def normed(x: Tensor, layer: attention.Attention = layer) -> Tensor:
            qkv = layer.project(x, *tables, {})
            if layer.in_one_node:
                return layer(*qkv, TokenLayout(1, *tables, *(None,) * 4), {})
            return torch.cat([part.flatten(1) for part in qkv], 1)

        calls = backward_calls(normed)
        assert calls.count(f"sagekernels.{operator}.default") == 1
        assert calls.count("aten.cat.default") == (matmul == Matmul(joined=True))  # A 16-bit matmul joins its weights.


def gradients(backend: str = "sdpa", compiled: bool = False, **how: object) -> list[Tensor]:
    """Return the loss and gradients of a model on packed documents."""
    positions = torch.tensor([[*range(5), *range(11)]]).expand(4, -1)
    return loss_and_gradients(small_model(backend=backend, **how), compiled, positions=positions)


@pytest.fixture(scope="module")
def eager() -> dict[str, list[Tensor]]:
    return {backend: gradients(backend) for backend in ("sdpa", "sage")}


def test_a_model_is_that_of_two_steps(eager: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order differ, and FP8 may round a number beside the middle of two codes the other way."""
    monkeypatch.setattr(attention, "qk_norm_rope", in_two_steps)
    for found, expected in zip(eager["sdpa"], gradients(), strict=True):
        assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_self_normalizing_attention_computes_the_same_bits(
    eager: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sage, "normalizes", False)
    apart = gradients("sage")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(eager["sage"], apart, strict=True))


@pytest.mark.parametrize(("backend", "checkpointing", "compiled"), [
    ("sdpa", "none", False), ("sdpa", "selective", False), ("sdpa", "selective", True), ("sage", "none", False),
    ("sage", "selective", False), ("sage", "full", False), ("sage", "full", True),
])  # fmt: skip
def test_a_model_computes_the_same_bits(
    checkpointing: str, compiled: bool, backend: str, eager: dict[str, list[Tensor]]
) -> None:
    """The model is recomputed in two ways, compiled, and both."""
    found = gradients(backend, compiled, activation_checkpointing=checkpointing)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, eager[backend], strict=True))

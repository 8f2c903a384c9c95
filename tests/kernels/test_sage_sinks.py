"""Attention sinks: one more score of each head, beside float64, in every recipe, and what a mean of K does to them."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qk_inputs import random_qk
from sagekernels import (
    admission,
    attention_reference,
    backends,
    normed_attention,
    observe,
    qk_norm_rope,
    reference,
    sage_attention,
)
from sagekernels.call import RECIPES
from sagekernels.observe import Sample, keep, measure, observed, pooled_rel_l2
from sagekernels.sinks import _scores_kernel
from sagekernels.testing import (
    Shape,
    SinkResults,
    errors,
    exact_results,
    random_inputs,
    random_sinks,
    rel_l2,
    results_of,
)
from sass import compiled

DOCUMENTS = Shape(1, 420, 420, 4, 2, 64, documents=(100, 1, 63, 220, 36), sinks=True)
SHAPES = [
    DOCUMENTS,
    DOCUMENTS._replace(window=100),
    DOCUMENTS._replace(window=16),
    Shape(2, 133, 133, 3, 1, 80, causal=False, sinks=True),
    Shape(1, 70, 133, 2, 2, 32, sinks=True),
]
LIMITS = {"o": 0.012, "dq": 0.018, "dk": 0.018, "dv": 0.014, "dsinks": 0.05}


def problem(shape: Shape, seed: int = 0, **how) -> tuple[tuple[Tensor, ...], dict]:
    """Return q, k, v and do, and the arguments of attention. The mean of K is twice as large as its noise."""
    seen = {"causal": shape.causal, "cu_seqlens": shape.cu_seqlens(), "window": shape.window}
    return random_inputs(shape, k_mean=2.0, seed=seed, **how), {"sinks": random_sinks(shape, seed=seed), **seen}


def test_the_reference_has_one_more_column() -> None:
    """A sink is a key of its own whose value is zero."""
    shape = Shape(1, 50, 50, 2, 1, 16, causal=False, sinks=True)
    q, k, v, do = random_inputs(shape, dtype=torch.float64)
    sinks = random_sinks(shape).double()
    found = exact_results(q, k, v, do, causal=False, sinks=sinks)
    for head in range(2):
        # Another channel, which is 1 in all queries, makes the score of the key.
        wide = torch.cat((q[:, :, head : head + 1], torch.ones(1, 50, 1, 1, dtype=q.dtype)), -1)
        keys = torch.cat((torch.nn.functional.pad(k, (0, 1)), torch.zeros(1, 1, 1, 17, dtype=q.dtype)), 1)
        keys[0, -1, 0, -1] = sinks[head] / 0.25
        values = torch.nn.functional.pad(v, (0, 1, 0, 0, 0, 1))
        o = attention_reference(wide, keys, values, causal=False, scale=0.25)[..., :16]
        torch.testing.assert_close(found.o[:, :, head : head + 1], o)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_recipe_is_at_its_own_error(shape: Shape, recipe: str) -> None:
    inputs, options = problem(shape)
    found = results_of(sage_attention, *inputs, recipe=recipe, **options)
    judged = errors(found, exact_results(*inputs, **options))
    scale = 4.0 if recipe == "paper" else 1.0  # Its gradients err by 0.04 without sinks too.
    assert all(judged[name] < scale * limit for name, limit in LIMITS.items()), judged
    assert isinstance(found, SinkResults) and found.dsinks.dtype == torch.float32


def test_without_smoothing() -> None:
    inputs, options = problem(DOCUMENTS._replace(window=100))
    for recipe in ("fine", "scores"):
        ours = results_of(sage_attention, *inputs, recipe=recipe, smooth_k=False, **options)
        judged = errors(ours, exact_results(*inputs, **options))
        assert all(judged[name] < 2 * most for name, most in LIMITS.items()), judged


def test_the_gradient_of_a_sink_over_seeds() -> None:
    """It is a sum with signs of few numbers, so one draw says little."""
    squares = []
    for seed in range(12):
        inputs, options = problem(DOCUMENTS._replace(window=100), seed)
        found = results_of(sage_attention, *inputs, recipe="scores", **options)
        squares.append(errors(found, exact_results(*inputs, **options))["dsinks"] ** 2)
    assert math.sqrt(sum(squares) / len(squares)) < 0.02


@pytest.mark.parametrize("recipe", ["fine", "scores"])
def test_the_mean_of_k_is_missed_where_it_is_left_out(monkeypatch, recipe: str) -> None:
    """The output is wrong without the shift of the sink, and dQ without its term."""
    inputs, options = problem(DOCUMENTS._replace(window=100))
    exact = exact_results(*inputs, **options)
    backward, scores = backends.backward, reference.sink_scores

    def lacking(call) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = backward(call)
        term = call.sink_terms.unflatten(1, (2, -1))[..., None] * call.saved.k_mean.unsqueeze(2)
        return dq - (term.flatten(1, 2).transpose(1, 2) * call.scale).to(dq.dtype), dk, dv

    with monkeypatch.context() as patch:
        patch.setattr(backends, "backward", lacking)
        judged = errors(results_of(sage_attention, *inputs, recipe=recipe, **options), exact)
        assert judged["dq"] > 0.2 and max(judged[name] for name in ("o", "dk", "dv")) < 0.02, judged
    monkeypatch.setattr(reference, "sink_scores", lambda q, mean, *rest: scores(q, None, *rest))
    judged = errors(results_of(sage_attention, *inputs, recipe=recipe, **options), exact)
    assert judged["o"] > 0.2 and judged["dsinks"] > 0.3, judged


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sink_of_minus_infinity_is_none(recipe: str) -> None:
    inputs, options = problem(DOCUMENTS._replace(window=100))
    sinks = torch.full_like(options.pop("sinks"), -math.inf)
    none = results_of(sage_attention, *inputs, recipe=recipe, **options)
    *found, of_sinks = results_of(sage_attention, *inputs, recipe=recipe, sinks=sinks, **options)
    assert all(map(torch.equal, none, found)) and not of_sinks.any()


@pytest.mark.parametrize("size", [-30.0, 30.0, 1e4])
def test_sinks_of_any_size(size: float) -> None:
    inputs, options = problem(Shape(1, 200, 200, 4, 2, 64, window=60, sinks=True))
    options["sinks"] = torch.full((4,), size)
    exact = exact_results(*inputs, **options)
    found = results_of(sage_attention, *inputs, recipe="scores", **options)
    assert all(x.isfinite().all() for x in found)
    if size < 1e3:
        assert max(errors(found, exact).values()) < 0.06
    else:
        assert not any(x.any() for x in found)


@pytest.mark.parametrize("magnitude", [1e-20, 1e-7, 1e4])
def test_gradients_of_any_size(magnitude: float) -> None:
    inputs, options = problem(Shape(1, 128, 128, 2, 1, 32, sinks=True), do_scale=magnitude)
    exact = exact_results(*inputs, **options)
    for recipe in ("fine", "scores"):
        judged = errors(results_of(sage_attention, *inputs, recipe=recipe, **options), exact)
        assert max(judged.values()) < 0.05, judged


def test_what_is_not_finite_stays_in_its_head() -> None:
    inputs, options = problem(Shape(1, 100, 100, 2, 2, 32, sinks=True))
    inputs[0][0, 60, 1, 3] = math.nan
    found = results_of(sage_attention, *inputs, **options)
    assert all(x[..., 0, :].isfinite().all() for x in found[:4])
    assert found.o[0, 60, 1].isnan().all() and found.dsinks.isfinite().tolist() == [True, False]


def test_gradients_only_where_asked_and_in_their_dtype() -> None:
    (q, k, v, do), options = problem(Shape(1, 70, 70, 2, 1, 32, sinks=True))
    for dtype in (torch.float32, torch.bfloat16):
        sinks = options["sinks"].clone().to(dtype)
        assert not sage_attention(q, k, v, sinks=sinks).requires_grad
        sinks.requires_grad_()
        sage_attention(q, k, v, sinks=sinks).backward(do)
        assert sinks.grad.dtype == dtype and sinks.grad.all()
    found = results_of(sage_attention, q, k, v, do, sinks=options["sinks"])
    again = results_of(lambda *x, sinks: checkpoint(sage_attention, *x, sinks=sinks, use_reentrant=False), q, k, v, do,
                       sinks=options["sinks"])  # fmt: skip
    assert all(map(torch.equal, found, again))
    with torch.autocast("cpu", torch.bfloat16):
        wide = results_of(sage_attention, *(x.float() for x in (q, k, v)), do, sinks=options["sinks"])
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, wide, strict=True))


def test_no_tokens() -> None:
    q, sinks = torch.zeros(2, 0, 4, 32, requires_grad=True), torch.zeros(4, requires_grad=True)
    o = sage_attention(q, q[:, :, :2], q[:, :, :2], sinks=sinks)
    o.sum().backward()
    assert o.shape == (2, 0, 4, 32) and sinks.grad.tolist() == [0.0] * 4


@pytest.mark.parametrize(("sinks", "kind", "message"), [
    (torch.zeros(2), ValueError, r"sinks must be \[4\], one for each head of q, got shape \(2,\)"),
    (torch.zeros(4, 1), ValueError, r"sinks must be \[4\]"),
    (torch.zeros(4, dtype=torch.int32), TypeError, "sinks must be float32, bfloat16 or float16, got torch.int32"),
    (torch.zeros(4, device="meta"), ValueError, "sinks must be on cpu, got meta"),
])  # fmt: skip
def test_mistakes_say_what_is_supported(sinks: Tensor, kind: type[Exception], message: str) -> None:
    q, k = torch.zeros(1, 8, 4, 32), torch.zeros(1, 8, 2, 32)
    with pytest.raises(kind, match=message):
        sage_attention(q, k, k, sinks=sinks)


def test_they_compile_into_one_graph() -> None:
    shape = Shape(1, 70, 70, 2, 1, 32, documents=(30, 40), window=12, sinks=True)
    inputs, options = problem(shape)

    def block(q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
        return sage_attention(q * 1.5, k, v, recipe="scores", **how) * 2

    expected = results_of(block, *inputs, **options)
    torch._dynamo.reset()
    found = results_of(torch.compile(block, fullgraph=True, backend="aot_eager"), *inputs, **options)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("smooth_k", [True, False])
def test_the_operators_keep_torchs_rules(smooth_k: bool) -> None:
    inputs, options = problem(Shape(1, 70, 70, 2, 1, 32, sinks=True))
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], options["sinks"])]
    arguments = (*leaves[:3], None, True, 0.2, smooth_k, "fine", "twin", leaves[3])
    torch.library.opcheck(torch.ops.sagekernels.forward, arguments)
    with torch.no_grad():
        o, *saved = torch.ops.sagekernels.forward(*arguments)
    arguments = (inputs[3], inputs[2], o, *saved, None, True, 0.2, "fine", "twin")
    torch.library.opcheck(torch.ops.sagekernels.backward, arguments, test_utils=("test_schema", "test_faketensor"))


def test_kernel_compiles() -> None:
    sizes = {"HEAD_DIM": 64, "BLOCK_D": 64, "ROWS": 64}
    types = {"Q": "*bf16", "scale": "fp32"} | dict.fromkeys(("SCORES", "MEAN", "SINKS"), "*fp32")
    for more in ({}, {"MEAN": None}):
        assert "st.global" in compiled(_scores_kernel, 90, sizes | more, types, _scores_kernel.arg_names).asm["ptx"]


def test_only_a_function_that_shifts_sinks_is_admitted(monkeypatch) -> None:
    shape = Shape(1, 4096, 4096, 2, 1, 32, documents=(4000, 96), window=1024, sinks=True)
    how = {"dtype": torch.bfloat16, "device": "cpu", "limits": admission.LIMITS["scores"]}

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **named) -> Tensor:
        return sage_attention(q, k, v, cu_seqlens=cu_seqlens, recipe="scores", **named)

    verdict = admission.admit(attend, shape, **how)
    assert verdict.passed and verdict.errors.keys() == set(SinkResults._fields), verdict
    assert not admission.admit(lambda *x, window, sinks: attend(*x, sinks=sinks), shape, **how).passed
    scores = reference.sink_scores
    monkeypatch.setattr(reference, "sink_scores", lambda q, mean, *rest: scores(q, None, *rest))
    assert "o off by" in admission.admit(attend, shape, **how).reason


def test_behind_qk_norm_they_are_two_steps() -> None:
    x = random_qk(66, (4, 2), 16, 1.0, torch.bfloat16)
    leaves = [each.detach().requires_grad_() for each in (x.q, x.k, torch.randn_like(x.k), x.q_gain, x.k_gain)]
    tables, sinks = (x.cos, x.sin, x.eps), torch.tensor([0.0, 1.0, 3.0, 6.0], requires_grad=True)
    o = normed_attention(*leaves, *tables, batch=2, sinks=sinks, window=9)
    rows = [y.unflatten(0, (2, -1)) for y in qk_norm_rope(*leaves, *tables)]
    expected, do = sage_attention(*rows, sinks=sinks, window=9), torch.randn_like(o)
    grads = [torch.autograd.grad(y, (*leaves, sinks), do) for y in (o, expected)]
    assert torch.equal(o, expected) and all(map(torch.equal, *grads))


def test_observers_know_the_sinks() -> None:
    """O, dQ, dK and dV of a sample are those of float64 with sinks, and the rows of P lack the sink's share."""

    class Listener:
        def forward(self, call, saved) -> None:
            self.kept, self.saved = keep(call, Sample.of(call.q, call.k, 1, 1 << 40, 0)), saved

        def backward(self, call, grads) -> None:
            self.found = measure(call, grads, self.kept)

    inputs, options = problem(DOCUMENTS._replace(window=100))
    listener = Listener()
    with observed(listener):
        found = results_of(sage_attention, *inputs, recipe="scores", **options)
    exact = exact_results(*inputs, **options)
    for name, ours, truth in zip(("O", "dQ", "dK", "dV"), found, exact, strict=False):
        assert pooled_rel_l2(*listener.found.squares[name].tolist()) == pytest.approx(rel_l2(ours, truth), rel=2e-3)
    for name in ("P", "dS"):
        assert pooled_rel_l2(*listener.found.squares[name].tolist()) < 0.02, name
    assert 0.05 < (listener.saved.sink_scores - listener.saved.lse).exp().mean() < 0.95 and not observe.listening()

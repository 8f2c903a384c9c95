"""sage_attention on the CPU: the twin against float64, its promises about scales, and the mistakes of callers."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sagekernels
from kernel_inputs import call_of, chunk_bounds
from sagekernels import attention_reference, default_recipe, sage_attention
from sagekernels.admission import LIMITS
from sagekernels.call import RECIPES
from sagekernels.quantize import TILE, quantize_twin, token_mean
from sagekernels.reference import ScoresOfCodes, document_bounds, twin_forward
from sagekernels.testing import Shape, errors, exact_results, random_inputs, rel_l2, results_of

SHAPES = [
    Shape(2, 200, 200, 4, 2, 32),
    Shape(1, 192, 192, 7, 1, 64, causal=False),
    Shape(1, 100, 333, 2, 1, 80),
    Shape(1, 333, 333, 2, 2, 96, documents=(5, 0, 125, 203, 0, 0)),
    Shape(1, 333, 333, 2, 2, 192, causal=False, documents=(5, 0, 125, 203, 0, 0)),
    Shape(1, 1, 77, 2, 2, 256),
    Shape(3, 65, 65, 1, 1, 16),
    Shape(2, 200, 200, 4, 2, 32, window=70),
    Shape(1, 333, 333, 2, 1, 64, documents=(5, 0, 125, 203, 0, 0), window=40),
    Shape(1, 200, 200, 2, 1, 32, causal=False, documents=(5, 0, 125, 70), window=33),
    Shape(2, 70, 200, 2, 1, 32, window=40),
]


def options_of(shape):
    """Return the arguments of sage_attention that say what its queries see."""
    return {"causal": shape.causal, "cu_seqlens": shape.cu_seqlens(), "window": shape.window}


def direct_attention(q, k, v, causal, cu_seqlens=None, window=None):
    """Compute softmax attention in float64 with an explicit mask, query head by query head."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])[None]
    seen = (j <= i) if causal else torch.ones(i.numel(), j.numel(), dtype=torch.bool)
    if cu_seqlens is not None:
        document = (torch.arange(q.shape[1])[:, None] >= cu_seqlens[1:]).sum(1)
        seen = seen & (document[:, None] == document[None])
    if window is not None:
        seen = seen & ((i - j).abs() < window)
    out = []
    for h in range(heads):
        scores = q[:, :, h] @ k[:, :, h // group].mT / math.sqrt(q.shape[-1])
        out.append(torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v[:, :, h // group])
    return torch.stack(out, 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_attention(shape):
    inputs = random_inputs(shape, sigma=2.0, dtype=torch.float64)
    options = options_of(shape)
    assert (
        max(errors(results_of(direct_attention, *inputs, **options), exact_results(*inputs, **options)).values())
        < 1e-12
    )


def test_the_reference_in_chunks(monkeypatch):
    shape = Shape(1, 400, 400, 2, 1, 32)
    inputs = random_inputs(shape, dtype=torch.float64)
    whole = exact_results(*inputs)
    monkeypatch.setattr("sagekernels.reference.CHUNK_SCORES", 1)  # One tile of queries is computed at a time.
    assert max(errors(exact_results(*inputs), whole).values()) < 1e-12


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_is_close_to_attention(shape, recipe):
    inputs = random_inputs(shape, sigma=1.0, k_mean=3.0, do_scale=1e-3)
    options = options_of(shape)
    judged = errors(results_of(sage_attention, *inputs, **options, recipe=recipe), exact_results(*inputs, **options))
    assert max(judged.values()) < (0.065 if recipe == "paper" else 0.025), judged


def test_chunks_do_not_change_the_twin(monkeypatch):
    inputs = random_inputs(Shape(1, 400, 400, 2, 1, 32))
    for recipe in RECIPES:
        whole = results_of(sage_attention, *inputs, recipe=recipe)
        with monkeypatch.context() as patch:
            patch.setattr("sagekernels.reference.CHUNK_SCORES", 1)
            assert max(errors(results_of(sage_attention, *inputs, recipe=recipe), whole).values()) < 3e-3


def test_packed_documents_are_separate_calls():
    shape = Shape(1, 300, 300, 2, 2, 32, documents=(100, 7, 193, 0, 0))
    q, k, v, do = random_inputs(shape, dtype=torch.float64)
    packed = exact_results(q, k, v, do, cu_seqlens=shape.cu_seqlens())
    for a, b in ((0, 100), (100, 107), (107, 300)):
        alone = exact_results(*(x[:, a:b] for x in (q, k, v, do)))
        assert max(rel_l2(x[:, a:b], y) for x, y in zip(packed, alone, strict=True)) < 1e-12


@pytest.mark.parametrize("recipe", RECIPES)
def test_queries_and_keys_of_different_tokens(recipe):
    """The last queries of two sequences, side by side, see the keys of their documents: as calls of their own do, and
    no farther from float64."""
    documents, queries, keys = ((30, 60, 1, 24), (50, 65)), 45, 115
    q, k, v, do = random_inputs(Shape(1, 2 * queries, 2 * keys, 2, 1, 32), k_mean=1.0)
    options = {"causal": False, "bounds": chunk_bounds(queries, keys, documents)}
    exact = exact_results(q, k, v, do, **options)
    for number, lengths in enumerate(documents):
        begin = 0
        for length in lengths:
            own_keys = slice(number * keys + begin, number * keys + begin + length)
            first, begin = max(begin, keys - queries), begin + length
            own = slice(number * queries + first + queries - keys, number * queries + begin + queries - keys)
            if first < begin:
                alone = exact_results(q[:, own], k[:, own_keys], v[:, own_keys], do[:, own])
                whole = [exact.o[:, own], exact.dq[:, own], exact.dk[:, own_keys], exact.dv[:, own_keys]]
                for a, b in zip(whole, alone, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
            else:
                assert not exact.dk[:, own_keys].any() and not exact.dv[:, own_keys].any()
    found = errors(results_of(sage_attention, q, k, v, do, **options, recipe=recipe), exact)
    assert all(value < LIMITS[recipe][name] for name, value in found.items()), found
    with pytest.raises(ValueError, match="as many keys as queries"):
        sage_attention(q, k, v, causal=True, bounds=options["bounds"])


def test_document_bounds():
    starts, ends = document_bounds(torch.tensor([0, 0, 3, 3, 5, 5, 5], dtype=torch.int32), 5)
    assert starts.tolist() == [0, 0, 0, 3, 3] and ends.tolist() == [3, 3, 3, 5, 5]


def test_bounds_of_a_window():
    """A query sees `window` tokens, its own included, and nothing of other documents. A row without any is one."""
    starts, ends = document_bounds(torch.tensor([0, 4, 4, 9], dtype=torch.int32), 9, 3)
    assert starts.tolist() == [0, 0, 0, 1, 4, 4, 4, 5, 6] and ends.tolist() == [3, 4, 4, 4, 7, 8, 9, 9, 9]
    whole = sagekernels.document_bounds(None, 5, 2)
    assert whole.dtype == torch.int32 and whole.tolist() == [[0, 0, 1, 2, 3], [2, 3, 4, 5, 5]]


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_by_any_description(causal):
    """All rows share one window. One that hides no key gives the bits of none, also where there are more keys than
    queries."""
    inputs = random_inputs(Shape(2, 90, 90, 2, 1, 32))
    how = {"causal": causal, "recipe": "scores"}
    found = results_of(sage_attention, *inputs, window=20, **how)
    shared = results_of(sage_attention, *inputs, bounds=sagekernels.document_bounds(None, 90, 20), **how)
    assert all(map(torch.equal, found, shared))
    whole = results_of(sage_attention, *inputs, **how)
    assert all(map(torch.equal, whole, results_of(sage_attention, *inputs, window=90, **how)))
    assert rel_l2(found.o, whole.o) > 0.1
    q, k, v, do = random_inputs(Shape(1, 20, 90, 2, 1, 32))
    more_keys = (results_of(sage_attention, q, k, v, do, window=window, **how) for window in (90, None))
    assert all(map(torch.equal, *more_keys))


def test_backward_reads_the_scores_of_the_forward():
    """P of the backward sums to 1 in each row, which is true only of the scores that made the log-sum-exp."""
    q, k, v, _ = random_inputs(Shape(1, 300, 300, 4, 2, 32, documents=(5, 0, 125, 170)), sigma=3.0, k_mean=5.0)
    for recipe in RECIPES:
        call = call_of(Shape(1, 300, 300, head_dim=32, documents=(5, 0, 125, 170)), q, k, v, recipe)
        _, saved = twin_forward(call)
        s = ScoresOfCodes(call, saved)(range(300))
        p = torch.exp(s.flatten(1, 2) - saved.lse[..., None])
        torch.testing.assert_close(p.sum(-1), torch.ones(1, 4, 300), rtol=1e-4, atol=0)


def test_smoothing_changes_nothing_but_the_error():
    shape = Shape(1, 256, 256, 2, 2, 64)
    inputs = random_inputs(shape, k_mean=20.0)
    exact = exact_results(*inputs)
    smooth, raw = (errors(results_of(sage_attention, *inputs, smooth_k=s), exact) for s in (True, False))
    assert max(smooth.values()) < 0.03 and raw["o"] > 5 * smooth["o"]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e-7, 1e4, 1e20])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_any_size(magnitude, recipe):
    inputs = random_inputs(Shape(1, 128, 128, 2, 1, 32), do_scale=magnitude)
    exact = exact_results(*inputs)
    judged = errors(results_of(sage_attention, *inputs, recipe=recipe), exact)
    assert max(judged.values()) < (0.07 if recipe == "paper" else 0.03), judged


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros(recipe):
    q, k, v, do = random_inputs(Shape(1, 128, 128, 2, 1, 32))
    assert all((g == 0).all() for g in results_of(sage_attention, q, k, v, torch.zeros_like(do), recipe=recipe)[1:])
    uniform = results_of(sage_attention, q * 0, k, v, do, recipe=recipe, causal=False)
    assert rel_l2(uniform.o, v.double().mean(1, keepdim=True).expand_as(uniform.o)) < 0.02
    assert (
        torch.isfinite(uniform.dk).all() and (results_of(sage_attention, q, k, v * 0, do, recipe=recipe).o == 0).all()
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_non_finite_values_propagate(where, bad, recipe):
    inputs = random_inputs(Shape(1, 200, 200, 2, 2, 32))
    # An infinite key must score plus infinity. In 16 bits minus infinity would have the weight 0 and hide the key.
    inputs[0][0, 130, 1, 3] = 1.0
    inputs[["q", "k", "v", "do"].index(where)][0, 130, 1, 3] = bad
    got = results_of(sage_attention, *inputs, smooth_k=False, recipe=recipe)
    finite = {name: torch.isfinite(x).all(-1) for name, x in zip(got._fields, got, strict=True)}
    assert all(x[:, :, 0].all() for x in finite.values())  # The other head stays finite.
    assert not finite["dq"][0, 130, 1] and not finite["dk" if where != "do" else "dv"][0, :128, 1].any()
    if where != "do":
        assert not finite["o"][0, 130, 1]


def test_codes_use_the_symmetric_range():
    x = torch.randn(2, 100, 3, 32) * 10 ** torch.linspace(-30, 30, 100)[None, :, None, None]
    for per_tile in (False, True):
        codes, scale = quantize_twin(x, per_tile=per_tile)
        assert codes.shape == (2, 3, 100, 32) and codes.abs().max() == 127
        span = TILE if per_tile else 1
        largest = x.transpose(1, 2).abs().amax(-1)
        for a in range(0, 100, span):
            group = largest[:, :, a : a + span].amax(-1)
            torch.testing.assert_close(
                scale[:, :, a : a + span] * 127, group[..., None].expand(-1, -1, min(span, 100 - a))
            )
    assert (quantize_twin(torch.zeros(1, 3, 1, 16)).scale == 0).all()


def test_the_mean_of_a_row():
    x = torch.randn(2, 100, 3, 16)
    torch.testing.assert_close(token_mean(x)[:, :, 0], x.mean(1))


def test_any_strides():
    q, k, v, do = random_inputs(Shape(2, 70, 70, 2, 2, 32))
    expected = results_of(sage_attention, q, k, v, do)
    odd = [x.mT.contiguous().mT for x in torch.stack((q, k, v), 2).unbind(2)]
    got = results_of(sage_attention, *odd, do.transpose(1, 2).contiguous().transpose(1, 2))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("capability", "recipe"), [((0, 0), "fine"), ((9, 0), "scores"), ((8, 9), "fine")])
def test_the_default_recipe_is_the_fast_one_of_the_device(monkeypatch, capability, recipe) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sagekernels.backends.capability", lambda _: capability)
        assert default_recipe(torch.device("cpu")) == recipe
    monkeypatch.setattr("sagekernels.autograd.default_recipe", lambda _: recipe)
    inputs = random_inputs(Shape(1, 70, 70, 2, 2, 32))
    named, default = (results_of(sage_attention, *inputs, **how) for how in ({"recipe": recipe}, {}))
    assert all(torch.equal(a, b) for a, b in zip(named, default, strict=True))


def test_gradients_only_where_asked():
    q, k, v, do = random_inputs(Shape(1, 64, 64, 2, 2, 32))
    assert not sage_attention(q, k, v).requires_grad
    k.requires_grad_()
    sage_attention(q, k, v).backward(do)
    assert q.grad is None and v.grad is None and k.grad.abs().sum() > 0


def test_no_tokens():
    q = torch.zeros(2, 0, 4, 32, requires_grad=True)
    o = sage_attention(q, q[:, :, :2], q[:, :, :2])
    assert o.shape == (2, 0, 4, 32)
    o.sum().backward()
    assert q.grad.shape == q.shape
    k, v = torch.randn(2, 2, 5, 2, 32).requires_grad_().unbind()
    torch.use_deterministic_algorithms(True)  # This setting fills torch.empty with NaN.
    try:
        grads = torch.autograd.grad(sage_attention(q, k, v).sum(), (q, k, v))
    finally:
        torch.use_deterministic_algorithms(False)
    assert grads[0].shape == q.shape and not grads[1].any() and not grads[2].any()


def test_no_zeros_stand_for_gradients_of_what_is_kept():
    class Int8Zeros(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.found += function is torch.ops.aten.zeros.default and out.dtype == torch.int8
            return out

    q, k, v, do = random_inputs(Shape(1, 64, 64, 2, 2, 32))
    o = sage_attention(q.requires_grad_(), k, v)
    with Int8Zeros() as zeros:
        o.backward(do)
    assert q.grad.abs().sum() > 0 and zeros.found == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_casts_the_inputs_and_nothing_else(recipe):
    """The twin's products of codes and of float32 numbers are not cast."""
    inputs = random_inputs(Shape(1, 70, 70, 2, 1, 32), sigma=2.0)
    expected = results_of(sage_attention, *inputs, recipe=recipe)
    q, k, v, do = (x.float() for x in inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = results_of(sage_attention, q, k, v, do.bfloat16(), recipe=recipe)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


def test_autocast_and_activation_checkpointing():
    q, k, v, do = (x.float() for x in random_inputs(Shape(1, 64, 64, 2, 2, 32)))
    k = k.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = results_of(sage_attention, q, k, v, do.bfloat16())
        got = results_of(lambda *x: checkpoint(sage_attention, *x, use_reentrant=False), q, k, v, do.bfloat16())
    assert expected.o.dtype == torch.bfloat16 and expected.dq.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_operators_keep_torchs_rules():
    q, k, v, _ = random_inputs(Shape(1, 70, 70, 2, 1, 32))
    cu_seqlens = torch.tensor([0, 30, 70], dtype=torch.int32)
    torch.library.opcheck(torch.ops.sagekernels.document_bounds, (cu_seqlens, 70, 8))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    arguments = (*leaves, document_bounds(cu_seqlens, 70), True, 0.2, True, "fine", "twin")
    torch.library.opcheck(torch.ops.sagekernels.forward, arguments)


@pytest.mark.filterwarnings("error::UserWarning")  # torch.compile warns when it looks into a cache.
@pytest.mark.parametrize(("documents", "window"), [((), None), ((30, 40), None), ((1, 9, 60), 12), ((), 12)])
def test_compiles_into_one_graph(documents, window):
    shape = Shape(1, 70, 70, 2, 1, 32, documents=documents, window=window)
    q, k, v, do = random_inputs(shape)

    def block(q, k, v, cu_seqlens):
        return sage_attention(q * 1.5, k, v, cu_seqlens=cu_seqlens, window=window) * 2

    options = {"cu_seqlens": shape.cu_seqlens()}
    expected = results_of(block, q, k, v, do, **options)
    got = results_of(torch.compile(block, fullgraph=True, backend="aot_eager"), q, k, v, do, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    shared = results_of(sage_attention, q, k, v, do, bounds=shape.bounds())
    assert all(map(torch.equal, shared, results_of(sage_attention, q, k, v, do, window=window, **options)))


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


INT32 = torch.int32
MISTAKES = [
    ((x(1, 4, 2, 32),) * 3, {"recipe": "coarse"}, ValueError, "recipe 'coarse' is not one of paper, fine, scores"),
    ((x(1, 4, 2, 32),) * 3, {"backend": "cuda"}, ValueError, "backend 'cuda' is not one of"),
    ((x(1, 4, 2, 32),) * 3, {"backend": "triton"}, TypeError, "takes bfloat16 or float16, got"),
    ((x(1, 4, 2, 32),) * 3, {"scale": 0.0}, ValueError, "scale must be positive"),
    ((x(4, 2, 32),) * 3, {}, ValueError, "must be .batch, tokens, heads, head_dim., got shape"),
    ((x(1, 4, 2, 32), x(1, 4, 2, 32), x(1, 4, 2, 32).half()), {}, TypeError, "must have one dtype"),
    ((x(1, 4, 2, 32).double(),) * 3, {}, TypeError, "must be bfloat16, float16 or float32, got torch.float64"),
    ((x(1, 4, 2, 32), x(1, 4, 2, 32), x(1, 5, 2, 32)), {}, ValueError, "k and v must have one shape"),
    ((x(2, 4, 2, 32), x(1, 4, 2, 32), x(1, 4, 2, 32)), {}, ValueError, "must agree in batch and head_dim"),
    ((x(1, 4, 2, 8),) * 3, {}, ValueError, "head_dim must be from 16 to 256, got 8"),
    ((x(1, 4, 2, 264),) * 3, {}, ValueError, "head_dim must be from 16 to 256, got 264"),
    ((x(1, 4, 3, 32), x(1, 4, 2, 32), x(1, 4, 2, 32)), {}, ValueError, "3 heads of q must be a multiple of the 2"),
    ((x(1, 4, 2, 32), x(1, 3, 2, 32), x(1, 3, 2, 32)), {}, ValueError, "at least as many keys as queries"),
    ((x(1, 4, 2, 32), x(1, 0, 2, 32), x(1, 0, 2, 32)), {"causal": False}, ValueError, "hold no token"),
    ((x(2, 4, 2, 32),) * 3, {"cu_seqlens": x(3, dtype=INT32)}, ValueError, "cu_seqlens needs batch 1"),
    ((x(1, 4, 2, 32),) * 3, {"cu_seqlens": x(3)}, ValueError, "must be int32"),
    ((x(1, 4, 2, 32),) * 3, {"bounds": x(2, 5, dtype=INT32)}, ValueError, r"bounds must be int32 \[2, 4\]"),
    ((x(1, 4, 2, 32),) * 3, {"bounds": x(2, 4, dtype=INT32), "cu_seqlens": x(3, dtype=INT32)}, ValueError, "not both"),
    ((x(1, 4, 2, 32),) * 3, {"cu_seqlens": x(3, dtype=INT32)}, ValueError, "must rise from 0 to 4"),
    ((x(1, 4, 2, 32),) * 3, {"window": 0}, ValueError, "window must be at least 1 .a query sees its own token., got 0"),
    ((x(1, 4, 2, 32),) * 3, {"window": 2.5}, TypeError, "window must be a whole number of tokens, got 2.5"),
    ((x(1, 4, 2, 32),) * 3, {"window": "4"}, TypeError, "window must be a whole number of tokens, got '4'"),
    ((x(1, 4, 2, 32),) * 3, {"window": 2, "bounds": x(2, 4, dtype=INT32)}, ValueError, "bounds or a window, not both"),
    ((x(1, 4, 2, 32), *[x(1, 6, 2, 32)] * 2), {"window": 5, "causal": False}, ValueError, "a window of 5 needs"),
    ((x(1, 4, 2, 32), *[x(1, 6, 2, 32)] * 2), {"bounds": x(2, 4, dtype=INT32)}, ValueError, "bounds need as many keys"),
    ((x(1, 4, 2, 32), x(1, 4, 2, 32).to("meta"), x(1, 4, 2, 32)), {}, ValueError, "must be on one device"),
]


@pytest.mark.parametrize(("tensors", "options", "kind", "message"), MISTAKES, ids=[m[3] for m in MISTAKES])
def test_mistakes_say_what_is_supported(tensors, options, kind, message):
    with pytest.raises(kind, match=message):
        sage_attention(*tensors, **options)


def test_the_reference_takes_one_sink_for_each_head():
    with pytest.raises(ValueError, match=r"sinks must be \[4\], one for each head of q, got shape \(2,\)"):
        attention_reference(x(1, 4, 4, 32), *[x(1, 4, 2, 32)] * 2, sinks=torch.zeros(2))


def test_attention_reference_keeps_dtype_and_grouped_heads():
    q, k, v, _ = random_inputs(Shape(1, 40, 40, 6, 2, 16))
    assert attention_reference(q, k, v).dtype == torch.bfloat16

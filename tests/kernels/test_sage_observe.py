"""An observer hears of calls of sage_attention, and the sums of a sample agree with float64 by hand."""

import math

import pytest
import torch
from torch import Tensor

from kernel_inputs import call_of
from sagekernels import observe, sage_attention
from sagekernels.call import RECIPES
from sagekernels.observe import Kept, Sample, keep, measure, observed, pooled_cosine, pooled_rel_l2
from sagekernels.quantize import TILE, quantize_twin, token_mean
from sagekernels.testing import Shape, exact_results, random_inputs, results_of

EVERYTHING = 1 << 40


class Listener:
    """An observer that measures the sample of every call."""

    def __init__(self, sequences: int = 1, scores: int = EVERYTHING, turn: int = 0) -> None:
        self.how, self.kept, self.found = (sequences, scores, turn), [], []

    def forward(self, call, saved) -> None:
        self.kept.append(keep(call, Sample.of(call.q, call.k, *self.how)))

    def backward(self, call, grads) -> None:
        self.found.append(measure(call, grads, self.kept.pop()))


def visible(shape: Shape) -> Tensor:
    """Return which keys each query sees, bool [N, N]: causal, within one document and within the window."""
    documents = torch.arange(len(shape.documents) or 1).repeat_interleave(torch.tensor(shape.documents or (shape.n_q,)))
    seen = (documents[:, None] == documents[None, :]).tril()
    return seen if shape.window is None else seen.triu(1 - shape.window)


def scores_of(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return the scores [H, N, N] of q [N, H, D] and k [N, H_kv, D]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5).masked_fill(~mask, -math.inf)


def by_hand(shape: Shape, inputs: tuple, ours: tuple, recipe: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return our value and the exact one of every tensor in float64. Each product is written out over the whole
    matrices."""
    mask, group = visible(shape), shape.heads // shape.kv_heads
    q, k, v, do = (x[0].double() for x in inputs)
    per_tile = RECIPES[recipe].per_tile
    k_mean = token_mean(inputs[1])
    q8 = quantize_twin(inputs[0], per_tile=per_tile).dequantized()[0].transpose(0, 1).double()
    k8 = quantize_twin(inputs[1], mean=k_mean, per_tile=per_tile).dequantized()[0].transpose(0, 1).double()
    s8 = scores_of(q8, k8, mask)
    wide_v = v.repeat_interleave(group, 1)
    dp = torch.einsum("nhd,mhd->hnm", do, wide_v).masked_fill(~mask, 0)
    p8, p = s8.softmax(-1), scores_of(q, k, mask).softmax(-1)
    o = torch.einsum("hnm,mhd->nhd", p, wide_v)
    deltas = [(do * x).sum(-1).T for x in (ours[0][0].double(), o)]
    ds8, ds = (x * (dp - delta[..., None]) for x, delta in zip((p8, p), deltas, strict=True))
    exact = exact_results(*inputs, cu_seqlens=shape.cu_seqlens(), window=shape.window)
    pairs = {"delta": tuple(deltas), "P": (p8, p), "dP": (dp, dp), "dS": (ds8, ds)}
    return pairs | dict(zip(("O", "dQ", "dK", "dV"), zip(ours, exact, strict=True), strict=True))


SHAPES = {
    "grouped heads": Shape(n_q=160, n_k=160, heads=4, kv_heads=2),
    "documents": Shape(n_q=256, n_k=256, heads=2, kv_heads=1, documents=(70, 0, 58, 100, 28)),
    "window": Shape(n_q=256, n_k=256, heads=2, kv_heads=1, documents=(70, 0, 58, 100, 28), window=40),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", ["paper", "fine", "scores"])
def test_the_sums_are_those_of_whole_matrices_in_float64(shape: Shape, recipe: str) -> None:
    inputs = random_inputs(shape, sigma=2.0, k_mean=1.0, do_scale=1e-9, seed=7)
    listener = Listener(sequences=2 if shape.documents else 1)
    with observed(listener):
        ours = results_of(sage_attention, *inputs, recipe=recipe, bounds=shape.bounds())
    (found,) = listener.found
    truth = by_hand(shape, inputs, ours, recipe)
    assert found.squares.keys() == truth.keys()
    for name, (x, exact) in truth.items():
        error, size = (x - exact).double().norm().item(), exact.double().norm().item()
        sums = found.squares[name].tolist()
        assert sums[2] == pytest.approx(size**2, rel=1e-4), name
        assert pooled_rel_l2(*sums) == pytest.approx(error / size, rel=2e-3, abs=1e-6), name
        cosine = torch.nn.functional.cosine_similarity(x.double().flatten(), exact.double().flatten(), 0).item()
        assert 1 - pooled_cosine(*sums) == pytest.approx(1 - cosine, rel=1e-2, abs=1e-9), name
    q, k = (x[0].double() for x in inputs[:2])
    assert found.largest_logit.item() == pytest.approx(scores_of(q, k, visible(shape)).max().item(), rel=1e-5)


def test_zeros_and_scales_by_hand() -> None:
    """dQ under `fine` gets dS times the scale of K, with one scale per row of a tile. `paper` has one scale for the
    tile, for dK as well."""
    shape = Shape(n_q=128, n_k=128, heads=1, kv_heads=1)
    inputs = random_inputs(shape, sigma=2.0, seed=3)
    for recipe, size in (("fine", 1), ("paper", TILE)):
        listener = Listener()
        with observed(listener):
            ours = results_of(sage_attention, *inputs, recipe=recipe)
        (found,) = listener.found
        ds = by_hand(shape, inputs, ours, recipe)["dS"][0][0]
        k_scale = quantize_twin(inputs[1], mean=token_mean(inputs[1]), per_tile=size > 1).scale[0, 0].double()
        folded, zero, scales = ds * k_scale, 0, []
        for i in range(0, 128, size):
            for j in range(0, i + size, TILE):
                x = folded[i : i + size, j : j + TILE]
                scales.append(x.abs().max().item() / 127)
                zero += ((x / scales[-1]).round() == 0).logical_and(x != 0).sum().item()
        total = (ds != 0).sum().item()
        assert found.zeros["dQ"].tolist() == pytest.approx([zero, total], abs=3)
        assert 0 < found.zeros["dQ"][0] < total and found.zeros["dK"][1] == total
        q_scale = quantize_twin(inputs[0], per_tile=size > 1).scale
        assert found.scales["Q"].tolist() == [q_scale.min().item(), q_scale.max().item()]
        assert found.scales["dS"][0] <= min(x for x in scales if x) * (1 + 1e-4)
        assert found.scales["dS"][1] >= max(scales) * (1 - 1e-4)
    assert listener.found[0].scales.keys() == {"Q", "K", "dO", "dS"}


def test_without_int8_gradients_their_rounding_is_unsaid() -> None:
    listener, inputs = Listener(), random_inputs(Shape(n_q=64, n_k=64))
    with observed(listener):
        results_of(sage_attention, *inputs, recipe="scores")
    assert listener.found[0].zeros == {} and listener.found[0].scales.keys() == {"Q", "K"}


def test_a_sample_of_pairs_takes_turns() -> None:
    q, k = torch.empty(2, 128, 4, 16), torch.empty(2, 128, 2, 16)
    whole = Sample.of(q, k, 2, EVERYTHING, 0)
    assert len(whole.pairs) == len(set(whole.pairs)) == 8 and whole.length == 64 and whole.first == 0
    budget = 3 * 64 * 64 * 2
    turns = [Sample.of(q, k, 2, budget, turn).pairs for turn in range(8)]
    assert all(len(pairs) == 3 for pairs in turns)
    assert {pair for pairs in turns for pair in pairs} == set(whole.pairs)
    # A sequence of 50 tokens would cut a tile.
    assert Sample.of(q[:, :100], k[:, :100], 2, EVERYTHING, 0).length == 100


@pytest.mark.parametrize(("documents", "window"), [((), None), ((300, 84, 256), None), ((300, 340), 90)])
def test_the_last_rows_of_a_long_sequence_are_exact(documents: tuple[int, ...], window: int | None) -> None:
    """The sample takes as many rows as fit. O, P, dS and dQ of the last rows, and dK and dV of the last keys, equal
    those of the whole sequence."""
    shape = Shape(n_q=640, n_k=640, heads=2, kv_heads=1, documents=documents, window=window)
    inputs = random_inputs(shape, sigma=2.0, seed=5)
    listener = Listener(scores=2 * 640 * 150)
    with observed(listener):
        ours = results_of(sage_attention, *inputs, recipe="paper", bounds=shape.bounds())
    first = 640 - 128
    (found,) = listener.found
    for name, (x, exact) in by_hand(shape, inputs, ours, "paper").items():
        rows = (..., slice(first, None), slice(None)) if name in ("P", "dP", "dS") else (..., slice(first, None))
        if name in ("O", "dQ", "dK", "dV"):
            rows = (slice(None), slice(first, None))
        x, exact = x[rows].double(), exact[rows].double()
        sums = found.squares[name].tolist()
        assert sums[2] == pytest.approx(exact.square().sum().item(), rel=1e-4), name
        assert pooled_rel_l2(*sums) == pytest.approx(((x - exact).norm() / exact.norm()).item(), rel=2e-3), name


def test_rows_of_a_batch_share_a_window() -> None:
    """The sums of two rows are those of each row alone."""
    shape, found = Shape(2, 130, 130, 2, 1, 32, window=50), []
    inputs = random_inputs(shape)
    for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
        with observed(listener := Listener()):
            results_of(sage_attention, *(x[rows] for x in inputs), window=50)
        found.append(listener.found[0].squares)
    both, *alone = found
    for name, sums in both.items():
        torch.testing.assert_close(sums, alone[0][name] + alone[1][name], rtol=1e-3, atol=0)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(n_q=300, n_k=300, heads=2, kv_heads=1)
    inputs, found = random_inputs(shape), []
    for scores in (observe._CHUNK_SCORES, 1):
        monkeypatch.setattr(observe, "_CHUNK_SCORES", scores)
        listener = Listener()
        with observed(listener):
            results_of(sage_attention, *inputs)
        found.append(listener.found[0])
    whole, chunked = found
    for name in whole.squares:
        torch.testing.assert_close(whole.squares[name], chunked.squares[name], rtol=1e-4, atol=0)
    for name in whole.scales:
        torch.testing.assert_close(whole.scales[name], chunked.scales[name], rtol=1e-4, atol=0)
    assert whole.zeros["dK"][1] == chunked.zeros["dK"][1]


def test_compiled_calls_are_heard_and_give_the_same() -> None:
    """Calls come in order, and each backward pass has what its forward pass saved. No graph is made for the
    observer."""
    inputs = random_inputs(Shape(n_q=64, n_k=64), dtype=torch.float32)

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sage_attention(sage_attention(q, k, v, recipe="paper"), k, v)

    class Order:
        """An observer that keeps the addresses of what was saved, and the recipes."""

        def __init__(self) -> None:
            self.forwards, self.backwards = [], []

        def forward(self, call, saved) -> None:
            self.forwards.append(saved.lse.data_ptr())

        def backward(self, call, grads) -> None:
            self.backwards.append((call.saved.lse.data_ptr(), call.recipe))

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, order = torch.compile(twice, fullgraph=True, backend="aot_eager"), Order()
    before = results_of(compiled, *inputs)
    with observed(order):
        after = results_of(compiled, *inputs)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    first, second = order.forwards
    assert order.backwards == [(second, "fine"), (first, "paper")]


def test_no_attention_but_causal_is_observed() -> None:
    q, k, v, do = random_inputs(Shape(n_q=64, n_k=64))
    with observed(Listener()), pytest.raises(NotImplementedError, match="only causal"):
        results_of(sage_attention, q, k, v, do, causal=False)


def test_pooled_numbers_of_nothing() -> None:
    assert (pooled_rel_l2(0.0, 0.0, 0.0), pooled_cosine(0.0, 0.0, 0.0)) == (0.0, 1.0)
    assert (pooled_rel_l2(1.0, 1.0, 0.0), pooled_cosine(1.0, 1.0, 0.0)) == (math.inf, 0.0)


def test_what_is_kept_is_a_copy() -> None:
    """The model may overwrite its own q and k before the backward pass."""
    shape = Shape(n_q=64, n_k=64)
    q, k, v, _ = random_inputs(shape)
    kept: Kept = keep(call_of(shape, q, k, v, "fine"), Sample.of(q, k, 1, EVERYTHING, 0))
    before = kept.k.clone()
    k.zero_()
    assert torch.equal(kept.k, before)

"""A mixture of experts by rows and grouped products: the twins agree with a loop over experts in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernel_inputs import random_choices, router_results
from sagekernels import grouped_casts, grouped_products, grouped_swiglu, int8_matmul, router
from sagekernels.casts import E4M3, INT8, quantize
from sagekernels.grouped import COMBINE_ROWS, GATHER_ROWS, PLAN_ROWS, TILE, combine, gather, plan_rows
from sagekernels.grouped_matmul import GROUPED_LOW_BIT, GroupedLowBit, GroupedMatmul, grouped_gated, grouped_matmul
from sagekernels.grouped_swiglu import weighted_swiglu
from sagekernels.router import ROUTER_GRADIENTS, ROUTER_LOGITS, router_logits
from sagekernels.testing import rel_l2

LOADS = (0, 17, 128, 1, 129, 0, 40, 0)
TOP, HIDDEN, INNER = 3, 32, 48
LIMITS = {"fp8": 0.1, "int8": 0.03}
"""Largest relative errors of normal numbers: two roundings to codes in each of two layers."""


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp(x, weights, gate_up, down, choices, matmul=None, room=None):  # type: ignore[no-untyped-def]
    """Compute the mixture as models do."""
    rows = plan_rows(choices, len(gate_up), room)
    inner = grouped_gated(x, gate_up, weights, rows, matmul, gathers=True)
    return grouped_matmul(inner, down, rows, matmul, combines=True)


def loop(x, weights, gate_up, down, choices):  # type: ignore[no-untyped-def]
    """Compute it one expert after the other, for all tokens."""
    y = torch.zeros_like(x)
    for expert, place in itertools.product(range(len(gate_up)), range(choices.shape[1])):
        gate, up = (x @ gate_up[expert].t()).chunk(2, 1)
        of_expert = (F.silu(gate) * up * weights[:, place, None]) @ down[expert].t()
        y = y + torch.where((choices[:, place] == expert)[:, None], of_expert, 0)
    return y


CHOICES = random_choices(LOADS, TOP)
TENSORS = (
    normal(1, len(CHOICES), HIDDEN),
    normal(2, *CHOICES.shape).sigmoid(),
    normal(3, len(LOADS), 2 * INNER, HIDDEN) / HIDDEN**0.5,
    normal(4, len(LOADS), HIDDEN, INNER) / INNER**0.5,
)
GRAD = normal(5, len(CHOICES), HIDDEN)


def results(function, dtype: torch.dtype, *arguments: object) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Return the output, and the gradients of x, the router's weights, gate_up and down."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in TENSORS]
    y = function(*leaves, CHOICES, *arguments)
    return [y.detach(), *torch.autograd.grad(y, leaves, GRAD.to(dtype))]


@pytest.fixture(scope="module")
def truth() -> list[Tensor]:
    return results(loop, torch.float64)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_a_mixture_is_a_loop_over_experts(dtype, limit, truth):
    for found, exact in zip(results(mlp, dtype), truth, strict=True):
        assert found.dtype == dtype and rel_l2(found, exact) < limit


@pytest.mark.parametrize("precision", GROUPED_LOW_BIT)
def test_codes_err_by_their_rounding(precision, truth):
    """The output, and all gradients. Weights in 8 bits that are kept change no bit."""
    matmul = GROUPED_LOW_BIT[precision]
    found = results(mlp, torch.float32, matmul)
    for ours, exact in zip(found, truth, strict=True):
        assert 1e-3 < rel_l2(ours, exact) < LIMITS[precision]
    assert rel_l2(found[4], truth[4]) < 0.9 * LIMITS[precision]

    def kept(x, weights, gate_up, down, choices):  # type: ignore[no-untyped-def]
        rows, flat = plan_rows(choices, len(gate_up)), [weight.flatten(0, 1) for weight in (gate_up, down)]
        codes = [matmul.keep(weight.detach()) for weight in (gate_up, down)]
        inner = grouped_gated(gather(x, rows), flat[0], weights, rows, matmul, codes[0])
        return combine(grouped_matmul(inner, flat[1], rows, matmul, codes[1]), rows)

    for ours, theirs in zip(found, results(kept, torch.float32), strict=True):
        assert torch.equal(ours, theirs)


def test_casts_know_the_largest_magnitudes_of_swiglu():
    """SwiGLU leaves them for the next product and for its own gradients. No bit depends on it."""
    matmul, known = GROUPED_LOW_BIT["int8"], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if operator is grouped_casts.GROUPED_CASTS:
                known.append(len(args) == 9 and args[8] is not None)
            return operator(*args, **(kwargs or {}))

    def apart(x, weights, gate_up, down, choices):  # type: ignore[no-untyped-def]
        rows = plan_rows(choices, len(gate_up))
        inner = weighted_swiglu(grouped_matmul(x, gate_up, rows, matmul, gathers=True), weights, rows)
        return grouped_matmul(inner, down, rows, matmul, combines=True)

    with Watch():
        found = results(mlp, torch.bfloat16, matmul)
    assert known == [False, True, False, True]  # x of both layers, their dY
    for ours, theirs in zip(found, results(apart, torch.bfloat16), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(mlp(*(tensor.bfloat16() for tensor in TENSORS), CHOICES, matmul), found[0])


def test_recomputed_blocks_have_the_same_bits():
    """They give each tensor that autograd kept once."""

    def recomputed(*arguments: object) -> Tensor:
        made: Tensor = checkpoint(mlp, *arguments, use_reentrant=False)
        return made

    for matmul in (None, GROUPED_LOW_BIT["int8"]):
        found = results(recomputed, torch.float32, matmul)
        for ours, theirs in zip(found, results(mlp, torch.float32, matmul), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("precision", [None, "int8", "fp8"])
def test_torch_compile_makes_one_graph(precision):
    torch._dynamo.reset()
    matmul = None if precision is None else GROUPED_LOW_BIT[precision]
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for eager, graph in zip(results(mlp, torch.float32, matmul), results(compiled, torch.float32, matmul), strict=True):
        assert torch.equal(eager, graph)


def test_results_do_not_depend_on_the_room():
    """Empty rows are zeros, forward and backward."""
    for matmul in (GroupedMatmul(), GROUPED_LOW_BIT["int8"]):
        exact = results(mlp, torch.float32, matmul)
        for room in (sum(LOADS), 1000):
            for ours, theirs in zip(exact, results(mlp, torch.float32, matmul, room), strict=True):
                assert torch.equal(ours, theirs)
        rows = plan_rows(CHOICES, len(LOADS), 1000)
        assert not grouped_matmul(normal(1, 1000, HIDDEN), TENSORS[2], rows, matmul)[sum(LOADS) :].any()


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [None, sum(LOADS), 700, 200, 0])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_are_sorted_and_in_tiles(room, dtype):
    """Rows are sorted by expert, then by choice. Each row is in one tile, and experts without rows have one as well."""
    rows = plan_rows(CHOICES.to(dtype), len(LOADS), room)
    flat = CHOICES.flatten()
    order = torch.cat([(flat == expert).nonzero()[:, 0] for expert in range(len(LOADS))])
    room = flat.numel() if room is None else room
    expected = torch.full((room,), -1)
    expected[: len(order)] = order[:room]
    assert torch.equal(rows.choice.long(), expected)
    assert rows.load.tolist() == list(LOADS)
    assert rows.overflow.item() == (room < sum(LOADS))
    ends = [min(end, room) for end in itertools.accumulate(LOADS)]
    assert rows.ends.tolist() == ends
    slots = torch.full((flat.numel(),), -1)
    slots[order[:room]] = torch.arange(min(room, len(order)))
    assert torch.equal(rows.slot.long(), slots.view(CHOICES.shape))
    assert torch.equal(rows.tokens().long(), torch.where(expected < 0, -1, expected // TOP))
    covered: list[tuple[int, int]] = []
    tiles = rows.tiles.tolist()
    for expert, begin, end, _ in tiles:
        if expert >= 0:
            assert end == ends[expert]
        covered += [(row, expert) for row in range(begin, min(begin + TILE, end))]
    of_rows = torch.bucketize(torch.arange(room), rows.ends.long(), right=True).tolist()
    assert covered == [(row, expert if expert < len(LOADS) else -1) for row, expert in enumerate(of_rows)]
    first = rows.first.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(first)):
        assert end > begin and all(tiles[tile][0] == expert for tile in range(begin, end))
    assert all(tile[0] == -1 for tile in tiles[first[-1] :])


def test_no_tokens_are_no_rows():
    """A rank may have none of the tokens."""
    rows = plan_rows(torch.zeros(0, 2, dtype=torch.int64), 3, 5)
    assert rows.choice.tolist() == [-1] * 5 and rows.ends.tolist() == [0] * 3
    x = torch.zeros(0, HIDDEN, requires_grad=True)
    y = mlp(x, torch.zeros(0, 2), TENSORS[2][:3], TENSORS[3][:3], torch.zeros(0, 2, dtype=torch.int64), None, 5)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, HIDDEN)


def test_gather_and_combine_are_transposes_of_each_other():
    """Both have gradients of gradients. Sums are in float32, in the order of the choices."""
    rows = plan_rows(CHOICES, len(LOADS), 400)
    x, y = normal(1, len(CHOICES), 4).double().requires_grad_(), normal(2, 400, 4).double().requires_grad_()
    for function, one, other in ((gather, x, y), (combine, y, x)):
        (grad,) = torch.autograd.grad(function(one, rows), one, other, create_graph=True)
        (again,) = torch.autograd.grad(grad, other, one.detach())
        assert torch.equal(again, function(one.detach(), rows))
    assert torch.allclose((gather(x, rows) * y).sum(), (combine(y, rows) * x).sum())
    narrow = y.detach().bfloat16()
    exact = torch.zeros(len(CHOICES), 4)
    for place in range(TOP):
        exact += torch.where(rows.slot[:, place, None] < 0, 0, narrow.float()[rows.slot[:, place].long()])
    assert torch.equal(combine(narrow, rows), exact.bfloat16())
    turned = narrow.t().contiguous().t()
    assert torch.equal(combine(turned, rows), combine(narrow, rows))
    assert (gather(torch.full_like(x, torch.nan), rows)[sum(LOADS) :] == 0).all()


# -- parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [INT8, E4M3], ids=str)
def test_casts_are_those_of_each_experts_matrix(number):
    """A row, and a column of an expert, have codes and scale of their own. Zeros fill the last tile."""
    rows = plan_rows(CHOICES, len(LOADS))
    x = TENSORS[0] * torch.exp2(4 * normal(7, len(CHOICES), 1))
    of_rows = gather(x, rows)
    codes, scale, turned, turned_scale = grouped_casts.grouped_casts(of_rows, rows, number, False)
    gathered = grouped_casts.grouped_casts(x, rows, number, True)
    for ours, theirs in zip(gathered[:2], (codes, scale), strict=True):
        assert torch.equal(ours[: sum(LOADS)].float(), theirs[: sum(LOADS)].float())
    assert all(torch.equal(*pair) for pair in zip(gathered[2:], (turned, turned_scale), strict=True))
    for found, expected in zip((codes, scale), quantize(of_rows, number), strict=True):
        assert torch.equal(found.float(), expected.float())
    own = grouped_casts.row_casts(of_rows, rows, number, False)
    assert torch.equal(own[0].float(), codes.float()) and torch.equal(own[1], scale)
    begins, ends = [0, *rows.ends.tolist()], rows.ends.tolist()
    for expert, (begin, end) in enumerate(zip(begins, ends, strict=False)):
        mine = turned[:, TILE * rows.first[expert] : TILE * rows.first[expert + 1]].float()
        assert not mine[:, end - begin :].any()
        if end > begin:
            expected = quantize(of_rows[begin:end].t(), number)
            assert torch.equal(mine[:, : end - begin], expected.codes.float())
            assert torch.equal(turned_scale[expert], expected.scale[:, 0])
    weight = normal(8, 3, 24, 16)
    codes, scale, turned, turned_scale = grouped_casts.weight_casts(weight, number)
    assert turned.shape == (3, 16, 32) and not turned[..., 24:].float().any()
    for expert in range(3):
        for found, of_codes, whole in (
            (codes[expert], scale[expert], weight[expert]),
            (turned[expert, :, :24], turned_scale[expert], weight[expert].t()),
        ):
            expected = quantize(whole, number)
            assert torch.equal(found.float(), expected.codes.float()) and torch.equal(of_codes, expected.scale[:, 0])


def test_weighted_swiglu_is_its_derivative():
    """Empty rows are zeros whatever they hold, and choices without a row have no gradient."""
    rows = plan_rows(CHOICES, len(LOADS), 400)
    gate_up, grad = normal(1, 400, 10).double(), normal(2, 400, 5).double()
    gate_up[sum(LOADS) :] = torch.nan
    grad[sum(LOADS) :] = torch.nan
    leaves = [gate_up.requires_grad_(), TENSORS[1].double().requires_grad_()]
    y = weighted_swiglu(*leaves, rows)
    own = slice(0, sum(LOADS))
    gate, up = gate_up[own].chunk(2, 1)
    exact = F.silu(gate) * up * leaves[1].flatten()[rows.choice[own].long(), None]
    torch.testing.assert_close(y[own], exact)
    assert not y[sum(LOADS) :].any()
    expected = torch.autograd.grad(exact, leaves, grad[own])
    for ours, theirs in zip(torch.autograd.grad(y, leaves, grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_routers_multiply_with_the_error_of_fp32(magnitude):
    """Weights are small and large. Two of the three parts alone would have an error of 1e-5, the gradient of tokens is
    rounded to bfloat16. Other dtypes are multiplied as they are."""
    x, weight, grad = normal(1, 77, 64).bfloat16(), magnitude * normal(2, 6, 64), normal(3, 77, 6)
    truth = router_results(x.double(), weight.double(), grad.double())
    parts = router.logits_by_parts(x, weight), *router.gradients_by_parts(grad, x, weight)
    for found in (parts, router_results(x, weight, grad)):
        for ours, exact, limit in zip(found, truth, (5e-7, 3e-3, 5e-7), strict=True):
            assert rel_l2(ours, exact) < limit
    assert torch.equal(router_logits(x.float(), weight), x.float() @ weight.t())


def test_the_operators_keep_their_promises():
    rows = plan_rows(CHOICES, len(LOADS), 400)
    x, top, int8 = TENSORS[0], TOP, INT8
    gate_up = normal(1, 400, 2 * INNER)
    turned = grouped_casts.grouped_casts(x, rows, int8, True)
    places = rows.choice, rows.slot, rows.ends, rows.tiles
    weight = grouped_casts.weight_casts(TENSORS[2], int8)
    tokens, of_router = x.bfloat16(), normal(2, 6, HIDDEN)
    of_gate, bias = (gate_up[:, :INNER], gate_up), normal(4, len(LOADS), 2 * INNER)
    calls = [
        (ROUTER_LOGITS, (tokens, of_router)),
        (ROUTER_GRADIENTS, (normal(3, len(x), 6), tokens, of_router)),
        (PLAN_ROWS, (CHOICES, 8, 400)),
        (GATHER_ROWS, (x, rows.choice, top)),
        (COMBINE_ROWS, (gate_up, rows.slot)),
        (
            grouped_swiglu.WEIGHTED_SWIGLU,
            (gate_up, None, TENSORS[1], rows.choice, rows.ends, rows.tiles, "geglu", True),
        ),
        (grouped_swiglu.WEIGHTED_SWIGLU_GRADIENTS, (*of_gate, None, TENSORS[1], *places, rows.first, "swiglu", False)),
        (grouped_swiglu.WEIGHTED_SWIGLU_GRADIENTS, (*of_gate, bias, TENSORS[1], *places, rows.first, "swiglu", True)),
        (grouped_casts.GROUPED_ROW_CASTS, (x, rows.choice, top, int8, True)),
        (grouped_casts.GROUPED_CASTS, (x, rows.choice, rows.ends, rows.tiles, rows.first, top, int8, True)),
        (grouped_casts.WEIGHT_CASTS, (TENSORS[2][:, :-1], int8)),
        (grouped_products.GROUPED_PRODUCT, (gate_up[:, :HIDDEN], TENSORS[2].mT, rows.ends, rows.tiles)),
        (grouped_products.GROUPED_WEIGHT_PRODUCT, (gate_up, gate_up[:, :HIDDEN], rows.ends)),
        (grouped_products.GROUPED_CODES_PRODUCT, (*turned[:2], *weight[:2], rows.ends, rows.tiles, torch.float32)),
        (grouped_products.GROUPED_CODES_WEIGHT_PRODUCT, (*turned[2:], *turned[2:], rows.first, torch.bfloat16)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_rows_of_tokens_are_not_kept():
    """The backward pass gathers them again. The weight itself is kept, and no view of it."""
    rows, kept = plan_rows(CHOICES, len(LOADS)), []
    x, weight = TENSORS[0].clone().requires_grad_(), TENSORS[2].flatten(0, 1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        grouped_matmul(x, weight, rows, gathers=True)
    assert {id(saved) for saved in kept if saved.is_floating_point()} == {id(x), id(weight)}


@pytest.mark.parametrize(("found", "int8", "fp8"), [
    ((8, 0), "portable", "compute capability 8.9"), ((8, 9), "portable", "portable"), ((9, 0), "sm_90", "sm_90"),
    ((10, 3), "B300", "portable"), ((12, 0), "portable", "portable"), ((7, 5), "8.0", "compute capability 8.9"),
])  # fmt: skip
def test_gpus_have_tiles_or_are_refused(found, int8, fp8, monkeypatch):
    monkeypatch.setattr(int8_matmul, "capability", lambda device: found)
    for number, expected in ((INT8, int8), (E4M3, fp8)):
        if expected in int8_matmul.TILES:
            assert int8_matmul.codes_family.__wrapped__(torch.device("cuda"), number) == expected
        else:
            with pytest.raises(NotImplementedError, match=expected):
                int8_matmul.codes_family.__wrapped__(torch.device("cuda"), number)


def test_what_they_do_not_take_they_refuse():
    rows = plan_rows(CHOICES, len(LOADS))
    x, weight = TENSORS[0], TENSORS[2]
    length = CHOICES.numel()
    with pytest.raises(TypeError, match=r"choices in int64 or int32, got torch\.float32"):
        plan_rows(CHOICES.float(), 8)
    with pytest.raises(ValueError, match=r"experts of a token\], got shape \(3,\)"):
        plan_rows(CHOICES[0], 8)
    with pytest.raises(ValueError, match="got experts 0 and room 5"):
        plan_rows(CHOICES, 0, 5)
    with pytest.raises(ValueError, match=rf"gather takes a matrix of {len(x)} tokens, got shape"):
        gather(x[:-1], rows)
    with pytest.raises(TypeError, match=r"combine takes .*, got torch\.int64"):
        combine(CHOICES, rows)
    with pytest.raises(TypeError, match=r"got torch\.float32, torch\.bfloat16"):
        grouped_matmul(x, weight.bfloat16(), rows, gathers=True)
    with pytest.raises(ValueError, match=rf"takes x \[{length}, {HIDDEN}\], got shape"):
        grouped_matmul(x, weight, rows)
    with pytest.raises(ValueError, match=r"takes weights \[8, N, K\], got shape \(7,"):
        grouped_matmul(x, weight[1:], rows, gathers=True)
    with pytest.raises(ValueError, match="multiples of 16, got 32 to 88"):
        grouped_matmul(x, weight[:, 8:], rows, GroupedLowBit(), gathers=True)
    with pytest.raises(ValueError, match="smaller micro-batches"):
        grouped_matmul(x, weight, rows, GroupedLowBit(), gathers=True, tokens=131_073)
    with pytest.raises(ValueError, match=rf"takes \[{length}, 2 F\] and weights"):
        weighted_swiglu(x, TENSORS[1], rows)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(grouped_matmul(leaf, weight, rows, gathers=True).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; use a loop over experts"):
        grad.sum().backward()

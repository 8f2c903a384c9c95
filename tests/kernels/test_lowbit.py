"""Linear layers in 8 bits against float64: the error of every product is within the rounding of its operands, at any
magnitude."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import run_distributed
from sagekernels.casts import E4M3, INT8, QUANTIZE_BOTH, Rounded, quantize
from sagekernels.lowbit import LOW_BIT, LowBit, library_product, product
from sagekernels.matmul import linear
from sagetrain.parallel.collectives import Region, finish_leave
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear, keep_weights
from sagetrain.parallel.topology import ParallelGroups, Topology

IN, OUTS = 48, (64, 16, 32)

every_precision = pytest.mark.parametrize("name", LOW_BIT)
every_number = pytest.mark.parametrize("number", [E4M3, INT8], ids=str)


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers. Rows and columns have their own magnitudes, and one row and one column are zeros."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw)
    x *= torch.exp2(4 * torch.randn(shape[0], 1, generator=draw)) * torch.exp2(torch.randn(shape[1], generator=draw))
    x[shape[0] // 2], x[:, shape[1] // 3] = 0, 0
    return x.to(dtype)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def _rounding(x: Tensor, number: torch.dtype) -> Tensor:
    """Return the largest change of each element by rounding (float64). For FP8 it is half a step of the mantissa or,
    among the subnormals, half the least of them (2^-9), at a scale of less than 2 largest / limit. For INT8 it is half
    of 127 equal steps."""
    x = x.double()
    if number == INT8:
        return _largest(x) / 254 * (1 + 1e-6) + torch.zeros_like(x)
    return 2**-4 * x.abs() + 2**-9 * _largest(x) / torch.finfo(number).max


def _bound(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> Tensor:
    """Return the largest error of a b^T if a and b are wrong by no more than of_a and of_b."""
    a, b = a.double().abs(), b.double().abs()
    return a @ of_b.t() + of_a @ b.t() + of_a @ of_b.t()


def _assert_within(actual: Tensor, truth: Tensor, bound: Tensor) -> None:
    """Check that the error is within the bound plus the result's own rounding to its dtype. Results that are no twins
    are rounded from a sum in fp32."""
    assert actual.isfinite().all()
    step = torch.finfo(actual.dtype).eps
    slack = step * (truth.abs() + bound) + torch.finfo(actual.dtype).tiny
    excess = (actual.double() - truth).abs() - bound - slack
    assert excess.max() <= 0, excess.max()


# -- codes and scales --------------------------------------------------------------------------------------------


@every_number
@pytest.mark.parametrize("magnitude", [1e-32, 1e-12, 1.0, 1e30])
def test_codes_are_close_at_any_magnitude(number: torch.dtype, magnitude: float) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)) * magnitude
    codes, scale = quantize(x, number)
    assert codes.dtype == number and codes.is_contiguous() and scale.dtype == torch.float32
    assert scale.shape == (8, 1)
    error = (codes.double() * scale - x).abs()
    assert (error <= _rounding(x, number)).all()
    limit = 127 if number == INT8 else torch.finfo(number).max
    assert (_largest(codes.double()) >= limit / 2).all()  # The codes use the range.
    if number != INT8:
        mantissa, _ = torch.frexp(scale)
        assert (mantissa == 0.5).all()  # The scale is a power of two.


@every_number
def test_no_value_is_rounded_out_of_the_range(number: torch.dtype) -> None:
    """The largest magnitudes lie around those at which the scale changes, where a division by them rounds."""
    limit = 127.0 if number == INT8 else torch.finfo(number).max
    at = torch.tensor([limit * 2.0**k for k in (-100, -3, 0, 5, 100 if number == INT8 else 90)])
    near = [at, at.nextafter(torch.tensor(0.0)), at.nextafter(torch.tensor(torch.inf))]
    x = torch.cat(near)[:, None]
    codes, scale = quantize(x, number)
    assert codes.float().isfinite().all()
    assert ((codes.double() * scale - x).abs() <= _rounding(x, number)).all()


@every_number
def test_zeros_stay_zeros(number: torch.dtype) -> None:
    """Numbers close to zero become zero or stay close to it."""
    for value in (0.0, 1e-40, 1e-37):
        codes, scale = quantize(torch.full((4, 16), value, dtype=torch.bfloat16), number)
        assert ((codes.double() * scale - value).abs() <= min(value, 2**-126)).all()
        assert scale.isfinite().all()


@every_number
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(number: torch.dtype, bad: float) -> None:
    """A value that is not finite spoils its row, and no more."""
    x = torch.ones(3, 16)
    x[1, 5] = bad
    b = quantize(torch.ones(2, 16), number)
    rows = product(quantize(x, number), b, torch.float32)
    assert rows[1].isnan().all()
    assert rows[[0, 2]].isfinite().all()


@every_number
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_kernels_multiply_as_the_twin(number: torch.dtype, dtype: torch.dtype) -> None:
    """The kernels are those of the CPU, which take the same layouts and scales. tests/gpu has those of a GPU."""
    a, b = (quantize(_random(seed, rows, 64), number) for seed, rows in ((1, 33), (2, 48)))
    truth = product(a, b, torch.float64)
    magnitudes = product(_positive(a), _positive(b), torch.float64)
    found = library_product(a, b, dtype)
    assert found.dtype == dtype
    error = (found.double() - truth).abs() - torch.finfo(dtype).eps * truth.abs()
    assert (error <= 64 * torch.finfo(torch.float32).eps * magnitudes).all()


def _positive(x: Rounded) -> Rounded:
    return Rounded(x.codes.double().abs(), x.scale)


@every_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_activation_is_rounded_as_the_layer_rounds_it(name: str, dtype: torch.dtype) -> None:
    """FP8 takes a byte a column and 16 a row, and the layer makes the codes of x itself from it. INT8, which
    has other grids along the tokens, travels whole."""
    matmul, x = LOW_BIT[name], torch.cat([_random(1, 40, 64) * scale for scale in (1e-30, 1.0, 1e30)]).to(dtype)
    packed = matmul.pack(x)
    if name == "fp8":
        assert (packed.dtype, packed.shape) == (torch.uint8, (120, 64 + 16))
        found = matmul.unpack(packed, dtype)
        assert found.dtype == dtype
        codes, scale = quantize(x, E4M3)
        assert torch.equal(found.double(), codes.double() * scale)
        again = quantize(found, E4M3)
        assert torch.equal(again.codes.double() * again.scale, codes.double() * scale)
        x[7, 3], x[50, 0] = torch.nan, torch.inf
        found = matmul.unpack(matmul.pack(x), dtype)
        assert found[[7, 50]].isnan().all()
        assert found.isnan().sum() == 2 * 64
    else:
        assert packed is x
        assert matmul.unpack(packed, dtype) is x


@every_precision
def test_formats_are_as_documented(name: str) -> None:
    """docs/low-bit-linear.md: x, W as it lies and transposed, and dY have one format, and a scale for each row."""
    matmul = LOW_BIT[name]
    x, weight, grad = (_random(seed, 32, 16, dtype=torch.bfloat16) for seed in range(3))
    operand, saved = matmul.read(x)
    kept, prepared = matmul.keep([weight]), matmul.prepare([grad])
    found = [operand, saved, kept[:2], kept[2:], prepared[:2], prepared[2:]]
    assert {part[0].dtype for part in found} == {E4M3 if name == "fp8" else INT8}
    assert all(len(part[1]) == len(part[0]) for part in found)
    assert matmul.operand(x)[0].dtype == operand[0].dtype


# -- the three products ------------------------------------------------------------------------------------------


def _products(matmul: LowBit, x: Tensor, weights: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the gradient of x, and the gradients of several weights as one."""
    x, weights = x.detach().requires_grad_(), [w.detach().requires_grad_() for w in weights]
    outputs = linear(x, weights, matmul)
    grad_x, *grad_weights = torch.autograd.grad(outputs, (x, *weights), grads)
    return torch.cat(outputs, 1).detach(), grad_x, torch.cat(grad_weights)


@every_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [64, 37])
@pytest.mark.parametrize("scales", [(1, 1, 1), (1e4, 1e-2, 1e-12), (1e12, 1, 1e-30), (1e-30, 1e3, 1e20)], ids=str)
def test_products_are_within_the_rounding_of_their_operands(
    name: str, dtype: torch.dtype, tokens: int, scales: tuple[float, float, float]
) -> None:
    matmul = LOW_BIT[name]
    of_x, of_w, of_grad = scales
    x, grads = of_x * _random(1, tokens, IN, dtype=dtype), [of_grad * _random(5, tokens, n, dtype=dtype) for n in OUTS]
    weights = [of_w * _random(2 + i, n, IN, dtype=dtype) for i, n in enumerate(OUTS)]
    weight, grad = torch.cat(weights), torch.cat(grads, 1)
    output, grad_x, grad_weight = _products(matmul, x, weights, grads)

    def operand(value: Tensor, number: torch.dtype) -> tuple[Tensor, Tensor]:
        return value, _rounding(value, number)

    def check(actual: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
        assert actual.dtype == dtype
        truth = a[0].double() @ b[0].double().t()
        _assert_within(actual, truth, _bound(*a, *b))
        # The error shows that eight bits are used: FP8 is wrong by some percent of the whole, INT8 by some per mille.
        error = ((actual - truth).norm() / truth.norm()).item()
        assert 5e-4 < error < 0.1, error

    check(output, operand(x, matmul.number), operand(weight, matmul.number))
    check(grad_x, operand(grad, matmul.gradient), operand(weight.t(), matmul.number))
    check(grad_weight, operand(grad.t(), matmul.gradient), operand(x.t(), matmul.number))


@every_precision
def test_strides_do_not_matter(name: str) -> None:
    """x, weights and gradients have strides. The gradient of a sum has strides of 0."""
    matmul = LOW_BIT[name]
    x, weight, grad = _random(1, 21, IN), _random(2, 64, IN), torch.ones(())
    plain = _products(matmul, x, [weight], [grad.expand(21, 64).contiguous()])
    strided = [torch.empty(IN, 2 * n)[:, ::2].copy_(part.t()).t() for n, part in ((21, x), (64, weight))]
    for part, other in zip(plain, _products(matmul, strided[0], [strided[1]], [grad.expand(21, 64)]), strict=True):
        assert torch.equal(part, other)


@every_precision
def test_what_was_in_a_result_does_not_matter(name: str) -> None:
    matmul = LOW_BIT[name]
    x, weight, grad = _random(1, 21, IN), _random(2, 64, IN), _random(3, 21, 64)
    _, grad_x, grad_weight = _products(matmul, x, [weight], [grad])
    out = torch.full_like(x, torch.nan)
    prepared = matmul.prepare([grad])
    assert torch.equal(matmul.input_gradient(prepared, [weight], out=out), grad_x)
    assert torch.equal(out, grad_x)
    total = torch.ones_like(weight)
    matmul.add_weight_gradient(total, prepared, matmul.read(x)[1])
    assert torch.equal(total, 1 + grad_weight)


class Cast(TorchDispatchMode):
    """A counter of the casts in both orientations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is QUANTIZE_BOTH
        return function(*args, **(kwargs or {}))


@every_precision
def test_without_gradients_nothing_is_cast_for_them(name: str) -> None:
    matmul = LOW_BIT[name]
    x, weight = _random(1, 21, IN), _random(2, 64, IN).requires_grad_()
    with Cast() as cast:
        (expected,) = linear(x, [weight], matmul)
    assert cast.count == 1
    with Cast() as cast, torch.no_grad():
        (found,) = linear(x, [weight], matmul)
    assert cast.count == 0
    assert torch.equal(found, expected)


@every_precision
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_products_of_what_is_not_finite_are_not_finite(name: str, bad: float) -> None:
    """The loss or the gradient norm must show that a step overflowed."""
    matmul = LOW_BIT[name]
    x, weight, grad = _random(1, 21, IN), _random(2, 64, IN), _random(3, 21, 64)
    for operand in (x, weight, grad):
        clean = operand[3, 4].clone()
        operand[3, 4] = bad
        results = _products(matmul, x, [weight], [grad])
        seen = [not result.isfinite().all() for result in results]
        assert seen == [operand is not grad, operand is not x, operand is not weight]
        operand[3, 4] = clean


@every_precision
def test_kept_weights_multiply_as_the_weights_themselves(name: str) -> None:
    """Results are equal bit for bit, eager and compiled, with one graph for all layers and one for evaluation. The kept
    weights are written anew when asked to."""
    torch._dynamo.reset()
    groups, sizes = ParallelGroups.single(), {"a": 64, "c": 32}
    layers = torch.nn.ModuleList(
        ColumnParallelLinear(IN, sizes, Region(groups), matmul=LOW_BIT[name]) for _ in range(3)
    )
    x, g = _random(1, 20, IN), _random(2, 20, 96)
    compiled = [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers]
    torch._dynamo.utils.counters.clear()
    for seed in range(2):
        for i, layer in enumerate(layers):
            for j, weight in enumerate(layer.parameters()):
                # This write moves no version counter.
                weight.data.copy_(_random(10 + 7 * seed + 3 * i + j, *weight.shape))
        keep_weights(layers)
        for layer, fast in zip(layers, compiled, strict=True):
            assert [tuple(part.shape) for part in layer.kept if part.dtype != torch.float32] == [(96, IN), (IN, 96)]
            truth = _products(layer.matmul, x, list(layer.parameters()), list(g.split([64, 32], 1)))
            for call in (layer, fast):
                y = torch.cat(call(x), 1)
                grads = torch.autograd.grad(y, list(layer.parameters()), g)
                assert torch.equal(y, truth[0])
                assert torch.equal(torch.cat(grads), truth[2])
            with torch.no_grad():
                assert torch.equal(torch.cat(fast(x), 1), truth[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@every_precision
def test_weights_that_are_kept_are_not_rounded_again(name: str) -> None:
    """In every micro-batch of a step, forward and backward do not read the parameters."""
    layer = ColumnParallelLinear(IN, {"a": 64, "c": 32}, Region(ParallelGroups.single()), matmul=LOW_BIT[name])
    for j, weight in enumerate(layer.parameters()):
        weight.data.copy_(_random(10 + j, *weight.shape))
    x, g = _random(1, 20, IN).requires_grad_(), _random(2, 20, 96)
    y, grad_x, _ = _products(layer.matmul, x.detach(), list(layer.parameters()), list(g.split([64, 32], 1)))
    keep_weights(layer)
    for weight in layer.parameters():
        weight.data.fill_(torch.nan)
    for _ in range(2):
        found = torch.cat(layer(x), 1)
        assert torch.equal(found, y) and torch.equal(torch.autograd.grad(found, x, g)[0], grad_x)


# -- gradients that are gathered ---------------------------------------------------------------------------------


class Whole(LowBit):
    """Products that gather the gradient as it is and round it afterwards."""

    gradient_travels = False


class Gathered(TorchDispatchMode):
    """A counter of the bytes that all-gathers are given."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.bytes += args[0].nbytes
        return function(*args, **(kwargs or {}))


def _even(seed: int, rows: int, columns: int) -> Tensor:
    """Return magnitudes that e4m3 never rounds as subnormal numbers, whichever scale it has."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.exp2(-6 * torch.rand(rows, columns, generator=draw) + torch.randn(rows, 1, generator=draw))
    return x * torch.randn(rows, columns, generator=draw).sign()


def _gather_gradients(groups: ParallelGroups, dtype: torch.dtype, compiled: bool) -> tuple[list[int], int]:
    """Compare a row-parallel layer under sequence parallelism that gathers dY in 8 bits with one that gathers dY
    whole. Return the number of elements that differ, of the gradients of x and of the weight, and the bytes that were
    gathered."""
    own, region, results = LOW_BIT["fp8"], Region(groups, sharded=True, dtype=dtype), []
    x, grad = _random(1, 40, 32).to(dtype), _even(2 + groups.tp_rank, 20, 64).to(dtype)
    for matmul in (Whole(**vars(own)), own):
        layer = RowParallelLinear(64, 64, region, matmul=matmul)
        with torch.no_grad():
            layer.weight.copy_(_random(3 + groups.tp_rank, 64, 32))
        if compiled:
            layer.compile(fullgraph=True, backend="aot_eager")
        leaf = x.clone().requires_grad_()
        y = finish_leave(layer(leaf), region)
        with Gathered() as gathered:
            y.backward(grad)
        results.append([leaf.grad, layer.weight.grad])
    return [(a != b).sum().item() for a, b in zip(*results, strict=True)], gathered.bytes


CASES = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]


def _gather_all_gradients() -> list[tuple[list[int], int]]:
    torch.set_num_threads(1)
    groups = ParallelGroups.create(Topology(2, 2))
    return [_gather_gradients(groups, *case) for case in CASES]


def test_gradients_gathered_in_8_bits_equal_later_rounding() -> None:
    """e4m3 takes a byte a column and 16 a token."""
    for found in run_distributed(_gather_all_gradients, 2):
        assert found == [([0, 0], 20 * (64 + 16))] * len(CASES)

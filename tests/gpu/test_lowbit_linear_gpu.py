"""Linear layers in 8 bits on a GPU: torch's kernels, eager and compiled, agree with the twin on the CPU."""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

import tiny
from on_gpu import needs_gpu, poison
from sagekernels.admission import median_seconds
from sagekernels.casts import E4M3, INT8, Rounded, quantize, quantize_both, quantize_both_twin
from sagekernels.lowbit import HEADS, LOW_BIT, product
from sagetrain.auto.linear_choice import time_layers
from sagetrain.config.linear_sizes import LinearSizes
from sagetrain.config.schema import SIXTEEN_BITS, AttentionConfig, LinearConfig, ModelConfig
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import matmuls_of
from sagetrain.model.transformer import Transformer, gradients
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.cross_entropy import linear_cross_entropy
from sagetrain.parallel.layers import ColumnParallelLinear, keep_weights
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.linear_errors import LinearErrors

pytestmark = needs_gpu((8, 9))  # FP8 matmuls
SINGLE = ParallelGroups.single()
SIZES = {"q": 256, "k": 64, "v": 64}
every_precision = pytest.mark.parametrize("name", LOW_BIT)
every_number = pytest.mark.parametrize("number", [E4M3, INT8], ids=str)


def _random(seed: int, rows: int, columns: int) -> Tensor:
    """Return bf16 numbers on the CPU. Rows have their own magnitudes, and one row is all zeros."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw) * torch.exp2(2 * torch.randn(rows, 1, generator=draw))
    x[rows // 2] = 0
    return x.bfloat16()


def _error(found: Tensor, truth: Tensor) -> float:
    return ((found.double().cpu() - truth.double().cpu()).norm() / truth.double().norm().cpu()).item()


@pytest.mark.parametrize("compiled", [False, True])
@every_number
def test_codes_are_the_twins(number: torch.dtype, compiled: bool) -> None:
    """Magnitudes go from 1e-30 to 1e30, and matrices are read as they lie and transposed. A quotient that is rounded
    otherwise moves one INT8 code in a thousand by one."""
    torch._dynamo.reset()
    call = torch.compile(quantize, fullgraph=True, dynamic=False) if compiled else quantize
    for scale in (1e-30, 1e-12, 1.0, 1e30):
        x = (_random(1, 300, 512) * scale).bfloat16()
        for operand in (x, x.t()):
            codes, scales = quantize(operand, number)
            poison()
            found, found_scales = call(operand.cuda(), number)
            assert found.is_contiguous()
            moved = (found.cpu().float() - codes.float()).abs()
            if number == INT8:
                torch.testing.assert_close(found_scales.cpu(), scales, rtol=1e-6, atol=0)
                assert moved.max() <= 1 and (moved > 0).float().mean() < 1e-3
            else:
                assert torch.equal(found_scales.cpu(), scales)
                assert moved.max() == 0


@every_number
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_casts_in_both_orientations_are_the_twins(dtype: torch.dtype, number: torch.dtype) -> None:
    """The results are equal bit for bit, whatever their memory held. The cases have sizes that fill no tile, strides,
    many magnitudes, zeros and subnormal numbers."""
    for rows, columns, scale in ((300, 512, 1.0), (333, 2064, 1e-30), (64, 16, 1e30), (37, 129, 1e-36), (1, 1, 1.0)):
        x = (_random(1, rows, columns).float() * scale).to(dtype)
        for one in (x, x.t(), x.repeat(1, 2)[:, :columns]):
            poison()
            ours, twin = quantize_both(one.cuda(), number), quantize_both_twin(one, number)
            for found, expected in zip(ours, twin, strict=True):
                assert torch.equal(found.scale.cpu(), expected.scale)
                assert torch.equal(found.codes.view(torch.uint8).cpu(), expected.codes.view(torch.uint8))


@every_number
def test_casts_in_both_orientations_hide_nothing(number: torch.dtype) -> None:
    x = _random(1, 300, 512)
    x[3, 4], x[200, 9], x[201, 9] = torch.nan, torch.inf, -torch.inf
    ours, twin = quantize_both(x.cuda(), number), quantize_both_twin(x, number)
    for found, expected in zip(ours, twin, strict=True):
        assert torch.equal(found.scale.isnan().cpu(), expected.scale.isnan())
        assert expected.scale.isnan().any()


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_activations_are_the_twins(compiled: bool) -> None:
    """Sequence parallelism sends packed activations. Packing and unpacking may lie in two graphs."""
    torch._dynamo.reset()
    matmul, x = LOW_BIT["fp8"], _random(1, 300, 512)
    pack, unpack = (torch.compile(f, fullgraph=True) if compiled else f for f in (matmul.pack, matmul.unpack))
    packed = matmul.pack(x)
    poison()
    assert torch.equal(pack(x.cuda()).cpu(), packed)
    assert torch.equal(unpack(packed.cuda(), torch.bfloat16).cpu(), matmul.unpack(packed, torch.bfloat16))


@every_number
def test_products_are_the_twins(number: torch.dtype) -> None:
    """Products of the same codes differ only by the precision of the sum (FP8: the tensor cores' own) and the rounding
    to bf16."""
    for rows, columns, others in ((300, 512, 256), (1001, 4096, 2048), (64, 16, 16)):
        a, b = quantize(_random(1, rows, columns), number), quantize(_random(2, others, columns), number)
        truth = product(a, b, torch.float64)
        on_gpu = [Rounded(*(part.cuda() for part in operand)) for operand in (a, b)]
        poison()
        found = product(*on_gpu, torch.bfloat16)
        assert found.shape == (rows, others) and found.dtype == torch.bfloat16
        assert _error(found, truth) < (0.003 if number == INT8 else 0.01)


def _layer(name: str, device: str) -> ColumnParallelLinear:
    region = Region(SINGLE, dtype=torch.bfloat16, device=torch.device(device))
    layer = ColumnParallelLinear(512, SIZES, region, matmul=LOW_BIT[name])
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(_random(5 + seed, *parameter.shape))
    return layer


def _results(layer: ColumnParallelLinear, call, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = torch.cat(call(x), 1)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), grad)]


@every_precision
@pytest.mark.parametrize("tokens", [1024, 1001])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_layers_compute_as_the_twin(name: str, tokens: int, compiled: bool, kept: bool) -> None:
    torch._dynamo.reset()
    x, grad = _random(1, tokens, 512), 1e-6 * _random(2, tokens, sum(SIZES.values()))
    truth = _results(layer := _layer(name, "cpu"), layer, x, grad)
    layer = _layer(name, "cuda")
    if kept:
        keep_weights(layer)
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    poison()
    for found, expected in zip(_results(layer, call, x.cuda(), grad.cuda()), truth, strict=True):
        assert _error(found, expected) < 0.01


@every_precision
def test_what_is_not_finite_is_not_hidden(name: str) -> None:
    torch._dynamo.reset()
    layer = _layer(name, "cuda")
    call = torch.compile(layer, fullgraph=True)
    for bad, in_x in itertools.product((torch.nan, torch.inf), (True, False)):
        x, grad = _random(1, 64, 512).cuda(), _random(2, 64, sum(SIZES.values())).cuda()
        (x if in_x else grad)[3, 4] = bad
        y, grad_x, *grad_weights = _results(layer, call, x, grad)
        assert y.isfinite().all() != in_x
        assert grad_x.isfinite().all() == in_x
        assert not all(g.isfinite().all() for g in grad_weights)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_and_its_loss_are_those_of_the_twin(name: str) -> None:
    """The tokens fill no tile, some do not count, and a chunk is odd."""
    labels = torch.arange(300) * 7 % 512
    labels[40:60] = -100
    found = []
    for device in ("cpu", "cuda"):
        hidden, weight = (0.03 * _random(seed, rows, 256).to(device) for seed, rows in ((1, 300), (2, 512)))
        how = {"matmul": HEADS[name], "kept": HEADS[name].keep((weight,)), "chunk": 141, "divisor": 280.0}
        read = hidden.requires_grad_(), weight.requires_grad_()
        if device == "cuda":
            poison()
        loss = linear_cross_entropy(*read, labels.to(device), SINGLE, **how)
        found.append((loss.detach(), *torch.autograd.grad(loss, read)))
    for truth, ours in zip(*found, strict=True):
        assert _error(ours, truth) < 0.01


SHAPE = ModelConfig(num_layers=4, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, num_key_value_heads=2)


def _model(linear: LinearConfig) -> Transformer:
    place = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    matmuls, _ = matmuls_of(linear, SHAPE, tensor_parallel_size=1, **place)
    attention = AttentionConfig(backend="sdpa")
    return tiny.transformer(SHAPE, attention, vocab_size=1024, groups=SINGLE, matmuls=matmuls, **place)


@every_precision
def test_a_compiled_model_in_8_bits_is_close_to_16_bits(name: str) -> None:
    """Compiled and eager kernels round differently where they are fused. Both are as far from 16 bits as 8 bits are.
    The errors are measured by the model's own operators, so no graph is added."""
    tokens = torch.randint(0, 1024, (2, 513), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    results = []
    for kind in ("16 bits", "eager", "compiled"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = _model(SIXTEEN_BITS if kind == "16 bits" else LinearConfig(precision=name))
        if kind == "compiled":
            compile_blocks(model)
        model.keep_weights()
        loss = model(inputs, labels)
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.float().flatten() for p in model.parameters()])))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs < SHAPE.num_layers + 5  # Blocks share their graphs.
    (exact, true_gradient), *others = results
    for loss, gradient in others:
        assert loss == pytest.approx(exact, rel=0.005)
        assert _error(gradient, true_gradient) < 0.2
    tokens = torch.arange(2 * 512, device="cuda").view(2, 512)
    SINGLE.metrics.clear()
    LinearErrors(model, range(SHAPE.num_layers)).measure([partial(gradients, partial(model, tokens, tokens))])
    found = SINGLE.metrics.reduce(tokens.device)
    errors = [value for key, value in found.items() if key.endswith("rel_l2")]
    assert len(errors) == SHAPE.num_layers * 4 * 3 and all(0 < error < 0.1 for error in errors)
    model(tokens, tokens).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_auto_times_a_compiled_layer() -> None:
    """`linear.precision: auto` finds both arithmetics right and times them."""
    times, refused = time_layers(
        {"qkv": LinearSizes(512, SIZES)},
        ["int8"],
        tokens=1024,
        joined=False,
        kept=True,
        compiled=True,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        seconds=partial(median_seconds, device="cuda"),
    )
    assert not refused
    assert set(times["qkv"]) == {"bf16", "int8"} and all(0 < x < 1 for x in times["qkv"].values())

"""SwiGLU rounded as it is computed, between two linear layers in FP8: the same bits as written and then rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import run_distributed
from sagekernels.casts import quantize_both
from sagekernels.swiglu import QUANTIZE_SWIGLU, quantize_swiglu, quantize_swiglu_gradient
from sagetrain.config.schema import AttentionConfig, LinearConfig, ModelConfig
from sagetrain.model.mlp import MLP
from sagetrain.model.selection import matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel import lowbit
from sagetrain.parallel.layers import keep_weights
from sagetrain.parallel.lowbit import RECIPES
from sagetrain.parallel.topology import ParallelGroups, Topology

SHAPE = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_key_value_heads=2)
SINGLE = ParallelGroups.single()
FUSED = [("fp8", "tensorwise"), ("fp8", "rowwise")]
fused_recipe = pytest.mark.parametrize("name", FUSED, ids=" ".join)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(name: tuple[str, str], dtype: torch.dtype = torch.float32, kept: bool = True) -> MLP:
    place = {"dtype": dtype, "device": torch.device("cpu")}
    layer = MLP(SHAPE, SINGLE, matmul=RECIPES[name], sequence_parallel=False, **place)
    with torch.no_grad():
        for seed, weight in enumerate(layer.parameters()):
            weight.copy_(0.3 * random(seed, *weight.shape))
    if kept:
        keep_weights(layer)
    return layer


def results(layer: MLP, x: Tensor, grad: Tensor, compiled: bool = False) -> list[Tensor]:
    """Output, and gradients of x and of the weights."""

    def call(x: Tensor) -> Tensor:
        return layer.down(layer(x))

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    x = x.detach().requires_grad_()
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), grad)]


class Seen(TorchDispatchMode):
    """Which operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append(function)
        return function(*args, **(kwargs or {}))


@fused_recipe
@pytest.mark.parametrize("tokens", [48, 37, 1])
@pytest.mark.parametrize("kept", [True, False])
def test_fused_and_apart_are_the_same_bits(name: tuple[str, str], tokens: int, kept: bool) -> None:
    """In fp32, where nothing is rounded in between; eager and compiled, with magnitudes of their own in every row."""
    torch._dynamo.reset()
    layer = mlp(name, kept=kept)
    x = random(5, tokens, 64) * torch.exp2(3 * random(6, tokens, 1))
    grad = 1e-6 * random(7, tokens, 64)
    assert layer.fused
    with Seen() as seen:
        found = results(layer, x, grad)
    assert seen.calls.count(QUANTIZE_SWIGLU) == 2
    assert torch.ops.aten.silu.default not in seen.calls
    compiled = results(layer, x, grad, compiled=True)
    layer.fused = False
    with Seen() as seen:
        apart = results(layer, x, grad)
    assert QUANTIZE_SWIGLU not in seen.calls
    for ours, same, other in zip(found, compiled, apart, strict=True):
        assert torch.equal(ours, other)
        assert torch.equal(same, other)


@fused_recipe
def test_in_16_bits_it_is_as_close_to_float64_as_apart(name: tuple[str, str]) -> None:
    """Rounded to 16 bits once less, and then to 8."""
    layer, exact = mlp(name, torch.bfloat16), mlp(name, torch.bfloat16)
    x, grad = (2 * random(5, 200, 64)).bfloat16(), random(7, 200, 64).bfloat16()
    found = results(layer, x, grad)
    layer.fused = False
    apart = results(layer, x, grad)
    weights = [weight.detach().double().requires_grad_() for weight in exact.parameters()]
    wide = x.double().requires_grad_()
    gate, up = (wide @ weight.t() for weight in weights[:2])
    y = (gate * gate.sigmoid() * up) @ weights[2].t()
    truth = [y.detach(), *torch.autograd.grad(y, (wide, *weights), grad.double())]
    for ours, other, expected in zip(found, apart, truth, strict=True):
        errors = [((value.double() - expected).norm() / expected.norm()).item() for value in (ours, other)]
        assert errors[0] < 0.15 and errors[0] < 1.02 * errors[1], errors


@fused_recipe
def test_torchs_own_kernels_take_what_autograd_hands_on(name: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: they look at strides, when torch.compile traces them already."""
    torch._dynamo.reset()
    monkeypatch.setattr(lowbit, "product", lowbit.library_product)
    layer = mlp(name, torch.bfloat16)
    x, grad = random(5, 48, 64).bfloat16(), random(7, 48, 64).bfloat16()
    eager = results(layer, x, grad)
    for ours, other in zip(results(layer, x, grad, compiled=True), eager, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FUSED], ids=" ".join)
def test_other_recipes_stay_apart(name: tuple[str, str]) -> None:
    layer = mlp(name)
    assert not layer.fused
    with Seen() as seen:
        results(layer, random(1, 20, 64), random(2, 20, 64))
    assert QUANTIZE_SWIGLU not in seen.calls


def test_layers_of_two_kinds_stay_apart() -> None:
    """`down` has half the weights of gate and up together."""
    linear = LinearConfig(precision="fp8", keep_layers_below=2 * 64 * 96)
    matmuls, _ = matmuls_of(linear, SHAPE, device=torch.device("cpu"), dtype=torch.float32)
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    layer = MLP(SHAPE, SINGLE, matmul=matmuls[0], sequence_parallel=False, **place)
    assert layer.gate_up.matmul.gates and not layer.down.matmul.gates and not layer.fused


@fused_recipe
def test_without_gradients_nothing_is_made_for_them(name: tuple[str, str]) -> None:
    layer, x = mlp(name), random(5, 37, 64)
    expected = results(layer, x, random(7, 37, 64))[0]
    with Seen() as seen, torch.no_grad():
        assert torch.equal(layer.down(layer(x)), expected)
    assert not [call for call in seen.calls if str(call).startswith("sagekernels")]


@fused_recipe
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_output_and_gradients(name: tuple[str, str], bad: float) -> None:
    layer, x, grad = mlp(name), random(5, 37, 64), random(7, 37, 64)
    x[3, 4] = bad
    assert all(not found.isfinite().all() for found in results(layer, x, grad))
    x[3, 4], grad[3, 4] = 0, bad
    y, *grads = results(layer, x, grad)
    assert y.isfinite().all()
    assert all(not found.isfinite().all() for found in grads)


# -- in a model ----------------------------------------------------------------------------------------------------


def model(groups: ParallelGroups = SINGLE, **arguments: object) -> Transformer:
    matmuls, _ = matmuls_of(LinearConfig(precision="fp8"), SHAPE, device=torch.device("cpu"), dtype=torch.float32)
    attention = AttentionConfig(backend="sdpa")
    network = Transformer(SHAPE, attention, vocab_size=128, groups=groups, matmuls=matmuls, **arguments)
    network.keep_weights()
    return network


def gradients(network: Transformer, fused: bool) -> list[Tensor]:
    """And the loss."""
    assert all(block.mlp.fused for block in network.blocks) or not fused
    for block in network.blocks:
        block.mlp.fused = fused
    text = torch.randint(0, 128, (4, 17), generator=torch.Generator().manual_seed(5))
    network.zero_grad()
    loss = network(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    loss.backward()
    return [loss.detach(), *(p.grad for p in network.parameters())]


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing_keeps_the_bits(checkpointing: str, compiled: bool) -> None:
    torch._dynamo.reset()
    expected = gradients(model(), fused=False)
    network = model(activation_checkpointing=checkpointing)
    if compiled:
        network.compile_blocks(backend="aot_eager")
    for found, other in zip(gradients(network, fused=True), expected, strict=True):
        assert torch.equal(found, other)


def fused_beside_apart() -> list[bool]:
    torch.set_num_threads(1)
    groups, same = ParallelGroups.create(Topology(2, 2)), []
    for how in ({"sequence_parallel": True}, {"sequence_parallel": True, "overlap": True}, {"overlap": False}):
        network = model(groups, **how)
        pairs = zip(gradients(network, fused=True), gradients(network, fused=False), strict=True)
        same.append(all(torch.equal(found, other) for found, other in pairs))
    return same


def test_tensor_parallelism_keeps_the_bits() -> None:
    """With sequences sharded, codes gathered, and in halves."""
    for same in run_distributed(fused_beside_apart, 2):
        assert same == [True, True, True]


# -- the operator --------------------------------------------------------------------------------------------------


def test_the_operator_casts_what_autograd_computes() -> None:
    """In both orientations, whatever the strides."""
    gate, up = (random(seed, 37, 20).requires_grad_() for seed in (1, 2))
    grad = random(3, 37, 20)
    y = torch.nn.functional.silu(gate) * up
    expected = y.detach(), torch.cat(torch.autograd.grad(y, (gate, up), grad), 1)
    gate, up = gate.detach(), up.detach()
    for number, per_row in ((torch.float8_e4m3fn, True), (torch.float8_e5m2, False)):
        for strided in (lambda x: x, lambda x: x.t().contiguous().t()):
            one, two, of = strided(gate), strided(up), strided(grad)
            found = quantize_swiglu(one, two, number, per_row), quantize_swiglu_gradient(of, one, two, number, per_row)
            for pair, matrix in zip(found, expected, strict=True):
                for ours, twin in zip(pair, quantize_both(matrix, number, per_row), strict=True):
                    assert torch.equal(ours.codes.view(torch.uint8), twin.codes.view(torch.uint8))
                    assert torch.equal(ours.scale, twin.scale)


@pytest.mark.parametrize("backward", [True, False])
def test_the_operator_keeps_its_promises(backward: bool) -> None:
    gate, up, grad = random(1, 37, 20), random(2, 37, 20), random(3, 37, 20)
    arguments = (grad if backward else None, gate, up, torch.float8_e4m3fn, True)
    torch.library.opcheck(QUANTIZE_SWIGLU, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_it_does_not_take_it_refuses() -> None:
    x, e4m3 = torch.zeros(4, 4), torch.float8_e4m3fn
    with pytest.raises(TypeError, match=r"quantize_swiglu takes .* to e4m3 or e5m2, got torch\.float32 to torch\.int8"):
        quantize_swiglu(x, x, torch.int8, True)
    with pytest.raises(ValueError, match=r"one shape and dtype, got \(4, 4\) in torch\.float32 and \(4, 3\)"):
        quantize_swiglu(x, x[:, :3], e4m3, True)
    with pytest.raises(ValueError, match=r"quantize_swiglu_gradient .* in torch\.float32 and \(4, 4\) in torch\.bf"):
        quantize_swiglu_gradient(x.bfloat16(), x, x, e4m3, True)

"""Gradients of SwiGLU on a GPU: the kernel agrees with float64, and a compiled model with plain torch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_inputs import random_swiglu, swiglu_gradients_error
from on_gpu import needs_gpu, poison
from sagekernels.casts import NUMBERS, largest_twin, quantize_both
from sagekernels.lowbit import LOW_BIT
from sagekernels.matmul import Matmul
from sagekernels.swiglu import swiglu_gradients_triton, swiglu_gradients_twin, swiglu_triton
from sagetrain.config.layer_specs import layers
from sagetrain.config.schema import ModelConfig
from sagetrain.model.mlp import MLP
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.layers import ColumnParallelLinear, keep_weights
from sagetrain.parallel.topology import ParallelGroups

pytestmark = needs_gpu((8, 9))  # FP8 matmuls
SHAPE = ModelConfig(num_layers=1, hidden_size=256, ffn_hidden_size=704, num_attention_heads=4)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_within_one_rounding_of_float64(dtype: torch.dtype) -> None:
    """The cases have sizes that fill no tile, strides, many magnitudes and the ends of the sigmoid. The memory of the
    result held other values before."""
    magnitudes = (1.0, 1e-2, 20.0, 1.0, 1.0) if dtype == torch.float16 else (1.0, 1e-15, 1e15, 1.0, 1.0)
    shapes = ((300, 512), (1001, 5632), (37, 129), (1, 1), (64, 704))
    for (rows, columns), magnitude in zip(shapes, magnitudes, strict=True):
        grad, gate, up = random_swiglu(rows, columns, magnitude, dtype, "cuda")
        part, turned = grad.repeat(1, 2)[:, :columns], [x.t().contiguous().t() for x in (grad, gate, up)]
        for inputs in ((grad, gate, up), (part, gate, up), turned):
            poison()
            found, largest = swiglu_gradients_triton(*inputs)
            assert torch.equal(largest, largest_twin(found))
            assert found.shape == (rows, 2 * columns) and found.dtype == dtype and found.is_contiguous()
            assert swiglu_gradients_error(found, *inputs) <= 1
            poison()
            y, largest = swiglu_triton(*inputs[1:])
            assert torch.equal(largest, largest_twin(y))
            exact = F.silu(inputs[1].double()) * inputs[2].double()
            least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            bound = (torch.finfo(dtype).eps / 2 + 1e-6) * exact.abs() + least
            assert ((y.double() - exact).abs() <= bound).all()


def test_known_magnitudes_change_no_bit_of_a_cast() -> None:
    for number, (rows, columns) in itertools.product(NUMBERS, ((1001, 5632), (37, 129))):
        for x, largest in (
            swiglu_triton(*random_swiglu(rows, columns, 1.0, torch.bfloat16, "cuda")[1:]),
            swiglu_gradients_triton(*random_swiglu(rows, columns, 1.0, torch.bfloat16, "cuda")),
        ):
            poison()
            found, expected = quantize_both(x, number, largest), quantize_both(x, number)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
                assert torch.equal(ours.scale, theirs.scale)


def test_what_is_not_finite_stays_so() -> None:
    grad, gate, up = random_swiglu(64, 128, 1.0, torch.bfloat16, "cuda")
    gate = gate.clone()
    grad[3, 4], grad[5, 6], gate[7, 8], gate[9, 10] = torch.nan, torch.inf, torch.nan, -torch.inf
    found, expected = swiglu_gradients_triton(grad, gate, up)[0], swiglu_gradients_twin(grad, gate, up)[0]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.parametrize("matmul", [LOW_BIT["fp8"], Matmul(joined=True)])
def test_an_mlp_compiled_is_that_of_plain_torch(matmul: Matmul, monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLP differs from plain torch only by roundings that fall the other way, and no kernel joins the gradients."""

    gated = ColumnParallelLinear.gated

    def plain(layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        gate, up = layer(x)
        return F.silu(gate) * up

    def results(patched: bool) -> tuple[list[Tensor], list[str]]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        region = Region(ParallelGroups.single(), dtype=torch.bfloat16, device=torch.device("cuda"))
        layer = MLP(layers(SHAPE)[0], region, matmuls={"gate_up": matmul, "down": matmul})
        for weight in layer.parameters():
            torch.nn.init.normal_(weight, std=0.05)
        keep_weights(layer)
        x = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        grad = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda")
        call = torch.compile(lambda x: layer.down(layer(x)), fullgraph=True)
        monkeypatch.setattr(ColumnParallelLinear, "gated", plain if patched else gated)
        call(x).backward(grad)
        x.grad = None
        layer.zero_grad()
        poison()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            y = call(x)
            y.backward(grad)
        return [y, x.grad, *(w.grad for w in layer.parameters())], [event.key for event in profile.key_averages()]

    found, kernels = results(False)
    expected, others = results(True)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).double().norm() <= 2e-3 * theirs.double().norm()
    assert any("swiglu_gradients_kernel" in name for name in kernels)
    assert not any("silu_backward" in name for name in kernels)
    assert any("silu_backward" in name for name in others)

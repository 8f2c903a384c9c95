"""SwiGLU whose gradients are halves of one matrix: the twin agrees with float64, and in a model with plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backward_graph import backward_calls
from kernel_inputs import random_swiglu, swiglu_gradients_error
from sagekernels.casts import QUANTIZE_BOTH, largest_twin
from sagekernels.lowbit import LOW_BIT
from sagekernels.matmul import Matmul
from sagekernels.swiglu import SWIGLU, SWIGLU_GRADIENTS, swiglu, swiglu_gradients_twin
from sagetrain.config.layer_specs import layers
from sagetrain.model import mlp
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.layers import ColumnParallelLinear, keep_weights
from small_model import SHAPE, SINGLE, loss_and_gradients, small_model

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_is_within_one_rounding_of_float64(dtype: torch.dtype) -> None:
    """Products are subnormal at 1e-20."""
    magnitudes = (1.0, 1e-2, 20.0, 1e-3) if dtype == torch.float16 else (1.0, 1e-15, 1e15, 1e-20)
    for rows, columns, magnitude in zip((1, 37, 16, 37), (1, 129, 48, 129), magnitudes, strict=True):
        inputs = random_swiglu(rows, columns, magnitude, dtype)
        found, largest = swiglu_gradients_twin(*inputs)
        assert torch.equal(largest, largest_twin(found))
        assert found.shape == (rows, 2 * columns) and found.dtype == dtype
        assert swiglu_gradients_error(found, *inputs) <= 1
        assert swiglu_gradients_error(found * (1 + 8 * torch.finfo(dtype).eps), *inputs) > 1


def test_the_twin_is_the_derivative() -> None:
    """The derivative confirms the float64 formulas above."""
    gate, up, grad = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(F.silu(gate) * up, (gate, up), grad)
    torch.testing.assert_close(swiglu_gradients_twin(grad, gate, up)[0], torch.cat(expected, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_halves_of_one_matrix(dtype: torch.dtype) -> None:
    grad, gate, up = random_swiglu(37, 20, 1.0, dtype)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    y = swiglu(gate, up)
    assert torch.equal(y, F.silu(gate) * up)
    of_gate, of_up = torch.autograd.grad(y, (gate, up), grad)
    assert of_gate.untyped_storage().data_ptr() == of_up.untyped_storage().data_ptr()
    assert torch.equal(torch.cat((of_gate, of_up), 1), swiglu_gradients_twin(grad, gate.detach(), up.detach())[0])


def test_it_keeps_gate_and_up_alone() -> None:
    _, gate, up = random_swiglu(8, 16, 1.0, torch.bfloat16)
    gate, up, kept = gate.requires_grad_(), up.requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        swiglu(gate, up)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]


def test_the_operator_keeps_its_promises() -> None:
    for inputs in (random_swiglu(9, 20, 1.0, torch.bfloat16), [torch.randn(20, 9).t() for _ in range(3)]):
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(SWIGLU_GRADIENTS, tuple(inputs), test_utils=tests)
        torch.library.opcheck(SWIGLU, tuple(inputs[1:]), test_utils=tests)


def test_what_it_does_not_take_it_refuses() -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(TypeError, match=r"swiglu takes bf16, fp16 or fp32, got torch\.float64"):
        swiglu(x.double(), x.double())
    with pytest.raises(ValueError, match=r"one shape and dtype, got \(4, 4\) in torch\.float32 and \(4, 3\)"):
        swiglu(x, x[:, :3])
    with pytest.raises(ValueError, match=r"got \(4, 4\) in torch\.float32 and \(4, 4\) in torch\.bfloat16"):
        swiglu(x, x.bfloat16())
    with pytest.raises(ValueError, match=r"takes matrices .* got \(4,\) in"):
        swiglu(x[0], x[0])


# -- in a model ----------------------------------------------------------------------------------------------------


def backward_graph(matmul: Matmul) -> list[str]:
    """Return the operations in an MLP's backward pass."""
    region = Region(SINGLE, dtype=torch.bfloat16)
    layer = mlp.MLP(layers(SHAPE)[0], region, matmuls={"gate_up": matmul, "down": matmul})
    for weight in layer.parameters():
        nn.init.normal_(weight)
    return backward_calls(lambda x: layer.down(layer(x)))


def test_gradients_that_are_joined_are_not_copied() -> None:
    for matmul in (LOW_BIT["int8"], Matmul(joined=True)):
        calls = backward_graph(matmul)
        assert calls.count("sagekernels.swiglu_gradients.default") == 1
        # A 16-bit matmul joins its weights, and one in 8 bits joins nothing.
        assert calls.count("aten.cat.default") == (type(matmul) is Matmul)
    assert "sagekernels.swiglu_gradients.default" not in backward_graph(Matmul())


def test_both_casts_know_the_largest_magnitudes() -> None:
    """SwiGLU leaves them for the next layer and for its own gradients."""
    known: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if operator is QUANTIZE_BOTH:
                known.append(len(args) == 3 and args[2] is not None)
            return operator(*args, **(kwargs or {}))

    matmuls = dict.fromkeys(("gate_up", "down"), LOW_BIT["int8"])
    layer = mlp.MLP(layers(SHAPE)[0], Region(SINGLE, dtype=torch.bfloat16), matmuls=matmuls)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.1)
    keep_weights(layer)
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    with Watch():
        layer.down(layer(x)).sum().backward()
    assert known == [False, True, False, True]  # x of both layers, then their dY


def test_a_model_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_qk_norm_rope.py recomputes and compiles the same layers."""

    def gated(layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        gate, up = layer(x)
        return F.silu(gate) * up

    found = loss_and_gradients(small_model())
    monkeypatch.setattr(ColumnParallelLinear, "gated", gated)
    assert all(map(torch.equal, found, loss_and_gradients(small_model())))

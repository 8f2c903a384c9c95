"""Addition and norm as one node with the linear layer before it: the twin has the bits of autograd, and a model those
of plain torch."""

from typing import Any

import pytest
import torch
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_inputs import add_norm_errors, random_norm
from sagekernels.add_norm import ADD_NORM, ADD_NORM_GRADIENTS, add_norm_gradients_twin, add_norm_twin
from sagekernels.casts import QUANTIZE_BOTH, largest_twin
from sagekernels.matmul import LARGEST_OF
from sagetrain.config.schema import ModelConfig
from sagetrain.model.block import Block
from sagetrain.model.norm import RMSNorm
from sagetrain.parallel.collectives import Region
from small_model import SHAPE, SINGLE, loss_and_gradients, small_model

HYBRID = {"num_layers": 4, "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 32}}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_is_within_one_rounding_of_float64(dtype: torch.dtype) -> None:
    magnitudes = (1.0, 1e-2, 0.1) if dtype == torch.float16 else (1.0, 1e-15, 1e15)
    for rows, columns, magnitude in zip((1, 37, 16), (1, 129, 48), magnitudes, strict=True):
        inputs = random_norm(rows, columns, magnitude, dtype)
        made = add_norm_twin(*inputs[:2], inputs[4], 1e-6)
        gradients = add_norm_gradients_twin(*inputs[2:4], made[0], inputs[4], 1e-6)
        assert all(part.dtype == dtype for part in (*made[:2], *gradients[:2]))
        assert torch.equal(made[2], largest_twin(made[1])) and torch.equal(gradients[2], largest_twin(gradients[0]))
        assert max(add_norm_errors(inputs, 1e-6, made, gradients)) <= 1
        spoiled = [part * (1 + 100 * torch.finfo(dtype).eps) for part in (made[1], *gradients[:2])]
        found = add_norm_errors(inputs, 1e-6, (made[0], spoiled[0]), spoiled[1:])
        assert min(found[1:]) > 1


def test_the_twin_has_the_bits_of_autograd() -> None:
    x, y, of_stream, of_normed, gain = random_norm(37, 129, 1.0, torch.float32)
    norm = RMSNorm(129, 1e-6, Region(SINGLE))
    norm.gain.data.copy_(gain)
    x, y = x.requires_grad_(), y.requires_grad_()
    stream = x + y
    normed = norm(stream)
    of_x, of_y, of_gain = torch.autograd.grad((stream, normed), (x, y, norm.gain), (of_stream, of_normed))
    with torch.no_grad():
        made = ADD_NORM(x, y, gain, 1e-6)
        gradients = ADD_NORM_GRADIENTS(of_stream, of_normed, made[0], gain, 1e-6)
    for found, expected in zip((*made[:2], *gradients[:2]), (stream, normed, of_x, of_gain), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(of_x, of_y)


def test_the_operators_keep_their_promises() -> None:
    x, y, of_stream, of_normed, gain = random_norm(9, 20, 1.0, torch.bfloat16)
    tests = ("test_schema", "test_faketensor")
    library.opcheck(ADD_NORM, (x, y, gain, 1e-6), test_utils=tests)
    library.opcheck(ADD_NORM_GRADIENTS, (of_stream, of_normed, x, gain, 1e-6), test_utils=tests)
    library.opcheck(LARGEST_OF, (x,), test_utils=tests)


# -- in a model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("linear", "model"), [
    ({}, {}), ({"keep_first_blocks": 1}, {}), ({"keep_last_blocks": 1}, {}), ({}, HYBRID),
], ids=str)  # fmt: skip
def test_a_model_computes_the_same_bits(
    linear: dict[str, int], model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 nothing is rounded on the way."""
    shape = ModelConfig(**SHAPE.model_dump() | model)
    found = loss_and_gradients(small_model("int8", shape, linear=linear))
    monkeypatch.setattr(Block, "added", lambda block, layer, post_norm, norm: [block.made_by(layer), block.ended(norm)])
    monkeypatch.setattr(Block, "measures", False)
    assert all(map(torch.equal, found, loss_and_gradients(small_model("int8", shape, linear=linear))))


def test_casts_know_the_largest_magnitudes_of_norms() -> None:
    """The casts of attention's output and of the gradients of q, k and v do not know them. One pass of its own finds
    those of the first norm."""
    known: list[bool] = []
    passes: list[object] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if operator is QUANTIZE_BOTH:
                known.append(len(args) == 3 and args[2] is not None)
                if known[-1]:
                    assert torch.equal(args[2], largest_twin(args[0]))
            passes.append(operator) if operator is LARGEST_OF else None
            return operator(*args, **(kwargs or {}))

    model = small_model("int8")
    with Watch():
        loss_and_gradients(model)
    assert known == [True, False, True, True] * 2 + [True, True, True, False] * 2  # qkv, out, gate_up, down and back
    assert len(passes) == 1

"""The functions of sagekernels refuse second derivatives, transforms of torch.func and names that do not exist, each by
its own name."""

from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import sagekernels
from sagekernels import Linear8bit
from sagekernels.backends import NAMED
from sagekernels.call import RECIPES
from sagekernels.lowbit import LOW_BIT
from sagetrain.parallel.cross_entropy import linear_cross_entropy
from sagetrain.parallel.topology import ParallelGroups

TOKENS, HEADS, HEAD_DIM = 6, 2, 16
WIDTH = HEADS * HEAD_DIM
TABLES = torch.ones(HEAD_DIM), torch.ones(HEAD_DIM), torch.ones(TOKENS, 1, 8), torch.zeros(TOKENS, 1, 8), 1e-6


def heads(x: Tensor) -> list[Tensor]:
    return [x.view(1, TOKENS, HEADS, HEAD_DIM)] * 3


def loss_of(x: Tensor) -> Tensor:
    labels = torch.arange(TOKENS)
    return linear_cross_entropy(x, torch.eye(WIDTH), labels, ParallelGroups.single())


TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "sage_attention": lambda x: sagekernels.sage_attention(*heads(x)),
    "normed_attention": lambda x: sagekernels.normed_attention(x, x, x, *TABLES),
    "qk_norm_rope": lambda x: sagekernels.qk_norm_rope(x, x, x, *TABLES)[0],
    "swiglu": lambda x: sagekernels.swiglu(x, x),
    **{f"Linear8bit {precision}": Linear8bit(WIDTH, WIDTH, precision=precision) for precision in LOW_BIT},
    "linear_cross_entropy": loss_of,
}  # fmt: skip
ONCE = {name: TWICE[name] for name in ("sage_attention", "normed_attention", "qk_norm_rope", "swiglu")}
ONCE |= {"Linear8bit": Linear8bit(WIDTH, WIDTH)}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", TWICE)
def test_gradients_refuse_to_be_differentiated(name: str, recomputed: bool) -> None:
    """The first gradients are those of a pass that is not recorded."""
    call = TWICE[name]
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def gradient(power: int, record: bool) -> Tensor:
        y = checkpoint(call, x, use_reentrant=False) if recomputed else call(x)
        return torch.autograd.grad(y.pow(power).sum(), x, create_graph=record)[0]

    refused = pytest.raises(NotImplementedError, match=f"{name.split()[0]}.* has no second derivative; use ")
    for power in (1, 2):  # The gradient of a sum is a constant, which gradients must not hide behind.
        found = gradient(power, record=True)
        assert torch.equal(found, gradient(power, record=False))
        with refused:
            found.square().sum().backward()
    with refused:
        torch.autograd.grad(found.square().sum(), x)


def test_layers_in_16_bits_have_second_derivatives() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(TOKENS, WIDTH, requires_grad=True)

    def second(call: Callable[[Tensor], Tensor]) -> Tensor:
        (grad,) = torch.autograd.grad(call(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    ours = second(lambda x: sagekernels.matmul.linear(x, [layer.weight], sagekernels.matmul.Matmul())[0])
    torch.testing.assert_close(ours, second(layer))


@pytest.mark.parametrize("name", ONCE)
def test_transforms_are_refused(name: str) -> None:
    call, x = ONCE[name], torch.randn(TOKENS, WIDTH)
    transforms: list[Callable[[], Any]] = [
        lambda: torch.vmap(call)(x[None]),
        lambda: torch.func.grad(lambda x: call(x).sum())(x),
        lambda: torch.func.jvp(call, (x,), (x,)),
    ]
    for transform in transforms:
        with pytest.raises(NotImplementedError, match=rf"^{name} takes no transforms .*; use .* there$"):
            transform()
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(NotImplementedError, match=f"^{name} takes no"):
        call(forward_ad.make_dual(x, x))


def test_names_are_literals_and_checked() -> None:
    """The types name what the tables hold. A wrong name is an error with the argument, the value and the names."""
    layers, x, ours = nn.Sequential(nn.Linear(16, 16)), torch.ones(TOKENS, WIDTH), sagekernels
    tables: dict[tuple[Callable, str], tuple[Any, Callable[[str], Any]]] = {
        (ours.sage_attention, "recipe"): (RECIPES, lambda n: ours.sage_attention(*heads(x), recipe=n)),
        (ours.sage_attention, "backend"): (NAMED, lambda n: ours.sage_attention(*heads(x), backend=n)),
        (ours.normed_attention, "recipe"): (RECIPES, lambda n: ours.normed_attention(x, x, x, *TABLES, recipe=n)),
        (ours.normed_attention, "backend"): (NAMED, lambda n: ours.normed_attention(x, x, x, *TABLES, backend=n)),
        (ours.convert, "precision"): (LOW_BIT, lambda n: ours.convert(layers, precision=n)),
        (Linear8bit.__init__, "precision"): (LOW_BIT, lambda n: Linear8bit(16, 16, precision=n)),
    }
    for (function, argument), (allowed, call) in tables.items():
        hint = get_type_hints(function)[argument]
        literals = [hint] if get_origin(hint) is Literal else [each for each in get_args(hint) if get_args(each)]
        assert {name for each in literals for name in get_args(each)} == set(allowed)
        for name in allowed:
            found = rf"{argument} '{name.upper()}' is not one of .*{name}.*; did you mean '{name}'\?$"
            with pytest.raises(ValueError, match=found):
                call(name.upper())
        with pytest.raises(ValueError, match=f"{argument} 'xx' is not one of .*[^?]$"):
            call("xx")
    assert type(layers[0]) is nn.Linear

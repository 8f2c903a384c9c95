"""Linear8bit: an nn.Linear that multiplies 8-bit numbers, forward and backward; and convert, which makes the linear
layers of a model such layers.

The parameters stay those of nn.Linear, in 16 or 32 bits, with their names. So optimizers, checkpoints, DDP and FSDP see
no difference. lowbit.py says what is rounded and how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .casts import DTYPES, MULTIPLE
from .lowbit import LOW_BIT, LowBit, Precision
from .matmul import linear
from .operators import autocast_dtype
from .refusals import one_of, refuse_transforms


class Linear8bit(nn.Linear):
    """A linear layer whose output and gradients are products of 8-bit numbers.

    The layer multiplies in the dtype of its input, or in that of autocast: results and sums have it, and operands are
    rounded to 8 bits from it, with a scale for each row. A weight in 16 bits takes an input of its own dtype alone, as
    nn.Linear does, and one in 32 bits is read in the dtype of the input. The layer takes any number of tokens. Both
    numbers of features have to be multiples of 16. Gradients have no derivative themselves.

    Args:
        precision: "int8" or "fp8". FP8 needs compute capability 8.9 or newer.

    Raises:
        ValueError: the precision is unknown, or a number of features is no multiple of 16.
        TypeError: the dtype is not bfloat16, float16 or float32. Calls raise it as well, for that of the input.
    """

    matmul: LowBit
    path: str = ""
    """The name of the layer in the model that `convert` was given, for errors."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision = "int8",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.matmul = _matmul("Linear8bit", precision)
        if problem := _problem(self):
            raise problem[0](f"Linear8bit: {problem[1]}")

    def forward(self, input: Tensor) -> Tensor:
        """Return input W^T + bias, [..., in_features] -> [..., out_features]."""
        refuse_transforms("Linear8bit", "nn.Linear")
        cast = autocast_dtype(input)
        if input.dtype not in DTYPES or (cast is None and self.weight.dtype not in (input.dtype, torch.float32)):
            raise TypeError(self._refused(input.dtype))
        x = input if cast is None else input.to(cast)
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        if x.numel() == 0:  # There is nothing to scale by.
            return F.linear(x, weight, bias)
        (y,) = linear(x.reshape(-1, x.shape[-1]), [weight], self.matmul)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if bias is None else y + bias

    def _refused(self, dtype: torch.dtype) -> str:
        """Return the error about an input's dtype."""
        layer, own = self.path or "Linear8bit", self.weight.dtype
        layer += f" ({self.in_features} to {self.out_features} features)"
        if dtype not in DTYPES:
            return f"{layer}: the input must be bfloat16, float16 or float32, got {dtype}"
        return f"{layer}: the weight is {own}, and so must the input be, got {dtype}; cast one of them, or use autocast"

    def extra_repr(self) -> str:
        """Return the sizes and the precision, for print(model)."""
        return f"{super().extra_repr()}, {_name_of(self.matmul)}"


Filter = Callable[[nn.Module, str], bool]
"""A function of a linear layer and its name in the model: whether the layer is to be converted."""


def convert(
    model: nn.Module,
    filter: Filter | None = None,
    *,
    precision: Precision = "int8",
    classes: Collection[type[nn.Linear]] = (nn.Linear,),
) -> nn.Module:
    """Turn linear layers of a model into Linear8bit, in place.

    A layer stays the same object with the same parameters and hooks, and the names of the state_dict stay. Convert a
    model before it is compiled and before fully_shard.

    Args:
        filter: decides by layer and name, as torchao's module_filter_fn does. Default: convert the layers inside an
            nn.ModuleList, nn.ModuleDict or nn.Sequential, where models keep their blocks. The output projection, which
            needs 16 bits, usually lies outside.
        precision: see Linear8bit.
        classes: the classes of layers that the filter is asked about. A layer of a derived class keeps its other
            methods and is still one of that class, but Linear8bit's `forward` takes the place of its own. So such a
            class has to be named here.

    Returns:
        The model.

    Raises:
        TypeError: the filter is no function.
        ValueError: the precision is unknown, the filter chooses no layer, or layers cannot be multiplied in 8 bits.
            Every such layer is named, and none is converted.
    """
    if filter is not None and not callable(filter):
        raise TypeError(
            f"convert: filter is {filter!r}, and must be a function of a layer and its name; precision is by name"
        )
    matmul, wanted = _matmul("convert", precision), filter or _in_blocks(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        if (type(module) in classes or isinstance(module, Linear8bit | nn.LazyLinear)) and wanted(module, name)
    }
    if not layers:
        found = sum(isinstance(module, nn.Linear) for module in model.modules())
        kinds = " or ".join(each.__name__ for each in classes)
        where = "that the filter chose" if filter else "inside an nn.ModuleList, nn.ModuleDict or nn.Sequential"
        raise ValueError(
            f"convert: no layer to convert. The model has {found} linear layers, and none {where} is of class {kinds}. "
            "Give a filter(module, name) that chooses layers, or name their class in classes"
        )
    problems = [f"{name or 'the model'}: {why[1]}" for name, layer in layers.items() if (why := _problem(layer))]
    if problems:
        listed = "\n".join(problems)
        raise ValueError(f"convert: layers that cannot be multiplied in 8 bits; leave them out by a filter:\n{listed}")
    for name, layer in layers.items():
        layer.__class__ = _converted(type(layer))  # type: ignore[arg-type]  # a class can be hashed
        vars(layer).update(matmul=matmul, path=name)
    return model


@functools.cache
def _converted(kind: type) -> type:
    """Return the class of a converted layer of a class."""
    if kind is nn.Linear or issubclass(kind, Linear8bit):
        return Linear8bit if kind is nn.Linear else kind

    def reduce(layer: nn.Module, protocol: SupportsIndex) -> Any:
        """Pickle a layer by the class that it had, because nobody can import this one."""
        reduced: Any = kind.__reduce_ex__(layer, protocol)
        make, (known, *given), *rest = reduced
        return (_remade, (make, kind, *given), *rest) if known is made else (make, (known, *given), *rest)

    members = {"__module__": kind.__module__, "__reduce_ex__": reduce}
    made = type(f"{kind.__name__}8bit", (Linear8bit, kind), members)
    return made


def _remade(make: Callable[..., Any], kind: type, *given: Any) -> Any:
    """Make the layer that was pickled, without its state."""
    return make(_converted(kind), *given)


def _in_blocks(model: nn.Module) -> Filter:
    """Return the filter that chooses the layers inside a container of torch."""
    containers = nn.ModuleList | nn.ModuleDict | nn.Sequential
    inside = {each for module in model.modules() if isinstance(module, containers) for each in module.modules()}
    return lambda module, name: module in inside


def _matmul(what: str, precision: str) -> LowBit:
    if precision not in LOW_BIT:
        raise one_of(f"{what}: precision", precision, LOW_BIT)
    return LOW_BIT[precision]


def _name_of(matmul: LowBit) -> str:
    return next((name for name, known in LOW_BIT.items() if known == matmul), repr(matmul))


def _problem(layer: nn.Linear) -> tuple[type[Exception], str] | None:
    """Return the error that tells why a layer cannot be multiplied in 8 bits. None: it can."""
    if isinstance(layer, nn.LazyLinear):
        return ValueError, "a LazyLinear, which has no weight before its first input: call the model once before"
    if layer.weight.dtype not in DTYPES:
        return TypeError, f"the weight must be bfloat16, float16 or float32, got {layer.weight.dtype}"
    # A weight that ZeRO 3 has cut up has no sides of its own.
    if odd := [side for side in (layer.out_features, layer.in_features) if side % MULTIPLE]:
        sizes = f"{layer.in_features} to {layer.out_features} features"
        return ValueError, f"{sizes}: {' and '.join(map(str, odd))} is not a multiple of {MULTIPLE}"
    return None

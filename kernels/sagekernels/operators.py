"""Make operators of torch out of functions.

They are registered by hand and have no list of tensors in their schemas, because torch.library.custom_op and such lists
cost the host more per call than all launches.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("sagekernels", "DEF")


def operator(function: Callable, fake: Callable, *arguments: type) -> torch._ops.OpOverload:
    """Register torch.ops.sagekernels.<name of the function>, with its types as the schema.

    fake: a function that makes empty results of the same arguments, for torch.compile.
    arguments: NamedTuples that list the arguments of a function whose signature does not.
    """
    name = function.__name__.strip("_")
    if arguments:
        returned = inspect.signature(function).return_annotation
        listed = [each for kind in arguments for each in inspect.signature(kind).parameters.values()]
        function.__signature__ = inspect.Signature(listed, return_annotation=returned)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, torch._disable_dynamo(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sagekernels::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.sagekernels, name).default


def by_device(name: str, twin: Callable, kernel: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Register torch.ops.sagekernels.<name>: a kernel where its first argument is on a GPU, elsewhere and in float64
    the torch twin. Both take the same arguments, and `fake` is that of `operator`."""

    @functools.wraps(twin)
    def run(first: Tensor, *others: Any) -> Any:
        return (kernel if first.is_cuda and first.dtype != torch.float64 else twin)(first, *others)

    run.__name__ = name
    return operator(run, fake)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast has for the device of a tensor. None: it is not enabled, or the device, such as
    meta, has none."""
    kind = x.device.type
    return None if x.is_meta or not torch.is_autocast_enabled(kind) else torch.get_autocast_dtype(kind)

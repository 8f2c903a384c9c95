"""Make operators of torch out of functions.

They are registered by hand and have no list of tensors in their schemas, because torch.library.custom_op and such lists
cost the host more per call than all launches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LIBRARY = torch.library.Library("sagekernels", "DEF")


def operator(function: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Register torch.ops.sagekernels.<name of the function>, with its types as the schema.

    fake: a function that makes empty results of the same arguments, for torch.compile.
    """
    name = function.__name__.strip("_")
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, torch._disable_dynamo(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sagekernels::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.sagekernels, name).default


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast has for the device of a tensor. None: it is not enabled, or the device, such as
    meta, has none."""
    kind = x.device.type
    return None if x.is_meta or not torch.is_autocast_enabled(kind) else torch.get_autocast_dtype(kind)

"""Check the types of arguments of the library's functions. A mistake is then a ConfigError that names the argument."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from sagetrain.config.errors import ConfigError, shown
from sagetrain.config.linear_sizes import LowBit

LoadedAttention = Literal["sdpa", "sage", "flash", "reference"]
"""An attention backend of a model that was loaded."""
LoadedPrecision = Literal["bf16", LowBit]
"""A precision of the linear layers of a model that was loaded."""

P = ParamSpec("P")
R = TypeVar("R")
_TYPES: dict[str, type] = {
    "str": str,
    "Path": os.PathLike,
    "PathLike": os.PathLike,
    "int": Integral,
    "float": Real,
    "Mapping": Mapping,
}


_OPTIONS = {
    "field": "chat-field",
    "host_memory_gib": "host-memory",
    "num_workers": "workers",
    "rows": "row",
    "template": "chat-template",
    "texts": "data",
    "variants": "variant",
}
"""The options of the command that have other names than the arguments in Python."""
_FLAGS = ("chat", "overwrite", "skip_bad_lines")
"""The settings that are switched on."""
_under_way: set[object] = set()
"""The calls from Python that are under way."""


def spelled(name: str) -> str:
    """Return how the caller spells a setting in this moment: `--top-k` on the command line, `top_k` in Python."""
    if _under_way:
        return f"{name}=True" if name in _FLAGS else name
    return f"--{_OPTIONS.get(name, name.replace('_', '-'))}"


def from_python() -> bool:
    """Whether a call from Python is under way."""
    return bool(_under_way)


def speak_python() -> None:
    """Spell settings as Python does from here on, in a worker process of such a call."""
    _under_way.add(speak_python)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise ConfigError if an argument is not of the type of its annotation. Its messages spell settings
    as Python does, and torch has its defaults meanwhile."""
    signature = inspect.signature(function)
    parameters = signature.parameters.items()
    annotations = {name: each.annotation for name, each in parameters if isinstance(each.annotation, str)}
    module: Mapping[str, object] = getattr(function, "__globals__", {})

    @wraps(function)
    def _call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # Python says it better if an argument is missing or unknown.
            return function(*args, **kwargs)
        check_types(function.__name__, annotations, bound.arguments, module)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _at_home(value, annotations.get(name, ""))
        call = object()
        _under_way.add(call)
        try:
            with _defaults_of_torch():
                return function(*bound.args, **bound.kwargs)
        finally:
            _under_way.discard(call)

    return _call


def _defaults_of_torch() -> contextlib.ExitStack:
    """Return the context in which torch computes as it does by default, whatever the caller has set: with gradients,
    without autocast, and with new tensors in float32 on the CPU. A caller without torch has set nothing."""
    stack = contextlib.ExitStack()
    if torch := sys.modules.get("torch"):
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        # The context of a device is asked at every call of torch, so it is entered only where it changes something.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
    return stack


def check_fields(value: Any) -> None:
    """Check the fields of a dataclass beside their annotations, and put the home folder in the place of ~ in paths.
    Raises ConfigError if a field has another type."""
    kind = type(value)
    annotations = {each.name: str(each.type) for each in fields(value)}
    check_types(kind.__name__, annotations, vars(value), vars(sys.modules[kind.__module__]))
    for name, wanted in annotations.items():
        object.__setattr__(value, name, _at_home(getattr(value, name), wanted))


def _at_home(value: Any, wanted: str) -> Any:
    """Return a path, or several, with the home folder in the place of "~", because no shell has replaced it. Return
    what is no path by its annotation as it is."""
    if "Path" not in wanted:
        return value
    if type(value) in (list, tuple):
        return type(value)(_at_home(each, wanted) for each in value)
    begins = isinstance(value, str | Path) and str(value).startswith("~/")
    return type(value)(os.path.expanduser(value)) if begins else value


def check_types(
    what: str, annotations: Mapping[str, str], values: Mapping[str, object], module: Mapping[str, object]
) -> None:
    """Check values beside annotations as they stand in the code, both by name. Raises ConfigError if a value has
    another type.

    Args:
        what: the beginning of the message.
        annotations: the annotations. Types that neither this module nor `module` knows are not checked.
        module: the names of the module with the annotations.
    """
    for name, value in values.items():
        wanted = annotations.get(name)
        if wanted and not _fits(value, (parsed := ast.parse(wanted, mode="eval").body), module):
            given = shown(value) if isinstance(value, str | Real | None) else f"a {type(value).__name__}"
            raise ConfigError(f"{what}: {name} is {given}, and must be {_in_words(value, parsed, wanted, module)}")


def check_least(what: str, least: float, numbers: Mapping[str, float | None]) -> None:
    """Check that numbers, by the names of their arguments, are finite and not below `least`. None is no number. Raises
    ConfigError otherwise."""
    for name, value in numbers.items():
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{what}: {name} is {value}, and must be a number from {least:g} on")


def _choices(wanted: ast.expr, module: Mapping[str, object]) -> tuple[Any, ...]:
    """Return the values of a Literal, which may have a name in `module`. Other annotations have none."""
    if isinstance(wanted, ast.BinOp):
        return _choices(wanted.left, module) + _choices(wanted.right, module)
    if isinstance(wanted, ast.Subscript) and ast.unparse(wanted.value) == "Literal":
        values = ast.literal_eval(wanted.slice)
        return values if isinstance(values, tuple) else (values,)
    known = module.get(wanted.id) if isinstance(wanted, ast.Name) else None
    return get_args(known) if get_origin(known) is Literal else ()


def _in_words(value: object, wanted: ast.expr, text: str, module: Mapping[str, object]) -> str:
    """Return what an argument must be. Of a closed set, the words name every value, and the one that was meant."""
    choices = _choices(wanted, module)
    if not choices:
        return text
    near = difflib.get_close_matches(str(value).lower(), choices, 1)
    optional = " or None" * text.endswith("| None")
    return f"one of {', '.join(map(shown, choices))}{optional}" + (f"; did you mean {shown(near[0])}?" if near else "")


def _fits(value: object, wanted: ast.expr, module: Mapping[str, object]) -> bool:
    """Whether a value is of an annotation's type."""
    if choices := _choices(wanted, module):
        return value in choices or (value is None and ast.unparse(wanted).endswith("| None"))
    if isinstance(wanted, ast.BinOp):
        return _fits(value, wanted.left, module) or _fits(value, wanted.right, module)
    if isinstance(wanted, ast.Constant):
        return value is wanted.value
    name, inner = (wanted.value, wanted.slice) if isinstance(wanted, ast.Subscript) else (wanted, None)
    kind = ast.unparse(name).rpartition(".")[2]
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner] if inner else []
    if kind == "Callable":
        return callable(value)
    if kind in ("Sequence", "tuple"):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return False
        if kind == "Sequence":
            return all(_fits(each, parts[0], module) for each in value)
        return len(value) == len(parts) and all(map(_fits, value, parts, [module] * len(parts)))
    if kind == "bool" or isinstance(value, bool):
        return isinstance(value, bool) and kind in ("bool", "object")
    known = _TYPES.get(kind, module.get(kind))
    return not isinstance(known, type) or isinstance(value, known)

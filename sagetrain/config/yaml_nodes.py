"""Read YAML as plain values with a line number for every key, and write it.

Scalars follow YAML 1.2: only true and false are booleans (`compile: on` is the word "on"), 010 is ten, dates and 1:30
are text. Beyond YAML 1.2, 3e-4 and 1_000_000 are numbers, and a whole number may be written 2.1e6. Nothing but plain
values is ever constructed: no tags, no merge keys, no aliases (some lines of which can stand for a billion values), no
code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import yaml

try:
    from yaml import CSafeLoader as _Events
except ImportError:  # PyYAML was built without libyaml.
    from yaml import SafeLoader as _Events  # type: ignore[assignment]

from sagetrain.config.errors import beyond_ascii, shown

KeyPath = tuple[str | int, ...]
"""The place of a value: keys, and indices of lists."""

LARGEST_WHOLE, _LARGEST = 10**18, 3e38  # The latter is about the largest float32.
_WAYS_OUT = {
    r"'\t'": "write spaces in place of tabs",
    "mapping values are not": "a key ends with a colon and a space; this line or the one above it lacks one, or is "
    "indented too far",
    "expected <block end>": "indent it like the keys above it of the same section",
    "expected <block end>, but found '<scalar>'": "a quote inside of quotes is written twice",
    "end of stream": "a quote or a bracket that opens here is not closed",
    "expected '<document start>'": "a section is a line such as `model:`, with its keys below it, indented",
    **dict.fromkeys(
        ("character '%'", "character '@'", "character '`'", "alphabetic or numeric"), "put the text in quotes"
    ),
    "another document": "a file is one run: no --- inside of it",
}
"""Fixes for common syntax errors, by a part of PyYAML's message."""
_ALIAS = "alias"
_DIGITS = "[0-9](?:_?[0-9])*"  # Digits as Python's int takes them: 2024_ and 1__0 are text.
_RESOLVERS = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", rf"[-+]?{_DIGITS}", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
]


class _Composer(yaml.composer.Composer):
    """A composer that leaves aliases as they are, so that values are no more than the text."""

    check_event: Any
    get_event: Any

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node."""
        if not self.check_event(yaml.AliasEvent):
            return super().compose_node(parent, index)
        event = self.get_event()
        return yaml.ScalarNode(_ALIAS, event.anchor, event.start_mark, event.end_mark)


class _Loader(_Composer, yaml.SafeLoader):
    """The loader whose messages say most."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _FastLoader(_Composer, _Events):
    """A loader that is several times as fast. libyaml's own composer would crash where brackets are nested too deep."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def __init__(self, stream: str) -> None:
        _Events.__init__(self, stream)
        _Composer.__init__(self)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each text that this loader or an ordinary YAML 1.1 reader would take for something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent the items of a list below its key."""
        return super().increase_indent(flow, False)

    def represent_float(self, data: float) -> yaml.ScalarNode:
        """Write 1e16 as 10000000000000000.0. Written as 1.0e+16, it would be read as a whole number."""
        if data.is_integer() and abs(data) <= LARGEST_WHOLE:
            return self.represent_scalar("tag:yaml.org,2002:float", f"{data:.1f}")
        return super().represent_float(data)

    def other(self, value: object) -> yaml.Node:
        """Write a path as text, and a number of numpy as the number that it shows. Raises YAMLError for what is
        neither."""
        if isinstance(value, Path):
            return self.represent_str(str(value))
        if isinstance(value, Integral):
            return self.represent_int(int(value))
        return self.represent_float(float(str(value))) if isinstance(value, Real) else self.represent_undefined(value)


_Dumper.add_representer(float, _Dumper.represent_float)
_Dumper.add_representer(None, _Dumper.other)  # type: ignore[arg-type]  # None stands for all other types.


for _tag, _pattern, _first in _RESOLVERS:
    _compiled = re.compile(rf"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(_tag, _compiled, [*_first, ""] if _tag.endswith("null") else list(_first))
    if _tag.endswith(("int", "float")):
        _Dumper.add_implicit_resolver(_tag, _compiled, list(_first))


class YamlProblem(NamedTuple):
    """A part of the text that is not acceptable YAML here."""

    message: str
    line: int | None
    """Line number, counted from 1."""
    path: KeyPath = ()


def parse(text: str) -> tuple[Any, dict[KeyPath, int], list[YamlProblem]]:
    """Parse YAML text. Return the values, the line of every path, and the problems found: duplicate keys, syntax
    errors, and constructs that are not allowed here. With a syntax error the values are None."""
    lines: dict[KeyPath, int] = {}
    problems: list[YamlProblem] = []
    try:
        try:
            node = yaml.compose(text, Loader=_FastLoader)
        except yaml.YAMLError:
            node = yaml.compose(text, Loader=_Loader)
        value = None if node is None else _value(node, (), lines, problems)
    except yaml.YAMLError as error:
        marks = [getattr(error, f"{name}_mark", None) for name in ("problem", "context")]
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        way_out = "".join(f"; {fix}" for said, fix in _WAYS_OUT.items() if said in reason)
        mark = next(filter(None, reversed(marks) if "end of stream" in reason else marks), None)
        # For a character that YAML does not allow, the error has a position but no line.
        line = mark.line + 1 if mark else text.count("\n", 0, getattr(error, "position", 0)) + 1
        near = "".join(text.split("\n")[max(0, line - 2) : line])
        if others := beyond_ascii("".join(each for each in near if not each.isalpha())):
            way_out += f"; this line or the one above it has {others}: type it anew if it stands for a space or a sign"
        return None, {}, [YamlProblem(f"not valid YAML: {reason}{way_out}", line)]
    except RecursionError:
        return None, {}, [YamlProblem("not valid YAML: brackets or lists stand in one another too deep", 1)]
    return value, lines, problems


def dump(value: Any, flow: bool = False) -> str:
    """Return plain values as block-style YAML, with the keys in the given order; with `flow` on one line."""
    width = 1 << 30 if flow else 120
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, width=width, default_flow_style=flow, allow_unicode=flow
    )
    return text


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[YamlProblem]) -> Any:
    """Return the plain value of a node, and record the line of every path inside it."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind == _ALIAS:
        rule = f"the alias *{node.value} is not taken here: write out what it stands for, or quote it if it is text"
        problems.append(YamlProblem(rule, line, path))
        return None
    if kind == "seq" and isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, i), lines, problems) for i, child in enumerate(node.value)]
    if kind == "map" and isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_line, key = key_node.start_mark.line + 1, key_node.value
            here = (*path, key)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _ALIAS:
                problems.append(YamlProblem("a key must be a word", key_line, path))
            elif key == "<<" and not key_node.style:
                problems.append(YamlProblem("merge keys are not taken here: write the keys out", key_line, here))
            elif key in result:
                problems.append(YamlProblem(f"given twice: first on line {lines[here]}", key_line, here))
            else:
                lines[here] = key_line
                result[key] = _value(value_node, here, lines, problems)
        return result
    if isinstance(node, yaml.ScalarNode) and kind in _SCALARS:
        try:
            value = _SCALARS[kind](node.value)
        # The exponent or the number of digits is beyond Python's limits, or !!int is in front of another text.
        except (ArithmeticError, ValueError):
            rule = "cannot be read as a number; numbers are written 262144, 262_144, 2.1e6 or 3e-4"
            problems.append(YamlProblem(f"{shown(node.value)} {rule}", line, path))
            return None
        largest = _LARGEST if isinstance(value, float) else LARGEST_WHOLE
        if isinstance(value, int | float) and largest < abs(value) < math.inf:
            rule = "is larger than any number of a run: up to 1e18 if whole, else 3e38"
            problems.append(YamlProblem(f"{shown(node.value)} {rule}", line, path))
            return None
        return value
    problems.append(YamlProblem(f"the tag {kind!r} is not taken here", line, path))
    return None


def _float(text: str) -> int | float:
    """Read a number. 2.1e6 is exactly the whole number 2100000; 1.0 stays a float."""
    if re.search("[eE]", text):
        number = Decimal(text)
        if number == number.to_integral_value() and abs(number) <= LARGEST_WHOLE:
            return int(number)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": _float,
    "str": str,
}

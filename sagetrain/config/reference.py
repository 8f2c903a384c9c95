"""The key reference: walks the schema and says in words what every key takes. The error messages use it too."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sagetrain.config.schema import RunConfig, Section
from sagetrain.config.yaml_nodes import KeyPath

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "anything"}
_LIMITS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}


@dataclass(frozen=True)
class Key:
    """One line of the key reference."""

    name: str
    """Dotted key. The first item of a list stands for all items: `data.train.0.path`."""
    takes: str
    default: str
    doc: str

    @property
    def when_left_out(self) -> str:
        """The key's value where it is left out: required, or its default."""
        return self.default if self.default == "required" else f"default {self.default}"


class Slot(NamedTuple):
    """The type and the constraints of one value of the schema."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    @property
    def sections(self) -> list[type[Section]]:
        """Section classes that a value here can have: one, several (a union told apart by `schedule`), or none."""
        if isinstance(self.annotation, type) and issubclass(self.annotation, Section):
            return [self.annotation]
        args = get_args(self.annotation) if get_origin(self.annotation) in (Union, types.UnionType, Annotated) else ()
        return [section for arg in args for section in Slot(arg).sections]

    @property
    def optional(self) -> bool:
        """Whether null is allowed here."""
        return type(None) in get_args(self.annotation)

    @property
    def item(self) -> Slot | None:
        """The slot of the items of a list or tuple. None for anything else."""
        origin, args = get_origin(self.annotation), get_args(self.annotation)
        if origin is Annotated:
            return Slot(args[0]).item
        return Slot(args[0]) if origin in (list, tuple) else None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values, where they are listed one by one."""
        args = get_args(self.annotation)
        if self.annotation is bool:
            return True, False
        if get_origin(self.annotation) in (Union, types.UnionType):
            return tuple(choice for arg in args for choice in Slot(arg).choices)
        return args if get_origin(self.annotation) is Literal else ()


def slot_of(field: FieldInfo) -> Slot:
    """Return the slot of a pydantic field."""
    return Slot(field.annotation, tuple(field.metadata))


def tag_of(section: type[Section]) -> str | None:
    """Return the value of `schedule` that selects this member of a union of sections."""
    field = section.model_fields.get("schedule")
    return get_args(field.annotation)[0] if field else None


def tags_of(sections: list[type[Section]]) -> list[str]:
    """Return the values of `schedule` that tell the members of a union apart."""
    return [tag for section in sections if (tag := tag_of(section))]


def locate(location: KeyPath) -> tuple[KeyPath, type[Section] | None, Slot]:
    """Find the place in the schema that a pydantic error location names: the path without union tags, the section that
    holds the last key, and the slot of the last key. Items of lists have no section (None), and the slot of an unknown
    key takes anything."""
    path: KeyPath = ()
    section: type[Section] | None = None
    slot: Slot | None = Slot(RunConfig)
    for part in location:
        if slot is None:
            return (*path, part), None, Slot(Any)
        members = {tag_of(member): member for member in slot.sections}
        if len(members) > 1 and part in members:
            slot = Slot(members[part])
            continue
        if not members and slot.item is None and get_origin(slot.annotation) in (Union, types.UnionType):
            # The rest of the location names a member of a union of plain values, and the item if that is a list.
            lists = [Slot(arg) for arg in get_args(slot.annotation) if Slot(arg).item]
            if lists and isinstance(location[-1], int):
                return (*path, location[-1]), None, lists[0].item or Slot(Any)
            break
        path = (*path, part)
        section = next(iter(members.values()), None)
        if section is None:
            slot = slot.item
        else:
            slot = slot_of(section.model_fields[str(part)]) if part in section.model_fields else None
    return path, section, slot or Slot(Any)


def default_of(path: KeyPath) -> Any:
    """Return the default of a key. None: it has none, or there is no such key."""
    place, section, _ = locate(path)
    field = section.model_fields.get(str(path[-1])) if section and place == path else None
    return None if field is None or field.is_required() else field.get_default()


def describe(slot: Slot) -> str:
    """Return what a key takes, in words: `a whole number above 0`, `one of a, b`, `a list of ...`."""
    annotation, metadata = slot
    origin, args = get_origin(annotation), get_args(annotation)
    if slot.sections:
        either = f"a section: {' or '.join(outline(section) for section in slot.sections)}"
        return f"{either}, or null" if slot.optional else either
    if origin is Annotated:
        return describe(Slot(args[0], (*args[1:], *metadata)))
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else describe(Slot(arg, metadata)) for arg in args)
    if origin is list:
        least = "of at least one item" if any(isinstance(m, annotated_types.MinLen) for m in metadata) else ""
        return " ".join(["a list", *([least] if least else []), f"whose items are each {describe(Slot(args[0]))}"])
    if origin is tuple:
        return f"a list of {len(args)}, each {describe(Slot(args[0]))}"
    if annotation is str and any(hasattr(m, "min_length") for m in _constraints(metadata)):
        return "text that is not empty"
    if annotation is str and (patterns := [m.pattern for m in metadata if getattr(m, "pattern", None)]):
        return f"text of the letters {' and '.join(patterns[0].strip('^[]+$'))}"
    limits = [
        f"{word} {getattr(m, name)}"
        for m in _constraints(metadata)
        for name, word in _LIMITS.items()
        if hasattr(m, name)
    ]
    return " ".join([_WORDS[annotation], " and ".join(limits)]).strip()


def keys(section: type[Section] = RunConfig, prefix: str = "") -> list[Key]:
    """Return every key of the schema in order, with what it takes, its default and its documentation."""
    result: list[Key] = []
    for name, field in section.model_fields.items():
        slot = slot_of(field)
        doc = " ".join((field.description or "").split())
        inner, dotted = slot.sections, f"{prefix}{name}"
        if slot.item is not None and slot.item.sections:
            inner, dotted = slot.item.sections, f"{dotted}.0"
        if slot.item is not None or not inner or slot.optional:
            result.append(Key(f"{prefix}{name}", describe(slot), _default(field), doc))
        union_tags = tags_of(inner) if len(inner) > 1 else []
        if union_tags:
            result.append(Key(f"{dotted}.schedule", f"one of {', '.join(union_tags)}", _default(field), doc))
        for member in inner:
            result += [
                Key(
                    key.name,
                    key.takes,
                    key.default,
                    f"({member_tag}) {key.doc}" if (member_tag := tag_of(member)) else key.doc,
                )
                for key in keys(member, f"{dotted}.")
                if not (union_tags and key.name == f"{dotted}.schedule")
            ]
    return result


def markdown() -> str:
    """Return the key reference as a Markdown page. Each key has a heading of its own, so that a search finds it."""
    lines = [
        "# Every key of the YAML",
        "",
        "`sagetrain plan --keys` prints the same; `--keys optimizer` prints a section.",
        "",
    ]
    section = None
    for key in keys():
        first, _, _ = key.name.partition(".")
        lines += ["", f"## {first}", ""] if first != section else []
        label = key.name.removeprefix(f"{first}.")
        lines += [f'### `{key.name}` {{ data-toc-label="{label}" }}', "", key.doc, ""]
        lines += [f"Takes {_literal(key.takes)}; {_literal(key.when_left_out)}.", ""]
        section = first
    return "\n".join(lines)


def outline(section: type[Section]) -> str:
    """Return the keys of a section, in braces."""
    tag = tag_of(section)
    return (
        "{"
        + ", ".join(f"schedule: {tag}" if tag and name == "schedule" else name for name in section.model_fields)
        + "}"
    )


def _constraints(metadata: tuple[Any, ...]) -> list[Any]:
    """Return the constraints one by one. pydantic keeps the constraints of one Field together."""
    return [part for m in metadata for part in (m.metadata if isinstance(m, FieldInfo) else [m])]


def _literal(text: str) -> str:
    """Return Markdown that shows a text literally, with the braces and brackets of sections escaped."""
    return re.sub(r"([<>*_|\[\]{}])", r"\\\1", text)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "derived"
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, bool) or field.default is None:
        return {True: "true", False: "false", None: "null"}[field.default]
    return str(list(field.default) if isinstance(field.default, tuple) else field.default)

"""Load a RunConfig from one YAML file and `a.b=c` overrides. All mistakes are reported at once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sagetrain.config import former_keys, yaml_nodes
from sagetrain.config.errors import (
    ConfigError,
    Finding,
    Level,
    Readable,
    beyond_ascii,
    is_utf8,
    many,
    refuse_pointer,
    shown,
    url_meant,
)
from sagetrain.config.other_names import key_meant, value_meant
from sagetrain.config.reference import default_of, describe, keys, locate, outline, slot_of, tag_of, tags_of
from sagetrain.config.schema import RunConfig, Section
from sagetrain.config.yaml_nodes import LARGEST_WHOLE, KeyPath

_ABSENT, _FIX = object(), "\n      fix: "
_OTHER_UNIT: dict[KeyPath, KeyPath] = {
    ("lr_schedule", one): ("lr_schedule", other)
    for pair in (("warmup", "warmup_tokens"), ("decay", "decay_tokens"))
    for one, other in permutations(pair)
}
"""The key that says the same in another unit. An override of one takes the place of the other, unless its value is the
default, which says nothing."""


def load_config(
    path: str | Path | Readable, overrides: Sequence[str] = (), passed_over: Callable[[str], None] | None = None
) -> RunConfig:
    """Read a run's configuration. Raises ConfigError, which lists every problem with place, key, value, rule
    and fix.

    Args:
        path: a file, on a disk or in a store, or the name of a shipped configuration (`325m`).
        overrides: `dotted.key=value` texts. Values are read as YAML. Items of lists are named by index
            (`data.train.0.path=corpus`). A whole section may be given at once (`tokens_per_step={schedule: constant,
            tokens: 262144}`).
        passed_over: for the config.yaml of a run, which an earlier version may have written: gets a message for each
            setting that there is no longer, which then counts for nothing. None: such a setting is a problem.
    """
    source = _Source(path, overrides)
    for key, value in source.former:
        if passed_over:
            passed_over(f"{source.file}: {_dotted(key.path)} = {shown(value)} counts for nothing now: {key.why}")
        else:
            source.report(key.path, f"is no longer there: {key.why}{_FIX}{key.fix}", value)
    try:
        config = RunConfig.model_validate(source.tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
        places = [locate(detail["loc"])[0] for detail in details]
        for detail, place in zip(details, places, strict=True):
            # Each member of a union has its say. The one that names an item knows more than those that name the list.
            if not any(len(other) > len(place) and other[: len(place)] == place for other in places):
                source.explain(detail)
    source.raise_problems()
    return config


def config_path(name: str | Path) -> Path:
    """Return the path of an existing file, or else of the shipped configuration with this name: configs/<name>.yaml.
    Raises ConfigError if the name is neither; the message lists the names there are."""
    path = Path(name)
    if said := url_meant(path):
        raise ConfigError(said)
    if is_assignment(str(name)):
        raise ConfigError(f"{name}: name a configuration before what it changes: my.yaml KEY=VALUE")
    if path.is_file() or path.suffix or len(path.parts) != 1:
        return path
    there = {file: path for file, path in shipped().items() if path.suffix == ".yaml"}
    if path.name not in there:
        what = "is a folder" if path.is_dir() else "no such file"
        raise ConfigError(f"{name}: {what}, and no shipped configuration of that name; there are {', '.join(there)}")
    return there[path.name]


def shipped() -> dict[str, Path]:
    """Return the configurations and the templates for launchers that come with the package, by name."""
    # The folder is in the package when installed, or beside sagetrain/ in a checkout.
    package = Path(__file__).parents[1]
    folder = next(f for f in (package / "configs", package.parent / "configs") if f.is_dir())
    files = (file for suffix in (".yaml", ".sbatch", ".example") for file in sorted(folder.glob(f"*{suffix}")))
    return {file.stem: file for file in files}


def dump_config(config: RunConfig) -> str:
    """Return the complete configuration as YAML text. Loading the text gives an equal object."""
    return yaml_nodes.dump(config.model_dump(mode="json"))


def saved_config(path: Readable) -> dict[str, Any]:
    """Return the configuration in a file that a run has written, as plain values. Its keys may be those of another
    version. Raises ConfigError if the file cannot be read, or was changed to something that no run writes."""
    tree, _, problems = yaml_nodes.parse(_text_of(path))
    if problems or not isinstance(tree, dict | None):
        line, what = (problems[0].line, problems[0].message) if problems else (1, "it holds no sections")
        raise ConfigError(f"{path}:{line}: cannot be read: {what}; restore the file as the run wrote it")
    return tree or {}


def _text_of(path: Readable) -> str:
    refuse_pointer(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}; save it as UTF-8") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder; that of a run has its configuration in {path}/config.yaml") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def located(findings: Iterable[Finding], path: str | Path, overrides: Sequence[str]) -> list[Finding]:
    """Return findings with the places where their keys, or else the nearest parents of these, were given: `file:line`,
    the override, or for a default the file. Findings about overrides that exclude values of the file, which the run
    therefore does not have, are added."""
    source, found = _Source(path, overrides), []
    for each in findings:
        key = tuple(int(part) if part.isdecimal() else part for part in each.key.split("."))
        found.append(replace(each, where=source.given(key) or str(path)))
    return [*found, *source.notes]


class _Source:
    """The values of a file with overrides applied, the place where each was given, and the problems found in them."""

    def __init__(self, path: str | Path | Readable, overrides: Sequence[str]):
        path = config_path(path) if isinstance(path, str | Path) else path
        self.file = str(path)
        self.origins: dict[KeyPath, str] = {}
        self.problems: list[str] = []
        self.notes: list[Finding] = []
        self.tree, self.lines, problems = yaml_nodes.parse(_text_of(path))
        self.unusable = {problem.path for problem in problems}
        for problem in problems:
            self.report(problem.path, problem.message, where=f"{self.file}:{problem.line}")
        if not isinstance(self.tree, dict):
            if not problems:
                self.report((), "no configuration: sections such as `model:` are expected at the top level")
            self.raise_problems()
        if "model_type" in self.tree and "model" not in self.tree:
            raise ConfigError(
                f"{self.file} is the config.json of a Hugging Face model: `sagetrain config finetune --model FOLDER` "
                "writes a configuration that trains it on, and `sagetrain import FOLDER RUN` reads its weights"
            )
        for override in overrides:
            self._override(override)
        foreign = [(key, value) for key, value in _texts(self.tree) if not is_utf8(value)]
        for key, value in foreign:
            self.report(key, "is not UTF-8, as a configuration is: rename it (mv, convmv)", ascii(value)[1:-1])
        if foreign:
            self.raise_problems()
        self._fall_away()
        self.former = former_keys.take_out(self.tree)

    def given(self, path: KeyPath) -> str:
        """Return the override or `file:line` that gave a key, or else its nearest parent; "" if there is none."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return f"override {self.origins[path[:end]]}"
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return ""

    def explain(self, detail: ErrorDetails) -> None:
        """Report one of pydantic's validation errors in the words of the schema."""
        kind, value = detail["type"], detail["input"]
        path, section, slot = locate(detail["loc"])
        if kind == "default_factory_not_called" or (value is None and path in self.unusable):
            return  # This follows from a problem that is reported itself.
        if kind == "extra_forbidden" and section is not None:
            self.report(path, f"unknown key{_hint_for_unknown(path, section, value)}", value)
        elif kind == "missing" and section is not None:
            self.report(path, f"missing; it takes {describe(slot)}{_meaning(section, path)}")
        elif kind == "string_pattern_mismatch" and section is not None:
            self.report(path, f"must be {describe(slot)}{_meaning(section, path)}", value)
        elif kind in ("union_tag_not_found", "union_tag_invalid"):
            tags = tags_of(slot.sections)
            takes = f"one of {', '.join(tags)}"
            if "schedule" in value:
                self.report((*path, "schedule"), _must_be(takes, value["schedule"], tags), value["schedule"])
            else:
                self.report((*path, "schedule"), f"missing; it takes {takes}")
        elif value is None and (default := default_of(path)) is not None:
            fix = "leave it out for its defaults" if slot.sections else f"its default is {shown(default)}"
            self.report(path, f"must be {describe(slot)}; {fix}", value)
        elif kind == "value_error":
            self.report(path, str(detail["ctx"]["error"]), value)
        else:
            if kind == "missing":  # An item is missing in a list of fixed length.
                path, _, slot = locate(detail["loc"][:-1])
            rule = _must_be(describe(slot), value, slot.choices, _dotted(path))
            if isinstance(value, int | float) and (other := _OTHER_UNIT.get(path)):
                rule += f"; {_dotted(other)} takes {describe(locate(other)[2])}"
            if section is not None and path not in self.lines and path not in self.origins:
                rule += _meaning(section, path)  # The value is derived.
            self.report(path, rule, value)

    def raise_problems(self) -> None:
        """Raise ConfigError with all problems found so far, if there are any."""
        if self.problems:
            count = many(len(self.problems), "problem")
            raise ConfigError("\n  ".join([f"{count} in the configuration {self.file}:", *self.problems]))

    def _override(self, text: str) -> None:
        """Apply one `dotted.key=value` override."""
        name, equals, value_text = text.partition("=")
        parts = name.strip().split(".")
        if not equals or "" in parts:
            self.report(
                (), "must be dotted.key=value in one word, for example optimizer.lr=3e-4", where=f"override {text}"
            )
            return
        value, _, problems = yaml_nodes.parse(value_text) if is_utf8(value_text) else (value_text, {}, [])
        for problem in problems:
            self.report((), problem.message, where=f"override {text}")
        target = self.tree
        path: KeyPath = ()
        for part, within in pairwise(parts):
            key = self._child(target, part, path, text)
            if key is None:
                return
            path = (*path, key)
            if target[key] is None:  # This is a section, a list at its default, or the first item of another list.
                items = default if isinstance(default := default_of(path), list | tuple) else ()
                new: list[Any] | dict[str, Any] = [None] * (within == "0") if within.isdecimal() else {}
                target[key], self.origins[path] = [*items] or new, text
            target = target[key]
        key = self._child(target, parts[-1], path, text)
        if key is not None:
            path, was = (*path, key), target[key] if isinstance(target[key], dict) and isinstance(value, dict) else {}
            gone = {each: was[each] for each in was if each not in value and (*path, each) in self.lines}
            target[key] = value
            # Keys that the new value replaces no longer have a place.
            before = dict.fromkeys(self.origins.pop(other) for other in [*self.origins] if other[: len(path)] == path)
            self.lines = {other: line for other, line in self.lines.items() if other[: len(path)] != path}
            self.origins[path] = text
            for other in (each for each in before if each != text):
                self._note("given_twice", "warning", path, value, f"{other} stands before it and counts for nothing")
            self._replaced(path, value, gone)
            self.unusable |= {(*path, *problem.path) for problem in problems}

    def _note(self, rule: str, level: Level, path: KeyPath, value: Any, why: str, fix: str = "") -> None:
        self.notes.append(Finding(rule, level, _dotted(path), value, why, fix, where=self.given(path)))

    def _fall_away(self) -> None:
        """Leave out the values of the file that an override excludes: keys of another schedule, and the other one of
        two keys that say the same."""
        for name, field in RunConfig.model_fields.items():
            members, given = slot_of(field).sections, self.tree.get(name)
            if not isinstance(given, dict):
                continue
            chosen = [member for member in members[1:] and members if tag_of(member) == given.get("schedule")]
            if chosen and (name, "schedule") in self.origins:
                others = {key for member in members for key in member.model_fields} - chosen[0].model_fields.keys()
                self._leave_out((name, "schedule"), others)
        for path, (section, other) in _OTHER_UNIT.items():
            given = self.tree.get(section)
            if path not in self.origins or not isinstance(given, dict):
                continue
            if (value := given[path[1]]) != default_of(path):
                self._leave_out(path, {other})
            elif given.get(other) and (section, other) in self.lines:
                why = f"leaves {other} {given[other]} of {self.given((section, other))} as it is"
                fix = f"{section}.{other}={shown(default_of((section, other)))} takes that away"
                self._note("stays", "warning", path, value, why, fix)

    def _leave_out(self, by: KeyPath, excluded: Collection[str | int]) -> None:
        """Leave out those of the excluded keys that the file gave, because of the override of the key `by`."""
        section, key = by
        given = self.tree[section]
        gone = {each: given.pop(each) for each in [*given] if each in excluded and (section, each) in self.lines}
        self._replaced(by, given[key], gone)

    def _replaced(self, by: KeyPath, value: Any, gone: Mapping[Any, Any]) -> None:
        """Note the keys of the file that an override has taken away."""
        if said := ", ".join(f"{each} {was}" for each, was in gone.items() if was):
            self._note("falls_away", "info", by, value, f"in the place of {said} of {self.file}")

    def _child(self, target: Any, part: str, path: KeyPath, text: str) -> str | int | None:
        """Return the key of `part` inside `target`, and create it where needed. Return None, and report a problem,
        where there can be no such key."""
        if isinstance(target, dict):
            target.setdefault(part, None)
            return part
        if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
            return int(part)
        if isinstance(target, list):
            rule = f"is a list of {len(target)}, counted from 0: there is no item {part!r}"
            rule += f"{_FIX}name one that there is, or give the whole list: {_dotted(path)}=[...]"
        else:
            rule = "is a single value: nothing can be set inside it"
        self.report(path, rule, target, where=f"override {text}")
        return None

    def report(self, path: KeyPath, rule: str, value: Any = _ABSENT, where: str = "") -> None:
        key = _dotted(path) + ("" if value is _ABSENT else f" = {shown(value)}")
        problem = ": ".join(part for part in (where or self.given(path) or self.file, key, rule) if part)
        if problem not in self.problems:  # Each member of a union reports the same problem.
            self.problems.append(problem)


def _texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the texts in a tree of keys and lists, with their paths."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(each, (*path, key))


def _meaning(section: type[Section], path: KeyPath) -> str:
    doc = section.model_fields[str(path[-1])].description
    return f": {' '.join(doc.split())}" if doc else ""


def _must_be(slot_text: str, value: Any, choices: Sequence[Any], key: str = "") -> str:
    """Return `must be ...`, with a hint where the mistake is a common one."""
    hint = ""
    if meant := value_meant(value, choices, key):
        hint = f"; did you mean {meant}?"
    elif isinstance(value, str) and slot_text.startswith("a list"):
        item = f"{{path: {value}}}" if "{path" in slot_text else value.strip("()")
        hint = f"; a list is written [{item}]"
    elif isinstance(value, str) and "text" not in slot_text and (others := beyond_ascii(value)):
        hint = f"; it has {others}: type it anew"
    elif isinstance(value, str):
        near = difflib.get_close_matches(value, [choice for choice in choices if isinstance(choice, str)], 1)
        if near:
            hint = f"; did you mean {near[0]}?"
        elif "number" in slot_text and any(map(str.isdigit, value)):
            hint = "; numbers are written 262144, 262_144, 2.1e6 or 3e-4, without units or quotes"
    elif isinstance(value, float) and value.is_integer() and "whole number" in slot_text:
        hint = f"; written without a point: {value:.0f}" if abs(value) <= LARGEST_WHOLE else "; the largest is 1e18"
    return f"must be {slot_text}{hint}"


def _hint_for_unknown(path: KeyPath, section: type[Section], value: Any) -> str:
    """Return a hint about where an unknown key was probably meant to go, or where each key inside of another library's
    section was. The same section is searched first, then all others. The cutoffs keep names apart that share only a
    word: max_steps and drop_steps are 0.7 alike, misspelt names more than 0.8."""
    name, section_name = str(path[-1]), _dotted(path[:-1])
    if "." in name:
        return "; dots are for overrides: in the file, each section is a line of its own"
    if ":" in name:
        return "; a key ends with a colon and a space"
    if others := beyond_ascii(name):
        return f"; it has {others}: type it anew"
    known = {key.name: key for key in keys()}
    if _dotted(path) in known:  # The key is known, but belongs to other members of the union.
        owners = [key.doc.partition(")")[0][1:] for key in keys() if key.name == _dotted(path)]
        return (
            f" for schedule: {tag_of(section)}; it belongs to {' and '.join(owners)}"
            f"{_FIX}leave it out, or set {section_name}.schedule: {owners[0]}"
        )
    inside = [f"{key}: {meant}" for key in flat(value) if (meant := key_meant(key.rpartition(".")[2], name))]
    if isinstance(value, dict) and inside:
        return f"; {'; '.join(inside)}"
    if meant := key_meant(name, _dotted(path[:-1])):
        return f"; {meant}"
    name = name.lower()
    near = difflib.get_close_matches(name, section.model_fields, 1, cutoff=0.75)
    fields = section.model_fields if section_name else {}
    near = near or [field for field in fields if field.startswith(f"{name}_") or field.endswith(f"_{name}")]
    if 1 <= len(near) <= 2:
        return f"; did you mean {' or '.join(_dotted((*path[:-1], field)) for field in near)}?"
    last_parts = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = difflib.get_close_matches(name, last_parts, 1, cutoff=0.8)
    near = near or [part for part in last_parts if part.endswith(f"_{name}")]
    elsewhere = f" did you mean {last_parts[near[0]]}?" if len(near) == 1 else ""
    fix = "" if elsewhere else f"{_FIX}write one of these keys, or leave it out"
    return f";{elsewhere} {section_name or 'the configuration'} takes {outline(section)}{fix}"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def is_assignment(word: str) -> bool:
    """Whether a word of a command line is NAME=VALUE, and not an existing file or folder."""
    # Unlike Path.exists, os.path.exists accepts words that are too long for a file name.
    return "=" in word and not os.path.exists(word)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict, keyed by dotted names."""
    if isinstance(tree, dict):
        return {k: v for key, sub in tree.items() for k, v in flat(sub, f"{prefix}{key}.").items()}
    return {prefix[:-1]: tree}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return one dict, keyed by dotted names, as nested dicts: `flat` the other way round."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        within = tree
        for section in sections:
            within = within.setdefault(section, {})
        within[name] = value
    return tree


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values in which two flat dicts differ, by key. A key that one of them lacks has None there."""
    return {key: (ours.get(key), theirs.get(key)) for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)}


def null_above(tree: Mapping[str, Any], key: str) -> bool:
    """Return whether flat settings have null in the place of a section that this key is in."""
    names = key.split(".")
    return any(tree.get(".".join(names[:count]), "") is None for count in range(1, len(names)))

"""Decide what `auto` stands for: as the run had it, by a rule where nothing can be timed, or by times.

A choice brings its settings and what measures its candidates. A candidate whose results are wrong on this device has
infinite seconds. The table of times goes to the log, to a file of the run folder and to one of the host, in which later
starts find the decision. Layers of one model must not differ between ranks: the first rank decides for all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import triton

import sagekernels
from sagetrain.cluster.failures import Failures
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.schema import RunConfig
from sagetrain.config.sections.data import cache_folder
from sagetrain.data.token_file import write_atomic
from sagetrain.parallel.objects import of_rank_0
from sagetrain.parallel.topology import ParallelGroups

T = TypeVar("T")
Times = Mapping[str, Mapping[str, float]]
"""Seconds by what was timed, such as a layer, and then by candidate. They are infinite where a candidate is wrong."""

DRIVER = Path("/proc/driver/nvidia/version")
SOURCES = [Path(sagekernels.__file__).parent, *(Path(__file__).parent.parent / room for room in ("parallel", "model"))]
"""The folders whose files decide how fast a candidate is. A decision that was made with other files is made anew."""


@dataclass(frozen=True)
class StartOfRun:
    """The start of a run on this rank, for which `auto` is settled."""

    cfg: RunConfig
    groups: ParallelGroups
    vocab_size: int
    """The padded size of the vocabulary."""
    device: torch.device
    dtype: torch.dtype
    compiled: bool
    """Whether the run compiles its blocks."""
    folder: RunFolder
    """The run folder, which keeps the tables of times."""
    say: Callable[[str], None]
    """Receives the tables, and the reason where a choice that the run had cannot be kept."""


@dataclass(frozen=True)
class TimeTable:
    """The times of a choice's candidates, and what the log says of them."""

    about: str
    """The shape, dtype and passes that were timed."""
    times: Times
    remarks: Sequence[str] = ()
    """The errors of candidates, and the reasons why some are not used."""


FASTEST = "auto: the fastest"
"""The reason of a choice by times."""


def as_before(
    key: str, asked: T, kept: T, say: Callable[[str], None], cannot_run: Callable[[T], str] = lambda kept: ""
) -> tuple[T, str]:
    """Return the settings with `auto` as the run had it, and a few words that say so if this changes any of them.

    Args:
        kept: the settings as the run had them.
        say: receives the reason where they cannot be kept, for example on other hardware.
        cannot_run: returns why settings cannot run here, or an empty string.
    """
    if kept == asked:
        return asked, ""
    if problem := cannot_run(kept):
        say(f"{key}: what auto was so far cannot run here ({problem}): decided anew")
        return asked, ""
    return kept, f"as the run had it: auto decides once, naming {key} changes it"


def fastest(times: Times, gains: Mapping[str, float] = MappingProxyType({})) -> str:
    """Return the candidate with the least time, the first one of several. Those in `gains` must be so many times as
    fast as those that are not named. Raises RuntimeError if no candidate may be used."""
    seconds = {
        name: sum(row[name] for row in times.values()) * gains.get(name, 1.0) for name in next(iter(times.values()))
    }
    best = min(seconds, key=lambda name: seconds[name])
    if math.isinf(seconds[best]):
        raise RuntimeError("no candidate may be used")
    return best


def decide(
    what: str,
    start: StartOfRun,
    measure: Callable[[], TimeTable],
    pick: Callable[[Times], str] = fastest,
    *,
    file: Path,
    key: Sequence[object] = (),
    waits: str = "candidates are compiled, compared with fp32 or float64, and timed; naming one skips this",
    together: bool = False,
) -> str:
    """Return the name that `pick` takes from the measured times. The table is said, and goes to a file of the run and
    to one of the host (cache_folder). A later call with the same key, on the same kind of device, with the same driver,
    torch, Triton and SOURCES, gets the name from one of the files. The file of the host gets no table in which a
    candidate was refused: what failed in one run may have failed for its surroundings. Raises RuntimeError if no
    candidate may be used; the message holds every candidate's reason.

    Args:
        file: the file of the run. That of the host has the same name.
        waits: says what a start waits for while it measures.
        together: all ranks call it, since `measure` is collective. The files of the first rank count.
    """
    device, first = start.device, not together or not dist.is_initialized() or dist.get_rank() == 0
    named, files = _named(device, key), [file, *_of_host(file)] if first else []
    entry = next(((each, found) for each in files if (found := _entries(each).get(named))), None)
    if entry := of_rank_0(entry, device=device) if together else entry:
        there, kept = entry
        every = " and ".join(map(str, dict.fromkeys([there, *files])))
        start.say(f"{what}: {kept['chosen']} (chosen before, {there}; to time again, remove {every})")
    else:
        start.say(f"{what} auto: {waits}")
        kept = _decided(what, start, measure, pick)
    for each in files[:1] if kept.get("refused") else files:
        _keep(each, named, kept)
    return str(kept["chosen"])


def _named(device: torch.device, key: Sequence[object]) -> str:
    """Return the name of an entry of the files: the device, the software and the key."""
    paths = (path for folder in SOURCES for path in sorted(folder.glob("*.*")))
    files = b"".join(path.read_bytes() for path in paths if path.is_file())
    software = f"torch {torch.__version__} triton {triton.__version__} {hashlib.sha256(files).hexdigest()[:12]}"
    return " | ".join((_place(device), _driver(), software, *map(str, key)))


def _driver() -> str:
    """Return the version of NVIDIA's driver, as it says it; an empty string without one."""
    with suppress(OSError):
        return DRIVER.read_text().partition("\n")[0]
    return ""


def _place(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _decided(
    what: str, start: StartOfRun, measure: Callable[[], TimeTable], pick: Callable[[Times], str]
) -> dict[str, Any]:
    """Measure, pick, and return the entry of the files."""
    found = measure()
    about = f"{what} on {_place(start.device)}, {found.about}"
    lines = [about, *_table(found.times), *(f"  {remark}" for remark in found.remarks)]
    try:
        chosen = pick(found.times)
    except RuntimeError as error:
        raise RuntimeError("\n".join([str(error), *lines])) from error
    start.say("\n".join([*lines, f"  chosen: {chosen}"]))
    refused = any(math.isinf(seconds) for row in found.times.values() for seconds in row.values())
    return {"chosen": chosen, "table": lines, "refused": refused}


def _of_host(file: Path) -> list[Path]:
    """Return the file in which this host keeps such choices for all runs; none for a user without a home folder."""
    with suppress(RuntimeError):
        return [cache_folder("choices") / file.name]
    return []


def _entries(file: Path) -> dict[str, Any]:
    # A file that cannot be read, or an entry, costs another measurement and no run.
    with suppress(OSError, TypeError, ValueError):
        every = dict(json.loads(file.read_text())).items()
        return {name: entry for name, entry in every if isinstance(entry, dict) and "chosen" in entry}
    return {}


def _keep(file: Path, named: str, entry: Mapping[str, Any]) -> None:
    """Add an entry to a file, unless it is there. A place that cannot be written to keeps nothing."""
    if named in (entries := _entries(file)):
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({**entries, named: dict(entry)}, indent=1).encode())


def _table(times: Times) -> list[str]:
    """Format the milliseconds of each candidate, and how many times as fast as the first one it is."""
    names = list(next(iter(times.values())))
    lines = [f"  {'':<24}" + "".join(f"{name:>24}" for name in names)]
    for what, row in times.items():
        cells = [f"{1e3 * row[name]:.3f} ms" if row[name] < math.inf else "not used" for name in names]
        cells[1:] = [
            cell + f" ({row[names[0]] / row[name]:.2f})" * (max(row[name], row[names[0]]) < math.inf)
            for cell, name in zip(cells[1:], names[1:], strict=True)
        ]
        lines.append(f"  {what:<24}" + "".join(f"{cell:>24}" for cell in cells))
    return lines


def by_first_rank(what: str, choose: Callable[[], T], device: torch.device) -> T:
    """Let the first rank choose for all ranks. If it fails, every rank raises an error that says so; collective."""
    if not dist.is_initialized():
        return choose()
    failures, chosen = Failures(), list[T]()
    with failures.kept(what):
        chosen = [choose()] if dist.get_rank() == 0 else []
    failures.check()
    return of_rank_0(chosen, device=device)[0]

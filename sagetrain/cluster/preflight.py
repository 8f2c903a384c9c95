"""The preflight check: which hosts, ranks and devices take part in a run, and whether all of them have the same
software, configuration and files.

Hosts of a cluster drift apart: an older checkout, another YAML file, a token file that was never copied again. Such a
run would not fail, but its ranks would train different things. Every rank therefore reports before anything is built or
written. The reports go through the key-value store of the process group. It works where the fast network between ranks
does not, and between versions that could not exchange a tensor. Rank 0 prints a table and decides for all ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import socket
import textwrap
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

import sagetrain
from sagetrain.cluster.join import init_distributed
from sagetrain.cluster.rendezvous import RanksMissing, by_host, ended_by_signals, ranges, where
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.errors import CheckpointError, ConfigError, TrainingError, many, to_stderr
from sagetrain.config.schema import AttentionConfig, RunConfig, TrainingConfig
from sagetrain.parallel.host import ranks_of_host
from sagetrain.parallel.topology import Topology

FIXES = {
    "versions": "install the same versions on every host: pip install -c constraints.txt -e . in the same checkout",
    "configuration": "start every host with the same YAML file and the same overrides",
    "files": "copy tokenizer.model and the token files (.bin, .idx, .json) again from one host to the others, "
    "or keep them in a folder that all hosts share",
    "devices": "start on devices of one kind; or name what all of these GPUs can do in the place of auto: "
    "attention.backend, attention.recipe, linear.precision",
}
"""The values that all hosts must share, with the fix for each."""

SHOWN = 12
"""The number of digits of a file's hash in messages and checkpoints."""

LOCAL_KEYS = ("training.network_interface",)
"""The settings that describe a host and may differ between hosts."""

_OF_USERS = (ConfigError, TrainingError)
"""The errors whose text says what is wrong. All ranks end with it; an error of another kind needs its traceback."""

Row = dict[str, Any]
_Say = Callable[[str], None]


def check_in(
    cfg: RunConfig,
    topology: Topology,
    device: torch.device,
    read: Callable[[_Say], dict[str, str]],
    hears: _Say = to_stderr,
    keeps: _Say | None = None,
) -> dict[str, str]:
    """Report this rank, wait for the reports of all ranks, and let rank 0 decide whether the run can start; collective.
    Raises ConfigError on every rank if hosts disagree in versions, configuration or files, or if a host cannot take
    part. A rank whose `read` raises an unexpected error raises this error itself.

    Args:
        read: checks the files of this host and returns their hashes by name. The first rank of each host calls it with
            a function that reports progress. The other ranks wait as long as progress is reported.
        hears: gets the lines for people. `keeps` gets the table of hosts, versions and hashes, if it is given.

    Returns:
        The hashes, which are the same on all hosts.
    """
    store, files = _store_of("check in"), {}
    if os.environ["LOCAL_RANK"] == "0":

        def say(text: str) -> None:
            store.add("preflight/alive", 1)
            hears(f"{socket.gethostname()}: {text}")

        try:
            files = read(say)
        # The other ranks wait for this one, whatever the error is.
        except Exception as error:
            with nullcontext() if isinstance(error, _OF_USERS) else suppress(ConfigError):
                _exchange(store, _unable(error), hears)
            raise
    found = _exchange(store, _row(cfg, topology, device, files), hears, keeps)
    if device.type == "cpu" and cfg.training.dtype == "bf16" and dist.get_rank() == 0:
        hears("warning: no GPU is seen: the run trains on the CPU, for small models; `sagetrain doctor` says more")
    return found


def _store_of(meeting: str) -> Store:
    """Open the part of the process group's store that is for the next meeting of this name. A program may train one run
    after the other, and what ranks said about the run before is still in the store."""
    store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"{meeting} {store.add(f'{meeting}, rank {dist.get_rank()}', 1)}", store)


def share(folder: RunFolder, hears: _Say = to_stderr) -> None:
    """Let rank 0 make and lock the run folder, and let the first rank of each host check that it sees the same folder;
    collective. Raises CheckpointError on rank 0 if another run uses the folder, and OSError if the folder cannot
    be made. Raises ConfigError on every rank if hosts do not share the folder, and on the other ranks if rank 0 raises
    an error.

    Args:
        hears: gets warnings about the file system.
    """
    store, rank, world_size = _store_of("share"), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        token = secrets.token_hex(8)
        try:
            if warning := folder.claim(token, hears):
                hears(warning)
        except (CheckpointError, OSError) as error:
            store.set("folder/token", json.dumps([None, f"rank 0 on {socket.gethostname()}: {error}"]))
            _have_read(store)
            raise
        store.set("folder/token", json.dumps([token, ""]))
    token, problem = json.loads(_when_there(store, "folder/token"))
    if not problem:
        why = folder.finds(token) if rank and os.environ["LOCAL_RANK"] == "0" else ""
        store.set(f"folder/{rank}", json.dumps({"host": socket.gethostname(), "rank": rank, "why": why}))
        if rank == 0:
            rows = [json.loads(_when_there(store, f"folder/{other}")) for other in range(world_size)]
            problem = _unshared(folder, rows)
            (folder.unclaim if problem else folder.found)()
            store.set("folder/verdict", problem)
        problem = _when_there(store, "folder/verdict").decode()
    if problem:
        _have_read(store)
        raise ConfigError(problem)


def _unshared(folder: RunFolder, rows: list[Row]) -> str:
    """Say which hosts do not see rank 0's folder. The text is empty if all of them see it."""
    reasons = sorted({row["why"] for row in rows} - {""})
    if not reasons:
        return ""
    sides = "; ".join(f"{where([row for row in rows if row['why'] == why])} {why}" for why in reasons)
    return (
        f"training.run_dir {folder.path}: the hosts of this run do not share this folder, where every rank writes its "
        f"part of a checkpoint. Rank 0 on {rows[0]['host']} made it; {sides}. Nothing was started or written. Name a "
        "folder that all hosts have under the same path (NFS, Lustre)"
    )


def _have_read(store: Store) -> None:
    """Let rank 0 wait up to a minute until the others have read why the run cannot start. The store may live in the
    process of rank 0, so it leaves last."""
    if rank := dist.get_rank():
        store.set(f"read/{rank}", "")
    elif others := [f"read/{other}" for other in range(1, dist.get_world_size())]:
        with suppress(dist.DistStoreError):
            store.wait(others, timedelta(minutes=1))


def stay_out(problem: Exception) -> None:
    """Report that this rank cannot take part, so that the other hosts do not wait for it until their timeout. Raises
    ConfigError on every rank if the report was sent.

    On a single host this does nothing, because the launcher ends all ranks when one leaves. It also does nothing if the
    ranks have already met, or could not meet.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if (ranks_of_host() or world_size) == world_size or dist.is_initialized() or isinstance(problem, RanksMissing):
        return
    with ended_by_signals():
        init_distributed(TrainingConfig.model_fields["timeout_minutes"].default)
        _exchange(_store_of("check in"), _unable(problem), to_stderr)


def _unable(problem: Exception) -> Row:
    said = f"{problem}" if isinstance(problem, _OF_USERS) else f"{type(problem).__name__}: {problem}"
    return {"host": socket.gethostname(), "rank": dist.get_rank(), "problem": said}


def _exchange(store: Store, row: Row, hears: _Say, keeps: _Say | None = None) -> dict[str, str]:
    """Collect the reports on rank 0, print them, and return the hashes of the files on every rank. Raises ConfigError
    on every rank, if the run cannot start."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store.set(f"preflight/{rank}", json.dumps(row))
    if rank == 0:
        rows = [json.loads(_when_there(store, f"preflight/{other}")) for other in range(world_size)]
        problem = _verdict(rows)
        store.set("preflight/verdict", json.dumps([problem, rows[0].get("files")]))
        if not any(row["problem"] for row in rows):
            (keeps or hears)("\n".join(table(rows)))
            for line in (*differing_environment(rows), *differing_allocation(world_size), *idle_gpus(rows)):
                hears(line)
    # The reason why the run cannot start is empty if it can.
    problem, files = json.loads(_when_there(store, "preflight/verdict"))
    if problem:
        _have_read(store)
        raise ConfigError(problem)
    told: dict[str, str] = files
    return told


def _when_there(store: Store, key: str, patience: timedelta = timedelta(minutes=10)) -> bytes:
    """Wait for a key that another rank will write and return its value. The wait continues as long as any rank gives
    signs of life."""
    while True:
        signs = store.add("preflight/alive", 0)
        try:
            store.wait([key], patience)
            value: bytes = store.get(key)
            return value
        except dist.DistStoreError:
            if store.add("preflight/alive", 0) == signs:
                raise


def _verdict(rows: list[Row]) -> str:
    """Say why the run cannot start. The text is empty if it can."""
    problems = dict.fromkeys(row["problem"] for row in rows)
    if list(problems) == [""]:
        lines = disagreements(rows)
        return "\n  ".join(["the hosts of this run disagree; nothing was started or written", *lines]) if lines else ""
    # All ranks report the same problem, so no rank is named.
    if len(problems) == 1:
        return str(rows[0]["problem"])
    sides = [f"on {where([r for r in rows if r['problem'] == text])}: {text}" for text in problems if text]
    return "\n  ".join(["some hosts cannot take part in this run; nothing was started or written", *sides])


def disagreements(rows: list[Row]) -> list[str]:
    """Return one line for each value that must agree and does not. The line says which host has which value, and each
    kind of value comes with a fix."""
    lines = []
    for kind, fix in FIXES.items():
        # Only the first rank of each host reports files.
        told = [row for row in rows if row[kind]]
        names = dict.fromkeys(name for row in told for name in row[kind])
        values = {name: [row[kind].get(name, "unset") for row in told] for name in names}
        differing = [f"{name}: {sides}" for name in names if (sides := _sides(told, values[name]))]
        lines += [*differing, f"  fix: {fix}"] if differing else []
    return lines


def differing_environment(rows: list[Row]) -> list[str]:
    """Return warnings about environment variables of the communication libraries that differ between hosts."""
    names = sorted({name for row in rows for name in row["environment"]})
    return [
        f"warning: environment variable {name} differs between hosts: {sides}. Launchers pass few variables on; "
        "`sagetrain config hostfile` says how they reach every host"
        for name in names
        if (sides := _sides(rows, [row["environment"].get(name, "unset") for row in rows]))
    ]


def differing_allocation(world_size: int) -> list[str]:
    """Return a warning if Slurm allocated tasks or GPUs that the run does not use."""
    names = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE")
    told = {name: os.environ[name] for name in names if name in os.environ}
    tasks, hosts, gpus = (int(text) if (text := told.get(name, "")).isdigit() else 0 for name in names)
    lent = {tasks: many(tasks, "task"), hosts * gpus: f"{many(hosts, 'host')} with {many(gpus, 'GPU')} each"}
    lent.pop(0, None)
    if not lent or world_size in lent:
        return []
    return [
        f"warning: this run has {many(world_size, 'rank')}, Slurm's allocation has "
        f"{', '.join(lent.values())}. If that is not meant, start one rank a task, as `sagetrain config slurm` does; "
        "parallel.world_size makes a wrong number an error. If another job left "
        f"{', '.join(f'{name}={text}' for name, text in told.items())} behind: unset {' '.join(told)}"
    ]


def idle_gpus(rows: list[Row]) -> list[str]:
    """Return warnings about hosts that have more GPUs than ranks. A command that was started without a launcher is one
    cause."""
    return [
        f"warning: {host} has {gpus} GPUs, of which this run uses {len(members)}: start a rank on each (torchrun "
        f"--nproc-per-node {gpus} -m sagetrain train), or hide the others (CUDA_VISIBLE_DEVICES)"
        for host, members in by_host(rows).items()
        if (gpus := max(row["gpus"] for row in members)) > len(members)
    ]


def table(rows: list[Row]) -> list[str]:
    """Return the lines of the start-up table: one line for each host, then the values that all hosts share."""
    axes = {"pp": "pipeline parallel", "dp": "data parallel", "cp": "context parallel", "tp": "tensor parallel"}
    cells: list[tuple[str, ...]] = [("host", "ranks", *axes.values(), "devices")]
    for host, members in by_host(rows).items():
        devices = dict.fromkeys(row["device"] for row in members)
        counts = (sum(row["device"] == device for row in members) for device in devices)
        cells.append(
            (
                host,
                *(ranges(row[axis] for row in members) for axis in ("rank", *axes)),
                ", ".join(f"{count} x {device}" for count, device in zip(counts, devices, strict=True)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    first = rows[0]
    configuration = hashlib.sha256(json.dumps(first["configuration"]).encode()).hexdigest()[:12]
    whose = "" if not disagreements(rows) else f" ({first['host']})"
    hashes = {"configuration": configuration, **first["files"]}
    for what, common in (("versions", first["versions"]), ("hashes", hashes)):
        said = f"{what}{whose}: {', '.join(f'{name} {text}' for name, text in common.items())}"
        lines += textwrap.wrap(said, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return lines


def _row(cfg: RunConfig, topology: Topology, device: torch.device, files: dict[str, str]) -> Row:
    rank = dist.get_rank()
    tree = {
        f"{section}.{key}": value
        for section, values in cfg.model_dump(mode="json").items()
        for key, value in (values or {}).items()
    }
    return {
        "host": socket.gethostname(),
        "problem": "",
        "rank": rank,
        "pp": rank // topology.stage_size,
        **dict(zip(("dp", "cp", "tp"), topology.coords(rank), strict=True)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "devices": _told_apart(cfg.attention, cfg.linear.precision, device),
        "gpus": torch.cuda.device_count(),
        "versions": {**versions(), **_flash_attn(cfg.attention.backend, device)},
        "configuration": {name: value for name, value in tree.items() if name not in LOCAL_KEYS},
        "files": {name: digest[:SHOWN] for name, digest in files.items()},
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_")) or name == "OMP_NUM_THREADS"
        },
    }


def _told_apart(attention: AttentionConfig, precision: str, device: torch.device) -> dict[str, str]:
    """Return the properties of the device that all ranks must share. If `auto` asked what a GPU can do and ranks got
    different answers, they would wait for each other forever."""
    told, decided = {"device": device.type}, [attention.backend, precision]
    decided += [attention.recipe] if attention.backend == "sage" else []
    if device.type == "cuda" and "auto" in decided:
        told["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return told


def _flash_attn(backend: str, device: torch.device) -> dict[str, str]:
    """Return the version of flash-attn that backend `auto` finds on this host. The first rank chooses for all ranks."""
    if device.type != "cuda" or backend != "auto":
        return {}
    # The import also loads Triton, which `doctor` does not need.
    from sagetrain.model.backends import find_flash

    found = find_flash(device)
    return {"flash-attn": found[0] if found else "none"}


def versions() -> dict[str, str]:
    """The versions, by name, of the packages that must be the same on all hosts."""
    return {
        "sagetrain": f"{sagetrain.__version__} (sources {_source_hash()})",
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "deepspeed": _installed("deepspeed"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _source_hash() -> str:
    """Return a hash of the source code that runs, because two different checkouts may have the same version number."""
    digest = hashlib.sha256()
    for package in ("sagetrain", "sagekernels"):
        found = find_spec(package)
        assert found is not None and found.origin is not None, "this code runs in it"
        folder = Path(found.origin).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _sides(rows: list[Row], values: list[Any]) -> str:
    """Return `x on node0 (ranks 0..7); y on node1 (ranks 8..15)`, or an empty text if all values are equal."""
    sides: dict[str, list[Row]] = {}
    for row, value in zip(rows, values, strict=True):
        text = value if isinstance(value, str) else json.dumps(value)
        sides.setdefault(text, []).append(row)
    return "; ".join(f"{text} on {where(members)}" for text, members in sides.items()) if len(sides) > 1 else ""

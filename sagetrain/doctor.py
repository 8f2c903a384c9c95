"""The checks of `sagetrain doctor`: what this machine, or every host of a launch, has and lacks for training. They
cover versions, GPUs, links, disk and clock.

Each rank checks its own device, and the first rank of a host checks the host. The results go to rank 0 through the
key-value store, which works even if the ranks' fast network does not. Only then is that network tried.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import torch
import torch.distributed as dist

from sagetrain.auto import linear_choice
from sagetrain.auto.attention_choice import admissions
from sagetrain.cluster import preflight
from sagetrain.cluster.interfaces import use_interface
from sagetrain.cluster.join import init_distributed
from sagetrain.config.errors import many
from sagetrain.config.layer_specs import layers, linear_layers
from sagetrain.config.linear_sizes import LOW_BIT, LowBit
from sagetrain.config.schema import AttentionConfig, LinearConfig, ModelConfig, ParallelConfig
from sagetrain.costs.which_gpu import of_device
from sagetrain.data.open_files import files_of_rank_0, ranks_allowed
from sagetrain.model.selection import cannot_multiply
from sagetrain.parallel.host import ranks_of_host
from sagetrain.planning.tables import PAGE, Table, console, print_table

EXAMPLE = ModelConfig(
    num_layers=20, hidden_size=2048, ffn_hidden_size=5632, num_attention_heads=16, num_key_value_heads=4
)
"""The model whose shapes are tried without a configuration: that of configs/1b.yaml."""

EXTRAS = {
    "fla": ("fla", "model.delta_net on a GPU"),
    "gs": ("gcsfs", "training.run_url: gs://"),
    "lm-eval": ("lm_eval", "evaluation.tasks, eval --tasks"),
    "s3": ("s3fs", "training.run_url: s3://"),
    "transformers": ("transformers", "results/generation/generate.py"),
    "wandb": ("wandb", "logging.wandb"),
}
"""For each extra of setup.cfg, the module that it brings, and the keys and options that need it."""

MINUTES = 5.0
"""Minutes that ranks wait for one another in all."""

MIB = 2**20


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    what: str
    where: str
    """Host, or host and rank."""
    verdict: Literal["ok", "look", "bad"]
    """look: training runs, but maybe slower or at a risk. bad: training does not run, or not as configured."""
    found: str
    fix: str = ""


def examine(
    model: ModelConfig | None, parallel: ParallelConfig, run_dir: Path, interface: str | None, disk_mib: int
) -> list[Check]:
    """Run all checks. This is collective if a launcher started several ranks.

    Args:
        model: shapes to try; None: EXAMPLE.
        interface: network interface for the ranks' traffic, if one is configured.

    Returns:
        The checks of all ranks on rank 0, and the own checks on other ranks.
    """
    use_interface(interface)
    device = init_distributed(MINUTES)
    rank, world_size, host = dist.get_rank(), dist.get_world_size(), socket.gethostname()
    own: list[Check] = []
    if os.environ.get("LOCAL_RANK", "0") == "0":
        own += [
            *versions(host),
            extras(host),
            *host_limits(host, max(world_size, parallel.world_size or 1)),
            *disk(run_dir, disk_mib, host),
        ]
    own += gpu(device, model or EXAMPLE, parallel, f"{host}, rank {rank}")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"doctor/{rank}", json.dumps([asdict(check) for check in own]))
    if rank:
        store.wait(["doctor/go"], timedelta(minutes=MINUTES))
        store.set(f"doctor/clock/{rank}", repr(time.time()))
        all_checks = own
    else:
        found = [json.loads(store.get(f"doctor/{other}")) for other in range(world_size)]
        all_checks = [Check(**check) for checks in found for check in checks]
        all_checks += disagreements(all_checks)
        store.set("doctor/go", "")
        now = time.time()
        all_checks += clocks({other: float(store.get(f"doctor/clock/{other}")) - now for other in range(1, world_size)})
    if world_size > 1:
        all_checks += links(device, host)
    dist.destroy_process_group()
    return all_checks


# -- a host ------------------------------------------------------------------------------------------------------


def versions(host: str) -> list[Check]:
    """Return the versions of the software. `disagreements` compares them between hosts."""
    known = {**preflight.versions(), "CUDA": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        known["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return [Check("versions", host, "ok", ", ".join(f"{name} {text}" for name, text in known.items()))]


def extras(host: str) -> Check:
    """Return which of the optional packages are installed."""
    lacking = [name for name, (module, _) in EXTRAS.items() if find_spec(module) is None]
    found = [
        f"{name} {f'not installed (for {EXTRAS[name][1]})' if name in lacking else 'installed'}" for name in EXTRAS
    ]
    wanted = "all" if len(lacking) == len(EXTRAS) else ",".join(lacking)
    return Check(
        "extras", host, "ok", f"optional: {', '.join(found)}", f"pip install 'sagetrain[{wanted}]'" if lacking else ""
    )


def disagreements(checks: Iterable[Check]) -> list[Check]:
    """Return a check for each host that has other versions than the first."""
    first, *others = [check for check in checks if check.what == "versions"]
    return [
        Check("versions", check.where, "bad", f"not those of {first.where}", preflight.FIXES["versions"])
        for check in others
        if check.found != first.found
    ]


def host_limits(host: str, world_size: int) -> list[Check]:
    """Check shared memory, which NCCL and gloo use between the ranks of a host, the limit of open files for a run of so
    many ranks, and the time that the name of an address takes."""
    shared = shutil.disk_usage("/dev/shm").free
    memory = Check("shared memory", host, "ok", f"{shared / 2**30:.1f} GiB free")
    if shared < 2**30:
        memory = Check("shared memory", host, "look", f"{shared / 2**20:.0f} MiB free in /dev/shm; NCCL may need 1 GiB",
                       "in a container: --shm-size=8g, or --ipc=host")  # fmt: skip
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks, needed = ranks_allowed(files), files_of_rank_0(world_size)
    found = f"hard limit {files:,}: enough for {ranks:,} ranks, token files not counted; the soft limit is raised to it"
    limit = Check("open files", host, "ok", "no limit" if files == resource.RLIM_INFINITY else found)
    if files != resource.RLIM_INFINITY and files < needed:
        found = f"hard limit {files:,}; rank 0 of {world_size:,} ranks needs {needed:,}, and more for token files"
        fix = (
            "a higher hard limit: /etc/security/limits.conf, LimitNOFILE= of a service, --ulimit nofile= of a container"
        )
        limit = Check("open files", host, "bad", found, fix)
    return [memory, limit, _names(host)]


def _names(host: str) -> Check:
    begin = time.perf_counter()
    with suppress(OSError):  # A missing name is an answer too.
        socket.getnameinfo((f"::ffff:{socket.gethostbyname(host)}", 0), 0)
    seconds = time.perf_counter() - begin
    if seconds < 0.5:
        return Check("names", host, "ok", f"the name of an address is found in {1e3 * seconds:.0f} ms")
    found = f"the name of an address is found in {seconds:.1f} s; the store where ranks meet asks at each connection"
    fix = "a name server that answers, or RES_OPTIONS='timeout:1 attempts:1' in what starts the ranks"
    return Check("names", host, "look", found, fix)


def disk(run_dir: Path, size_mib: int, host: str) -> list[Check]:
    """Check the speed, the locks and the free space of the folder that checkpoints go to. Nothing is left there.
    `size_mib` MiB are written."""
    folder = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    block = os.urandom(MIB)
    try:
        with TemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            for _ in range(size_mib):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = size_mib * MIB / (time.perf_counter() - begin)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = Check("locks", host, "ok", f"{folder} has them")
            except OSError as error:
                locks = Check("locks", host, "look", f"{folder} has none ({error.strerror})",
                              "nothing keeps a second run out of the run folder; start no other one there")  # fmt: skip
    except OSError as error:
        return [Check("run_dir", host, "bad", f"{folder}: {error.strerror}", "choose another training.run_dir")]
    free = shutil.disk_usage(folder).free
    slow = written < 200e6
    found = f"{folder}: writes {written / 1e9:.2f} GB/s, {free / 1e9:,.0f} GB free"
    fix = "a checkpoint takes 12 bytes a parameter; save to a faster disk, or less often" if slow else ""
    speed = Check("disk", host, "look" if slow else "ok", found, fix)
    return [speed, locks]


def clocks(ahead: dict[int, float]) -> list[Check]:
    """Check the seconds by which the clocks of other ranks are ahead of rank 0's, including the way of a message."""
    if not ahead:
        return []
    rank = max(ahead, key=lambda rank: abs(ahead[rank]))
    side = "ahead" if ahead[rank] > 0 else "behind"
    found = f"that of rank {rank} is furthest from rank 0's: {abs(ahead[rank]):.3f} s {side}"
    if abs(ahead[rank]) < 1:
        return [Check("clocks", "all hosts", "ok", found)]
    return [Check("clocks", "all hosts", "look", found, "synchronize the hosts (NTP): times in logs do not compare")]


# -- a rank ------------------------------------------------------------------------------------------------------


def gpu(device: torch.device, model: ModelConfig, parallel: ParallelConfig, where: str) -> list[Check]:
    """Check the device, and that it computes the attention functions and 8-bit matmuls correctly at the shapes of a
    rank."""
    if device.type != "cuda":
        fix = "install an NVIDIA driver, and torch with CUDA, to train at speed"
        threads = torch.get_num_threads()
        checks = [Check("GPU", where, "look", f"none; {many(threads, 'thread')}", fix)]
    else:
        free, total = torch.cuda.mem_get_info(device)
        major, minor = torch.cuda.get_device_capability(device)
        text = f"{torch.cuda.get_device_name(device)}, {total / 2**30:.0f} GiB, compute capability {major}.{minor}"
        busy = total - free > 2 * 2**30
        used = f"{text}; {(total - free) / 2**30:.1f} GiB in use by others"
        fix = "end what else runs on it (nvidia-smi)"
        checks = [Check("GPU", where, "look", used, fix) if busy else Check("GPU", where, "ok", text)]
    linear = _linear(device, model, parallel.tensor_parallel_size, where)
    return [*checks, *_attention(device, model, parallel, where), *linear]


def _attention(device: torch.device, model: ModelConfig, parallel: ParallelConfig, where: str) -> list[Check]:
    tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
    ranks, heads = tensor * context, layers(model)[0].attention
    ulysses = context // heads.gather_of(tensor, context)
    if heads.heads % tensor or heads.key_heads % tensor or ulysses not in heads.context_sizes(tensor):
        found = f"{model.num_attention_heads} and {model.num_key_value_heads} heads do not divide among {ranks} ranks"
        return [Check("attention", where, "bad", found, "sagetrain plan says which sizes do")]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results = admissions(AttentionConfig(), model, heads_split=tensor * ulysses, device=device, dtype=dtype)
    passed = [name for name, admission in results.items() if admission.passed]
    checks = [
        Check("attention", where, "bad", f"{name}: {admission.reason}", "it is refused; report this with the versions")
        for name, admission in results.items()
        if not admission.passed
    ]
    return [Check("attention", where, "ok", f"agree with float64: {', '.join(passed)}"), *checks]


def _linear(device: torch.device, model: ModelConfig, tensor_parallel_size: int, where: str) -> list[Check]:
    return [_matmuls(precision, device, model, tensor_parallel_size, where) for precision in LOW_BIT]


def _matmuls(
    precision: LowBit, device: torch.device, model: ModelConfig, tensor_parallel_size: int, where: str
) -> Check:
    low, what = LinearConfig(precision=precision), f"{precision.upper()} matmuls"
    dtype = torch.bfloat16
    if why := cannot_multiply(low, model, tensor_parallel_size=tensor_parallel_size, device=device, dtype=dtype):
        return Check(what, where, "look", f"no: {why}", "linear.precision bf16")
    layers = linear_layers(model, tensor_parallel_size)
    name, sizes = next((name, sizes) for name, sizes in layers.items() if low.takes(sizes))
    _, refused = linear_choice.time_layers(
        {name: sizes},
        [precision],
        tokens=256,
        joined=False,
        kept=False,
        compiled=False,
        device=device,
        dtype=dtype,
        seconds=lambda calls: 0.0,  # The kernels are tried and not timed.
    )
    if refused:
        return Check(what, where, "bad", "; ".join(refused), "linear.precision bf16")
    twin = "" if device.type == "cuda" else " (their twin in torch: exact, slow)"
    return Check(what, where, "ok", f"agree with float32{twin}")


# -- between ranks -----------------------------------------------------------------------------------------------


def links(device: torch.device, host: str) -> list[Check]:
    """Measure the bus bandwidth of an all-reduce over all ranks. This is collective, and the result of rank 0
    counts."""
    world_size, local = dist.get_world_size(), ranks_of_host() or 1
    x = torch.zeros((256 if device.type == "cuda" else 4) * MIB // 4, device=device)
    for _ in range(2):
        dist.all_reduce(x)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else dist.barrier
    wait()
    begin, times = time.perf_counter(), 5
    for _ in range(times):
        dist.all_reduce(x)
    wait()
    seconds = (time.perf_counter() - begin) / times
    rate = 2 * (world_size - 1) / world_size * x.nbytes / seconds
    found = f"all-reduce of {x.nbytes / MIB:.0f} MiB over {world_size} ranks: {rate / 1e9:.2f} GB/s bus bandwidth"
    if device.type == "cuda" and (reckoned := expected(torch.cuda.get_device_name(device), world_size, local)):
        found += f", {rate / reckoned:.2f} of what plan reckons with"
        if rate < reckoned / 2:
            fix = "NCCL_DEBUG=INFO shows which way it goes; training.network_interface, the drivers of the adapters"
            return [Check("links", "all ranks", "look", found, fix)]
    return [Check("links", "all ranks" if world_size > local else host, "ok", found)]


def expected(gpu_name: str, world_size: int, local: int) -> float | None:
    """Return the bus bandwidth that plan assumes, in bytes per second, over ranks of which `local` share a host. Return
    None if the GPU is unknown."""
    known = of_device(gpu_name)
    return replace(known, gpus_per_host=local).link(1, world_size)[0] if known else None


# -- what is printed ---------------------------------------------------------------------------------------------


def show(checks: Iterable[Check]) -> None:
    """Print one table. Equal results of several ranks are one line."""
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    for check in checks:
        lines.setdefault((check.what, check.verdict, check.found, check.fix), []).append(check.where)
    rows = []
    for (what, verdict, found, fix), places in lines.items():
        where = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
        rows.append((f"{verdict:<4}  {what}", f"{where}: {found}" + f"; fix: {fix}" * bool(fix)))
    print_table(console(most=PAGE), Table("", ("check", "found"), rows))

"""Run a function in N processes joined by gloo: distributed code tested on a CPU, without a launcher."""

import contextlib
import importlib.util
import inspect
import io
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

import forked


def run_distributed(
    function: Callable, world_size: int, *args: Any, timeout: float = forked.PATIENCE, backend: str = "gloo"
) -> list[Any]:
    """Call function(*args) in `world_size` fresh processes with torch.distributed up; return what each returned. Raises
    RuntimeError if a rank raised (the message holds its traceback), died, or did not finish within `timeout` seconds.

    The function is found by the file and name it was defined under, so it must be at the top level of a module.
    RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* are set as a launcher would set them. What the ranks print is printed.
    """
    # The store's port is chosen by the OS and held from here on: no other process can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forked.context()
    source = (inspect.getfile(function), function.__module__, function.__qualname__)
    pipes, processes = [], []
    with tempfile.NamedTemporaryFile("r", errors="replace") as log, _one_cpu() as cpus:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            address = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
            env = {**os.environ, **{key: str(value) for key, value in address.items()}, "MASTER_PORT": "0"}
            what = env, log.name, cpus, store.port, timeout, backend, source, args, sender
            process = context.Process(target=_child, args=what, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            print(log.read(), end="")


def of_first_rank(make: Callable[[], Iterable[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors that a function makes, on every rank. The first rank alone calls it, where all would compute
    the same; collective."""
    found = [[x.detach() for x in make()] if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(found)
    return found[0]


@contextlib.contextmanager
def _one_cpu() -> Iterator[set[int]]:
    """Reserve a CPU that the ranks of no other test have, if there is one. Messages between two CPUs take a third
    longer. Ranks on GPUs have all CPUs, because they compile kernels."""
    cpus = os.sched_getaffinity(0)
    if torch.cuda.is_available():
        yield cpus
        return
    with socket.socket(socket.AF_UNIX) as claim:
        for cpu in sorted(cpus):
            with contextlib.suppress(OSError):  # Another test has this CPU.
                claim.bind(f"\0sagetrain's tests on CPU {cpu}")
                cpus = {cpu}
                break
        yield cpus


def _collect(pipes: list, processes: list, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = connection.wait(list(waiting), timeout=deadline - time.monotonic())
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting.values())} did not finish in time")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, payload = pipe.recv()
            except EOFError:
                processes[rank].join()
                raise RuntimeError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not ok:
                raise RuntimeError(f"rank {rank} raised\n{payload}")
            results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _child(
    env: dict, log: str, cpus: set, port: int, timeout: float, backend: str, source: tuple, args: tuple, sender: Any
) -> None:
    forked.enter(env, log, log)
    os.sched_setaffinity(0, cpus)
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        buffer = io.BytesIO()
        torch.save(_load(*source)(*args), buffer)
        dist.barrier()  # No rank leaves while another one still needs it.
        sender.send((True, buffer.getvalue()))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads sometimes abort an orderly exit.


def _load(path: str, module_name: str, qualname: str) -> Callable:
    # The module is found by its path, because a fresh process cannot import the names that pytest's importlib mode
    # gives.
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], qualname)

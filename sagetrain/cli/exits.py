"""The end of the `sagetrain` command: errors become messages and exit codes.

Exit codes:
- 0: done, or stopped by a signal with a checkpoint.
- 2: a mistake in the configuration or the arguments, such as a run_dir that cannot be used.
- 3: a checkpoint that cannot be written or used, because of a full disk for instance.
- 4: training cannot go on, or a GPU has no memory left.
- 5: a hang, which is no progress for training.timeout_minutes. run_dir/stacks shows where each rank stood.
- 128 and more: a signal before training began.

The deepspeed launcher passes the codes on; torchrun turns each failure into a 1.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from sagetrain.cluster.lifeline import last_words, lifeline
from sagetrain.config.errors import TRAINING_EXIT_CODE, CheckpointError, ConfigError, TrainingError, way_to_room

console_script = False
"""True if this process runs one command and nothing after it. __main__.program sets it."""


class Errors:
    """A context manager that turns the exceptions that users cause into a message on stderr and an exit code. Other
    exceptions keep their traceback.

    If all ranks fail in the same way, the first rank of a host gives the reason, and the launcher ends the others while
    they wait. A rank that fails alone gives its own.
    """

    def __init__(self, rank: int = 0, run_dir: Path | None = None, output: Path | None = None):
        self.rank, self.run_dir, self.output = rank, run_dir, output

    def __enter__(self) -> Errors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt) and console_script:  # The command that was interrupted has cleaned up.
            leave(130)
        if self.run_dir and isinstance(error, OSError) and _is_unusable(self.run_dir, error):
            error = ConfigError(
                f"training.run_dir {self.run_dir} cannot be used: {error.filename}: {error.strerror}; "
                "choose another folder, or free this one"
            )
        if self.output and isinstance(error, OSError) and _is_unusable(self.output, error):
            error = ConfigError(f"{self.output} cannot be written: {error.strerror}; choose another place for it")
        error = misnamed(error) if isinstance(error, OSError) else error
        error = _not_imported(error) if isinstance(error, Exception) and _exit_code(error) is None else error
        if error is not None:
            last_words(error)
        if error is None or (code := _exit_code(error)) is None:
            return
        said = str(error)
        if isinstance(error, OSError):
            # Errors of this project name their file. Others come from a library, or from printing.
            folder = self.run_dir or self.output
            where = error.filename or (f"{folder} or standard output" if folder else "standard output")
            said = f"{where}: {error.strerror}; {way_to_room(str(error.strerror))} and run the same command again"
        if _is_out_of_memory(error):
            said = (
                f"{said.splitlines()[0].rstrip('.')}. Take less at a time (generate: --batch-size; eval: --context; "
                "train: data.micro_batch_size), or spread generate over more GPUs (torchrun)"
            )
        if self.rank:
            # Training's handler would ask for a checkpoint.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # Keepers end the others within two seconds.
            time.sleep(3 if lifeline() else 5 + 3 * int(os.environ.get("LOCAL_RANK", "0")))
        warn(f"rank {self.rank}: error: {said}" if self.rank else f"error: {said}")
        leave(code)


def misnamed(error: OSError) -> ConfigError | OSError:
    """Return the error as a message for people if it is about a file that mostly belongs to another user, or whose name
    is too long."""
    if not error.filename:
        return error
    if isinstance(error, PermissionError):
        return ConfigError(f"{error.filename}: {error.strerror}; let this user have it (chmod), or name another path")
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError(f"{error.filename}: {error.strerror}; name a shorter path")
    return error


def _not_imported(error: Exception) -> Exception:
    """Return the error as a message for people if torch raised it while it was imported, and somebody has set
    variables that torch reads. An installation that is broken raises ImportError, or OSError about a file that no
    variable names."""
    begin, ours = ("TORCH", "PYTORCH"), ("TORCHELASTIC_", "TORCH_CPP_LOG_LEVEL")
    variables = sorted(name for name in os.environ if name.startswith(begin) and not name.startswith(ours))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    from_torch = frames and frames[-1].f_globals.get("__name__", "").partition(".")[0] == "torch"
    folders = tuple(filter(None, map(os.environ.get, variables)))
    installed = isinstance(error, OSError) and not str(error.filename).startswith(folders)
    if not variables or not from_torch or isinstance(error, ImportError) or installed:
        return error
    why, given = str(error).strip().partition("\n")[0].rstrip("."), [f"{each}={os.environ[each]}" for each in variables]
    return ConfigError(f"torch cannot be imported: {why}; correct or unset what is wrong of {', '.join(given)}")


def _is_unusable(run_dir: Path, error: OSError) -> bool:
    """Whether the error says that this folder, one above it or something in it cannot be made, read or written."""
    numbers = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT)
    if not (error.errno in numbers and isinstance(error.filename, str | os.PathLike)):
        return False
    folder, path = run_dir.absolute(), Path(error.filename).absolute()
    return folder.is_relative_to(path) or path.is_relative_to(folder)


def _exit_code(error: BaseException) -> int | None:
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, OSError) and error.errno and way_to_room(os.strerror(error.errno)):
        return 3
    if isinstance(error, CheckpointError):
        return 3
    if isinstance(error, TrainingError) or _is_out_of_memory(error):
        return TRAINING_EXIT_CODE
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or this host ran out of memory. Training itself gives a longer message of a GPU."""
    torch = sys.modules.get("torch")
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error):
        return True
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def warn(text: str) -> None:
    """Print a line on stderr."""
    typer.echo(text, err=True)


def leave_together() -> NoReturn:
    """End the command on all ranks at once, with exit code 0."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier(device_ids=[torch.cuda.current_device()] if torch.cuda.is_available() else None)
    leave(0)


def leave(code: int) -> NoReturn:
    """End the command with an exit code.

    The console script ends its process at once, for two reasons: no destructor may wait for a rank that is gone, and
    gloo's threads sometimes abort an interpreter that shuts down. In a program that called `main`, SystemExit carries
    the code to the caller.
    """
    try:
        sys.stdout.flush()
    except OSError:
        if not code:  # A code stands for what has been said. That words were lost was not.
            raise
    sys.stderr.flush()
    if console_script:
        os._exit(code)
    raise SystemExit(code)


@contextmanager
def as_it_was() -> Iterator[None]:
    """Restore what a command changes for the calling program: signal handlers, environment, garbage collection, and
    torch's process group."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers, environment = {number: signal.getsignal(number) for number in numbers}, dict(os.environ)
    collects, frozen, grouped = gc.isenabled(), gc.get_freeze_count(), _has_process_group()
    try:
        yield
    finally:
        ends_group = _has_process_group() and not grouped
        if ends_group:
            from sagetrain.cluster.join import end_distributed

            end_distributed()
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if collects:
            gc.enable()
        if not frozen:
            gc.unfreeze()
        if ends_group:  # The trainer holds memory and the lock of its folder, and refers to itself.
            gc.collect()


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()

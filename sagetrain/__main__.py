"""The program `sagetrain`, and `main`, which runs a command inside of another Python program."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn, cast


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: main(["plan", "325m"]). The words default to those of the command line.

    Mistakes of users are messages on stderr and codes (cli/exits.py lists them); every other exception is raised.
    """
    from sagetrain.cli.exits import as_it_was
    from sagetrain.cli.main import run

    with as_it_was():
        return run(sys.argv[1:] if words is None else words)


def program() -> NoReturn:
    """Run the console script, which owns its process. From here on Ctrl-C ends it with code 130 and no traceback."""
    if not sys.flags.utf8_mode and sys.getfilesystemencoding() != "utf-8":
        # In such a locale (LC_ALL=C beside PYTHONUTF8=0) every letter beyond ASCII would be half of a surrogate pair.
        os.environ["PYTHONUTF8"] = "1"  # Ranks and workers inherit it.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # It was closed (2>&-), and the next file to be opened would take its place.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupted)
        from sagetrain.cli import exits
        from sagetrain.cli.main import run

        # Names of files are bytes, and go out as they came in. What was a file when Python began cannot change.
        with contextlib.suppress(OSError):
            cast(TextIOWrapper, sys.stdout).reconfigure(errors="surrogateescape")
        exits.console_script = True
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # This catches Ctrl-C during imports. Elsewhere exits.Errors does.
        os._exit(130)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C. While torch is imported the program ends at once, because an exception inside of its C++
    aborts."""
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os._exit(130)
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    program()

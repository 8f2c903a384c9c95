"""The program `sagetrain`, and `python -m sagetrain`."""

import os
import signal
import sys
from types import FrameType


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. While torch is imported it ends the program at once: an exception inside of its C++ aborts."""
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os._exit(130)
    signal.default_int_handler(number, frame)


def main() -> None:
    """The command line; from here on Ctrl-C ends it with code 130 and no traceback."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupted)
        from sagetrain.cli import main as command_line

        command_line()
    except KeyboardInterrupt:  # while something is imported; elsewhere cli.py sees to it
        os._exit(130)


if __name__ == "__main__":
    main()

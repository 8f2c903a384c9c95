"""The program `sagetrain`, and `python -m sagetrain`."""

import os


def main() -> None:
    """The command line; from here on Ctrl-C ends it with code 130 and no traceback."""
    try:
        from sagetrain.cli import main as command_line

        command_line()
    except KeyboardInterrupt:  # while something is imported; elsewhere cli.py sees to it
        os._exit(130)


if __name__ == "__main__":
    main()

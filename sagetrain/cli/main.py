"""The `sagetrain` command and its verbs. Each verb has a file of its own, which reads the words after it.

Heavy imports are inside the verbs, so that `--help` and `plan` answer at once and without torch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Annotated, cast

import typer

from sagetrain import __version__
from sagetrain.cli.compare import compare
from sagetrain.cli.diagnose import diagnose
from sagetrain.cli.doctor import doctor
from sagetrain.cli.evaluate import evaluate
from sagetrain.cli.exits import Errors, warn
from sagetrain.cli.export import export
from sagetrain.cli.generate import generate
from sagetrain.cli.import_folder import import_folder
from sagetrain.cli.plan import plan
from sagetrain.cli.prepare import prepare
from sagetrain.cli.report import report
from sagetrain.cli.shipped import print_shipped
from sagetrain.cli.train import train

VERBS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "plan": plan,
    "train": train,
    "config": print_shipped,
    "export": export,
    "import": import_folder,
    "eval": evaluate,
    "generate": generate,
    "compare": compare,
    "diagnose": diagnose,
    "doctor": doctor,
    "report": report,
}
"""The verbs, in the order of --help."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # rich's tables cut option names if the terminal is narrow.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, verb in VERBS.items():
    app.command(name)(verb)


def _version(given: bool) -> None:
    if given:
        typer.echo(f"sagetrain {__version__}")
        raise typer.Exit


@app.callback()
def sagetrain(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    local_rank: Annotated[
        int, typer.Option("--local_rank", "--local-rank", hidden=True, help="Given by `deepspeed --module sagetrain`.")
    ] = 0,
) -> None:
    """Pretrain Llama-like models in low precision: INT8 or FP8 linear layers, trainable INT8 attention (SageBwd).

    Typical order: prepare text into token files, take a configuration (config), plan the run on a laptop, train it (on
    a cluster: deepspeed --module sagetrain train CONFIG), then eval and generate.
    """


# get_group would leave out --install-completion.
_COMMAND = cast(typer.core.TyperGroup, typer.main.get_command(app))
for each in _COMMAND.commands.values():
    # The whole sentence is set here, because the list of commands would cut it.
    each.short_help = (each.help or "").partition("\n\n")[0]


def run(words: Sequence[str]) -> int:
    """Run a command, given as the words after `sagetrain`, and return its exit code. Raises KeyboardInterrupt upon
    Ctrl-C, in a command that does not save and stop on it. Help is as wide as the terminal. In a pipe its width has no
    limit."""
    try:
        os.getcwd()
    except FileNotFoundError:
        warn("error: the folder in which this command was started is gone (deleted, or made anew): cd to a folder")
        return 2
    # No shell replaces ~ behind --option=. What is a text and no path keeps it.
    of_path = re.compile("--(?!prompt=|stop=|split-on=|title=)[a-z-]+=~/")
    words = [re.sub(r"(?<==)~/.*", lambda at_home: os.path.expanduser(at_home[0]), word)
             if of_path.match(word) else word for word in words]  # fmt: skip
    for option, after in zip(words, [*words[1:], ""], strict=False):  # Other programs take keys as options.
        if words[0] in ("train", "plan", "doctor", "compare") and re.match(r"--[a-z_]+(\.\w+)+(=|$)", option):
            key, _, value = option[2:].partition("=")
            warn(f"error: {option}: keys of the YAML go without dashes: {key}={value or after or 'VALUE'}")
            return 2
    width, code = shutil.get_terminal_size((10_000, 24)).columns, 0
    try:
        # Commands that know a rank or a folder use their own Errors inside. This one is for --help on a full disk.
        with Errors():
            _COMMAND(list(words), prog_name="sagetrain", obj=tuple(words), terminal_width=width)
    except SystemExit as ended:
        code = int(ended.code or 0)
    if code == 130:  # This is the parser's code for an interrupt.
        raise KeyboardInterrupt
    return code

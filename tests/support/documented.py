"""Read commands as pages write them, in the way a shell would."""

import shlex
from collections.abc import Iterator

import typer

from sagetrain.cli.main import app
from sagetrain.config import load_config
from sagetrain.config.check import check

PROGRAMS = {"cp", "deepspeed", "git", "make", "pip", "python", "python3", "sagetrain", "sbatch", "torchrun"}

WRITTEN = {"ft.yaml": "minimal", "more.yaml": "1b"}
"""Files that documented commands write, and what is checked in their place."""


def split(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line that names one of PROGRAMS."""
    words: list[str] = []
    lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    try:
        for word in [*lexer, ";"]:
            if set(word) - set(";&|"):
                words.append(word)
                continue
            if words and words[0] in PROGRAMS:
                yield words[: words.index(">")] if ">" in words else words
            words = []
    except ValueError:  # The line is no command; it may be a text with an apostrophe.
        return


def sagetrain(words: list[str]) -> None:
    """Check that `sagetrain WORDS` can be parsed, and that a run it names could start."""
    group = typer.main.get_command(app)
    # click exits on an option that it does not know.
    parsed = group.commands[words[0]].make_context(words[0], words[1:])
    if words[0] == "train":
        train(words[1:], 1)
    else:
        assert parsed.params


def train(words: list[str], world_size: int) -> None:
    """Check that the words after `sagetrain train` or launch/train.py name a run that so many ranks could start."""
    words = [word for word in words if word not in ("--config", "-c")]
    path, overrides = WRITTEN.get(words[0], words[0]), words[1:]
    cfg = load_config(path, overrides)
    findings = check(cfg, world_size, path=path, overrides=overrides, files=False)
    assert [str(finding) for finding in findings if finding.level == "error"] == []

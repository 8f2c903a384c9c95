"""Every command of the documentation is checked, as far as it goes without a GPU, a cluster and the reader's text.

`plan` runs to its end. Commands that train are parsed by their launcher and by sagetrain, and their configuration is
checked for the ranks that they start. All other commands have their arguments parsed. Nothing is trained, installed or
written. Pages in results/ record commands of their time and are left out; tests/house/test_guides.py runs the commands
that can run.
"""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed.launcher import runner
from torch.distributed import run as torchrun

from documented import sagetrain, split, train
from forked import PATIENCE, Command
from runs import ROOT

RECORDS = {ROOT / "CHANGELOG.md"}
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kernels/*.md")} - RECORDS)


def commands(document: str) -> Iterator[list[str]]:
    """Yield the words of every command in fenced blocks, and of every command in `code` that is more than a name."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", document, re.M | re.S):
        if language in ("", "bash", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                yield from split(line)
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", document, flags=re.M | re.S)):
        yield from (words for words in split(span) if len(words) > 1 + (words[0] == "sagetrain"))


FOUND = [(path.relative_to(ROOT), words) for path in DOCUMENTS for words in commands(path.read_text())]


@pytest.mark.parametrize("command", sorted({shlex.join(words) for _, words in FOUND}))
def test_command(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several documents may have the command. It is tried once."""
    words = shlex.split(command)
    monkeypatch.chdir(ROOT)
    if words[:2] == ["sagetrain", "plan"]:
        log = tmp_path / "log"
        code, said = Command(words, os.environ, log, ROOT).wait(PATIENCE), log.read_text()
        # A guide also shows what is proposed where nothing fits as configured.
        assert code == 0 or (code == 2 and "None fits with the optimizer as configured" in said), said
    else:
        CHECKS[words[0]](words[1:])


def test_the_commands_of_readme_are_found() -> None:
    found = [words for path, words in FOUND if path == Path("README.md")]
    assert {words[0] for words in found} >= {"deepspeed", "make", "pip", "sagetrain", "sbatch", "torchrun"}
    assert {words[1] for words in found if words[0] == "sagetrain"} >= {"prepare", "plan", "train", "eval", "generate"}
    assert ["sagetrain", "plan", "--keys"] in found
    cluster = [words for path, words in FOUND if path == Path("docs/cluster.md")]
    continued = [words for words in cluster if words[0] == "deepspeed" and "data.document_attention=false" in words]
    assert continued, "a command over several lines"


def make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, assigned, _ = word.partition("=")
        assert re.search(rf"^{name} *\?=" if assigned else rf"^{name}:", makefile, re.M), word


def pip(words: list[str]) -> None:
    """The kernels leave the reader's torch as it is, and extras are added where sagetrain is installed."""
    assert words[0] == "install"
    if words[1] != "./kernels" and not words[1].startswith("sagetrain["):
        assert (ROOT / words[words.index("-c") + 1]).is_file()
    assert not ("-c" in words and "./kernels" in words)


def python(words: list[str]) -> None:
    if words[0] == "-m":
        name = words[1].replace(".", "/")
        assert any((ROOT / folder / f"{name}.py").exists() for folder in (".", "kernels")) or words[1] == "pytest"
    elif words[0] == "-c":
        compile(words[1], "command", "exec")
    else:
        assert (ROOT / words[0]).is_file()


def deepspeed(words: list[str]) -> None:
    given = runner.parse_args(words)
    ranks = given.num_gpus
    if ranks <= 0:  # The ranks are those of a host file, which is made from the example.
        assert given.hostfile == "hostfile"  # `sagetrain config hostfile` writes a file of this name.
        example = Path("launch/hostfile.example").read_text()
        ranks = sum(map(int, re.findall(r"^\w+ slots=(\d+)", example, re.M)))
    on_ranks(given.user_script, given.module, given.user_args, ranks)


def on_ranks(script: str, is_module: bool, words: list[str], ranks: int) -> None:
    """Check the program that a launcher starts: training, or any command."""
    if is_module:
        assert script == "sagetrain"
        train(words[1:], ranks) if words[0] == "train" else sagetrain(words)
    else:
        assert script == "launch/train.py"
        train(words, ranks)


def torch_run(words: list[str]) -> None:
    given = torchrun.parse_args(words)
    ranks = int(given.nnodes.rpartition(":")[2]) * int(given.nproc_per_node)
    on_ranks(given.training_script, given.module, given.training_script_args, ranks)


def sbatch(words: list[str]) -> None:
    given = [word for word in words if word.startswith("--")]
    script, *words = words[len(given) :]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (ROOT / script).read_text(), re.M))
    options |= dict(word.removeprefix("--").split("=") for word in given)
    train(words, int(options["nodes"]) * int(options["ntasks-per-node"]))


def exists(words: list[str]) -> None:
    assert (ROOT / words[0]).exists()


CHECKS = {
    "cp": exists,
    "deepspeed": deepspeed,
    "git": lambda words: None,
    "make": make,
    "pip": pip,
    "python": python,
    "python3": python,
    "sagetrain": sagetrain,
    "sbatch": sbatch,
    "torchrun": torch_run,
}

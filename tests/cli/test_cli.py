"""The command line itself: how it starts, which options it refuses, and errors in one line."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer

from forked import PATIENCE, Command
from held import file_of, hold
from runs import ROOT, STEPS, sagetrain, write_config
from sagetrain import __version__
from sagetrain.__main__ import main
from sagetrain.cli import configuration
from sagetrain.cli import main as cli
from sagetrain.cli.exits import Errors
from sagetrain.config import ConfigError


def command(*words: object) -> subprocess.CompletedProcess:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*map(str, words)], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, env=env, check=False
    )


@pytest.mark.parametrize("words", [
    ["-m", "sagetrain", "train", "--config", "none.yaml"],
    ["-m", "sagetrain", "--local_rank=0", "train", "none.yaml"],  # deepspeed --module calls it like this.
    ["launch/train.py", "--local_rank=0", "none.yaml", "optimizer.lr=1"],  # The deepspeed launcher calls it like this.
])  # fmt: skip
def test_the_package_and_the_launchers_script_can_be_run(words: list[str]) -> None:
    done = command(sys.executable, "-X", "importtime", *words)
    assert done.returncode == 2
    assert "error: none.yaml: cannot be read" in done.stderr
    assert " sagetrain.cli.main\n" in done.stderr
    assert " torch\n" not in done.stderr  # A mistake is told before torch is imported.


@pytest.mark.parametrize(("closed", "words", "code"), [
    ("0<&- 1>&-", "config quickstart", 0), ("0<&- 1>&- 2>&-", "plan none.yaml", 2)
])  # fmt: skip
def test_closed_streams_are_none_of_its_concern(closed: str, words: str, code: int) -> None:
    done = command("sh", "-c", f'exec "$0" -m sagetrain {words} {closed}', sys.executable)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


PROGRAM = """
import gc, json, os, signal, sys, threading
from sagetrain.__main__ import main

def state():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    return [*map(signal.getsignal, numbers)], dict(os.environ), gc.isenabled(), gc.get_freeze_count()

def interrupt(at):
    while not (os.path.exists(at) and open(at).readline()):
        pass
    os.kill(os.getpid(), signal.SIGINT)  # The run waits before its last step for this, or for the file to go.
    os.unlink(os.environ["HELD"])

config, run, codes = *sys.argv[1:], {}
gc.unfreeze()
before = state()
try:
    codes["plan"] = main(["plan", config, "--brief"])
    codes["mistake"] = main(["plan", "none.yaml"])
    codes["usage"] = main(["eval"])
    threading.Thread(target=interrupt, args=(f"{run}/metrics.jsonl",)).start()
    codes["interrupted"] = main(["train", config])
    codes["continued"] = main(["train", config])
    codes["eval"] = main(["eval", run, "--num-sequences", "8"])
finally:
    codes["as it was"] = state() == before
    print(json.dumps(codes))
"""


def test_commands_return_to_the_program_that_called_them(corpus: Path, tmp_path: Path) -> None:
    """Training, too, returns again and again, also after Ctrl-C, and leaves nothing of the process changed."""
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    (tmp_path / "program.py").write_text(PROGRAM)
    hold(config)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HELD": str(file_of(config))}
    output, errors = tmp_path / "output", tmp_path / "errors"
    words = ["python", str(tmp_path / "program.py"), str(config), str(tmp_path / "run")]
    assert Command(words, env, output, tmp_path, errors).wait(PATIENCE) == 0, errors.read_text()
    codes = json.loads(output.read_text().splitlines()[-1])
    assert codes == {
        **dict.fromkeys(("plan", "interrupted", "continued", "eval"), 0),
        **dict.fromkeys(("mistake", "usage"), 2),
        "as it was": True,
    }
    said = errors.read_text()
    assert "stopped by SIGINT at step" in said and f"finished at step {STEPS}," in said


def test_a_start_takes_six_lines_and_its_log_the_rest(corpus: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", training={"total_tokens": 2048})
    ended = sagetrain("train", config, "attention.smooth_k=false", "optimizer.lr=2e-3")
    lines = ended.stderr.splitlines()
    start = lines[: next(number for number, line in enumerate(lines) if line.startswith("step 1 |"))]
    assert ended.returncode == 0 and len(start) <= 6, ended.stderr
    log, has = (
        (tmp_path / "run/log.txt").read_text(),
        ("versions: sagetrain", "hashes: configuration", "    fix: ", "start: "),
    )
    assert all(text in log and text not in ended.stderr for text in has)
    assert "finished at step" in log and "step 1 |" not in log


@pytest.mark.parametrize(
    ("words", "expected"),
    [("sagetrain conf", "config"), ("sagetrain plan 32", "325m"), ("sagetrain config fine", "finetune"),
     ("sagetrain train 325m lr_schedule.min", "lr_schedule.min_lr=")],
)  # fmt: skip
def test_tab_completes_commands_configurations_and_keys(monkeypatch, capsys, words: str, expected: str) -> None:
    monkeypatch.setenv("_SAGETRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    main([])
    assert capsys.readouterr().out.split() == [expected]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_is_no_mistake_of_a_user_is_raised_to_the_program(monkeypatch, error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("sagetrain.planning.show.show_plan", fail)
    with pytest.raises(error):
        main(["plan", "minimal"])


@pytest.mark.parametrize("imported", ["typer.models", "torch.types"])
def test_ctrl_c_is_no_traceback_at_any_time(imported: str) -> None:
    program = [sys.executable, "-X", "importtime", "-m", "sagetrain", "generate", str(ROOT)]
    # A shell that starts the suite in the background hands on that SIGINT is ignored.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    for line in process.stderr:
        if line.endswith(f" {imported}\n"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait(timeout=PATIENCE) == 130
    assert "Traceback" not in rest and "KeyboardInterrupt" not in rest


def test_help_of_the_quickstart_starts_nothing() -> None:
    done = command(sys.executable, "launch/quickstart.py", "--help")
    assert done.returncode == 0
    assert "the whole life of a run" in done.stdout and "$ " not in done.stdout


def run_main(capsys, *words: object) -> str:
    """Run the command line in this process and return what it prints."""
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, None])
@pytest.mark.parametrize("name", [None, *typer.main.get_command(cli.app).commands])
def test_help_cuts_nothing_and_in_a_pipe_wraps_nothing(monkeypatch, capsys, name: str | None, columns: int | None):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    group = typer.main.get_command(cli.app)
    command = group.commands[name] if name else group
    lines = run_main(capsys, *([name] if name else []), "-h").splitlines()
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    said = [text for p in shown for text in p.opts if p.param_type_name == "option"]
    said += [word for line in command.help.splitlines() for word in line.split() if word.startswith("--")]
    assert [text for text in said if not any(text in line for line in lines)] == []  # Each text stays in one piece.
    said = [*command.help.split("\n\n"), *(p.help for p in shown if p.help)]
    if not name:
        said += [c.name + c.help.split("\n\n")[0] for c in group.commands.values()]
    said = ["".join(text.replace("\b", "").split()) for text in said]
    places = ["".join(line.split()) for line in (["".join(lines)] if columns else lines)]
    assert [text for text in said if not any(text in place for place in places)] == []


def test_version_and_help_have_their_usual_names(capsys) -> None:
    assert run_main(capsys, "--version") == f"sagetrain {__version__}\n"
    assert run_main(capsys, "-h") == run_main(capsys, "--help")


def test_what_is_shipped_is_printed_as_it_is(capsys) -> None:
    for file in (ROOT / "configs").iterdir():
        assert run_main(capsys, "config", file.stem) == file.read_text()
    assert main(["config", "2b"]) == 2
    assert "config 2b: nothing of that name is shipped; there are 1b, 24gb, 325m, 7b, 8b, " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(("words", "overrides"), [
    (["a.yaml"], []), (["--config", "a.yaml"], []), (["-c", "a.yaml"], []),
    (["a.yaml", "x=1", "y=2"], ["x=1", "y=2"]), (["--config", "a.yaml", "x=1", "y=2"], ["x=1", "y=2"]),
    (["x=1", "--config=a.yaml", "y=2"], ["x=1", "y=2"]), (["b.yaml", "-c", "a.yaml"], ["b.yaml"]),
])  # fmt: skip
def test_a_configuration_is_named_with_or_without_config(monkeypatch, capsys, command, words, overrides) -> None:
    named, done = configuration.named, []

    def note(*args):
        done.append(named(*args))
        raise typer.Exit

    monkeypatch.setattr(f"sagetrain.cli.{command}.named", note)
    run_main(capsys, command, *words)
    assert done == [(Path("a.yaml"), overrides)]


@pytest.mark.parametrize(("words", "code", "said"), [
    (["eval", "none"], 3, "there is no folder none; name the folder of a run"),
    (["generate", "none", "def"], 3, "there is no folder none; name the folder of a run"),
    (["export", "none", "folder"], 3, "there is no folder none; name the folder of a run"),
    (["diagnose", "none"], 3, "there is no folder none; name the folder of a run"),
    (["import", "none", "run"], 2, "none: no such folder; a model of the Hugging Face hub"),
])  # fmt: skip
def test_a_path_without_a_run_is_refused_before_torch(monkeypatch, capsys, tmp_path, words, code, said) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("inference.load", "interop.exporting", "interop.importing", "data.chat_template"):
        monkeypatch.setitem(sys.modules, f"sagetrain.{name}", None)  # An import fails then.
    assert main(words) == code
    assert f"error: {said}" in capsys.readouterr().err


def test_a_variable_that_torch_refuses_is_one_line(monkeypatch, capsys) -> None:
    for name in [name for name in os.environ if "TORCH" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_LOGS", "bad")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for name, ends in (("torch._logging", SystemExit), ("sagetrain.cli", ValueError)):
        with pytest.raises(ends), Errors():
            exec("raise ValueError('no such log.\\nThere are: all')", {"__name__": name})
    said = "error: torch cannot be imported: no such log; correct or unset what is wrong of TORCH_LOGS=bad\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/gone")
    for file, ends in (("/gone/x", SystemExit), ("/torch/lib", OSError)):  # The other is of the installation.
        with pytest.raises(ends), Errors():
            exec(f"raise OSError(30, 'Read-only file system', '{file}')", {"__name__": "torch._dynamo.package"})
    assert "Read-only file system: '/gone/x'; correct or unset what is wrong of TORCHI" in capsys.readouterr().err


LONG = "data.valid=[" + 300 * "x" + "]"  # This is no name of a file.


@pytest.mark.parametrize(
    "words", [(None, None), ("", None), ("optimizer.lr=1", None), ("optimizer.lr=1", ["x=2"]), (LONG, None)]
)
def test_a_configuration_that_is_not_named(words) -> None:
    with pytest.raises(ConfigError, match=r"name a configuration: sagetrain train my\.yaml"):
        configuration.named("train", words[0], None, words[1])
    with pytest.raises(ConfigError, match=r"--config a\.yaml and b\.yaml: name one configuration"):
        configuration.named("train", words[0], [Path("a.yaml"), Path("b.yaml")], words[1])


@pytest.mark.parametrize(("number", "code", "said"), [
    (errno.EROFS, 2, "page.html cannot be written: Read-only file system; choose another place for it"),
    (errno.EDQUOT, 3, "page.html: Disk quota exceeded; free some space of your quota (quota -s), or have it raised,"),
])  # fmt: skip
def test_a_page_that_cannot_be_written_is_one_line(monkeypatch, capsys, tmp_path, number, code, said) -> None:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "page.html"))

    monkeypatch.setattr("sagetrain.report.page.write_report", fail)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["plan", "--keys"]])
def test_a_full_disk_under_standard_output_is_one_line(words: list[str]) -> None:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        process = [sys.executable, "-m", "sagetrain", *words]
        pipes = {"stdout": full, "stderr": subprocess.PIPE}
        done = subprocess.run(process, **pipes, env=buffered, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 3
    advice = "free some space and run the same command again"
    assert done.stderr == f"error: standard output: No space left on device; {advice}\n"


def test_the_command_alone_shows_its_help() -> None:
    done = sagetrain()
    assert done.returncode == 2 and "Usage: sagetrain" in done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(typer.main.get_group(cli.app).commands))
def test_help_of_every_command_has_an_example(name: str) -> None:
    text = typer.main.get_group(cli.app).commands[name].help
    assert re.search(rf"^ *(sagetrain|torchrun \S+ \S+ -m sagetrain) {name} \S", text, re.M)


@pytest.mark.parametrize(("words", "said"), [
    (["plan", "minimal", "--optimizer.lr=1"], "error: --optimizer.lr=1: keys of the YAML go without dashes: opt"),
    (["train", "minimal", "--training.run_dir", "x"], "keys of the YAML go without dashes: training.run_dir=x"),
    (["prepare", "none", "-o", "none", "--tokenizer-sample", 0], "--tokenizer-sample"),
    (["prepare", __file__, "-o", "x", "--tokenizer=~/none.model"], f"tokenizer {Path.home()}/none.model: No such"),
    (["prepare", os.__file__, "-o", "x", "--vocab-size=300", "--split-on=~/no at"], "--split-on '~/no at' is nowhere"),
    (["plan", "--keys", "global_batch_size"], "; the key here is tokens_per_step.tokens (of a step of all"),
    (["plan", "--keys", "optimiser"], "error: --keys optimiser: no key has this in its name; did you mean optimizer"),
    (["plan", "minimal", "optimizer.lr", "=", "1"], "must be dotted.key=value in one word"),
    (["eval", "none", "--num-sequences", 0], "--num-sequences"),
    (["compare", "minimal", LONG, "--band", 1], "must be a section: {path, weight}"),
    (["eval", "none", "--num-sequences", -3], "--num-sequences"),
    (["generate", "none", "--seed", 2**64], "--seed"),
    (["generate", ".", "--temperature", 1e-40], "error: --temperature 1e-40: neither 0 nor at least 1e-6"),
    (["generate", "none", "--temperature", "nan"], "--temperature"),
    (["generate", ".", b"caf\xe9"], "error: the prompt 'caf\\udce9' is not UTF-8"),
    (["plan", "x" * 300], "File name too long; name a shorter path"),
])  # fmt: skip
def test_arguments_that_are_refused(capsys, words: list[object], said: str) -> None:
    assert main([os.fsdecode(word) if isinstance(word, bytes) else str(word) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_a_user_without_a_home_folder_runs_commands(monkeypatch, capsys) -> None:
    """Containers are run with numbers of users that no file of the image knows."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert main(["--version"]) == 0 and main(["config", "none", "--out=~/a"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("run_dir", "said"), [
    ("file", "{}/file is no folder that can be written to [run_dir]"),
    ("file/run", "{}/file is no folder that can be written to [run_dir]"),
    ("/proc/none/run", "/proc/none/run cannot be used: /proc/none"),
])  # fmt: skip
def test_a_run_dir_that_cannot_be_used_is_one_line(corpus: Path, tmp_path: Path, run_dir: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / run_dir
    config = write_config(tmp_path / "run.yaml", corpus, folder)
    done = sagetrain("train", "--config", config)
    assert done.returncode == 2
    assert "error: " in done.stderr and "training.run_dir" in done.stderr and said.format(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_no_number_of_an_option_is_infinite_or_nan(capsys) -> None:
    """Limits such as `min` let NaN pass, and infinity. A new option of a command is tried here as well."""
    options = {
        (verb, f"--{name.replace('_', '-')}")
        for verb, function in cli.VERBS.items()
        for name, kind in get_type_hints(function).items()
        if kind is float or float in get_args(kind)
    }
    assert {("plan", "--network-gbps"), ("plan", "--host-memory"), ("prepare", "--valid-fraction")} < options
    for verb, option in sorted(options):
        for value in ("nan", "inf", "-inf", "-1"):
            output = ["--output=out"] if verb == "prepare" else []
            assert main([verb, "configs", *output, f"{option}={value}"]) == 2
            assert option in capsys.readouterr().err
    assert main(["plan", "configs/1b.yaml", "--network-gbps", "0"]) == 2


def test_a_command_in_a_folder_that_is_gone(tmp_path: Path, monkeypatch, capsys) -> None:
    """Somebody has deleted the folder of the shell, or made it anew. Paths of it lead nowhere."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["plan", "minimal"]) == 2
    assert "error: the folder in which this command was started is gone" in capsys.readouterr().err

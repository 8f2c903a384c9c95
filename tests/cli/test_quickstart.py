"""`make quickstart` ends with commands to be copied, a page, and what comes next. Tests of the runs are elsewhere."""

import importlib.util
import io
import sys
from types import ModuleType

import pytest
from rich.console import Console

from documented import sagetrain, split
from runs import BIN, ROOT


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "launch/quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.console = Console(file=io.StringIO(), width=60)
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    return module


def test_it_ends_with_a_page_a_sample_and_working_commands(quickstart, monkeypatch) -> None:
    done: list[str] = []
    for name in ("train_and_stop_in_the_middle", "loss_table"):
        monkeypatch.setattr(quickstart, name, lambda *_: "")
    monkeypatch.setattr(quickstart, "run", done.append)
    monkeypatch.setattr(quickstart, "rows", lambda key: [])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # The environment is not activated.
    quickstart.main()
    assert [command.split()[1] for command in done[-3:]] == ["eval", "generate", "report"]
    lines = quickstart.console.file.getvalue().splitlines()
    page = (ROOT / "runs/quickstart/report.html").as_uri()
    assert f"  {page}" in lines and done[-1].endswith("-o runs/quickstart/report.html")
    assert f"Next, in {ROOT}:" in lines
    said = [line.strip() for line in lines if line.startswith("  ") and "/bin/" in line and page not in line]
    assert len(said) == len(quickstart.NEXT)
    for line in said:
        program, *_ = line.split()
        assert (ROOT / program).exists(), "relative to the folder that is named"
        for words in split(line.removeprefix(program.removesuffix(program.split("/")[-1]))):
            sagetrain(words[1:])


def test_commands_are_whole_and_omit_a_folder_that_is_on_path(quickstart, monkeypatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(quickstart.subprocess, "Popen", lambda words, **how: started.append(words))
    command = f"sagetrain plan configs/quickstart.yaml --world-size 2 {' '.join(5 * ['a.long.key=[value,value]'])}"
    for path in ("/usr/bin:/bin", f"{BIN}:/usr/bin"):
        monkeypatch.setenv("PATH", path)
        quickstart.start(command)
    with_folder, without = (line for line in quickstart.console.file.getvalue().splitlines() if line)
    assert without == f"$ {command}" and with_folder.endswith(f"/bin/{command}")
    assert started[0] == started[1] == command.split()

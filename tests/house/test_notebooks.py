"""The notebooks of docs/notebooks: a kernel of Jupyter runs each from top to bottom, in a folder of its own. The kernel
is forked from a process that has imported everything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forked import PATIENCE
from runs import ROOT
from stand_in import stand_in

if TYPE_CHECKING:
    import nbformat

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def kinds(notebook: nbformat.NotebookNode) -> list[set[str]]:
    """Return the kinds of outputs of each cell of code. Warnings of libraries (stderr) are left out."""
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return [{out.output_type for out in outs if out.get("name") != "stderr"} for outs in cells]


SHORTER = {"40_960": "20_480", "10_240": "5_120", "61_440": "15_360", "30_720": "7_680"}
"""The tokens of a run and of its evaluations have these values as shown, and those values in the test."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_did(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Collecting the tests would wait for these imports.
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # The reason is in tests/conftest.py.
    shown = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub("|".join(SHORTER), lambda number: SHORTER[number[0]], cell.source)
    kernel = AsyncKernelManager()
    kernel.kernel_spec.argv[0] = str(stand_in(tmp_path))
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, km=kernel, timeout=PATIENCE, iopub_timeout=PATIENCE, resources=folder).execute()
    # A library may print a line more on another machine.
    pairs = zip(kinds(shown), kinds(notebook), strict=True)
    assert not [(cell, there, found) for cell, (there, found) in enumerate(pairs) if not there <= found]
    assert any(kinds(shown))
    # Notebooks that run in one folder do not break each other.
    assert {each.name for each in tmp_path.iterdir() if each.is_dir()} <= {path.stem}


def test_there_is_one_of_a_whole_run_and_one_of_an_import() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["finetune", "pretrain"]

"""Runs whose folder was moved or copied, or that are used from another folder than before. Their data is found, or the
error says how to point to it."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from runs import finish, sagetrain, write_config
from sagetrain.config import ConfigError
from sagetrain.config.schema import DataConfig, DataSource
from sagetrain.inference.evaluate import evaluate
from sagetrain.inference.load import TrainedRun, load_run, with_data
from sagetrain.inference.located import located


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder with data and a run of two steps, whose paths are relative to the folder."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(corpus, folder / "data/docs")
    tree = {"training": {"total_tokens": 512}, "lr_schedule": {"warmup_tokens": 0}}
    config = write_config(folder / "run.yaml", Path("data/docs"), Path("runs/first"), **tree)
    tree = yaml.safe_load(config.read_text())
    tree["tokens_per_step"], tree["checkpoint"] = {"schedule": "constant", "tokens": 256}, {}
    config.write_text(yaml.safe_dump(tree))
    finish("sagetrain", config)
    return folder


@pytest.fixture(scope="module")
def run(project: Path) -> TrainedRun:
    return load_run(project / "runs/first", print)


def moved(run: TrainedRun, run_dir: Path, root: Path | None = None) -> tuple[DataConfig, list[str]]:
    said: list[str] = []
    return with_data(run, run_dir, root, said.append).cfg.data, said


def test_eval_and_diagnose_run_from_another_folder(project, tmp_path, monkeypatch):
    """The commands run in a folder that holds nothing."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(project, tmp_path / "elsewhere/project")
    for words in (["eval", "--num-sequences", "4", "--json"], ["diagnose"]):
        done = sagetrain(words[0], tmp_path / "elsewhere/project/runs/first", *words[1:])
        assert done.returncode == 0, done.stderr
        assert f"data.valid is read from {tmp_path}/elsewhere/project/data/docs/valid" in done.stderr
    shutil.move(tmp_path / "elsewhere/project/data/docs", tmp_path / "store")
    lone = tmp_path / "elsewhere/project/runs/first"
    for command in ("eval", "diagnose"):
        done = sagetrain(command, lone)
        assert done.returncode == 2 and "data.valid: data/docs/valid is not here (looked for from" in done.stderr
        assert "with --data-root, or copy it there" in done.stderr
    found = sagetrain("eval", lone, "--num-sequences", "4", "--json", "--data-root", tmp_path / "store")
    assert found.returncode == 0 and json.loads(found.stdout)["all"]["unigram_loss"] is not None, found.stderr


def test_where_data_is_looked_for(project, run, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    assert moved(run, project / "runs/first") == (run.cfg.data, [])
    assert moved(run, Path("runs/first")) == (run.cfg.data, [])
    monkeypatch.chdir(tmp_path)
    data, said = moved(run, project / "runs/first")
    assert data.valid[0].path == f"{project}/data/docs/valid"
    assert said == [f"data.{name} is read from {project}/data/docs/{name}" for name in ("train", "valid")]
    # A run folder was renamed, somewhere below a folder that holds the data.
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "data").symlink_to(project / "data")
    assert moved(run, tmp_path / "archive/2026/second")[0].valid[0].path == f"{tmp_path}/data/docs/valid"


@pytest.mark.parametrize("root", ["", "data", "data/docs"])
def test_a_folder_that_holds_the_data(project, run, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    data, _ = moved(run, tmp_path / "lone", project / root)
    assert data.train[0].path == f"{project}/data/docs/train" and data.valid[0].path == f"{project}/data/docs/valid"
    with pytest.raises(ConfigError, match=r"--data-root .*: data.valid \(data/docs/valid\) is not there"):
        moved(run, project / "runs/first", tmp_path)


def test_absolute_paths_and_patterns(project, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = DataConfig(
        train=[DataSource(path="/old/project/data/docs/tra*")], valid=[DataSource(path="/old/project/data/docs/valid")],
        seq_length=32, micro_batch_size=1,
    )  # fmt: skip
    found = located(began, "/old/project/runs/first", project / "runs/first", {}, None, print)
    assert [found.train[0].files, found.valid[0].path] == [
        [f"{project}/data/docs/train"], f"{project}/data/docs/valid"
    ]  # fmt: skip
    assert found.tokenizer is None  # The tokenizer lies beside the data.
    gone = began.model_copy(update={"train": [DataSource(path="/old/none/train")]})
    found = located(gone, "/old/project/runs/first", project / "runs/first", {}, None, print)
    assert found.tokenizer == str(project / "runs/first/tokenizer.model")
    found = located(began, "/old/project/runs/first", tmp_path, {}, project, print)
    assert found.valid[0].path == f"{project}/data/docs/valid"


def test_the_checksums_decide_between_files_of_one_name(project, run, tmp_path, monkeypatch):
    """The folder that the command is called from holds other data under the same path."""
    other = shutil.copytree(project / "data", tmp_path / "data") / "docs/valid.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"sha256": "0" * 64}))
    monkeypatch.chdir(tmp_path)
    data, said = moved(run, project / "runs/first")
    assert data.valid[0].path == f"{project}/data/docs/valid" and data.train[0].path == "data/docs/train"
    data, said = moved(run, tmp_path / "lone")
    assert data.valid[0].path == "data/docs/valid"
    assert said == ["data.valid is not what the run had: its checksums in .json are others (prepared again?)"]


def test_losses_of_a_moved_run_are_those_of_before(project, run, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    before = evaluate(run, 4)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"data.valid: data/docs/valid is not here"):
        evaluate(run, 4)
    assert evaluate(with_data(run, project / "runs/first", None, print), 4) == before

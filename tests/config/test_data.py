"""Data sources of many files, weights by size, and the errors that the rules find in them."""

import json
from pathlib import Path

import pytest

from checked_config import run_config
from runs import ROOT
from sagetrain.config import ConfigError, RunConfig, load_config
from sagetrain.config.rules.data import WRITTEN, findings, repeats

QUICKSTART = ROOT / "configs/quickstart.yaml"


def config(*train: dict, run_dir: Path | str = "x", **training: str) -> RunConfig:
    return run_config(data={"train": list(train)}, training={"run_dir": str(run_dir), "total_tokens": 1000, **training})


@pytest.fixture
def parts(tmp_path) -> str:
    """A pattern for two of three parts, of 100 and 500 tokens, with a tokenizer beside them."""
    for number, tokens in ((1, 100), (3, 500)):
        name = f"web-{number:05}-of-00003"
        (tmp_path / f"{name}.bin").write_bytes(bytes(2 * tokens))
        (tmp_path / f"{name}.idx").write_bytes(bytes(17) + b"\x08")
        (tmp_path / f"{name}.json").touch()
    (tmp_path / "tokenizer.model").touch()
    return str(tmp_path / "web-*")


def test_a_pattern_stands_for_the_files_that_are_there(tmp_path, parts):
    cfg = config({"path": parts})
    assert cfg.data.train[0].files == [f"{tmp_path}/web-00001-of-00003", f"{tmp_path}/web-00003-of-00003"]
    assert cfg.data.tokenizer_path == f"{tmp_path}/tokenizer.model"
    (tmp_path / "a[1].idx").touch()
    # This is the name of a file and no pattern.
    assert config({"path": f"{tmp_path}/a[1]"}).data.train[0].files == [f"{tmp_path}/a[1]"]


def test_missing_parts_are_named(parts):
    missing, repeats = findings(config({"path": parts}), required=True)
    assert (missing.rule, missing.level, missing.value) == ("missing_parts", "warning", parts)
    assert missing.message == "of 3 parts of web there are 2; the first that is missing: 2"
    assert "--shard 2/3" in missing.fix
    assert "holds 600 tokens, which training.total_tokens passes over 1.7 times" in repeats.message


def test_a_pattern_without_files_is_named(tmp_path, parts):
    found = list(findings(config({"path": parts}, {"path": f"{tmp_path}/none-*"}), required=True))
    (missing,) = [finding for finding in found if finding.rule == "data_files"]
    assert (missing.level, missing.key, missing.value) == ("error", "data.train.1.path", f"{tmp_path}/none-*")
    assert "no token file of this pattern" in missing.message


def test_proportional_shares_are_passed_over_equally_often(tmp_path, parts):
    sources = [{"path": f"{tmp_path}/web-0000{n}-of-00003", "weight": "proportional"} for n in (1, 3)]
    found = [finding for finding in findings(config(*sources), required=True) if finding.rule == "data_repeats"]
    assert [finding.message.split("passes over ")[1] for finding in found] == ["1.7 times", "1.7 times"]


def test_four_passes_that_are_few_steps_need_smaller_ones(parts):
    def fix(tokens: int) -> str:
        cfg = run_config(data={"train": [{"path": parts}]}, training={"total_tokens": 10**6},
                         tokens_per_step={"schedule": "constant", "tokens": tokens})  # fmt: skip
        (finding,) = repeats(cfg)
        return finding.fix

    few = ". That is below 100 steps of 32 tokens: take fewer tokens_per_step, too"
    assert "training.total_tokens=2_400, for four passes" in fix(32) and fix(32).endswith(few)
    assert fix(24).endswith("nearly as good as new text")


def test_proportional_does_not_mix_with_numbers():
    mixed = config({"path": "a", "weight": "proportional"}, {"path": "b", "weight": 2.0})
    (finding,) = [finding for finding in findings(mixed, required=False) if finding.rule == "mixed_weights"]
    assert (finding.level, finding.key, finding.value) == ("error", "data.train.1.weight", 2.0)
    assert "make all of them proportional or all numbers" in finding.fix


def test_documents_that_begin_otherwise_are_named(tmp_path):
    """Documents must begin like the other documents that are trained on, and like those that the initial model has
    learned."""

    def found(*train: dict, **training: str) -> list[str]:
        cfg = config(*train, **training)
        warnings = [finding for finding in findings(cfg, required=False) if finding.rule == "text_prefix"]
        assert all("prepare it again (--overwrite)" in finding.fix for finding in warnings)
        return [f"{finding.key} {finding.value} {finding.message}" for finding in warnings]

    chats = {"records": {"template_sha256": "c"}}
    for name, request in (("bos", {"prefix": [5]}), ("old-1", {}), ("old-2", {}), ("chats", chats)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"tokenizer_sha256": "a", "request": request}))
        (tmp_path / f"{name}.idx").touch()
    (tmp_path / "elsewhere.idx").touch()
    bos, old, others = ({"path": f"{tmp_path}/{name}"} for name in ("bos", "old-*", "[ce]*"))
    assert found(bos, others) == found(old, others) == []
    said = f"data.train.1.path {tmp_path}/old-1 documents do not begin with tokens [5] in 2 of 2 files of this source"
    (line,) = found(bos, old)
    assert line.startswith(f"{said}, but those of {tmp_path}/bos do")
    folder = tmp_path / "start/checkpoints/step-00000010"
    folder.mkdir(parents=True)
    for learned, count in (([5], 1), ([], 0), (None, 0)):
        (folder / "manifest.json").write_text(json.dumps({"state": {"text_prefix": learned}}))
        lines = found(others, old, init_from=str(tmp_path / "start"))
        assert lines == [line.replace(f"{tmp_path}/bos", f"{tmp_path}/start")] * count
        assert found(bos, init_from=str(folder)) == []


def test_chats_of_other_templates_are_named(tmp_path):
    chats = {"records": {"template_sha256": "c"}}
    for name, record in (("old", {}), ("a-1", {"chat_template": "A"}), ("a-2", {"chat_template": "B"})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"request": chats, **record}))
        (tmp_path / f"{name}.idx").touch()
    (tmp_path / "text.json").write_text(json.dumps({"request": {}}))
    (tmp_path / "text.idx").touch()

    def found(*names: str) -> list[str]:
        tree = config(*({"path": f"{tmp_path}/{name}"} for name in names))
        warnings = [finding for finding in findings(tree, required=False) if finding.rule == "chat_template"]
        return [f"{finding.key} {finding.value} {finding.message}" for finding in warnings]

    assert found("text", "a-1") == []
    (line,) = found("text", "a-*")
    written = f"its chats were written by another chat template than those of {tmp_path}/a-1"
    assert line.startswith(f"data.train.1.path {tmp_path}/a-2 {written}")
    (line,) = found("old", "a-1")
    assert line.startswith(f"data.train.0.path {tmp_path}/old an earlier version prepared its chats")


@pytest.mark.parametrize("weight", ["-1", "proportinal", "[1]"])
def test_a_weight_is_a_number_or_proportional(weight):
    with pytest.raises(ConfigError) as raised:
        load_config(QUICKSTART, [f"data.train.0.weight={weight}"])
    (line,) = str(raised.value).splitlines()[1:]
    assert "must be a number above 0 or proportional" in line
    assert ("did you mean proportional?" in line) == (weight == "proportinal")


@pytest.mark.parametrize(("given", "fix"), [
    ("data/train.bin", "leave .bin out: {0}/data/train"),
    ("data/train.idx", "leave .idx out: {0}/data/train"),
    ("data", "it is a folder: name one of {0}/data/train, {0}/data/valid"),
    ("text.jsonl", "it is text: make a token file of it with `sagetrain prepare`"),
    ("links/gone", "{0}/links/gone.bin is a link to nowhere, which is not there: copy the folder with the files that "
     "its links stand for (cp -rL)"),
    ("links/annex", "{0}/links/annex.idx is a pointer of git-annex, not the file: run `git annex get` in the folder"),
])  # fmt: skip
def test_a_path_close_to_a_token_file_suggests_the_file(tmp_path, given, fix):
    (tmp_path / "data").mkdir()
    for name in ("data/train.bin", "data/train.idx", "data/valid.bin", "data/valid.idx", "text.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "links").mkdir()
    (tmp_path / "links/gone.bin").symlink_to("nowhere")
    (tmp_path / "links/annex.idx").symlink_to("../.git/annex/objects/x/y")
    (finding, *_) = findings(config({"path": f"{tmp_path}/{given}"}), required=True)
    assert (finding.rule, finding.key) == ("data_files", "data.train.0.path")
    assert finding.fix == fix.format(tmp_path)


@pytest.mark.parametrize(("required", "level"), [(True, "error"), (False, "warning")])
def test_a_folder_with_files_of_somebody_else_is_no_run_dir(tmp_path, parts, required, level):
    """A run's files would replace others there: a configuration with comments, or a tokenizer beside its data."""
    folder = tmp_path / "run"
    folder.mkdir()

    def found() -> list:
        return [f for f in findings(config({"path": parts}, run_dir=folder), required) if f.rule == "run_dir"]

    (folder / "notes.txt").touch()
    (folder / "checkpoints").mkdir()  # Other projects have such a folder, too.
    assert found() == []
    for name in ("tokenizer.model", "config.yaml"):
        (folder / name).touch()
    (finding,) = found()
    assert (finding.level, finding.key) == (level, "training.run_dir")
    assert "holds config.yaml and tokenizer.model, which no run of SageTrain wrote there" in finding.message
    pages = (ROOT / "docs/run-folder.md").read_text()
    assert [name for name in WRITTEN if f"`{name}`" not in pages and f"`{name}/`" not in pages] == []
    (folder / ".lock").touch()  # A run was here and left its lock.
    assert found() == []
    (folder / ".lock").unlink()
    (folder / "checkpoints/step-00000010").mkdir()  # A run was copied to here without its lock.
    assert found() == []


def test_the_place_of_what_a_run_writes_is_free(tmp_path, parts, monkeypatch):
    def errors(run_dir: str = "run") -> list[str]:
        found = findings(config({"path": parts}, run_dir=tmp_path / run_dir), required=False)
        return [f"{each.key}: {each.message}" for each in found if each.level == "error"]

    (tmp_path / "run").symlink_to(tmp_path / "gone")  # mkdir would fail.
    assert errors() == [f"training.run_dir: {tmp_path}/run is no folder that can be written to"]
    (tmp_path / "run").unlink()
    for name in (".lock", "metrics.jsonl", "stacks"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in ("checkpoints", "tensorboard"):
        (tmp_path / "run" / name).touch()
    assert errors() == [
        f"training.run_dir: {tmp_path}/run/{name} is no {kind} that can be written to"
        for kind, names in (("folder", ("checkpoints", "tensorboard")), ("file", (".lock", "metrics.jsonl")))
        for name in names
    ]
    (tmp_path / "other/checkpoints/latest").mkdir(parents=True)
    (tmp_path / "other/checkpoints/step-00000040").touch()
    assert errors("other") == [
        f"training.run_dir: {tmp_path}/other/checkpoints/{name} is no {kind} that can be written to"
        for name, kind in (("step-00000040", "folder"), ("latest", "file"))
    ]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "run/checkpoints/inductor"))
    assert errors("new") == [f"TORCHINDUCTOR_CACHE_DIR: {tmp_path}/run/checkpoints is no folder that can be written to"]


def test_variables_in_paths_are_named():
    found = [each for each in findings(config({"path": "$DATA/x"}, {"path": "price$"}), required=False)
             if each.rule == "path_not_expanded"]  # fmt: skip
    assert [(each.level, each.key) for each in found] == [("error", "data.train.0.path")]
    assert 'begin it with ~ for the home folder; the shell replaces "data.train.0.path=$HOME/..."' in found[0].fix


def test_a_file_that_two_sources_name_is_said(parts):
    cfg = config({"path": parts}, {"path": parts.replace("*", "00003-of-00003")})
    found = [finding for finding in findings(cfg, required=False) if finding.rule == "source_twice"]
    assert [(each.level, each.key) for each in found] == [("warning", "data.train.1.path")]
    assert "web-00003-of-00003, as data.train.0 does" in found[0].message


def test_a_folder_in_the_place_of_a_file_gets_its_own_fix(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text("{}")
    cfg = run_config(data={"tokenizer": str(tmp_path)}, training={"init_from": str(tmp_path)})
    found = {finding.key: finding for finding in findings(cfg, required=True)}
    tokenizer, start = found["data.tokenizer"], found["training.init_from"]
    assert (tokenizer.message, tokenizer.fix) == ("is a folder, not a file", f"name {tmp_path}/tokenizer.json")
    assert start.fix == f"read it first, `sagetrain import {tmp_path} RUN`, and name RUN"


@pytest.mark.parametrize(
    ("total", "level", "passes"), [(100, None, ""), (104, None, ""), (300, "info", "3.0"), (500, "warning", "5.0")]
)
def test_passes_over_the_data_are_told(tmp_path, total: int, level: str | None, passes: str):
    index = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8])
    for name, tokens in (("few", 25), ("many", 10**6)):
        (tmp_path / f"{name}.bin").write_bytes(bytes(2 * tokens))
        (tmp_path / f"{name}.idx").write_bytes(index)
    data = {"train": [{"path": f"{tmp_path}/few", "weight": 1}, {"path": f"{tmp_path}/many", "weight": 3}]}
    found = list(repeats(run_config(data=data, training={"total_tokens": total})))
    assert [(f.level, f.key) for f in found] == ([(level, "data.train.0.path")] if level else [])
    assert not level or f"holds 25 tokens, which training.total_tokens passes over {passes} times" in found[0].message
    assert (level == "warning") == any("training.total_tokens=400, for four passes" in each.fix for each in found)

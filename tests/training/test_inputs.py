"""`plan` finds every error in the files at hand that `train` would refuse. Each refusal before the first step is tried
here with real files, or is excused by name."""

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from manifests import rewrite
from runs import ROOT, write_config
from sagetrain.config import ConfigError, load_config
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.costs.hardware import H200
from sagetrain.data.token_file import token_path
from sagetrain.data.tokenizer import Tokenizer, known_tokenizer
from sagetrain.planning.plan import make_plan
from sagetrain.training import inputs
from sagetrain.training.build_run import build


class World:
    """Copies of the token files and of a finished run, and a configuration that fits both."""

    def __init__(self, folder: Path, corpus: Path, pair: Path) -> None:
        self.data, self.run = shutil.copytree(corpus, folder / "data"), shutil.copytree(pair, folder / "run")
        self.config = write_config(folder / "run.yaml", corpus, folder / "new", tp_size=2)
        self.overrides = [f"data.{name}.0.path={self.data}/{name}" for name in ("train", "valid")]

    @property
    def newest(self) -> Path:
        return sorted(self.run.glob("checkpoints/step-*"))[-1]

    def write(self, name: str, tokens: np.ndarray, **recorded: object) -> None:
        writer = TokenFileWriter(self.data / name).begin(512)
        writer.add(tokens.astype(np.int32), np.array([len(tokens)]))
        writer.finish()
        writer.publish(dict(recorded))

    def record(self, name: str, **changes: object) -> None:
        file = self.data / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def other_tokenizer(self) -> bytes:
        return train_tokenizer([Path(__file__).read_text()], 512)

    def resume(self, *overrides: str, manifest: Callable[[dict], object] | None = None) -> None:
        """Go on with the run on the data that it was trained on. `manifest` changes that of its newest checkpoint."""
        self.overrides = []
        self._from("run_dir", overrides, manifest)

    def begin(self, *overrides: str, manifest: Callable[[dict], object] | None = None) -> None:
        self._from("init_from", overrides, manifest)

    def _from(self, key: str, overrides: Sequence[str], manifest: Callable[[dict], object] | None) -> None:
        self.overrides += [f"training.{key}={self.run}", *overrides]
        if manifest:
            rewrite(self.newest, manifest)


def imported(tree: dict) -> None:
    tree["state"].update(imported={"tokens": {}})


def cut_index(world: World) -> None:
    file = token_path(world.data / "train", ".idx")
    file.write_bytes(file.read_bytes()[:-1])


def changed_token(world: World) -> None:
    file = token_path(world.data / "valid", ".bin")
    file.write_bytes(b"\1\0" + file.read_bytes()[2:])


def foreign_tokens_in_a_large_file(world: World) -> None:
    world.write("train", np.append(np.zeros(9999), 600))
    inputs._READ_TOKENS = 100


def records_that_see_one_another(world: World) -> None:
    world.record("train", seq_length=32)
    world.overrides += ["data.document_attention=false", "data.document_positions=false"]


def another_tokenizer_by_name(world: World) -> None:
    (world.data / "other.model").write_bytes(world.other_tokenizer())
    world.overrides.append(f"data.tokenizer={world.data}/other.model")


def two_tokenizers_and_none_at_hand(world: World) -> None:
    world.record("valid", tokenizer_sha256="1" * 64)
    (world.data / "tokenizer.model").unlink()


def weights_of_another_tokenizer(world: World) -> None:
    model = world.other_tokenizer()
    (world.data / "tokenizer.model").write_bytes(model)
    for name in ("train", "valid"):
        world.record(name, tokenizer_sha256=Tokenizer(model).sha256)
    world.begin()


def weights_with_a_file_missing(world: World) -> None:
    world.overrides.append(f"training.init_from={world.newest}")
    next(world.newest.glob("shard-*")).unlink()


def weights_none_of_which_is_whole(world: World) -> None:
    for file in world.run.glob("checkpoints/*/shard-*"):
        os.truncate(file, 100)
    world.begin()


def weights_without_a_readable_manifest(world: World) -> None:
    (world.newest / "manifest.json").write_text("{}")
    world.begin()


def resumed_with_none_whole(world: World) -> None:
    for file in world.run.glob("checkpoints/*/shard-*"):
        file.unlink()
    world.resume()


def resumed_without_a_manifest(world: World) -> None:
    for file in world.run.glob("checkpoints/*/manifest.json"):
        file.unlink()
    world.resume()


def a_prompt_without_room(world: World) -> None:
    world.overrides += ["evaluation.samples_every_tokens=1", f"evaluation.samples_prompts=[short, {20 * 'long '}]"]


def a_run_folder_without_room(world: World) -> None:
    (world.config.parent / "new").mkdir()
    world.overrides.append(f"model.ffn_hidden_size={1 << 44}")


def resumed_with_states_that_lack_a_value(world: World) -> None:
    for folder in world.run.glob("checkpoints/step-*"):
        rewrite(folder, lambda tree: tree["state"].pop("sequences"))
    world.resume()


# Each row: what is wrong, how it comes about, the place where it is raised (file, function), and the message.
REFUSED: dict[str, tuple[Callable[[World], object], str, str, str]] = {
    "cut index": (cut_index, "token_file", "__init__", "the .idx has .* bytes where its header says"),
    "lost mask": (lambda world: world.record("train", mask_sha256="0" * 64),
        "token_file", "_open_mask", "which says what counts in the loss, does not exist"),
    "changed token": (changed_token, "token_file", "validate", "does not have the checksum that was recorded"),
    "too short": (lambda world: world.write("valid", np.arange(20)),
        "token_files", "__init__", "valid has 20 tokens, too few for one sequence of data.seq_length 32"),
    "foreign tokens": (lambda world: world.write("train", np.full(99, 600)),
        "token_file", "validate", "token 0 is outside of the vocabulary of 512"),
    "foreign tokens in a large file": (foreign_tokens_in_a_large_file,
        "token_files", "check_vocabulary", "holds token 600, outside of the vocabulary"),
    "broken record": (lambda world: (world.data / "valid.json").write_text("{"),
        "provenance", "read_provenance", "valid.json is not valid JSON"),
    "record that is a list": (lambda world: (world.data / "train.json").write_text("[]"),
        "provenance", "read_provenance", "train.json holds list, not keys"),
    "record of other types": (lambda world: world.record("train", request="none", seq_length="32"),
        "provenance", "read_provenance", "train.json: seq_length holds str, not int"),
    "records of another length": (lambda world: world.record("train", seq_length=24),
        "token_files", "_check_records", "sequences of 24 tokens .* would cut its records"),
    "records that see one another": (records_that_see_one_another,
        "token_files", "_check_records", "holds records, .* data.document_attention: true"),
    "another tokenizer": (lambda world: world.record("valid", tokenizer_sha256="1" * 64),
        "token_files", "check_tokenizers", "valid was prepared with another tokenizer than data"),
    "another tokenizer by name": (another_tokenizer_by_name,
        "token_files", "check_tokenizers", "was prepared with another tokenizer than data"),
    "two tokenizers and none at hand": (two_tokenizers_and_none_at_hand,
        "token_files", "check_tokenizers", "were prepared with different tokenizers"),
    "weights of another model": (lambda world: world.begin("model.ffn_hidden_size=96"),
        "init_from", "check", "model.ffn_hidden_size: 64 there, 96 here"),
    "weights of another tokenizer": (weights_of_another_tokenizer,
        "init_from", "check", r"tokenizer: .* there, .* here \(SHA-256\)"),
    "weights with a file missing": (weights_with_a_file_missing, "on_disk", "whole", "is damaged: .* is missing"),
    "weights none of which is whole": (weights_none_of_which_is_whole,
        "on_disk", "newest_whole", "no checkpoint is whole"),
    "weights without a readable manifest": (weights_without_a_readable_manifest,
        "init_from", "check", "manifest.json cannot be read"),
    "weights of other shapes": (
        lambda world: world.begin(manifest=lambda tree: tree["tensors"]["final_norm.gain"].update(shape=[1, 32])),
        "reading", "check_shapes", r"different in 1 tensor, first: final_norm.gain: .*\(1, 32\)"),
    "moments of an imported model": (lambda world: world.begin("training.init_moments=true", manifest=imported),
        "init_from", "check", "was imported and has weights alone"),
    "a run in an imported folder": (lambda world: world.resume(manifest=imported),
        "init_from", "check", "holds an imported model"),
    "never resumed": (lambda world: world.resume("checkpoint.resume=never"),
        "resume", "check", "checkpoint.resume is never"),
    "resumed with another seed": (lambda world: world.resume("training.seed=7"),
        "resume", "check", "training.seed: checkpoint 0, this run 7"),
    "resumed for fewer tokens": (lambda world: world.resume("training.total_tokens=14848"),
        "resume", "check", "total_tokens 14,848: the run in .* has already seen 15,360 tokens"),
    "resumed on other data": (lambda world: world.resume(f"data.train.0.path={world.data}/valid"),
        "resume", "check", "data.train: checkpoint .*train, this run .*valid"),
    "resumed with none whole": (resumed_with_none_whole, "on_disk", "newest_whole", "no checkpoint is whole"),
    "resumed without a manifest": (resumed_without_a_manifest, "on_disk", "newest_whole", "no checkpoint is whole"),
    "a prompt without room": (a_prompt_without_room,
        "inputs", "check_prompts", r"samples_prompts\.1 has .* tokens, more than half of the 32 "),
    "a run folder without room": (a_run_folder_without_room,
        "inputs", "check_disk", "a checkpoint takes .* the disk there has .* free"),
    "resumed with a newer state": (lambda world: world.resume(manifest=lambda tree: tree["state"].update(version=99)),
        "on_disk", "newest_whole", "has version 99, this SageTrain reads versions up to 1"),
    "resumed with states that lack a value": (resumed_with_states_that_lack_a_value,
        "on_disk", "newest_whole", "no checkpoint is whole"),
    "resumed with a forged ledger": (
        lambda world: world.resume(manifest=lambda tree: tree["state"]["ledger"].update(head="0" * 64)),
        "ledger", "verified", "ends in 000000000000, its steps give"),
}  # fmt: skip
ALONE = {"check_disk", "__init__", "_open_mask", "read_provenance", "_check_records", "check_tokenizers"}
"""The functions that a trainer calls before ranks meet. Later refusals are in test_resume.py."""
EXCUSED = {
    ("build_run", "check_files"): "attention and linear layers that this host's GPU cannot do: rules know the rest",
    ("build_run", "check_parts"): "a loss or tokens of a program's own",
    ("trainer", "__init__"): "a Trainer that a program builds by hand",
    ("resume", "restore"): "a stage of another length in a run whose steps were other ones before: rules know the rest",
    ("build_run", "check_host_memory"): "the memory of a host: plan takes it from --host-memory",
    ("masters", "check"): "what DeepSpeed keeps in memory",
    ("join", "init_distributed"): "the GPUs of a host",
    ("deepspeed_engine", "join_deepspeed"): "the environment of a host",
    ("interfaces", "use_interface"): "the network interfaces of a host",
    ("interfaces", "_check_named_interfaces"): "the network interfaces of a host, and its environment",
    ("preflight", "share"): "hosts that share no folder",
    ("preflight", "_exchange"): "hosts that differ",
    ("rendezvous", "meet"): "ranks that do not come",
    ("rendezvous", "listen"): "a port that is taken",
    ("rendezvous", "_reach"): "a host that is not reached",
    ("rendezvous", "_gather"): "ranks that do not come",
    ("run_folder", "claim"): "another run that has the folder at that moment",
    ("inputs", "_refuse_unknown"): "plan finds it (test_lm_eval.py), but listing the harness's tasks takes seconds",
    ("inputs", "_tasks"): "likewise",
    ("inputs", "refuse_generating"): "likewise",
    ("weights_and_biases", "on_start"): "a login",
    ("weights_and_biases", "check_login"): "a login of the host that trains",
    ("weights_and_biases", "_run_id"): "the run at Weights & Biases",
    ("rendezvous", "_make_room"): "the open files that a host allows",
    ("token_file", "_read"): "a file that is cut while it is read",
    ("token_file", "document_starts"): "a place in the middle of a large index, read with its sequence",
    ("token_file", "counted"): "a byte in the middle of a large mask, read with its sequence",
    ("tokenizer", "load"): "plan loads the tokenizer itself, and ends with the same message",
    ("manifest", "read_manifest"): "on_disk.problems says it",
    ("manifest", "_parsed"): "likewise",
    ("state", "from_json"): "likewise",
    ("state", "validated"): "likewise",
    ("on_disk", "whole_at"): "for eval and generate",
    ("reading", "_entry"): "after check_shapes",
    ("reading", "_range"): "weights that cannot be read: reading them all takes as long as loading them",
    ("reading", "rng"): "likewise",
    ("inputs", "_check_rights"): "a store in which nothing may be written: test_stores.py",
    ("on_disk", "remove"): "while training",
    ("ledger", "check_consumed"): "while training",
}
"""The refusals that a plan cannot make, and why."""


@pytest.fixture
def world(tmp_path: Path, corpus: Path, pair: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(inputs, "_READ_TOKENS", inputs._READ_TOKENS)
    return World(tmp_path, corpus, pair)


def planned(world: World, level: str) -> str:
    found = make_plan(world.config, world.overrides, 2, H200).findings
    return "\n".join(str(each) for each in found if each.level == level)


def test_what_fits_has_no_error_and_a_run_that_goes_on_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(world, "error") == ""
    world.begin()
    assert planned(world, "error") == "" and "new_positions" not in planned(world, "warning")
    world.begin("data.seq_length=64", "data.micro_batch_size=4")
    assert "made for sequences of 32 tokens, and RoPE rotates later positions" in planned(world, "warning")
    world.begin("model.rope_theta=5000")  # A faster RoPE is no remedy.
    assert "new_positions" in planned(world, "warning")
    world.begin("model.rope_theta=500000")  # The longer phase has a RoPE of its own.
    assert planned(world, "error") == "" and "new_positions" not in planned(world, "warning")
    world.resume()
    assert planned(world, "error") == ""
    assert "holds step-00000040: the run is finished there" in planned(world, "info")
    world.resume("training.total_tokens=14849")  # The last step would be the same.
    assert planned(world, "error") == ""
    world.resume("training.total_tokens=20000", "optimizer.lr=1e-3")
    assert planned(world, "error") == ""
    said = planned(world, "info")
    assert "goes on there, at 15,360 of 20,000 tokens; changed since: " in said
    assert "optimizer.lr: 0.003 -> 0.001; " in said and "training.total_tokens: 15360 -> 20000" in said
    assert "the learning rate goes from 2.36e-06 in the checkpoint's last step to" in planned(world, "warning")
    (world.newest / "config.yaml").unlink()
    assert "step-00000040 is damaged and passed over: " in planned(world, "warning")
    before = sorted(world.run.glob("checkpoints/step-*"))[-2].name
    assert f"holds {before}: the run goes on there" in planned(world, "info")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # Root may read everything.
    assert "no checkpoint is whole" in planned(world, "error")
    assert "checkpoints is no folder that can be written to" in planned(world, "warning")


def test_an_error_of_the_files_has_its_configuration_key(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.record("valid", tokenizer_sha256="1" * 64)
    line = 1 + world.config.read_text().splitlines().index("  valid:")
    assert f"{world.config}:{line}: data.valid = " in planned(world, "error")
    file = token_path(world.data / "train", ".idx")
    file.write_bytes(file.read_bytes()[:-16] + b"\x7f" * 8 + file.read_bytes()[-8:])
    assert "train: the document index is not in order" in planned(world, "error")

    def denied(file: object, path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("sagetrain.data.token_file.TokenFile.__init__", denied)  # Root may read everything.
    assert f"{world.data}/train: Permission denied" in planned(world, "error")


@pytest.mark.parametrize("wrong", REFUSED)
def test_plan_finds_what_train_refuses(world: World, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    raised = []

    def error(about: inputs.About, *words: str, original=inputs.About.error):
        trace = sys.exc_info()[2] if about.rule == "refused_by_train" else None
        while trace and trace.tb_next:
            trace = trace.tb_next
        if trace:
            raised.append((Path(trace.tb_frame.f_code.co_filename).stem, trace.tb_frame.f_code.co_name))
        return original(about, *words)

    monkeypatch.setattr(inputs.About, "error", error)
    spoil, *where, message = REFUSED[wrong]
    spoil(world)
    cfg = load_config(world.config, world.overrides)
    found = [str(each) for each in inputs.findings(cfg, known_tokenizer(cfg.data)) if each.level == "error"]
    assert {*raised} == {tuple(where)}, found
    assert all(re.search(message, said) for said in found), found
    alone = where[0] == "init_from" or (where[0] not in ("on_disk", "reading") and where[1] in ALONE)
    if alone and wrong != "two tokenizers and none at hand":
        with pytest.raises(ConfigError, match=message):
            build(cfg)


def test_every_refusal_before_the_first_step_is_found() -> None:
    names = {
        "training": "build_run trainer weights_and_biases init_from resume inputs",
        "engines": "deepspeed/deepspeed_engine deepspeed/masters",
        "cluster": "interfaces join preflight rendezvous run_folder",
        "checkpoint": "manifest on_disk reading ledger state",
    }
    files = [ROOT / f"sagetrain/{room}/{name}.py" for room, listed in names.items() for name in listed.split()]
    files += [ROOT / f"sagetrain/data/{name}.py" for name in ("loader", "token_files", "verify")]
    refusals = {(file.stem, name) for file in files for name in _refusing(ast.parse(file.read_text()))}
    tree = ast.parse((ROOT / "sagetrain/data/token_file.py").read_text())
    (reader,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TokenFile")
    refusals |= {("token_file", name) for name in _refusing(reader)} | {("provenance", "read_provenance")}
    refusals.add(("tokenizer", "load"))
    assert refusals == {*EXCUSED, *((file, name) for _, file, name, _ in REFUSED.values())}


def _refusing(tree: ast.AST) -> set[str]:
    """Return the functions that raise errors for users, apart from those that end a run that trains."""
    kinds = {"ConfigError", "CheckpointError", "RanksMissing", "PermissionError", "_damaged"}
    found = set()
    for function in ast.walk(tree):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else node.exc.func.attr
                if name in kinds or (name == "TrainingError" and function.name == "check_consumed"):
                    found.add(function.name)
    return found

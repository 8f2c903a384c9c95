"""The state of a run in a checkpoint: the states of older checkpoints are read, and older versions could read what is
written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from manifests import rewrite
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.state import VERSION, RunState, SettledLinear
from sagetrain.config.errors import CheckpointError, ConfigError
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training import resume
from sagetrain.training.init_from import differences

ORDER = "order of samples (hash of token files, weights, seq_length and seed)"
MODEL = {"num_layers": 2, "rope_theta": 500.0, "rope_scaling": None}
OF_A_RUN = {
    "step": 3,
    "tokens": 192,
    "sequences": 12,
    "ledger": {"head": "5f0c", "segments": [[0, 4, 3]], "dropped": [2]},
    "controllers": {"spikes": {"losses": [4.5, 4.25]}},
    "optimizer_steps": 12,
    "init_from": {
        "checkpoint": "/runs/first/checkpoints/step-00000010",
        "manifest (SHA-256)": "ab12",
        "step": 10,
        "tokens": 640,
        "optimizer_steps": 10,
        "imported tokens": {"eos_token_id": [2, 7]},
        "text_prefix": None,
        "chat_template": {"default": "A", "tools": "B"},
        "positions": {"length": 4096, "rope": {"rope_theta": 500.0, "rope_scaling": None}},
    },
    "text_prefix": [1],
    "chat_template": None,
    "identity": {
        "model": MODEL,
        "attention.qk_norm": "before_rope",
        "vocab_size": 128,
        "training.init_from": "/runs/first",
        "training.seed": 0,
        "data.seq_length": 16,
        "tokenizer (SHA-256)": None,
        ORDER: "77aa",
    },
    "engine": "fsdp",
    "attention": {"backend": "sage", "recipe": "fine"},
    "linear": {"precision": "int8", "keep_layers_below": 8192},
    "overlap": {"choice": "off", "layout": {"tensor_parallel_size": 2}},
    "files": {"tokenizer": "none", "data.train (checksums in .json)": "0011"},
    "guidance_overrides": ["lr_range"],
    "versions": {"sagetrain": "0.1", "torch": "2.11"},
}
"""The state as runs wrote it before it had a version."""
OF_AN_IMPORT = {
    "step": 0,
    "tokens": 0,
    "sequences": 0,
    "identity": {
        "model": MODEL,
        "attention.qk_norm": "none",
        "vocab_size": 32000,
        "data.seq_length": 4096,
        "tokenizer (SHA-256)": None,
    },
    "imported": {"architecture": "LlamaForCausalLM", "tokens": {"eos_token_id": 2}},
    "text_prefix": [1],
}
"""The state as imports wrote it."""


def read(tree: dict[str, Any]) -> RunState:
    return RunState.from_json(tree, Path("step-00000003"))


@pytest.mark.parametrize("before", [OF_A_RUN, OF_AN_IMPORT])
def test_the_written_keys_are_the_old_ones_and_a_version(before: dict[str, Any]) -> None:
    written = json.loads(json.dumps(read(before).to_json()))
    assert written == {"version": VERSION, **before}
    order = [key for key in written if key in before]
    assert order[:3] == ["step", "tokens", "sequences"] and read(written) == read(before)


def test_a_runs_own_texts_come_before_those_it_began_with() -> None:
    state, imported = read(OF_A_RUN), read(OF_AN_IMPORT)
    assert (state.texts.prefix, state.texts.end_tokens, state.positions.length) == ([1], [2, 7], 4096)
    assert state.texts.chat_template == {"default": "A", "tools": "B"}
    assert (imported.texts.prefix, imported.texts.end_tokens, imported.positions.length) == ([1], [2], 4096)


def test_a_state_of_before_some_keys_is_read() -> None:
    """Checkpoints of format 1 say nothing of controllers, overlap and the weights that a run began with."""
    later = {"controllers", "init_from", "chat_template", "text_prefix", "engine", "attention", "linear"}
    later |= {"overlap", "files"}
    state = read({key: value for key, value in OF_A_RUN.items() if key not in later})
    assert (state.step, state.controllers, state.init_from, state.overlap, state.files) == (3, {}, None, None, {})
    assert (state.texts.prefix, state.texts.end_tokens, state.positions.length) == ([], [], 16)


@pytest.mark.parametrize(("change", "words"), [
    ({"version": VERSION + 1}, rf"has version {VERSION + 1}, this SageTrain reads versions up to {VERSION}"),
    ({"version": "new"}, "has version new"), ({"step": "three"}, r"state\.step: Input should be a valid integer"),
    ({"sequences": None}, r"state\.sequences: missing"),
    ({"optimizer_steps": None}, r"state\.optimizer_steps: missing"),
    ({"identity": {**OF_A_RUN["identity"], "model": 7}}, r"state\.identity\.model: Input should be a valid dict"),
    ({"identity": {}, "tokens": None}, r"state\.tokens: missing; identity\.model: missing; identity\.attention"),
    ({"ledger": {"segments": [[0, "x", 1]]}}, r"state\.ledger\.segments\.0\.1: "),
    ({"linear": {"precision": "int3"}}, r"state\.linear\.precision: Input should be 'bf16'"),
    ({"tokens": 208}, r"state\.tokens: 208 are not 12 sequences of 16 tokens"),
    ({"step": 4}, r"state\.ledger: has 3 steps over 12 samples, the training state says 4 steps over 12"),
    ({"tokens": 208, "sequences": 13}, r"state\.ledger: has 3 steps over 12 samples, .* says 3 steps over 13"),
    ({"optimizer_steps": 13}, r"state\.optimizer_steps: 13, where the ledger has 12 updates at most"),
    ({"optimizer_steps": -1}, r"state\.optimizer_steps: -1, where"),
])  # fmt: skip
def test_what_is_missing_newer_or_contradicts_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^step-00000003: .*{words}"):
        read({**OF_A_RUN, **change})


def test_a_checkpoint_of_a_newer_version_is_not_damaged(tmp_path: Path) -> None:
    """The run does not set the newer checkpoint aside, and does not go on from an older one."""
    for step in (1, 2):
        tiny.save(tmp_path, ParallelGroups.single(), tiny.run_state(step, 4 * tiny.SEQ), ())
    rewrite(tmp_path / "step-00000002", lambda tree: tree["state"].update(version=VERSION + 1))
    with pytest.raises(CheckpointError, match="continue with the SageTrain that wrote it"):
        on_disk.newest_whole(tmp_path, print)
    on_disk.prune(tmp_path, keep_last=1, keep_every_tokens=None)
    assert len(on_disk.published(tmp_path)) == 2  # Checkpoints that cannot be read are left to people.


def test_the_written_state_does_not_change_during_training() -> None:
    state = tiny.run_state(1, 64, controllers={"spikes": {"losses": [1.0]}}, linear=SettledLinear("bf16"))
    tree = state.to_json()
    state.controllers["spikes"]["losses"].append(2.0)
    assert tree["controllers"] == {"spikes": {"losses": [1.0]}} and tree["linear"]["keep_layers_below"] == 0


def test_keys_of_the_model_that_came_later_have_their_defaults() -> None:
    identity = read(OF_A_RUN).identity
    now = replace(identity, model={**identity.complete.model, "qkv_bias": True})
    assert differences(identity, now) == ["model.qkv_bias: False there, True here"]
    assert differences(identity, replace(now, model={**now.model, "qkv_bias": False})) == []


WINDOWS = {"windows": {"tokens": 40, "pattern": "WF", "rope_theta": None}}


@pytest.mark.parametrize(("before", "now"), [(WINDOWS, {"windows": None}), ({}, WINDOWS)])
def test_a_section_that_one_of_two_models_has_is_a_difference(before: dict, now: dict, tmp_path: Path) -> None:
    """Neither a run that goes on nor one that begins with the weights computes attention otherwise."""
    first, cfg = tiny.run_state(1, 4 * tiny.SEQ), tiny.config(0)
    theirs, ours = (
        replace(first.identity, model=replace(first.identity, model=model).complete.model) for model in (before, now)
    )
    folder = tiny.save(tmp_path, ParallelGroups.single(), replace(first, identity=theirs), ())
    tokens = [each["windows"] and each["windows"]["tokens"] for each in (theirs.model, ours.model)]
    assert f"model.windows.tokens: {tokens[0]} there, {tokens[1]} here" in differences(theirs, ours)
    with pytest.raises(ConfigError, match=rf"windows\.tokens: checkpoint {tokens[0]}, this run {tokens[1]}.*settings"):
        resume.check(folder, cfg, ours, {})

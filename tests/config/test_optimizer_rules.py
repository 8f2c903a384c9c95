"""Rules for optimizers and for what the backward pass recomputes: each finding has key, value and fix."""

import pytest

import tiny
from sagetrain.config.rules import fit

FSDP = {"engine": "fsdp"}
CASES = [
    ({"optimizer": {"muon": {"steps": 7}}}, "no_effect", "optimizer.muon.steps", "only muon uses it"),
    ({"optimizer": {"name": "muon", "muon": {"adamw_matrices": ["q", "k", "v", "out", "gate", "up", "down"]}}},
     "muon_without_matrices", "optimizer.muon.adamw_matrices", "use optimizer.name: adamw"),
    ({"optimizer": {"name": "muon", "lr_of": {"head": 0.03}}},
     "large_lr", "optimizer.lr_of.head", "use a smaller one"),
    ({"optimizer": {"lr_of": {"embedding": 0.08}}}, "large_lr", "optimizer.lr_of.embedding", "use a smaller one"),
    ({"optimizer": {"name": "muon", "lr": 0.02, "muon": {"adjust_lr": "original"}}},
     "large_lr", "optimizer.lr", "or set optimizer.lr_of for what AdamW updates"),
    ({"optimizer": {"name": "muon", "weight_decay": 50.0, "lr_of": {"embedding": 0.1}}},
     "decay_in_one_step", "optimizer.weight_decay", "use a smaller optimizer.lr_of.embedding"),
    ({"optimizer": {"lr": 3e-3, "lr_base_width": 320}},
     "large_lr", "optimizer.lr", "(optimizer.lr_base_width 320 makes it 0.03 here) one step of AdamW"),
    ({"optimizer": {"name": "muon", "lr": 5e-3, "weight_decay": 40.0, "lr_base_width": 1280}},
     "decay_in_one_step", "optimizer.weight_decay", "times optimizer.lr 0.005 (optimizer.lr_base_width 1280 makes it"),
    ({"optimizer": {"weight_decay": 50.0, "weight_decay_lr": 0.02}},
     "decay_in_one_step", "optimizer.weight_decay", "use a smaller optimizer.weight_decay_lr"),
    ({"optimizer": {"weight_decay": 0.0, "weight_decay_lr": 1e-3}},
     "no_effect", "optimizer.weight_decay_lr", "optimizer.weight_decay 0"),
    ({"optimizer": {"lr_of": {"router": 1e-3}}}, "no_effect", "optimizer.lr_of.router", "without model.experts"),
    ({"optimizer": {"lr_of": {"head": 1e-3}}, "model": {"tie_embeddings": True}},
     "no_effect", "optimizer.lr_of.head", "has optimizer.lr_of.embedding"),
    ({"optimizer": {"lr_base_width": 16}, "model": {"tie_embeddings": True}},
     "base_width_tied", "optimizer.lr_base_width", "set optimizer.lr_of.embedding for this width"),
    ({"optimizer": {"moments": "bf16", "betas": [0.9, 0.999]}},
     "moments_stand_still", "optimizer.moments", "use fp32 or int8, or a second beta of at most 0.99609"),
    ({"model": {"value_embeddings": True}}, "value_embeddings_epsilon", "optimizer.eps", "use optimizer.eps: 1e-10"),
    ({"optimizer": {"master": "bf16_chance"}, "parallel": {"engine": "deepspeed"}},
     "bf16_masters_need_fsdp", "optimizer.master", "parallel.engine: fsdp"),
    ({"optimizer": {"master": "bf16_kahan"}, "parallel": FSDP, "training": {"dtype": "fp32"}},
     "bf16_masters_in_fp32", "optimizer.master", "training.dtype bf16"),
    ({"optimizer": {"master": "bf16_kahan"}, "parallel": {**FSDP, "zero_stage": 3}},
     "bf16_masters_bf16_gradients", "optimizer.master", "parallel.zero_stage 0 or 1"),
    ({"training": {"activation_checkpointing": 3}},
     "recomputed_blocks", "training.activation_checkpointing", "up to 2"),
    ({"optimizer": {"name": "muon", "muon": {"adamw_matrices": ["q", "k", "q"]}}},
     "named_twice", "optimizer.muon.adamw_matrices", "names q 2 times"),
    ({"stability": {"monitor": {"layers": [0, -2]}}}, "named_twice", "stability.monitor.layers", "names 0 2 times"),
    ({"training": {"drop_steps": [3, 4, 3]}}, "named_twice", "training.drop_steps", "names 3 2 times"),
    ({"evaluation": {"tasks": ["piqa", "piqa"]}}, "named_twice", "evaluation.tasks", "name it once"),
    ({"guidance": {"override": ["x", "x"]}}, "named_twice", "guidance.override", "names x 2 times"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "rule", "key", "fix"), CASES)
def test_findings_of_optimizers(sections: dict, rule: str, key: str, fix: str) -> None:
    found = {finding.rule: finding for finding in fit(tiny.config(1, "bf16", **sections), 1, tiny.VOCAB)}
    assert found[rule].key == key and fix in f"{found[rule].message} {found[rule].fix}"


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_masters_that_are_refused_are_not_warned_of(engine: str) -> None:
    """A refused setting has no warning about the gradients that it would round."""
    parallel, dtype = {"engine": engine, "zero_stage": 2}, "fp32" if engine == "fsdp" else "bf16"
    cfg = tiny.config(1, dtype, optimizer={"master": "bf16_kahan"}, parallel=parallel)
    assert [f.level for f in fit(cfg, 1, tiny.VOCAB) if f.key == "optimizer.master"] == ["error"]


@pytest.mark.parametrize("sections", [
    {"optimizer": {"name": "muon", "muon": {"adamw_matrices": ["k", "v"]}, "lr_of": {"gain": 1e-3}, "moments": "int8"}},
    {"optimizer": {"master": "bf16_chance", "moments": "bf16"}, "parallel": FSDP},
    {"optimizer": {"lr_of": {"head": 1e-3}, "lr_base_width": 16, "weight_decay": 40.0, "weight_decay_lr": 1e-3}},
    {"optimizer": {"lr_of": {"embedding": 1e-3}, "lr_base_width": 16}, "model": {"tie_embeddings": True}},
    {"training": {"activation_checkpointing": 2}}, {"training": {"activation_checkpointing": "auto"}},
])  # fmt: skip
def test_what_optimizers_can_do_has_no_finding(sections: dict) -> None:
    ours = ("optimizer", "training.activation_checkpointing")
    assert [f for f in fit(tiny.config(1, "bf16", **sections), 1, tiny.VOCAB) if f.key.startswith(ours)] == []

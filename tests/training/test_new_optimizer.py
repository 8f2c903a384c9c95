"""A run whose checkpoint has the moments of another optimizer is refused by train and plan. The error says how to go
on."""

from pathlib import Path

from runs import rows_of, sagetrain, write_config
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.reading import Reader

MUON, NEW = "optimizer.name=muon", "checkpoint.new_optimizer=true"


def run(config: Path, tokens: int, *more: str) -> str:
    """Train up to `tokens`. Return the error of a failed command."""
    done = sagetrain("train", config, f"training.total_tokens={tokens}", *more)
    return done.stderr + done.stdout if done.returncode else ""


def test_another_optimizer_than_the_checkpoints_needs_a_word(corpus: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", lr_schedule={"warmup_tokens": 256})
    assert run(config, 512) == ""
    root = tmp_path / "run/checkpoints"
    refused = "has the moments of optimizer.name adamw, and optimizer.name muon of this run needs others"
    said = run(config, 1024, MUON)
    assert refused in said and "checkpoint.new_optimizer: true" in said
    plan = sagetrain("plan", config, "training.total_tokens=1024", MUON)
    assert plan.returncode and refused in " ".join((plan.stdout + plan.stderr).split())
    assert on_disk.newest(root).name == on_disk.folder_name(2)

    assert run(config, 1024, MUON, NEW) == ""
    reader = Reader(on_disk.newest(root))
    matrix, gain = "blocks.0.attention.qkv.q", "blocks.0.attention_norm.gain"
    assert (reader.kinds(matrix), reader.kinds(gain)) == (("weight", "momentum"), KINDS)
    assert (reader.state.step, reader.state.optimizer_steps, reader.manifest["format"]) == (4, 2, 3)
    assert reader.local(matrix, "momentum", 0, 1).abs().max() > 0

    # The checkpoint is the run's own now: its moments are continued, with or without the key.
    assert run(config, 1280, MUON, NEW) == run(config, 1536, MUON) == ""
    assert Reader(on_disk.newest(root)).state.optimizer_steps == 4
    assert run(config, 1792).count("has the moments of optimizer.name muon") == 1
    told = "name muon, and optimizer.name muon with optimizer.muon.adamw_matrices [q] of this run needs others"
    assert told in run(config, 1792, MUON, "optimizer.muon.adamw_matrices=[q]")

    start = [f"training.run_dir={tmp_path / 'next'}", f"training.init_from={tmp_path / 'run'}"]
    said = run(config, 512, *start, "training.init_moments=true")
    assert "training.init_moments" in said and "has no moments for optimizer.name adamw" in said
    assert run(config, 512, *start) == ""
    assert any("train/loss" in row for row in rows_of(tmp_path / "next"))

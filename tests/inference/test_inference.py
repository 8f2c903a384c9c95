"""`sagetrain eval` and `sagetrain generate` on a run that was really trained."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from prepare_inputs import prepare
from runs import finish, sagetrain, write_config
from sagetrain.config.errors import CheckpointError, ConfigError
from sagetrain.data.token_file import TokenFile
from sagetrain.inference import load
from sagetrain.inference.evaluate import evaluate
from sagetrain.inference.load import load_run
from sagetrain.model import transformer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of a run of ten steps, beside its own copy of the corpus."""
    folder = tmp_path_factory.mktemp("inference")
    shutil.copytree(corpus, folder / "corpus")
    sections = {"training": {"total_tokens": 2560}, "checkpoint": {"every_tokens": 1280}}
    config = write_config(folder / "run.yaml", folder / "corpus", folder / "run", **sections)
    finish("sagetrain", config)
    return folder / "run"


def test_eval_takes_what_there_is_and_says_so(run: Path) -> None:
    there = (TokenFile(run.parent / "corpus/valid").num_tokens - 1) // 32
    result = sagetrain("eval", run, "--num-sequences", 100_000)
    assert result.stderr == f"100,000 sequences were asked for, and the held-out data has {there:,}: all are taken\n"
    assert f"; {there:,} sequences of 32 tokens" in result.stdout
    result = sagetrain("eval", run, "--num-sequences", 1, "--data", "any")
    assert result.returncode == 2 and "error: --num-sequences chooses among those of data.valid" in result.stderr


def test_any_checkpoint_can_be_named(run: Path, tmp_path: Path) -> None:
    assert [load_run(run, print, step).step for step in (5, 10)] == [5, 10]
    missing = sagetrain("generate", run, "def", "--checkpoint", 99)
    assert missing.returncode == 3
    assert "has no checkpoint of step 99; it has steps: 5, 10" in missing.stderr
    elsewhere = sagetrain("generate", run / "none", "def")
    assert elsewhere.returncode == 3 and f"error: there is no folder {run}/none; name the folder" in elsewhere.stderr
    shutil.copytree(run / "checkpoints/step-00000005", tmp_path / "kept")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    for path, message in (
        (tmp_path / "hf", "hf is a Hugging Face folder: read it first, `sagetrain import .*hf RUN`, and name RUN"),
        (tmp_path / "kept", "kept is a checkpoint without its run: put it into RUN/checkpoints"),
        (run / "checkpoints/step-00000005", f"step-00000005 is a checkpoint: name {run} with --checkpoint 5$"),
        (run / "config.yaml", r"config\.yaml is a file; name the folder of a run"),
    ):
        for step in (None, 5):
            with pytest.raises(CheckpointError, match=message):
                load_run(path, print, step)


def test_no_weight_is_drawn_that_the_checkpoint_overwrites(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the weights of a large model takes longer than reading them."""

    def draw(*_: object) -> None:
        raise AssertionError("weights are drawn")

    monkeypatch.setattr(transformer, "initialize", draw)
    loaded, reader = load_run(run, print), load.open_run(run, print).reader
    for name, parameter in loaded.model.named_parameters():
        assert parameter.device.type == "cpu" and parameter.requires_grad
        assert torch.equal(parameter.detach().flatten(), reader.local(name, "weight", 0, 1)), name


def test_generate_continues_the_prompt_and_repeats_itself(run: Path) -> None:
    first, again, other = (
        sagetrain("generate", run, "def get(", "--max-tokens", 12, "--seed", seed).stdout for seed in (0, 0, 1)
    )
    assert first.startswith("def get(") and len(first) > len("def get(\n")
    assert first == again != other
    empty = sagetrain("generate", run, "def get(", "--stop", first.removeprefix("def get(")[0])
    assert (empty.stdout, empty.stderr) == ("def get(\n", "no text follows prompt 1: it begins with a text of --stop\n")


def test_generate_needs_the_run_folder_alone(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    for data in (moved / "config.yaml", *moved.glob("checkpoints/*/config.yaml")):
        assert str(run.parent / "corpus") in data.read_text()
    (run.parent / "corpus").rename(run.parent / "away")
    try:
        assert sagetrain("generate", moved, "def get(", "--max-tokens", 3).stdout.startswith("def get(")
        assert "corpus/valid" in sagetrain("eval", moved).stderr
        (moved / "tokenizer.model").unlink()
        assert f"error: {moved} has lost its tokenizer, which is not at {run.parent}" in sagetrain("eval", moved).stderr
    finally:
        (run.parent / "away").rename(run.parent / "corpus")


def test_a_tokenizer_that_was_replaced_is_refused(run: Path) -> None:
    tokenizer = run / "tokenizer.model"
    kept = tokenizer.read_bytes()
    assert kept == (run.parent / "corpus/tokenizer.model").read_bytes()
    text = [str(Path(json.__file__).parent)]
    prepare(text, run.parent / "other/train", glob="*.py", vocab_size=400, valid_fraction=0.2, say=lambda text: None)
    try:
        tokenizer.write_bytes((run.parent / "other/tokenizer.model").read_bytes())
        for command in ("eval", "generate"):
            result = sagetrain(command, run)
            assert result.returncode == 3
            assert "was trained with another tokenizer" in result.stderr and "put that file back" in result.stderr
    finally:
        tokenizer.write_bytes(kept)


def test_loss_with_another_attention(run: Path) -> None:
    own, exact, sdpa = (evaluate(load_run(run, print, attention=x), 8)[0].loss for x in (None, "reference", "sdpa"))
    assert own != exact and abs(own - exact) < 1e-3 and abs(sdpa - exact) < 1e-6
    shown = sagetrain("eval", run, "--attention", "sdpa", "--num-sequences", 8).stdout
    assert f"{sdpa:.4f}" in shown
    with pytest.raises(ConfigError, match=r"--attention flash: attention\.backend flash needs a GPU"):
        load_run(run, print, attention="flash")


def test_a_run_trained_elsewhere_runs_on_sdpa(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine lacks the backend of the run (flash, or sage in fp32 on a GPU)."""

    def elsewhere(*_: object, **__: object) -> None:
        raise ValueError("attention.backend flash needs a GPU")

    monkeypatch.setattr(load, "resolve_backend", elsewhere)
    said: list[str] = []
    loaded = load_run(run, said.append)
    assert said == ["attention.backend flash needs a GPU; sdpa is used here"]
    assert loaded.model.blocks[0].attention.function.name == "sdpa" and math.isfinite(evaluate(loaded, 1)[0].loss)

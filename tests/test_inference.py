"""`sagetrain eval` and `sagetrain generate` on a run trained for real."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from runs import BIN, finish, write_config
from sagetrain.data.prepare import prepare
from sagetrain.inference import load
from sagetrain.inference.evaluate import evaluate
from sagetrain.inference.generate import generate
from sagetrain.inference.load import load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Folder of a run of ten steps, beside its own copy of the corpus."""
    folder = tmp_path_factory.mktemp("inference")
    shutil.copytree(corpus, folder / "corpus")
    config = write_config(folder / "run.yaml", folder / "corpus", folder / "run", training={"total_tokens": 2560})
    finish("sagetrain", config)
    return folder / "run"


def sagetrain(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([BIN / "sagetrain", *map(str, words)], capture_output=True, text=True, timeout=120)


def test_eval_gives_the_loss_that_training_ended_with(run: Path) -> None:
    result = sagetrain("eval", run)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row["valid/loss"] for row in rows if "valid/loss" in row][-1]
    assert f"validation loss   {trained:.4f}" in result.stdout
    assert "step 10, 2,560 tokens seen; 256 held-out tokens" in result.stdout


def test_generate_continues_the_prompt_and_repeats_itself(run: Path) -> None:
    first, again, other = (
        sagetrain("generate", run, "def get(", "--max-tokens", 12, "--seed", seed).stdout for seed in (0, 0, 1)
    )
    assert first.startswith("def get(") and len(first) > len("def get(\n")
    assert first == again != other


def test_generate_needs_the_run_folder_alone(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    for data in (moved / "config.yaml", *moved.glob("checkpoints/*/config.yaml")):
        assert str(run.parent / "corpus") in data.read_text()
    (run.parent / "corpus").rename(run.parent / "away")
    try:
        assert sagetrain("generate", moved, "def get(", "--max-tokens", 3).stdout.startswith("def get(")
        assert "corpus/valid" in sagetrain("eval", moved).stderr
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


def test_what_was_trained_elsewhere_runs_on_sdpa(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose backend this machine does not have (flash, or sage in fp32 on a GPU)."""

    def elsewhere(*_: object, **__: object) -> None:
        raise ValueError("attention.backend flash needs a GPU")

    monkeypatch.setattr(load, "resolve_backend", elsewhere)
    said: list[str] = []
    loaded = load_run(run, said.append)
    assert said == ["attention.backend flash needs a GPU; sdpa is used here"]
    assert loaded.model.blocks[0].attention.function.name == "sdpa" and math.isfinite(evaluate(loaded, 1).loss)


def test_no_token_is_sampled_that_the_tokenizer_does_not_have(run: Path) -> None:
    """model.vocab_size may be larger than the tokenizer's."""
    loaded = load_run(run, print)
    loaded.tokenizer.vocab_size = 3 + 256  # bytes alone
    for options in ((5.0, 0), (5.0, 500), (0.0, 0)):
        asked: list[int] = []
        decode = loaded.tokenizer.decode
        loaded.tokenizer.decode = lambda ids, asked=asked, decode=decode: (asked.extend(ids), decode(ids))[1]
        list(generate(loaded, "def ", 20, *options, seed=0))
        assert asked and max(asked) < 259

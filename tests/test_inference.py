"""`sagetrain eval` and `sagetrain generate` on a run trained for real."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prepare_inputs import published_tokenizer
from runs import finish, sagetrain, write_config
from sagetrain import cli
from sagetrain.config import ConfigError
from sagetrain.config.schema import DataSource
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.data.prepare import prepare
from sagetrain.data.token_file import TokenFile, TokenFileWriter, read_provenance
from sagetrain.inference import load
from sagetrain.inference.evaluate import evaluate
from sagetrain.inference.generate import generate
from sagetrain.inference.load import load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Folder of a run of ten steps, beside its own copy of the corpus."""
    folder = tmp_path_factory.mktemp("inference")
    shutil.copytree(corpus, folder / "corpus")
    sections = {"training": {"total_tokens": 2560}, "checkpoint": {"every_tokens": 1280}}
    config = write_config(folder / "run.yaml", folder / "corpus", folder / "run", **sections)
    finish("sagetrain", config)
    return folder / "run"


def test_eval_gives_the_loss_that_training_ended_with(run: Path) -> None:
    result = sagetrain("eval", run)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row["valid/loss"] for row in rows if "valid/loss" in row][-1]
    assert f"validation loss   {trained:.4f}" in result.stdout
    assert "step 10, 2,560 tokens seen; 256 held-out tokens" in result.stdout


def test_eval_takes_what_there_is_and_says_so(run: Path, tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "few", 512)
    writer.add(TokenFile(run.parent / "corpus/valid").tokens(0, 330), np.array([330]))
    writer.finish()
    writer.publish(read_provenance(run.parent / "corpus/valid"))
    result = sagetrain("eval", run, "--num-sequences", 100_000, "--data", tmp_path / "few")
    assert result.stderr == "100,000 sequences were asked for, and the held-out data has 10: all are taken\n"
    assert "; 320 held-out tokens" in result.stdout


def test_unigram_loss_is_by_the_frequencies_of_the_training_data(run: Path) -> None:
    """So that it does not fall when few tokens are evaluated, whose own entropy is small."""
    loaded = load_run(run, print)
    cfg = loaded.cfg
    train = TokenFile(cfg.data.train[0].path)
    counts = 1 + np.bincount(train.tokens(1, (train.num_tokens - 1) // 32 * 32 + 1), minlength=512)
    nats = -np.log(counts / counts.sum())
    held_out = Loader(SampleStream(cfg.data.valid, 32, seed=0), dp_rank=0, dp_size=1, micro_batch_size=1)
    expected = [nats[batch.labels.numpy()].mean() for batch in held_out.eval_batches(5)]
    one, five = (evaluate(loaded, sequences) for sequences in (1, 5))
    assert (one.unigram_loss, five.unigram_loss) == pytest.approx((expected[0], np.mean(expected)), rel=1e-9)
    assert one.unigram_loss > math.log(32)  # what the own entropy of 32 tokens cannot reach
    loaded.cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"train": [DataSource(path="none")]})})
    said: list[str] = []
    assert evaluate(loaded, 1, report=said.append) == replace(one, unigram_loss=None)
    assert said[0].startswith("no unigram loss: token file none: ")


def test_any_checkpoint_can_be_named(run: Path) -> None:
    assert [load_run(run, print, step).step for step in (5, 10)] == [5, 10]
    missing = sagetrain("generate", run, "def", "--checkpoint", 99)
    assert missing.returncode == 3
    assert "has no checkpoint of step 99; it has steps: 5, 10" in missing.stderr


def test_text_comes_from_a_file_or_from_standard_input(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("über\n".encode())
    (tmp_path / "latin.txt").write_bytes("über".encode("latin1"))
    assert cli._text(None, tmp_path / "prompt.txt") == "über\n"
    assert (cli._text(None, None), cli._text("as is", None)) == ("", "as is")
    for content, file, message in (
        (None, tmp_path / "latin.txt", r"the text of .*latin\.txt is not UTF-8"),
        (None, tmp_path / "none", "--file .*none cannot be read: No such file"),
        ("x", tmp_path / "prompt.txt", "either a prompt or --file"),
    ):
        with pytest.raises(ConfigError, match=message):
            cli._text(content, file)
    for content, name in (("über\n".encode(), "prompt.txt"), (b"\xfc", None)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        if name:
            assert cli._text("-", None) == "über\n"
        else:
            with pytest.raises(ConfigError, match="standard input is not UTF-8"):
                cli._text("-", None)


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
        list(generate(loaded, "\n", 20, *options, seed=0))
        assert asked and max(asked) < 259


def test_the_space_before_the_first_word_is_kept(run: Path) -> None:
    """By tokenizers that put a space before every text and leave it out of what they decode."""
    loaded, tokenizer = load_run(run, print), published_tokenizer()
    assert tokenizer.decode(tokenizer.encode("get")) == "get"
    loaded.tokenizer, script = tokenizer, iter([*tokenizer.encode("get one"), tokenizer.eos_id])

    class Scripted:
        blocks = ()

        def __call__(self, context: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(1, context.shape[1], 512)
            logits[0, -1, next(script)] = 1.0
            return logits

    loaded.model = Scripted()
    assert "".join(generate(loaded, "def", 20, 0.0, 0, seed=0)) == " get one"


def test_the_likeliest_text_is_that_of_the_whole_context(run: Path) -> None:
    """Kept keys and values change nothing, and a full context (32 tokens here) goes on with its later half."""
    loaded = load_run(run, print)
    asked: list[list[int]] = []
    decode = loaded.tokenizer.decode
    loaded.tokenizer.decode = lambda ids: (asked.append(list(ids)), decode(ids))[1]
    loaded.tokenizer.eos_id = -1
    list(generate(loaded, "def get(", 60, 0.0, 0, seed=0))
    tokens, start = max(asked, key=len), len(loaded.tokenizer.encode("def get("))
    assert len(tokens) == start + 60
    first = 0
    for end in range(start, len(tokens)):
        if end - first > 32:
            first = end - 17
        with torch.no_grad():
            logits = loaded.model(torch.tensor([tokens[first:end]]))[0, -1, : loaded.tokenizer.vocab_size]
        assert logits.max() - logits[tokens[end]] < 1e-5


def test_a_prompt_longer_than_the_context_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens, more than the context of 32 .*seq_length"):
        next(generate(load_run(run, print), "def get(self):\n" * 20, 1, 0.0, 0, seed=0))

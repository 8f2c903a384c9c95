"""`sagetrain eval`: the losses of training, and of whole texts in windows, against naive references."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from prepare_inputs import TEXTS, prepare
from runs import finish, rows_of, sagetrain, write_config
from sagetrain.cli.evaluate import _beside_unigram, _show_losses
from sagetrain.config import ConfigError
from sagetrain.config.schema import NO_DATA, DataSource
from sagetrain.data.loader import Loader
from sagetrain.data.token_file import TokenFile, token_path
from sagetrain.inference.evaluate import Evaluation, evaluate, evaluate_texts, together
from sagetrain.inference.load import TrainedRun, at_context, load_run
from sagetrain.inference.windows import windows
from streams import stream_of

EOS = 7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of a run of ten steps with two held-out sources."""
    folder = tmp_path_factory.mktemp("evaluate")
    tree = {
        "training": {"total_tokens": 2560},
        "data": {
            "train": [{"path": str(corpus / "train")}],
            "valid": [{"path": str(corpus / name)} for name in ("valid", "train")],
            "seq_length": 32,
            "micro_batch_size": 4,
        },
    }
    finish("sagetrain", write_config(folder / "run.yaml", corpus, folder / "run", **tree))
    return folder / "run"


@pytest.fixture(scope="module")
def loaded(run: Path) -> TrainedRun:
    # INT8 attention would round each token depending on the rest of its window.
    return load_run(run, print, attention="sdpa")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder with the same documents as .jsonl, .jsonl.zst and a token file."""
    folder = tmp_path_factory.mktemp("texts")
    lines = "".join(json.dumps({"body": text}) + "\n" for text in [*TEXTS[:3], "über\tαβγ 漢字 ☃\n", "x"])
    (folder / "held.jsonl").write_text(lines)
    (folder / "held.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    how = {"tokenizer": corpus / "tokenizer.model", "text_key": "body", "say": lambda text: None}
    prepare([str(folder / "held.jsonl")], folder / "prepared/held", **how)
    return folder


# -- the sequences that training evaluates on ----------------------------------------------------------------------


def test_eval_gives_the_losses_that_training_ended_with(run: Path) -> None:
    result = sagetrain("eval", run, "--json")
    assert result.returncode == 0, result.stderr
    found, rows = json.loads(result.stdout), rows_of(run)
    trained = [row for row in rows if "valid/loss" in row][-1]
    assert found["all"]["loss"] == pytest.approx(trained["valid/loss"], abs=1e-5)
    assert [part["name"] for part in found["sources"]] == ["valid", "train"]
    for part in found["sources"]:
        assert part["loss"] == pytest.approx(trained[f"valid/{part['name']}/loss"], abs=1e-5)
        assert part["tokens"] == 4 * 32 and 4 * 32 < part["bytes"] < 4 * 32 * 4
    table = sagetrain("eval", run).stdout
    assert "step 10, 2,560 tokens seen; 8 sequences of 32 tokens" in table and f"{trained['valid/loss']:.4f}" in table


def test_unigram_loss_uses_frequencies_of_the_training_data(loaded: TrainedRun) -> None:
    """A few evaluated tokens have a small entropy of their own, which must not lower the unigram loss."""
    cfg = loaded.cfg
    train = TokenFile(cfg.data.train[0].path)
    counts = 1 + np.bincount(train.tokens(1, (train.num_tokens - 1) // 32 * 32 + 1), minlength=512)
    nats = -np.log(counts / counts.sum())
    held_out = Loader(stream_of(cfg.data.valid, 32, seed=0), dp_rank=0, dp_size=1, micro_batch_size=1)
    expected = [nats[batch.labels.numpy()].mean() for batch in held_out.eval_batches(5)]
    one, five = (together(evaluate(loaded, sequences)) for sequences in (1, 5))
    assert (one.unigram_loss, five.unigram_loss) == pytest.approx((expected[0], np.mean(expected)), rel=1e-9)
    assert one.unigram_loss > math.log(32)  # The entropy of 32 tokens cannot reach this value.
    said: list[str] = []
    for path in ("gone", NO_DATA):
        data = cfg.data.model_copy(update={"train": [DataSource(path=path)]})
        without = evaluate(replace(loaded, cfg=cfg.model_copy(update={"data": data})), 1, said.append)
        assert together(without) == replace(one, unigram_nats=None)
    assert said[0].startswith("no unigram loss: data.train: gone is not here ")
    assert said[1:] == ["no unigram loss: an imported model has no training data"]


def test_losses_at_another_context_are_of_such_sequences(loaded: TrainedRun) -> None:
    """A batch has as many tokens as before. The losses are those of the model for each sequence alone."""
    for size, rows in ((8, 16), (64, 2)):
        run = at_context(loaded, size)
        assert (run.cfg.data.micro_batch_size, loaded.cfg.data.seq_length) == (rows, 32)
        held_out = Loader(stream_of(run.cfg.data.valid, size, seed=0), dp_rank=0, dp_size=1, micro_batch_size=1)
        with torch.no_grad():
            losses = [loaded.model(**batch.inputs(loaded.device)).item() for batch in held_out.eval_batches(5)]
        found = together(evaluate(run, 5))
        assert (found.sequences, found.tokens) == (5, 5 * size)
        assert found.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert at_context(loaded, 1_000).cfg.data.micro_batch_size == 1


# -- whole texts in windows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 9])
@pytest.mark.parametrize("eos_id", [EOS, -1])
def test_windows_score_every_token_once(size: int, eos_id: int) -> None:
    """The cases are all strides, several lengths of the text, and several sizes of the pieces in which it comes."""
    for stride in range(1, size + 1):
        for length in (1, 2, size, size + 1, size + 2, 3 * size + 1, 40):
            text = np.arange(100, 100 + length)
            whole = [EOS, *text] if eos_id >= 0 else [*text]
            begins = {i for i in range(len(whole)) if whole[i] % 5 == 0}
            for piece in (1, 3, 100):
                pieces = [text[i : i + piece] for i in range(0, length, piece)]
                found = list(windows([(p, np.flatnonzero(p % 5 == 0)) for p in pieces], size, stride, eos_id))
                scored = [token for sample, count in found for token in sample.tokens[len(sample.tokens) - count :]]
                assert scored == whole[1:]
                for number, (sample, count) in enumerate(found):
                    first = whole.index(sample.tokens[0])
                    assert sample.tokens.tolist() == whole[first : first + min(size, len(whole) - 1) + 1]
                    assert sample.document_starts == [i for i in range(1, size) if first + i in begins]
                    # At least size - stride + 1 tokens come before each token that counts.
                    assert number == 0 or count <= stride


def naive(loaded: TrainedRun, tokens: list[int], begins: set[int], stride: int) -> float:
    """Return the nats of tokens[1:]. Each token has a forward pass of its own, over the tokens that it may see, in
    float64."""
    size, last, nats = 32, len(tokens) - 1, 0.0
    for place in range(1, len(tokens)):
        window = max(0, -(-(place - size) // stride) * stride)
        window = max(0, min(window, last - size))
        first = max([window, *(begin for begin in begins if window <= begin < place)])
        with torch.no_grad():
            logits = loaded.model(torch.tensor([tokens[first:place]]))[0, -1].double()
        nats -= logits.log_softmax(-1)[tokens[place]].item()
    return nats


@pytest.mark.parametrize("stride", [7, 32])
def test_losses_of_windows_are_those_of_a_naive_reference(loaded: TrainedRun, texts: Path, stride: int) -> None:
    file = TokenFile(texts / "prepared/held")
    tokens = [loaded.tokenizer.eos_id, *file.tokens(0, file.num_tokens).tolist()]
    begins = {1 + file.document_start(i) for i in range(file.num_documents)}
    (found,) = evaluate_texts(loaded, [str(texts / "prepared/held")], stride)
    assert found.tokens == file.num_tokens > 100
    assert found.nats == pytest.approx(naive(loaded, tokens, begins, stride), rel=1e-6)


def test_a_table_without_bytes_says_why(loaded: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    masked = [Evaluation("chats", nats=2.0, tokens=1, bytes=None, sequences=1)]
    for run, why in ((loaded, "not all tokens count"), (replace(loaded, tokenizer=None), "the run has no tokenizer")):
        _show_losses(run, masked, None, as_json=False)
        said = " ".join(capsys.readouterr().out.split())
        assert f"no bytes: {why}" in said and "; 1 sequence of 32 tokens" in said


def test_sources_have_their_names_in_windows_too(loaded: TrainedRun) -> None:
    data = loaded.cfg.data.model_copy(update={"micro_batch_size": 128})  # All that is held out is scored.
    many = replace(loaded, cfg=loaded.cfg.model_copy(update={"data": data}))
    names = [part.name for part in evaluate_texts(many, stride=data.seq_length)]
    assert names == [part.name for part in evaluate(loaded, 8)]


def test_text_is_the_same_in_every_form(loaded: TrainedRun, texts: Path) -> None:
    paths = [str(texts / name) for name in ("held.jsonl", "held.jsonl.zst", "prepared/held")]
    forms = evaluate_texts(loaded, paths, text_key="body")
    size = sum(len(row["body"].encode()) for row in rows_of(texts, "held"))
    assert [form.bytes for form in forms] == [size] * 3
    assert [form.counted for form in forms] == ["in the text", "in the text", "by prepare"]
    assert len({form.nats for form in forms}) == 1
    assert forms[0].bits_per_byte == pytest.approx(forms[0].nats / math.log(2) / size)
    token_path(texts / "prepared/held", ".json").unlink()  # The file looks as if it came from elsewhere.
    (elsewhere,) = evaluate_texts(loaded, paths[2:])
    assert elsewhere == replace(forms[2], counted="in the decoded tokens")
    every = together(forms)
    assert (every.loss, every.bits_per_byte) == pytest.approx((forms[0].loss, forms[0].bits_per_byte))


@pytest.mark.parametrize("folder", [False, True])
def test_a_text_with_the_name_of_a_token_file_is_the_text(
    loaded: TrainedRun, texts: Path, tmp_path: Path, folder
) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(token_path(texts / "prepared/held", suffix), tmp_path / f"held{suffix}")
    path = str(tmp_path / "held")
    (alone,) = evaluate_texts(loaded, [path])
    source = tmp_path / "held/in.txt" if folder else tmp_path / "held"
    source.parent.mkdir(exist_ok=True)
    source.write_text("another text")
    text, tokens = evaluate_texts(loaded, [path, f"{path}.bin"])
    assert (text.counted, text.bytes) == ("in the text", len("another text"))
    assert tokens == replace(alone, name=f"{path}.bin")
    cfg = loaded.cfg.model_copy(update={"data": loaded.cfg.data.model_copy(update={"valid": [DataSource(path=path)]})})
    (held_out,) = evaluate_texts(replace(loaded, cfg=cfg), stride=16)
    assert held_out.counted == tokens.counted  # data.valid names token files alone.


def test_more_context_helps_and_is_asked_for_by_the_stride(run: Path, texts: Path) -> None:
    results = [sagetrain("eval", run, "--data", texts / "held.jsonl", "--text-key", "body", *more, "--json")
               for more in ([], ["--stride", 32], ["--context", 8])]  # fmt: skip
    assert [result.returncode for result in results] == [0, 0, 0], results
    half, none, short = (json.loads(result.stdout) for result in results)
    assert (half["window"], half["stride"], none["stride"]) == (32, 16, 32)
    assert (short["window"], short["stride"], short["all"]["tokens"]) == (8, 4, half["all"]["tokens"])
    assert half["all"]["tokens"] == none["all"]["tokens"] and half["all"]["loss"] != none["all"]["loss"]


def test_what_cannot_be_evaluated_is_said(loaded: TrainedRun, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    bare = replace(loaded, tokenizer=None)
    empty = loaded.cfg.model_copy(update={"data": loaded.cfg.data.model_copy(update={"valid": []})})
    for run, paths, stride, message in (
        (
            loaded,
            [],
            33,
            r"--stride 33 is longer than the windows, data\.seq_length 32: .* would not be scored; give at most 32$",
        ),
        (loaded, [str(tmp_path / "empty.txt")], None, r"--data .*empty\.txt: there is no text in it"),
        (loaded, [str(tmp_path / "no/such.txt")], None, r"such\.txt: no such file or folder"),
        (
            bare,
            [str(tmp_path / "empty.txt")],
            None,
            r"--data .*empty\.txt: no token file, and the run .* without a tok",
        ),
        (replace(loaded, cfg=empty), [], None, r"data\.valid is empty.* name some with --data"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate_texts(run, paths, stride)


@pytest.mark.parametrize(
    ("nats", "unigram", "expected"),
    [(4.5, 5.0, "web is 0.5000 below the unigram loss"), (5.37, 5.14, "web is 0.2300 above .*: train longer"),
     (5.0, None, "which is not known here")],
)  # fmt: skip
def test_a_loss_is_said_beside_that_without_context(nats: float, unigram: float | None, expected: str) -> None:
    assert re.search(expected, _beside_unigram(Evaluation("web", nats, 1, 4, unigram)))

"""Tokenizers give back exactly the text that went in, are trained alike each time, and name what is wrong."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepare_inputs import SAMPLE, published_tokenizer
from sagetrain.config import ConfigError
from sagetrain.config.schema import DataConfig
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer([SAMPLE], 1000))


@pytest.mark.parametrize("text", [
    "", " ", "\n", "  two  spaces   three ", "a\nb\n\n\nc\r\nd\te", "    def f(x):\n        return x  \n",
    "\u2581 the space mark \u2581\u2581itself\u2581", "\0 nul \0", "\ufeffmark, cafe\u0301 café \u00a0\u200b\u3000",
    "日本語 and 🎉👩‍👩‍👧 and \U0010ffff", "</ s><0x0A><pad>", "1234567890 3.14",
])  # fmt: skip
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2581 \n\t\0")))
def test_round_trip_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


@pytest.mark.parametrize("options", [{}, {"treat_whitespace_as_suffix": True}, {"add_dummy_prefix": False}])
def test_the_space_mark_adds_no_spaces_to_a_text(options):
    """A published model may add a space before a text, or after it, where SentencePiece leaves it. No other space is
    added."""
    ours = published_tokenizer(**options)
    end = " " * ("treat_whitespace_as_suffix" in options)
    for text in ("a\u2581b", "\u2581", "\u2581\u2581 the \u2581of", "the\u2581", "\ue000\u2581\ue001 \u2581"):
        assert ours.decode(ours.encode(text)) == text + end
        ids, marks, _ = ours.encode_parts([(text, True)])
        assert ids == ours.encode(text) and all(marks)  # A space that is put behind an answer belongs to it.
    every = "".join(map(chr, [*range(0xE000, 0xF900), 0x2581, 0xE000, 0x2581]))
    assert ours.decode(ours.encode(every)) == every + end


def test_digits_are_single_and_newlines_stand_alone(tokenizer):
    assert len(tokenizer.encode("2026")) - len(tokenizer.encode("")) == 4
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(SAMPLE)]
    assert all(piece == "\n" for piece in pieces if "\n" in piece)


def test_text_encodes_alike_in_parts_that_end_with_a_newline(tokenizer):
    cut = SAMPLE.index("\n", len(SAMPLE) // 2) + 1
    assert tokenizer.encode(SAMPLE[:cut]) + tokenizer.encode(SAMPLE[cut:]) == tokenizer.encode(SAMPLE)


def test_it_compresses(tokenizer):
    assert len(tokenizer.encode(SAMPLE)) < 0.45 * len(SAMPLE)


def test_training_is_deterministic(tokenizer):
    model = train_tokenizer([SAMPLE], 1000)
    again = Tokenizer(model)
    assert again.sha256 == tokenizer.sha256
    assert again.vocab_size == 1000


def test_lines_longer_than_sentencepiece_takes_are_used():
    words = " ".join(f"word{letter}" for letter in "abcdefghij" * 4000)
    assert Tokenizer(train_tokenizer([words], 300)).encode("worda") != list("worda")


@pytest.mark.parametrize(("texts", "vocab_size", "message"), [
    ([], 1000, r"a\.txt: no text to train"), (["", "\n\n"], 1000, r"a\.txt: no text to train .* name a source"),
    (["a short text"], 5000, r"5,000 tokens cannot be trained.*: --vocab-size \d{2,3} or less, or more text$"),
    (["a short text"], 100, r"100 tokens cannot be trained.*: --vocab-size \d{3} or more$"),
])  # fmt: skip
def test_training_errors(texts, vocab_size, message):
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(texts, vocab_size, "a.txt")


def test_ctrl_c_while_a_tokenizer_reads_its_sample():
    def texts():
        yield "some text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(texts(), 300)


def test_lone_surrogate(tokenizer):
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800c")


def test_load_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file.*sagetrain prepare"):
        Tokenizer.load(tmp_path / "tokenizer.model")
    for content, kind in ((b"", "SentencePiece model"), (b"{}", r"tokenizer\.json"), (b"\xff" * 100, "SentencePiece")):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"bad\.model is not a {kind}"):
            Tokenizer.load(tmp_path / "bad.model")


def test_the_path_of_the_tokenizer(tmp_path):
    config = {"train": [{"path": f"{tmp_path}/a/train"}, {"path": "b/train"}], "seq_length": 8, "micro_batch_size": 1}
    assert DataConfig(**config).tokenizer_path == f"{tmp_path}/a/tokenizer.model"
    assert DataConfig(**config, tokenizer="x.model").tokenizer_path == "x.model"


def test_a_model_without_eos_says_how_to_name_one(tmp_path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(published_tokenizer(eos_id=-1).model)
    with pytest.raises(
        ConfigError, match=r"tokenizer\.model has no end-of-sentence token, .*; name it in a .*"
    ) as refused:
        Tokenizer.load(file)
    (tmp_path / "tokenizer_config.json").write_text(re.search(r"\{.*\}", str(refused.value))[0])
    assert Tokenizer.load(file).spelling(Tokenizer.load(file).eos_id) == "</s>"

"""Texts for the tests of preparation, and `prepare` on them."""

import io
import json
import random
import sysconfig
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pipeline

from sagetrain.corpus import prepare as preparing
from sagetrain.corpus.prepare import Prepared
from sagetrain.corpus.request import Request
from sagetrain.data.token_file import TokenFile
from sagetrain.data.tokenizer import Tokenizer

SAMPLE = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
WORDS = ["the", "of", "and", "model", "token", "data", "12", "3.5", "naïve", "Zürich", "東京", "🙂", "def", "return"]


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    join = [" ", "  ", "\n", "\n    "]
    return [
        f"{number}: " + "".join(rng.choice(WORDS) + rng.choice(join) for _ in range(rng.randrange(1, 60)))
        for number in range(count)
    ]


TEXTS = make_texts(300)


def write_jsonl(path: Path, texts: list, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)))
    return path


def documents(path: Path) -> list[list[int]]:
    file = TokenFile(path)
    file.validate(deep=True)
    starts = [file.document_start(number) for number in range(file.num_documents)] + [file.num_tokens]
    stream = file.tokens(0, file.num_tokens).tolist()
    return [stream[a:b] for a, b in pairwise(starts)]


def published_tokenizer(**options: object) -> Tokenizer:
    """Train a SentencePiece model of 400 tokens in the way others do, for example with a space before every text."""
    model = io.BytesIO()
    given = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "vocab_size": 400,
        "minloglevel": 2,
    }
    lines = iter("\n".join(TEXTS).split("\n"))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **given | options)
    return Tokenizer(model.getvalue())


def published_pipeline() -> Pipeline:
    """Train a byte-level tokenizer of 600 tokens on SAMPLE. Token 0 begins a text, and token 1 ends it."""
    pipeline, alphabet = Pipeline(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    pipeline.pre_tokenizer, pipeline.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>"]
    how = {"vocab_size": 600, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    pipeline.train_from_iterator([SAMPLE], trainers.BpeTrainer(**how))
    return pipeline


def byte_pipeline(*control: str, merges: Sequence[tuple[str, str]] = ()) -> Pipeline:
    """Return a tokenizer of bytes, of what merges join, and of control tokens behind these."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    pipeline = Pipeline(models.BPE({token: number for number, token in enumerate(tokens)}, [*merges]))
    pipeline.pre_tokenizer, pipeline.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in control])
    return pipeline


def prepare(sources: list[str], output: str | Path, *, say: Callable[[str], None] = print, **options) -> Prepared:
    """Run `sagetrain prepare SOURCES --output OUTPUT`. The options are keyword arguments of Request."""
    return preparing.prepare(Request(sources, output=output, **options), say)


def quiet(sources: list[str], output: str | Path, **options) -> Prepared:
    return prepare(sources, output, say=lambda text: None, **options)

"""Write a tokenizer as the files that transformers.AutoTokenizer reads, with the same ids for the same text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Pipeline

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import TOKENIZER_JSON
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.data.tokenizer_copy import named_templates

_SPACE_MARK = "\u2581"
# This is one of SentencePiece's model types.
_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # These are SentencePiece's types of pieces.


def tokenizer_files(
    tokenizer: Tokenizer, seq_length: int, chat_templates: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """Return the contents of tokenizer.json, tokenizer_config.json and, for a SentencePiece model, the model, by file
    name. `chat_templates` by name replace the tokenizer's own. Raises ConfigError if tokenizer.json cannot give the ids
    of a SentencePiece model. The message names the model's option."""
    if tokenizer.file_name == TOKENIZER_JSON:
        files = {TOKENIZER_JSON: json.loads(tokenizer.model)}
        config = {**(tokenizer.config or {})}
    else:
        model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model)  # type: ignore[attr-defined]
        pipeline = _pipeline(model)
        _check(pipeline, tokenizer, model)
        if tokenizer.prefix:
            bos = model.pieces[tokenizer.bos_id].piece
            pipeline.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_id)]
            )
        files = {TOKENIZER_JSON: json.loads(pipeline.to_str())}
        named = {"unk_token": model.trainer_spec.unk_id, "pad_token": model.trainer_spec.pad_id}
        named |= {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        config = {name: model.pieces[number].piece for name, number in named.items() if number >= 0}
        config |= {**(tokenizer.config or {})} | tokenizer.special_tokens
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    if chat_templates and not chat_templates.items() <= tokenizer.chat_templates.items():
        config["chat_template"] = named_templates(chat_templates)
    files["tokenizer_config.json"] = config
    texts = {name: json.dumps(tree, indent=2, ensure_ascii=False) for name, tree in files.items()}
    return {tokenizer.file_name: tokenizer.model} | {name: f"{text}\n".encode() for name, text in texts.items()}


def _pipeline(model: Any) -> Pipeline:
    """Build a SentencePiece byte-pair encoding with the tokenizers package.

    Pieces get real spaces in place of SentencePiece's space mark. The mark itself, in a text, is then a character that
    is not in the vocabulary and is spelled in bytes, as in Tokenizer.encode.
    """
    if reason := next(_refusals(model), None):
        raise ConfigError(f"its SentencePiece model {reason}")
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    ids = {_spaced(piece.piece): number for number, piece in enumerate(model.pieces)}
    scores = {_spaced(piece.piece): piece.score for piece in model.pieces if piece.type == _NORMAL}
    # SentencePiece merges any two neighbours that form a piece, the piece with the highest score first.
    merges = sorted(
        (-score, -cut, (piece[:cut], piece[cut:]))
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    )
    for (score, _, first), (other, _, second) in pairwise(merges):
        if score == other and "".join(first) != "".join(second):
            raise ConfigError(
                f"its SentencePiece model gives {''.join(first)!r} and {''.join(second)!r} the same score, so that "
                "their places in a text decide which is made first"
            )
    unknown = _spaced(model.pieces[trainer.unk_id].piece)
    pairs = [pair for *_, pair in merges]
    pipeline = Pipeline(models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback))
    before: list[Any] = [] if trainer.byte_fallback else [normalizers.Replace(_SPACE_MARK, " ")]
    after: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if normalizer.add_dummy_prefix:
        before.append(normalizers.Prepend(" "))
        after.append(decoders.Strip(" ", 1, 0))
    if before:
        pipeline.normalizer = normalizers.Sequence(before)
    pipeline.decoder = decoders.Sequence(after)
    # SentencePiece looks for pieces in a text whose spaces are marks, and never finds one with a space.
    named = [(_spaced(piece.piece), piece.type) for piece in model.pieces if " " not in piece.piece]
    pipeline.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text, kind in named if kind in (_UNKNOWN, _CONTROL)]
    )
    # If the mark is a space in a text too, symbols are found after it was replaced.
    found_in = {"normalized": not trainer.byte_fallback}
    pipeline.add_tokens([AddedToken(text, **found_in) for text, kind in named if kind == _USER_DEFINED])
    return pipeline


def _refusals(model: Any) -> Iterator[str]:
    """Yield the reasons why tokenizer.json cannot give the ids of a SentencePiece model. They name SentencePiece's
    options."""
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    if trainer.model_type != _BPE:
        yield "is not a byte-pair encoding"
    if normalizer.precompiled_charsmap:
        yield f"normalizes text ({normalizer.name})"
    if normalizer.remove_extra_whitespaces:
        yield "takes spaces away around a text and beside others (remove_extra_whitespaces)"
    if not normalizer.escape_whitespaces:
        yield "keeps spaces as they are (escape_whitespaces is false)"
    if model.denormalizer_spec.precompiled_charsmap:
        yield "changes the text that it decodes (denormalizer_spec)"
    if normalizer.add_dummy_prefix and trainer.treat_whitespace_as_suffix:
        yield "puts a space behind a text (treat_whitespace_as_suffix)"
    if normalizer.add_dummy_prefix and any(piece.type == _USER_DEFINED for piece in model.pieces):
        # The tokenizers package would put the space before every part of a text between such symbols.
        yield "has user-defined symbols, and puts a space before a text"
    if unused := [piece.piece for piece in model.pieces if piece.type == _UNUSED]:
        yield f"has pieces that are switched off, such as {unused[0]!r}"
    if any(piece.piece == " " for piece in model.pieces):
        yield "has a symbol that is a single space, which SentencePiece never finds in a text"


def _check(pipeline: Pipeline, tokenizer: Tokenizer, model: Any) -> None:
    """Check that texts made of the model's pieces have the same ids in tokenizer.json. Raises ConfigError if not."""

    def differs(texts: Sequence[str]) -> bool:
        text = "".join(texts)
        return pipeline.encode(text, add_special_tokens=False).ids != tokenizer.encode(text)

    pieces = ["", " ", "\n", _SPACE_MARK, *(piece.piece.replace(_SPACE_MARK, " ") for piece in model.pieces)]
    for between in ("", " ", "  "):
        for start in range(0, len(pieces), 32):
            texts = [text for piece in pieces[start : start + 32] for text in (piece, between)]
            while differs(texts):
                half = len(texts) // 2
                shorter = next(
                    (part for part in (texts[:half], texts[half:]) if len(part) < len(texts) and differs(part)), None
                )
                if shorter is None:
                    raise ConfigError(
                        f"its SentencePiece model gives {''.join(texts)!r} other ids than tokenizer.json would"
                    )
                texts = shorter


def _spaced(piece: str) -> str:
    """Return a piece as the vocabulary of tokenizer.json has it. A piece that is never found gets the mark, so that it
    differs from other pieces."""
    return piece.replace(" ", _SPACE_MARK) if " " in piece else piece.replace(_SPACE_MARK, " ")

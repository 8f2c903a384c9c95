"""A tokenizer as the files that transformers.AutoTokenizer reads, with the same ids for the same text."""

from __future__ import annotations

import json
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Pipeline

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import TOKENIZER_JSON
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.data.tokenizer_copy import TOKENIZER_CONFIG, split

_SPACE_MARK = "\u2581"
_BPE = 2  # of SentencePiece's model types
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # of its types of pieces


def tokenizer_files(tokenizer: Tokenizer, seq_length: int) -> dict[str, bytes]:
    """Content of tokenizer.json, tokenizer_config.json and the SentencePiece model, if it is one, by file name.

    Raises ConfigError for a SentencePiece model that tokenizer.json is not made of here: no byte-pair encoding, one
    that normalizes text, or one with symbols of its user's and a space before every text.
    """
    if tokenizer.file_name == TOKENIZER_JSON:
        tree = json.loads(tokenizer.model)
        config = tree.pop(TOKENIZER_CONFIG)
        files = {TOKENIZER_JSON: tree}
    else:
        model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model)  # type: ignore[attr-defined]
        pipeline = _pipeline(model)
        if tokenizer.prefix:
            bos = model.pieces[tokenizer.bos_id].piece
            pipeline.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_id)]
            )
        files = {TOKENIZER_JSON: json.loads(pipeline.to_str())}
        named = {"unk_token": model.trainer_spec.unk_id, "pad_token": model.trainer_spec.pad_id}
        named |= {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        config = {name: model.pieces[number].piece for name, number in named.items() if number >= 0}
        config |= split(tokenizer.model)[1] | tokenizer.special_tokens
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    files["tokenizer_config.json"] = config
    texts = {name: json.dumps(tree, indent=2, ensure_ascii=False) for name, tree in files.items()}
    return {tokenizer.file_name: tokenizer.model} | {name: f"{text}\n".encode() for name, text in texts.items()}


def _pipeline(model: Any) -> Pipeline:
    """A SentencePiece byte-pair encoding in the terms of the tokenizers package.

    Pieces get real spaces in place of SentencePiece's mark, so that the mark itself, in a text, is a character that
    the vocabulary does not have and is spelled in bytes, as Tokenizer.encode does it.
    """
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    if trainer.model_type != _BPE:
        raise ConfigError("its SentencePiece model is not a byte-pair encoding")
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise ConfigError(f"its SentencePiece model normalizes text ({normalizer.name})")
    if normalizer.add_dummy_prefix and any(piece.type == _USER_DEFINED for piece in model.pieces):
        # The tokenizers package would put the space before every part of a text that such symbols cut out.
        raise ConfigError("its SentencePiece model has user-defined symbols, and puts a space before a text")
    ids = {_spaced(piece.piece): number for number, piece in enumerate(model.pieces)}
    scores = {_spaced(piece.piece): piece.score for piece in model.pieces if piece.type == _NORMAL}
    # SentencePiece merges any two neighbours that make a piece, the piece of the highest score first.
    merges = [
        (-score, -cut, (piece[:cut], piece[cut:]))
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    unknown = _spaced(model.pieces[trainer.unk_id].piece)
    pairs = [pair for *_, pair in sorted(merges)]
    pipeline = Pipeline(models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback))
    before: list[Any] = [] if trainer.byte_fallback else [normalizers.Replace(_SPACE_MARK, " ")]
    after: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if normalizer.add_dummy_prefix:
        before.append(normalizers.Prepend(" "))
        after.append(decoders.Strip(" ", 1, 0))
    if before:
        pipeline.normalizer = normalizers.Sequence(before)
    pipeline.decoder = decoders.Sequence(after)
    named = [(_spaced(piece.piece), piece.type) for piece in model.pieces]
    pipeline.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text, kind in named if kind in (_UNKNOWN, _CONTROL)]
    )
    pipeline.add_tokens([AddedToken(text, normalized=False) for text, kind in named if kind == _USER_DEFINED])
    return pipeline


def _spaced(piece: str) -> str:
    return piece.replace(_SPACE_MARK, " ")

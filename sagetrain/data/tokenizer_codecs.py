"""SentencePiece models and Hugging Face's tokenizer.json as what turns text into ids and back: two codecs with one
interface."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any

import sentencepiece
import tokenizers

from sagetrain.data.tokenizer_copy import SPLIT_SPECIAL, kept_templates

# SentencePiece writes a space as this character inside its pieces, and would decode the character as a space.
SPACE_MARK = "\u2581"
_STAND_INS = range(0xE000, 0xF900)
"""Characters for private use. One of them stands for the space mark. All have three bytes, as the mark has."""

Spans = list[tuple[int, int]]
"""For each token in a text, its first character and the one after its last."""


class SentencePiece:
    """The codec of a SentencePiece model. Control tokens are found in a text, and the space mark is no space."""

    def __init__(self, model: bytes, config: Mapping[str, Any]):
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.load_from_serialized_proto(model)
        except RuntimeError as error:
            raise ValueError("a SentencePiece model file, nor a tokenizer.json") from error
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.unknown_id: int = self._processor.unk_id()
        self._byte_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        self.special_tokens = {name: token for name, token in config.items() if name.endswith("_token")}
        self.special_tokens |= {name: self._processor.id_to_piece(each) for name, each in named.items() if each >= 0}
        self.special_tokens.pop("add_bos_token", None)
        self.prefix = [self.bos_id] if config.get("add_bos_token") and self.bos_id >= 0 else []
        self.chat_templates = kept_templates(config)
        self._as_characters = bool(config.get(SPLIT_SPECIAL))

    def encode(self, text: str) -> list[int]:
        if not self._written or not self._written.search(text):
            return self._plain(text)
        ids: list[int] = []
        for part in self._written.split(text):
            ids += [self._control[part]] if part in self._control else self._plain(part)
        return ids

    def _plain(self, text: str) -> list[int]:
        return self._spelled(self._processor.encode(self._without_marks(text)), text)

    @cached_property
    def _stand_in(self) -> str | None:
        """A character that the model spells in bytes, or None if the model has no bytes. It stands for the space mark,
        which SentencePiece would take for a space."""
        if not all(map(self._processor.is_byte, self._byte_ids)):
            return None
        return next((each for each in map(chr, _STAND_INS) if self._is_spelled(each)), None)

    def _is_spelled(self, character: str) -> bool:
        ids, spelled = self._processor.encode(f"a{character}a"), self._bytes(character)
        return any(ids[place : place + 3] == spelled for place in range(len(ids)))

    def _bytes(self, text: str) -> list[int]:
        return [self._byte_ids[byte] for byte in text.encode()]

    def _without_marks(self, text: str) -> str:
        """Replace space marks by the stand-in. The text is encoded as a whole, because a model may put a space before
        or behind each text."""
        return text.replace(SPACE_MARK, self._stand_in) if SPACE_MARK in text and self._stand_in else text

    def _spelled(self, ids: Iterable[int], text: str) -> list[int]:
        """Return the token ids of `_without_marks(text)`, with the bytes of the space mark where the text has it."""
        found = list(ids)
        if SPACE_MARK not in text or not self._stand_in:
            return found
        theirs, mark = self._bytes(self._stand_in), self._bytes(SPACE_MARK)
        marks = (letter == SPACE_MARK for letter in text if letter in (SPACE_MARK, self._stand_in))
        for place in range(len(found) - 2):
            if found[place : place + 3] == theirs and next(marks):
                found[place : place + 3] = mark
        return found

    @cached_property
    def _control(self) -> dict[str, int]:
        """Ids of control tokens by their texts. The text of the unknown token is that token, too."""
        if self._as_characters:
            return {}
        ids = filter(lambda each: self.is_control(each) or self._processor.is_unknown(each), range(self.vocab_size))
        return {self.piece(each): each for each in ids}

    @cached_property
    def _written(self) -> re.Pattern[str] | None:
        return any_of(self._control)

    def spans(self, text: str) -> tuple[list[int], Spans]:
        from sentencepiece.sentencepiece_pb2 import SentencePieceText  # type: ignore[attr-defined]

        found, spans, begin = [], [], 0
        for part in self._written.split(text) if self._written else [text]:
            if part in self._control:
                found.append(self._control[part])
                spans.append((begin, begin + len(part)))
            else:
                encoded = self._processor.encode(self._without_marks(part), out_type="serialized_proto")
                pieces = SentencePieceText.FromString(encoded).pieces
                # The offsets count bytes. This list has the number of characters that begin before each byte.
                characters = [*accumulate((byte & 0xC0 != 0x80 for byte in part.encode()), initial=begin)]
                found += self._spelled((piece.id for piece in pieces), part)
                # Pieces without a length are bytes of the next character, or a space before or behind the text.
                last = characters[-1] - (1 if part else 0)
                starts = (min(characters[p.begin], last) for p in pieces)
                spans += [(at, max(at + 1, characters[p.end])) for at, p in zip(starts, pieces, strict=True)]
            begin += len(part)
        return found, spans

    def is_control(self, token: int) -> bool:
        return bool(self._processor.is_control(token))

    def piece(self, token: int) -> str:
        return str(self._processor.id_to_piece(token))

    def decode(self, ids: list[int]) -> str:
        return str(self._processor.decode(ids))


class HuggingFace:
    """The codec of a tokenizer.json."""

    def __init__(self, model: bytes, config: Mapping[str, Any]):
        tree = json.loads(model)
        try:
            # Spans would lose the spaces at their ends, so that the last spaces of a part would count nowhere.
            post = tree.get("post_processor") or {}
            for step in post.get("processors") or [post]:
                step |= {"trim_offsets": False} if "trim_offsets" in step else {}
            self._pipeline = tokenizers.Tokenizer.from_str(json.dumps(tree))
        except Exception as error:
            raise ValueError(f"a tokenizer.json of the tokenizers package ({error})") from error
        self._pipeline.no_truncation()
        self._pipeline.no_padding()
        self._pipeline.encode_special_tokens = bool(config.get(SPLIT_SPECIAL))
        self.vocab_size: int = max(self._pipeline.get_vocab().values()) + 1
        self.bos_id, self.eos_id = (self._id(config.get(name)) for name in ("bos_token", "eos_token"))
        model_of = tree["model"]
        self.unknown_id = self._id(model_of.get("unk_token"))
        if isinstance(place := model_of.get("unk_id"), int):
            self.unknown_id = self._id(model_of["vocab"][place][0])
        # In the encoding of an empty text, tokens before and behind it cannot be told apart.
        text = self._pipeline.encode(string.printable)
        self.prefix = text.ids[: [*text.special_tokens_mask, 0].index(0)]
        self.special_tokens = {name: token for name, token in config.items() if name.endswith("_token")}
        self.chat_templates = kept_templates(config)

    @cached_property
    def _control(self) -> frozenset[int]:
        return frozenset(each for each, added in self._pipeline.get_added_tokens_decoder().items() if added.special)

    def _id(self, token: str | None) -> int:
        number = self._pipeline.token_to_id(token) if token else None
        return -1 if number is None else number

    def encode(self, text: str) -> list[int]:
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def spans(self, text: str) -> tuple[list[int], Spans]:
        encoding = self._pipeline.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def is_control(self, token: int) -> bool:
        return token in self._control

    def piece(self, token: int) -> str:
        return self._pipeline.id_to_token(token) or ""

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds any of these texts, the longest first. Return None if there are none."""
    found = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, found))})") if found else None

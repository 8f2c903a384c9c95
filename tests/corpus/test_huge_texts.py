"""One huge text takes bounded memory, and is seen to be read."""

import io
import zipfile
from itertools import chain, pairwise

import pytest
import zstandard

from prepare_inputs import make_texts
from sagetrain.corpus import blocks, files, long_texts
from sagetrain.corpus.archives import members
from sagetrain.corpus.chunk import Place
from sagetrain.corpus.files import CHUNK_BYTES, Wanted, read
from sagetrain.corpus.kinds import HEAD
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.data.tokenizer import Tokenizer

MB = 1 << 20


def test_a_zstd_frame_of_one_letter_comes_in_blocks() -> None:
    """All of it came at once, and what was left of it was copied for each block that was read."""
    content = b"a" * 64 * MB + "".join(make_texts(300)).encode()
    found = list(blocks._blocks_of_streams(io.BytesIO(zstandard.compress(content) * 2), blocks._ZstdFrame))
    assert b"".join(found) == 2 * content
    assert max(map(len, found)) < 16 * MB


def test_the_place_in_a_zip_moves_with_what_is_unpacked(tmp_path) -> None:
    """A few KB of an archive may be a huge text, and the bar stood at its end from its first block on."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.txt", b"a" * 4 * MB)
    (content,) = members(tmp_path / "a.zip", {"a.txt"})
    size = (tmp_path / "a.zip").stat().st_size
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        content = blocks.Content(content.name, lambda: file.open("a.txt"), content.read)
        with blocks.opened(content) as (text, read):
            places = [read() for _ in iter(lambda: text.read(blocks.BLOCK), b"")]
    assert all(after > before for before, after in pairwise(places)) and places[0] < 0.2 * size
    assert 0.5 * size < places[-1] <= size


def test_a_text_that_begins_with_white_space_is_read_in_parts() -> None:
    content = blocks.Content("a.txt", lambda: io.BytesIO(b"\n" * HEAD + b"a line\n" * (4 * CHUNK_BYTES // 7)))
    chunks = list(read(content, Wanted(("text",)), Place()))
    assert len(chunks) >= 4 and max(len(record) for chunk in chunks for record in chunk.records) < 2 * CHUNK_BYTES


@pytest.mark.parametrize("text", ["acgt" * 10_000, "é" * 40_000, " " * 40_000], ids=["genome", "letter", "spaces"])
def test_a_text_without_a_seam_is_cut_all_the_same(monkeypatch, text: str) -> None:
    monkeypatch.setattr(long_texts, "PIECE", 1000)
    monkeypatch.setattr(long_texts, "_FARTHEST", 8000)
    tokenizer = Tokenizer(train_tokenizer(make_texts(200), 384))
    encoded: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda part: encoded.append(part) or encode(part))
    found = [*chain(*long_texts.pieces(tokenizer, text))]
    assert max(map(len, encoded)) <= 10_000
    assert tokenizer.decode(found) == text


@pytest.mark.parametrize("size", [4, 5, 6, 7])
def test_a_separator_is_found_wherever_a_block_ends(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(files, "BLOCK", size)
    content = blocks.Content("a.txt", lambda: io.BytesIO(b"one ---- two"))
    assert files.contains(content, b"----") and not files.contains(content, b"-----")

"""Streams of samples for tests, which need no configuration of a run."""

from sagetrain.config.schema import DataConfig, DataSource
from sagetrain.data.loader import SampleStream


def stream_of(
    sources: list[DataSource],
    seq_length: int,
    seed: int = 0,
    attention: bool = True,
    positions: bool = True,
    vocab_size: int = 1 << 31,
    tokenizer_sha256: str | None = None,
) -> SampleStream:
    """Open token files whose tokens are of any vocabulary. The flags are those of documents."""
    how = {"seq_length": seq_length, "document_attention": attention, "document_positions": positions}
    return SampleStream(DataConfig.model_construct(**how), sources, seed, vocab_size, tokenizer_sha256)

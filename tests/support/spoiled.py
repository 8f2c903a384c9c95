"""Make token files that let a step go wrong by real means."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sagetrain.config.schema import DataSource
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.data.token_file import TokenFile
from streams import stream_of

MIDDLE = 13
"""The place in a sample where a document begins, for `begins`."""


def spoiled(corpus: Path, folder: Path, samples: Iterable[int], begins: int | None = None) -> Path:
    """Copy the corpus and replace some samples of a run (sequences of 32 tokens, seed 0) by one token, repeated.
    begins: start a document in the middle of this sample."""
    seq_length = 32
    folder.mkdir()
    for file in corpus.iterdir():
        shutil.copy(file, folder)
    file = TokenFile(corpus / "train")
    tokens = np.array(file.tokens(0, file.num_tokens))
    stream = stream_of([DataSource(path=str(corpus / "train"))], seq_length, 0)
    for sample in samples:
        _, window = stream.locate(sample)
        tokens[window * seq_length : (window + 1) * seq_length] = 500
    ends = [file.document_start(document) for document in range(1, file.num_documents)]
    if begins is not None:
        ends = sorted({*ends, stream.locate(begins)[1] * seq_length + MIDDLE})
    writer = TokenFileWriter(folder / "train").begin(512)
    writer.add(tokens, np.diff([0, *ends, len(tokens)]))
    writer.finish()
    writer.publish({**file.provenance(), "sha256": writer.sha256})
    return folder

"""The command `sagetrain prepare`: text in, token files and tokenizer out.

One process reads, several turn text into tokens, and the results are written in the order of reading. The files are the
same bytes whatever the number of workers. Memory does not grow with the corpus. A call that was interrupted is
continued by the next one (journal.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagetrain.config.errors import in_notebook, to_stderr
from sagetrain.config.schema import TOKENIZER_NAME, tokenizer_in
from sagetrain.corpus.counts import Counts
from sagetrain.corpus.destination import Destination
from sagetrain.corpus.encode import Encoder
from sagetrain.corpus.outputs import claimed
from sagetrain.corpus.records import Records, settled
from sagetrain.corpus.request import Request
from sagetrain.corpus.sources import Corpus
from sagetrain.corpus.split import check_split
from sagetrain.corpus.token_writer import alone_in
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.data.token_file import read_provenance
from sagetrain.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`."""

    train: Path
    """The path of the token file, as data.train[].path takes it."""
    valid: Path | None
    """The path of the held-out token file, if one was asked for."""
    tokenizer: Path
    """The file of the tokenizer, beside the token file."""
    counts: dict[str, Counts]
    """The counts of the token files, by "train" and "valid"."""
    vocab_size: int
    """The number of tokens of the tokenizer."""
    seconds: float
    """The time that the call took."""
    already_there: bool
    """Whether an earlier call with the same inputs had written everything, so that nothing was done."""


def prepare(request: Request, hears: Callable[[str], None] | None = None) -> Prepared:
    """Turn text into a token file (.bin, .idx, .json), with its tokenizer in the same folder: tokenizer.model
    (SentencePiece) or tokenizer.json (Hugging Face).

    An interrupted call leaves only *.partial files. A call with the same request continues from the last record, which
    is made every ten seconds or so; num_workers may change. A call whose result already exists, from the same inputs,
    returns at once.

    Args:
        request: the text, the output and the settings.
        hears: gets messages for people. None: they go to stderr, with a progress bar.

    Returns:
        The paths and counts of what was written.

    Raises:
        ConfigError: for everything that the caller can put right.
    """
    begin, say = time.perf_counter(), hears or to_stderr
    request.check()
    there = Destination(request)
    corpus = Corpus(request, there.division, request.records)
    if not request.has_tokenizer:
        next(corpus.chunks(), None)  # A name that is neither a file nor a dataset is named first.
        raise request.no_tokenizer()
    if not request.records:
        check_split(corpus, request.valid_fraction)
    given = None if request.vocab_size else Tokenizer.load(request.tokenizer or tokenizer_in(there.folder))
    records = settled(request.records, given) if request.records else None
    prefix = given.prefix if given and not (records and records.templated) else []
    file_name = given.file_name if given else TOKENIZER_NAME
    made_from = _made_from(request, corpus, given, records, prefix)
    with claimed(there) as outputs:
        if not request.overwrite and there.holds(made_from, file_name):
            outputs.journal.discard()
            say(f"{there.train}: already prepared from the same inputs")
            return _result(there, file_name, begin, True)
        outputs.read(made_from, request.overwrite)
        notes = there.check(made_from, given)
        for note in [*(given.notes if given else ()), *corpus.notes, *notes]:
            say(note)
        tokenizer = given or outputs.tokenizer() or _trained(request, corpus, say)
        there.check_siblings(tokenizer)
        encoder = Encoder(tokenizer, request.text_key, request.valid_fraction, request.skip_bad_lines, records, prefix)
        if gone_on := outputs.begin(corpus, encoder, trained=given is None):
            say(gone_on)
        try:
            outputs.write(request.num_workers, shown=hears is None or in_notebook())
            with alone_in(there.folder):
                # Other calls may have written there by now.
                there.check_siblings(tokenizer)
                for note in set(there.check_parts(made_from)) - set(notes):
                    say(note)
                outputs.publish(request)
        finally:
            if outputs.journal.exists:
                say(f"{there.train}: unfinished; the same call or command goes on with it")
    for line in outputs.sentences():
        say(line)
    return _result(there, file_name, begin, False)


def _trained(request: Request, corpus: Corpus, say: Callable[[str], None]) -> Tokenizer:
    assert request.vocab_size, "Request.check wants this one or a tokenizer"
    begin = time.perf_counter()
    say(f"training a tokenizer of {request.vocab_size:,} tokens")
    model = train_tokenizer(corpus.sample(request.tokenizer_sample), request.vocab_size, corpus.named)
    say(f"trained the tokenizer in {time.perf_counter() - begin:.0f} s")
    return Tokenizer(model)


def _made_from(
    request: Request, corpus: Corpus, given: Tokenizer | None, records: Records | None, prefix: list[int]
) -> dict[str, Any]:
    """Return what decides the content of the token files, as their record has it."""
    return (
        {
            "inputs": len(corpus.all_inputs),
            "inputs_sha256": corpus.identity(),
            "text_key": request.text_key,
            "valid_fraction": request.valid_fraction,
            "tokenizer": given.sha256 if given else [request.vocab_size, request.tokenizer_sample],
        }
        | ({"skip_bad_lines": True} if request.skip_bad_lines else {})
        | ({"shard": list(request.division)} if request.division else {})
        | ({"split_on": request.split_on} if request.split_on is not None else {})
        | ({"text_key": None, "records": records.request} if records else {})
        | ({"prefix": prefix} if prefix else {})
        | ({} if records and records.templated else {"control_tokens": True})
    )


def _result(there: Destination, tokenizer: str, begin: float, already_there: bool) -> Prepared:
    recorded = {side: read_provenance(path) for side, path in there.outputs.items()}
    return Prepared(
        there.train,
        there.outputs.get("valid"),
        there.folder / tokenizer,
        {side: Counts.recorded(record) for side, record in recorded.items()},
        recorded["train"]["vocab_size"],
        time.perf_counter() - begin,
        already_there,
    )

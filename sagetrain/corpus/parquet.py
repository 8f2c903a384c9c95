"""Read Parquet files, and rows of other Arrow tables, as chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.corpus.chunk import Chunk, root_of
from sagetrain.corpus.files import Wanted, check_columns


def read_parquet(path: Path, wanted: Wanted) -> Iterator[Chunk]:
    """Yield chunks of a Parquet file. Rows are the texts of one column, or with `fields` dicts of the wanted and the
    optional columns.

    Raises:
        ConfigError: the file cannot be read, or lacks a column.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with open(path, "rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            names = file.schema_arrow.names
            check_columns(path, names, wanted)
            columns = [name for name in (*wanted.columns, *wanted.optional) if root_of(name, names)]
            roots = [*dict.fromkeys(root_of(name, names) for name in columns)]
            size, rows = path.stat().st_size, max(file.metadata.num_rows, 1)
            number = 1
            for batch in file.iter_batches(batch_size=512, columns=roots):
                done = size * (number - 1 + len(batch)) // rows
                yield rows_of(str(path), batch, number, columns, wanted.fields, names, done)
                number += len(batch)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def rows_of(
    origin: str, table: Any, number: int, columns: Sequence[str], fields: bool, names: Sequence[str], consumed: int = 0
) -> Chunk:
    """Build a chunk from the rows of an Arrow table.

    Args:
        origin: file or dataset, for messages.
        table: an Arrow table or record batch.
        number: number of its first row.
        columns: the columns to read.
        fields: whether rows become dicts of fields instead of texts.
        names: all columns of the whole table.
        consumed: bytes of the input that have been read.
    """
    from sagetrain.corpus.arrow_tables import records_in, values_in

    try:
        records = records_in(table, columns) if fields else values_in(table, columns[0])
    except ValueError as error:
        what = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "a column of JSON holds what is none"
        raise ConfigError(f"{origin}, rows {number:,} to {number + len(table) - 1:,}: {what}: {error}") from error
    read = {root_of(name, names) for name in columns}
    unread = tuple(name for name in names if name not in read)
    return Chunk(origin, "row", number, records, consumed, unread=unread)

"""Read Parquet files, and rows of other Arrow tables, as chunks: without what a table added to its records, and with
their JSON parsed.

A table has every key of a structure in every row, with null where the row had none. The datasets library (5 and later)
writes objects of many kinds as columns of JSON, which hold text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from sagetrain.config.errors import ConfigError
from sagetrain.corpus.blocks import head, on_disk
from sagetrain.corpus.chunk import Chunk, loads, root_of, value_at
from sagetrain.corpus.files import Wanted, check_columns
from sagetrain.corpus.kinds import check_head


def read_parquet(path: Path, wanted: Wanted) -> Iterator[Chunk]:
    """Yield chunks of a Parquet file. Rows are the texts of one column, or with `fields` dicts of the wanted and the
    optional columns. Raises ConfigError if the file cannot be read, or lacks a column."""
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
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        begin = head(on_disk(path))
        check_head(str(path), begin)
        other = begin and not begin.startswith(b"PAR1")
        fix = "name it by what it is" if other else "copy it again, or write it anew"
        raise ConfigError(f"cannot read {path}: {error}; {fix}") from error


def rows_of(
    origin: str,
    table: pa.Table | pa.RecordBatch,
    number: int,
    columns: Sequence[str],
    fields: bool,
    names: Sequence[str],
    consumed: int = 0,
) -> Chunk:
    """Build a chunk from the rows of an Arrow table.

    Args:
        origin: file or dataset, for messages.
        number: number of its first row.
        fields: whether rows become dicts of fields instead of texts.
        names: all columns of the whole table.
        consumed: bytes of the input that have been read.
    """
    try:
        records = _records_in(table, columns) if fields else _values_in(table, columns[0])
    except ValueError as error:
        what = "a column of JSON holds what is none: " if isinstance(error, json.JSONDecodeError) else ""
        what = "not UTF-8: " if isinstance(error, UnicodeDecodeError) else what
        raise ConfigError(f"{origin}, rows {number:,} to {number + len(table) - 1:,}: {what}{error}") from error
    read = {root_of(name, names) for name in columns}
    unread = tuple(name for name in names if name not in read)
    return Chunk(origin, "row", number, records, consumed, unread=unread)


def _records_in(table: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table as dicts of those of the columns that it has. Raises ValueError if its JSON cannot be
    read."""
    there = [name for name in columns if root_of(name, table.schema.names)]
    values = [map(_text, _values_in(table, name)) for name in there]
    return [dict(zip(there, row, strict=True)) for row in zip(*values, strict=True)]


def _values_in(table: pa.Table | pa.RecordBatch, column: str) -> list[Any]:
    """Return the values of a column, or for a.b of the field b in a column of structs, which is None where a struct
    has null. Raises ValueError if the column has no such field, or its JSON cannot be read."""
    root = root_of(column, table.schema.names) or column
    kind = table.schema.field(root).type
    values = [_plain(value, kind) for value in table.column(root).to_pylist()]
    if root == column:
        return values
    # `_plain` leaves out fields that are null.
    has_field = _has_field(kind, column[len(root) + 1 :])

    def field(value: Any) -> Any:
        try:
            return value_at({root: value}, column)
        except KeyError as error:
            if has_field:
                return None
            raise ValueError(f"no {column!r}: {root!r} is of the type {kind}") from error

    return [*map(field, values)]


def _has_field(kind: pa.DataType, key: str) -> bool:
    """Whether a type of structs has a field of this name, or for a.b a field b in its field a."""
    if not pa.types.is_struct(kind):
        return False
    root = root_of(key, [each.name for each in kind])
    return root is not None and (root == key or _has_field(kind.field(root).type, key[len(root) + 1 :]))


def _text(value: Any) -> Any:
    """Return a value with the bytes in it as text, as columns of binary hold JSON."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: _text(each) for key, each in value.items()}
    return [_text(each) for each in value] if isinstance(value, list) else value


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value of to_pylist without what its Arrow type added. Nulls in JSON and in maps were in the data."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return loads(value) if kind.extension_name == "arrow.json" else _plain(value, kind.storage_type)
    if pa.types.is_struct(kind):
        return {each.name: _plain(value[each.name], each.type) for each in kind if value[each.name] is not None}
    if pa.types.is_map(kind):
        return {key: _plain(each, kind.item_type) for key, each in value}
    if hasattr(kind, "value_type") and isinstance(value, list):
        return [_plain(each, kind.value_type) for each in value]
    return value

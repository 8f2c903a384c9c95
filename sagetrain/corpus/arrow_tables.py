"""Read Parquet files, and rows of other Arrow tables, as chunks: without what a table added to its records, and with
their JSON parsed.

A table has every key of a structure in every row, with null where the row had none. The datasets library (5 and later)
writes objects of many kinds as columns of JSON, which hold text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from sagetrain.config.errors import ConfigError
from sagetrain.corpus.blocks import head, on_disk
from sagetrain.corpus.chunk import Chunk, loads, root_of, value_at
from sagetrain.corpus.files import Wanted, columns_among
from sagetrain.corpus.kinds import check_head


def read_parquet(path: Path, wanted: Wanted) -> Iterator[Chunk]:
    """Yield chunks of a Parquet file. Rows are the texts of one column, or with `fields` dicts of the wanted and the
    optional columns. Raises ConfigError if the file cannot be read, or lacks a column."""
    try:
        with open(path, "rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            names, size, rows = file.schema_arrow.names, path.stat().st_size, max(file.metadata.num_rows, 1)
            batches = file.iter_batches(batch_size=512, columns=roots_of(path, names, wanted))
            for chunk in chunks_of(str(path), batches, 1, wanted, names):
                chunk.consumed = size * (chunk.first - 1 + len(chunk.records)) // rows
                yield chunk
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        begin = head(on_disk(path))
        check_head(str(path), begin)
        other = begin and not begin.startswith(b"PAR1")
        fix = "name it by what it is" if other else "copy it again, or write it anew"
        raise ConfigError(f"cannot read {path}: {error}; {fix}") from error


def roots_of(origin: object, names: Sequence[str], wanted: Wanted) -> list[str]:
    """Return the columns of a table that hold the fields to read. Raises ConfigError as columns_among does."""
    return [*dict.fromkeys(root for each in columns_among(origin, names, wanted) if (root := root_of(each, names)))]


def chunks_of(
    origin: str, tables: Iterable[pa.Table | pa.RecordBatch], first: int, wanted: Wanted, names: Sequence[str] | None
) -> Iterator[Chunk]:
    """Yield a chunk of the rows of each Arrow table, as read_parquet does.

    Args:
        origin: file or dataset, for messages.
        first: number of the first row.
        names: all columns of the whole table. None: those of each table.
    """
    for table in tables:
        there = names or table.schema.names
        columns = columns_among(origin, there, wanted)
        read = {root_of(name, there) for name in columns}
        try:
            values = [_values_in(table, name) for name in columns]
            if wanted.fields:
                records = [dict(zip(columns, map(_text, row), strict=True)) for row in zip(*values, strict=True)]
        except ValueError as error:
            what = "a column of JSON holds what is none: " if isinstance(error, json.JSONDecodeError) else ""
            what = "not UTF-8: " if isinstance(error, UnicodeDecodeError) else what
            raise ConfigError(f"{origin}, rows {first:,} to {first + len(table) - 1:,}: {what}{error}") from error
        unread = tuple(name for name in there if name not in read)
        yield Chunk(origin, "row", first, records if wanted.fields else values[0], unread=unread)
        first += len(table)


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

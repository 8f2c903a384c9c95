"""Read rows of Arrow tables as records, without what the table added to them, and with their JSON parsed.

A table has every key of a structure in every row, with null where the row had none. The datasets library (5 and later)
writes objects of many kinds as columns of JSON, which hold text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sagetrain.corpus.chunk import loads, root_of, value_at


def records_in(table: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table as dicts of those of the columns that it has. Raises ValueError if its JSON cannot be
    read."""
    there = [name for name in columns if root_of(name, table.schema.names)]
    values = [map(_text, values_in(table, name)) for name in there]
    return [dict(zip(there, row, strict=True)) for row in zip(*values, strict=True)]


def values_in(table: pa.Table | pa.RecordBatch, column: str) -> list[Any]:
    """Return the values of a column. Raises ValueError if its JSON cannot be read."""
    root = root_of(column, table.schema.names) or column
    kind = table.schema.field(root).type
    values = [_plain(value, kind) for value in table.column(root).to_pylist()]
    try:
        return values if root == column else [value_at({root: value}, column) for value in values]
    except KeyError as error:
        raise ValueError(f"{root!r} holds no {column!r}") from error


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

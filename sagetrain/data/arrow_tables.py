"""Rows of Arrow tables as records: what the table added to them is taken away, and JSON is read.

A table has every key of a structure in every row, with null where the row had none. Columns of JSON, as the datasets
library (5 and later) writes objects of many kinds, hold text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def records_in(table: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a table with the columns that it has of these. ValueError if JSON in it cannot be read."""
    there = [name for name in columns if name in table.schema.names]
    values = [values_in(table, name) for name in there]
    return [dict(zip(there, row, strict=True)) for row in zip(*values, strict=True)]


def values_in(table: pa.Table | pa.RecordBatch, column: str) -> list[Any]:
    """The values of a column. ValueError as of records_in."""
    kind = table.schema.field(column).type
    return [_plain(value, kind) for value in table.column(column).to_pylist()]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A value of to_pylist without what its type adds. Nulls in JSON and in maps were there before."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return json.loads(value) if kind.extension_name == "arrow.json" else _plain(value, kind.storage_type)
    if pa.types.is_struct(kind):
        return {each.name: _plain(value[each.name], each.type) for each in kind if value[each.name] is not None}
    if pa.types.is_map(kind):
        return {key: _plain(each, kind.item_type) for key, each in value}
    if hasattr(kind, "value_type") and isinstance(value, list):
        return [_plain(each, kind.value_type) for each in value]
    return value

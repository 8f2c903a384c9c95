"""Read the record that `sagetrain prepare` writes beside a token file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError, pointer_at

# These values of a record are read. Others are only copied.
_TYPES = {"seq_length": int, "vocab_size": int, "request": dict, "tokenizer_sha256": str, "sha256": str, "blocks": dict}
_RECORD = "prepare the token file again, or, if it is from elsewhere, move that away"


def read_provenance(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of NAME.json, or an empty dict if there is none. Raises ConfigError if it is no JSON object,
    or if a value is of another type than `sagetrain prepare` writes."""
    file = Path(f"{os.fspath(path)}.json")
    try:
        record: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except IsADirectoryError as error:
        raise ConfigError(f"{file} is a folder; {_RECORD}") from error
    except ValueError as error:
        said = pointer_at(file) or f"{file} is not valid JSON ({error}); prepare the token file again"
        raise ConfigError(said) from error
    if not isinstance(record, dict):
        raise ConfigError(f"{file} holds {type(record).__name__}, not keys; {_RECORD}")
    for name, kind in _TYPES.items():
        if not isinstance(value := record.get(name), (kind, type(None))):
            raise ConfigError(f"{file}: {name} holds {type(value).__name__}, not {kind.__name__}; {_RECORD}")
    return record

"""Rules for what `sagetrain prepare` recorded of the training files: the tokens before each document, and the template
of chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sagetrain.config.errors import Finding
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import DataConfig, RunConfig

TEXT_PREFIX = "text_prefix"
"""The key of a checkpoint's state for the tokens that the model learned before every text."""
CHAT_TEMPLATE = "chat_template"
"""The key for the chat template of the data, in the record of a token file and in a checkpoint's state. The value is
one template, or templates by name, as in tokenizer_config.json."""


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Find training files whose first tokens or chat templates differ from those of other files or of the model to
    start from."""
    records = prepared(cfg.data)
    yield from _prefixes(cfg, records)
    yield from _templates(cfg, records)


def manifests(start: str) -> list[Path]:
    """Return the manifests of the checkpoints that training.init_from can mean: those of a run, the newest last, or the
    checkpoint itself."""
    return sorted(Path(start).glob("checkpoints/step-*/manifest.json")) + [*Path(start).glob("manifest.json")]


def prepared(data: DataConfig) -> dict[str, dict[str, Any]]:
    """Return the records that `sagetrain prepare` wrote beside the training files, by path. Files from elsewhere have
    an empty record."""
    return {path: _read(Path(f"{path}.json")) for source in data.train for path in source.files}


def _request(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `sagetrain prepare` was asked for. A record that is damaged is an error elsewhere."""
    request = record.get("request")
    return request if isinstance(request, dict) else {}


def _of_chats(record: Mapping[str, Any]) -> bool:
    return "template_sha256" in (_request(record).get("records") or ())


def text_prefixes(records: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the tokens that `sagetrain prepare` put before each document, by path of the token file. Files from
    elsewhere are left out, and so are chats, because their template writes those tokens."""
    return {
        path: _request(record).get("prefix", [])
        for path, record in records.items()
        if "tokenizer_sha256" in record and not _of_chats(record)
    }


def chat_templates(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the chat templates of the `prepared` files that hold chats, by path. A template is empty for files that an
    earlier version prepared, because it kept none."""
    return {path: record.get(CHAT_TEMPLATE, "") for path, record in records.items() if _of_chats(record)}


def _templates(cfg: RunConfig, records: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Find training files of chats that do not know their template, or whose template differs from that of the first
    file."""
    templates = chat_templates(records)
    first = next((path for path, template in templates.items() if template), "")
    for i, source in enumerate(cfg.data.train):
        if unknown := [path for path in source.files if templates.get(path) == ""]:
            yield About("chat_template", f"data.train.{i}.path", unknown[0]).warning(
                "an earlier version prepared its chats, which did not record their template: the tokenizer's own goes "
                "along to `sagetrain generate --chat` and `sagetrain export`",
                "prepare it again (--overwrite) if its template was another one (--chat-template)",
            )
        if others := [path for path in source.files if templates.get(path, "") not in ("", templates.get(first))]:
            yield About("chat_template", f"data.train.{i}.path", others[0]).warning(
                f"its chats were written by another chat template than those of {first}: the model learns two formats, "
                "and the one of the first file alone goes along to `sagetrain generate --chat` and `sagetrain export`",
                "prepare the files with one template (--chat-template)",
            )


def _prefixes(cfg: RunConfig, records: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Find training files whose documents lack the first tokens that other files have, or that the model to start from
    learned."""
    begins, start = text_prefixes(records), cfg.training.init_from
    there = manifests(start) if start else []
    learned = _read(there[-1]).get("state", {}).get(TEXT_PREFIX) if there else None
    other, wanted = next(((f"those of {path}", prefix) for path, prefix in begins.items() if prefix), ("", []))
    if learned:
        other, wanted = f"those of {start}", learned
    for i, source in enumerate(cfg.data.train):
        lacking = [path for path in source.files if begins.get(path) == []]
        if wanted and lacking:
            yield About("text_prefix", f"data.train.{i}.path", lacking[0]).warning(
                f"documents do not begin with tokens {wanted} in {len(lacking)} of {len(source.files)} files of this "
                f"source, but {other} do, and so will texts that the model is asked about",
                "prepare it again (--overwrite) with the tokenizer of those: `sagetrain prepare` puts before each "
                "document what the tokenizer puts before a text",
            )


def _read(file: Path) -> dict[str, Any]:
    """Return the contents of a JSON file. Return an empty dict if it cannot be read, which is reported elsewhere."""
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}

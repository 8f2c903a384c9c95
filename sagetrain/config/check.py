"""All checks of a loaded configuration together, with the place of every key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from sagetrain.config.errors import Finding
from sagetrain.config.fit import fit
from sagetrain.config.guidance import guidance
from sagetrain.config.load import locations
from sagetrain.config.schema import RunConfig

_ORDER = {"error": 0, "warning": 1, "info": 2}


def check(
    cfg: RunConfig,
    world_size: int,
    *,
    vocab_size: int | None = None,
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    files: bool = True,
) -> list[Finding]:
    """Everything there is to say about a run before it starts, errors first.

    vocab_size: of the tokenizer, when known. path, overrides: what `cfg` was loaded from; findings then name file and
    line. files: whether missing data files are errors (to train) or warnings (to plan on another machine).
    """
    about_data = [*data_files(cfg, required=files), *data_repeats(cfg)]
    findings = [*fit(cfg, world_size, vocab_size), *guidance(cfg), *about_data]
    if path is not None:
        places = locations(path, overrides)
        findings = [dataclasses.replace(finding, where=_place(finding.key, places, path)) for finding in findings]
    return sorted(findings, key=lambda finding: _ORDER[finding.level])


def data_files(cfg: RunConfig, required: bool) -> Iterator[Finding]:
    """Token files and tokenizer that do not exist; errors if they are required, else warnings."""
    sources = [
        (f"data.{name}.{i}.path", source.path)
        for name in ("train", "valid")
        for i, source in enumerate(getattr(cfg.data, name))
    ]
    for key, prefix in sources:
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
        if missing:
            fix = "write it with `sagetrain prepare`; the path goes without .bin and .idx"
            yield _missing(required, key, prefix, f"no {' and no '.join(missing)}", fix)
    if not Path(cfg.data.tokenizer_path).is_file():
        fix = "name the tokenizer.model that `sagetrain prepare` wrote"
        message = "no such file" if cfg.data.tokenizer else f"no {cfg.data.tokenizer_path}"
        yield _missing(required, "data.tokenizer", cfg.data.tokenizer, message, fix)


def data_repeats(cfg: RunConfig) -> Iterator[Finding]:
    """Training sources that the run reads more than once; a warning past four passes, up to which repeated text is
    nearly as good as new (arXiv 2305.16264)."""
    weights = sum(source.weight for source in cfg.data.train)
    for i, source in enumerate(cfg.data.train):
        held, read = _tokens(source.path), cfg.training.total_tokens * source.weight / weights
        if held and read > held:
            yield Finding(
                "data_repeats",
                "info" if read <= 4 * held else "warning",
                f"data.train.{i}.path",
                source.path,
                f"holds {held:,} tokens, which training.total_tokens passes over {read / held:.1f} times",
                "more text, or fewer tokens; up to about four passes are nearly as good as new text",
            )


def _tokens(prefix: str) -> int:
    """Tokens of a token file by its size and its index's type code, 0 if that cannot be read: data.token_file.TokenFile
    opens it before training and says why. (That needs numpy, which `sagetrain plan` does without.)"""
    try:
        with Path(f"{prefix}.idx").open("rb") as index:
            code = index.read(18)[17]
        return Path(f"{prefix}.bin").stat().st_size // {3: 2, 4: 4, 5: 8, 8: 2}[code]
    except (OSError, IndexError, KeyError):
        return 0


def _missing(required: bool, key: str, value: str | None, message: str, fix: str) -> Finding:
    return Finding("data_files", "error" if required else "warning", key, value, message, fix)


def _place(key: str, places: dict[str, str], path: str | Path) -> str:
    """Where a key, or else its nearest parent, was given; the file for a default."""
    while key and key not in places:
        key = key.rpartition(".")[0]
    return places.get(key, str(path))

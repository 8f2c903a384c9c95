"""Read the contents of run folders for a page about them: curves over tokens, events, settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sagetrain.checkpoint.on_disk import newest, step_of
from sagetrain.checkpoint.reading import Reader
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.earlier_run import CRITICAL, STABILITY_NAME, critical_in_words
from sagetrain.config.errors import CheckpointError, ConfigError
from sagetrain.config.load import flat, load_config, saved_config
from sagetrain.config.schema import tokenizer_in
from sagetrain.costs.accounting import num_parameters
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.storage.local import read_rows
from sagetrain.storage.url_path import Location, checkpoints_of

MAX_POINTS = 2_000
"""Largest number of points of a curve. A longer curve keeps the least and the largest value of every stretch, so that
no spike is lost."""

_LAYER = re.compile(r"^(quant|quant_noise|noise|norms|moe)/\d+/")
"""The pattern of metrics with the number of a layer. Other names may have numbers too: valid/2024/loss belongs to a
source."""
_LEAST = "/cosine", "/entropy", "/min_load"
"""Endings of metrics whose worst layer is the one with the least value."""

_LOAD = re.compile(r"^blocks\.(\d+)\.mlp\.router\.load$")

Curve = tuple[list[int], list[float]]
"""The tokens seen, and the values."""


@dataclass(frozen=True)
class RunRecord:
    """The data that one run wrote.

    `curves` are keyed by metric. Metrics that differ only in their layer are one curve: quant/*/dS/rel_l2 is the
    largest over all layers, or the least if its name ends as one of `_LEAST`. `means` has the means over the stretches
    of those curves that were thinned; smooth lines are drawn from them. `events` have tokens, kind and text; `samples`
    have tokens, prompt and text.
    """

    name: str
    curves: Mapping[str, Curve]
    means: Mapping[str, Curve]
    events: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, str] = field(default_factory=dict)
    loads: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """The loads of experts in the last step of the newest checkpoint, over the mean, by layer. Empty without experts or
    checkpoints."""
    loads_step: int = 0
    """The step of these loads."""


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read the runs in these folders. Their names are the shortest that tell them apart. Raises ConfigError if a folder
    is not the folder of a run, or has no metrics yet."""
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def has_loss(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a step with a loss. A step in which no token counts has none; its row says 0."""
    return "train/loss" in row and row.get("train/counted_share") != 0


def different_settings(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all runs: dotted key -> its value in every run, or None where a run
    has no such key."""
    keys = sorted({key for run in runs for key in run.settings})
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def thinned(tokens: Sequence[int], values: Sequence[float], most: int = MAX_POINTS) -> Curve:
    """Return at most `most` points of a curve: of every stretch the least and the largest value, in their order."""
    count = len(tokens)
    if count <= most:
        return list(tokens), list(values)
    keep = []
    for stretch in _stretches(count, most):
        keep += sorted({min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    return [tokens[i] for i in keep], [values[i] for i in keep]


def averaged(tokens: Sequence[int], values: Sequence[float], most: int = MAX_POINTS) -> Curve:
    """Return the mean of every stretch that `thinned` takes two values of, at the end of the stretch."""
    stretches = _stretches(len(tokens), most)
    return [tokens[stretch[-1]] for stretch in stretches], [fmean(values[i] for i in stretch) for stretch in stretches]


def _stretches(count: int, most: int) -> list[range]:
    number = most // 2
    return [range(i * count // number, (i + 1) * count // number) for i in range(number)]


def _read(folder: Path, name: str) -> RunRecord:
    path = folder / "metrics.jsonl"
    rows = read_rows(path)
    if not rows:
        why = "it holds no metrics yet" if path.exists() else "there is no metrics.jsonl in it"
        raise ConfigError(f"{folder} is no run to report on: {why}; give the training.run_dir of a run that has begun")
    config = folder / "config.yaml"
    settings = flat(saved_config(config)) if config.exists() else {}
    settings.pop("training.run_dir", None)
    run_url = settings.get("training.run_url")
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        for metric, value in row.items():
            if metric in ("step", "tokens", "wall_time") or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):  # JSON has no such number, and no browser would draw it.
                continue
            curve = curves.setdefault(_LAYER.sub(r"\1/*/", metric), {})
            worst = min if metric.endswith(_LEAST) else max
            curve[row["tokens"]] = worst(value, curve.get(row["tokens"], value))
    events = [*_saves(rows), *read_rows(folder / "events.jsonl")]
    columns = {metric: _columns(curve) for metric, curve in sorted(curves.items())}
    return RunRecord(
        name,
        {metric: thinned(*curve) for metric, curve in columns.items()},
        {metric: averaged(*curve) for metric, curve in columns.items() if len(curve[0]) > MAX_POINTS},
        sorted(events, key=lambda event: event["tokens"]),
        settings,
        read_rows(folder / "samples.jsonl"),
        _parameters(folder) | _summary(rows) | _stability(folder / STABILITY_NAME),
        *(_loads(checkpoints_of(folder, run_url)) if settings.get("model.experts.number") else ()),
    )


def _columns(curve: Mapping[int, float]) -> Curve:
    tokens = sorted(curve)
    return tokens, [curve[at] for at in tokens]


def _saves(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for row in rows:
        if "perf/save_stall_seconds" in row:
            text = f"checkpoint of step {row['step']}: training stood still for {row['perf/save_stall_seconds']:.2f} s"
            yield {"tokens": row["tokens"], "step": row["step"], "kind": "save", "text": text}


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    steps = [row for row in rows if has_loss(row)]
    valid = [row["valid/loss"] for row in rows if "valid/loss" in row]
    found = {"steps": f"{max(row['step'] for row in rows):,}", "tokens": f"{max(row['tokens'] for row in rows):,}"}
    if steps:
        last = [row["train/loss"] for row in steps[-max(1, len(steps) // 20) :]]
        found["training loss (last 5 %)"] = f"{sum(last) / len(last):.4f}"
        if rates := [row["perf/tokens_per_second"] for row in steps if "perf/tokens_per_second" in row]:
            found["tokens/s (median)"] = f"{median(rates):,.0f}"
    if valid:
        found["validation loss (last)"] = f"{valid[-1]:.4f}"
        found["validation loss (least)"] = f"{min(valid):.4f}"
    return found


def _parameters(folder: Path) -> dict[str, str]:
    """Return the number of the model's parameters, if this version can read the run's configuration and knows its
    vocabulary."""
    with suppress(ConfigError):
        cfg = load_config(folder / "config.yaml", passed_over=lambda said: None)
        file = tokenizer_in(folder)
        size = cfg.model.vocab_size or (Tokenizer.load(file).vocab_size if file.is_file() else None)
        if size:
            return {"parameters": f"{num_parameters(cfg.model, cfg.attention, padded_vocab_size(size)):,}"}
    return {}


def _stability(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return {"quantization beside the gradient's noise": critical_in_words(json.loads(path.read_text())[CRITICAL])}
    return {}


def _loads(root: Location) -> tuple[dict[int, list[float]], int]:
    """Return the loads of experts that the newest checkpoint has, and its step."""
    with suppress(OSError, CheckpointError):
        if (folder := newest(root)) is not None:
            reader = Reader(folder)
            names = {int(found[1]): name for name in reader.tensors if (found := _LOAD.match(name))}
            # Routers keep them as multiples of the mean, less 1.
            loads = {layer: (reader.local(names[layer], "weight", 0, 1) + 1).tolist() for layer in sorted(names)}
            reader.close()
            return loads, step_of(folder)
    return {}, 0


def _names(folders: Sequence[Path]) -> list[str]:
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"the same run is named twice: {', '.join(map(str, folders))}")

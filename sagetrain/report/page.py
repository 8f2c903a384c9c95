"""The page as one file that loads nothing from a network. plotly draws the curves in the browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sagetrain import __version__
from sagetrain.config.errors import ConfigError
from sagetrain.data.token_file import write_atomic
from sagetrain.report.read import RunRecord, different_settings, read_runs


class Chart(NamedTuple):
    """Metrics on one pair of axes."""

    title: str
    metrics: tuple[str, ...]
    """The metrics. The first is drawn as a line, the others are dashed, with markers where they are few."""
    unit: str = ""
    """Unit of the vertical axis. Empty: it follows from the metric's name."""
    logarithmic: bool = False
    from_zero: bool = False
    exact: bool = False
    """Whether the values have no noise, such as a schedule, so that there is nothing to smooth."""


def _of_linear_layers(number: str) -> tuple[str, ...]:
    layers = "gate_up", "down", "experts_gate_up", "experts_down", "qkv", "out"
    return tuple(f"quant/*/{layer}.{number}" for layer in layers)


_ERROR = "relative L2 error, worst layer"
CHARTS = (
    Chart("Loss", ("train/loss", "valid/loss"), "nats per token"),
    Chart("Gradient norm", ("train/grad_norm",), "L2 norm", logarithmic=True),
    Chart("Learning rate", ("train/lr",), "learning rate", from_zero=True, exact=True),
    Chart("Tokens per step", ("train/tokens_per_step", "noise/all/scale_tokens"), "tokens", from_zero=True, exact=True),
    Chart("Throughput", ("perf/tokens_per_second",), "tokens per second", from_zero=True),
    Chart("Load of the fullest expert, worst layer", ("moe/max_load",), "multiple of the mean"),
    Chart("Entropy of the loads of experts", ("moe/*/entropy",), "part of the largest, worst layer"),
    Chart("Choices of experts that 8 bits change", ("moe/*/flips",), "share of tokens, worst layer"),
    Chart(
        "Error of quantization over the gradient's noise",
        ("quant_noise/*/ratio", "quant_noise/all/ratio", "quant_noise/*/bias_ratio"),
        "ratio, worst layer and whole model",
        logarithmic=True,
    ),
    Chart(
        "Bias of quantization over the gradient, both squared",
        ("quant_noise/*/bias_to_gradient", "quant_noise/all/bias_to_gradient"),
        "ratio, worst layer and whole model",
        logarithmic=True,
    ),
    Chart("Quantized dS", ("quant/*/dS/rel_l2",), _ERROR, logarithmic=True),
    Chart("dQ and dK", ("quant/*/dQ/rel_l2", "quant/*/dK/rel_l2"), _ERROR, logarithmic=True),
    Chart("O and dV", ("quant/*/O/rel_l2", "quant/*/dV/rel_l2"), _ERROR, logarithmic=True),
    Chart("dW of linear layers in 8 bits", _of_linear_layers("dW/rel_l2"), _ERROR, logarithmic=True),
    Chart("dY of linear layers that rounds to zero", _of_linear_layers("dY/zero_share_dX"), "share, worst layer"),
)
"""The charts that come first. Every other metric has a chart of its own in the last section of the page."""
MEANINGS = {
    "noise/all/scale_tokens": "gradient noise scale",
    "quant_noise/*/ratio": "worst layer",
    "quant_noise/all/ratio": "whole model",
    "quant_noise/*/bias_ratio": "bias alone, worst layer",
    "quant_noise/*/bias_to_gradient": "worst layer",
    "quant_noise/all/bias_to_gradient": "whole model",
}
"""Meanings of metrics whose names do not say them, for the legends of charts."""
UNITS = (
    ("/loss", "nats per token"),
    ("_seconds", "seconds"),
    ("/seconds", "seconds"),
    ("_gib", "GiB"),
    ("/mfu", "share of the 16-bit peak"),
    ("/mfu_full_attention", "share of the 16-bit peak"),
    ("/rel_l2", "relative L2 error"),
    ("/cosine", "cosine"),
    ("_tokens", "tokens"),
    ("_share", "share"),
)
"""The name of the axis for each ending of a metric's name. Other axes have the last part of the name."""


SMOOTHING = 0.8
"""The share that a drawn value keeps of the values before it, at first. A slider of the page changes it."""
_SAMPLES_SHOWN = 6


def write_report(folders: Sequence[Path], output: Path) -> int:
    """Write the page about these runs, in place of an older one, and return its bytes. Raises ConfigError if a folder
    is not the folder of a run, or the output is a file of something else."""
    if output.is_file():
        with output.open("rb") as file:
            begin = file.read(15)
        if begin and begin.lower() != b"<!doctype html>":
            raise ConfigError(f"{output} is no page, and would be replaced: name another file (--output), or delete it")
    page = render(read_runs(folders)).encode(errors="backslashreplace")
    write_atomic(output, page)
    return len(page)


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page as HTML text."""
    from plotly.offline import get_plotlyjs

    folder = resources.files("sagetrain.report")
    data = {
        "runs": [run.name for run in runs],
        "charts": [*(_chart(chart, runs) for chart in _charts(runs)), *_heat_maps(runs)],
        "events": [[[e["tokens"], e.get("kind", ""), e.get("text", "")] for e in run.events] for run in runs],
    }
    parts = {
        "title": html.escape(", ".join(run.name for run in runs)),
        "version": __version__,
        "summary": _summary(runs),
        "legend": _legend(runs),
        "difference": "What differs" if len(runs) > 1 else "Settings",
        "settings": _settings(runs),
        "samples": _samples(runs),
        "events": _events(runs),
        "smoothing": f"{SMOOTHING:g}",
        # A text such as "</script>" or "<!--" within a name would change where the element ends.
        "data": json.dumps(data).replace("<", "\\u003c"),
        "script": (folder / "page.js").read_text(),
        "plotly": get_plotlyjs(),
    }
    # In one pass: a text that is put in may hold {{data}} itself.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], (folder / "page.html").read_text())


def _legend(runs: Sequence[RunRecord]) -> str:
    """Return the items of the legend above all charts: the runs, where there are several, and the mark of events."""
    names = [f"<li>{html.escape(run.name)}</li>" for run in runs] if len(runs) > 1 else []
    marked = any(event.get("kind") != "save" for run in runs for event in run.events)
    return "".join([*names, '<li class="event">an event: the table below says which</li>' * marked])


def _charts(runs: Sequence[RunRecord]) -> list[tuple[Chart, bool]]:
    """Return the charts that have data, each with True if it is one of the first."""
    there = {metric for run in runs for metric in run.curves}
    first = [chart for chart in CHARTS if there & set(chart.metrics)]
    others = sorted(there - {metric for chart in first for metric in chart.metrics})
    return [*((chart, True) for chart in first), *((Chart(metric, (metric,)), False) for metric in others)]


def _chart(entry: tuple[Chart, bool], runs: Sequence[RunRecord]) -> dict[str, Any]:
    chart, is_first = entry
    traces = [
        {"run": i, "metric": metric, "meaning": MEANINGS.get(metric, ""), "rank": rank}
        | {"curve": run.curves[metric], "means": run.means.get(metric)}
        for rank, metric in enumerate(chart.metrics)
        for i, run in enumerate(runs)
        if metric in run.curves
    ]
    return {
        "title": chart.title,
        "unit": chart.unit or _unit(chart.metrics[0]),
        "exact": chart.exact,
        "log": chart.logarithmic,
        "fromZero": chart.from_zero,
        "first": is_first,
        "traces": traces,
    }


def _heat_maps(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a chart of the experts of each run that has some."""
    found = []
    for run in runs:
        if run.loads:
            of = f" of {run.name}" if len(runs) > 1 else ""
            title = f"Loads of experts{of} over the mean, step {run.loads_step:,}"
            heat = {
                "experts": list(range(len(next(iter(run.loads.values()))))),
                "layers": list(run.loads),
                "loads": [[round(load, 4) for load in loads] for loads in run.loads.values()],
            }
            found.append({"title": title, "unit": "layer", "first": True, "traces": [], "heat": heat})
    return found


def _unit(metric: str) -> str:
    return next((unit for end, unit in UNITS if metric.endswith(end)), metric.rpartition("/")[2].replace("_", " "))


def _summary(runs: Sequence[RunRecord]) -> str:
    labels = list(dict.fromkeys(label for run in runs for label in run.summary))
    # A column for each run, of which there are fewer than labels, fits the screen of a phone.
    rows = [[label, *(run.summary.get(label, "") for run in runs)] for label in labels]
    return _table(["", *(run.name for run in runs)], rows)


def _settings(runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        settings = sorted(runs[0].settings.items())
        table = _table(["setting", "value"], [[key, _value(value)] for key, value in settings])
        return f"<details><summary>All {len(settings)} settings</summary>{table}</details>"
    different = different_settings(runs)
    if not different:
        return "<p>None: all settings are the same.</p>"
    rows = [[key, *map(_value, row)] for key, row in different.items()]
    return _table(["setting", *(run.name for run in runs)], rows)


def _events(runs: Sequence[RunRecord]) -> str:
    rows = [
        [run.name, f"{event['tokens']:,}", event.get("kind", ""), event.get("text", "")]
        for run in runs
        for event in run.events
    ]
    if not rows:
        return "<p>None.</p>"
    table = _table(["run", "tokens", "event", "what"], rows)
    return f"<details{' open' * (len(rows) <= 12)}><summary>{len(rows)}</summary>{table}</details>"


def _samples(runs: Sequence[RunRecord]) -> str:
    rows = [(sample, run.name) for run in runs for sample in run.samples]
    rows.sort(key=lambda row: row[0]["tokens"], reverse=True)
    if not rows:
        return "<p>None: evaluation.samples_every_tokens asks for some.</p>"
    cells = [[name, f"{row['tokens']:,}", row.get("prompt") or "(empty)", row.get("text", "")] for row, name in rows]
    last = _table(["run", "tokens", "prompt", "text"], cells[:_SAMPLES_SHOWN], "texts")
    if len(cells) <= _SAMPLES_SHOWN:
        return last
    earlier = _table(["run", "tokens", "prompt", "text"], cells[_SAMPLES_SHOWN:], "texts")
    return f"{last}<details><summary>{len(cells) - _SAMPLES_SHOWN} earlier ones</summary>{earlier}</details>"


def _value(value: Any) -> str:
    return "-" if value is None else json.dumps(value) if isinstance(value, list | dict) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide {kind}"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>'

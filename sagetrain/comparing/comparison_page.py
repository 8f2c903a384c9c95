"""The page of a comparison: question, settings, tables, plot, and what it does not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sagetrain.comparing.analysis import LOSSES, Comparison, Line
from sagetrain.comparing.question import BRANCH, Setting
from sagetrain.comparing.results import Results
from sagetrain.comparing.run_records import DIVERGED, FAILED, STOPPED
from sagetrain.config.arguments import spelled
from sagetrain.config.errors import many
from sagetrain.config.load import differences

_SHOWN = (
    "model.num_layers",
    "model.hidden_size",
    "data.seq_length",
    "training.total_tokens",
    "optimizer.lr",
    "lr_schedule.shape",
    "lr_schedule.warmup",
    "lr_schedule.warmup_tokens",
    "lr_schedule.decay",
    "lr_schedule.decay_tokens",
    "lr_schedule.min_lr",
    "attention.qk_norm",
    "training.dtype",
)
"""Settings of the baseline that the page names."""
_BIAS = "squared bias"
_MANY_PASSES = 4
"""Number of passes over the data beyond which validation losses show over-fitting, so that only training losses of
pairs are compared."""


def page(results: Results, tables: Sequence[Comparison], margin: float, title: str, plot: str) -> str:
    """Return the page as Markdown. `plot` is the name of the picture."""
    return "\n".join([*_head(results, title), *_body(results, tables, margin, plot)]) + "\n"


def _head(results: Results, title: str) -> Iterator[str]:
    yield f"# {title or _question(results)}"
    yield ""
    settings = next(iter(results.settings.values()))
    first, last = results.calls[0].date[:10], results.calls[-1].date[:10]
    gpu_minutes = sum(call.seconds * call.gpus for call in results.calls) / 60
    devices = ", ".join(dict.fromkeys(call.devices for call in results.calls))
    spent = f" ({gpu_minutes:,.0f} GPU minutes)" if gpu_minutes else ""
    versions = ", ".join(dict.fromkeys(call.versions for call in results.calls))
    yield f"{first if first == last else f'{first} to {last}'}, {devices}{spent}, {versions}."
    yield f"{_count(results.parameters)} parameters, {_passes(results)}."
    yield ", ".join(f"{key} {settings[key]}" for key in _SHOWN if settings.get(key) is not None) + "."
    yield ""
    yield f"- baseline `{results.baseline}`: {_meant(results, results.question.variants[0])}"
    for variant in results.question.variants[1:]:
        yield f"- `{variant.name}`: {_meant(results, variant)}"
    yield ""
    yield from _parting(results)
    yield "```"
    yield from dict.fromkeys(call.command for call in results.calls)
    yield "```"
    yield ""


def _question(results: Results) -> str:
    names = [f"`{variant.name}`" for variant in results.question.variants[1:]]
    if not names:
        return f"How far apart are equal runs of `{results.baseline}`?"
    return f"Does {' or '.join(names)} end on another loss than `{results.baseline}`?"


def _meant(results: Results, variant: Setting) -> str:
    rows = [row.name for row in results.rows if f"{row.name}/{variant.name}" in results.settings]
    said: dict[str, list[str]] = {}  # In folders that were merged, a name may mean something else in another row.
    for row in rows:
        ours, theirs = (results.settings[f"{row}/{name}"] for name in (results.baseline, variant.name))
        changed = [f"{key} = {value}" for key, (_, value) in differences(ours, theirs).items()]
        said.setdefault(", ".join(changed) or variant.config, []).append(row)
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{meant} at {', '.join(at)}" for meant, at in said.items())


def _own(results: Results, row: Setting) -> str:
    """Return the settings of a row. If the row was a folder by itself, return what its baseline has otherwise than the
    baseline of the first row."""
    first, here = results.of_baseline(results.rows[0]), results.of_baseline(row)
    changed = [f"{key}={value}" for key, (_, value) in differences(first, here).items()]
    return " ".join(row.overrides or changed)


def _parting(results: Results) -> Iterator[str]:
    for row in results.rows:
        if tokens := results.of_baseline(row).get(BRANCH):
            of = f" at {row.name}" if row.name else ""
            yield f"Runs of a pair are one up to {tokens:,} tokens{of}: there the others leave the baseline."
            yield ""


def _count(count: int) -> str:
    return f"{count / 1e6:,.1f}M" if count >= 10**6 else f"{count:,}"


def _passes(results: Results) -> str:
    if not results.data_tokens:
        return "tokens of data.train unknown"
    rows = []
    for row in results.rows:
        total = results.of_baseline(row)["training.total_tokens"]
        of = f" at {row.name}" if row.name else ""
        rows.append(f"{_count(total)} tokens{of} ({total / results.data_tokens:.1f} passes)")
    return f"{_count(results.data_tokens)} tokens of text; " + ", ".join(dict.fromkeys(rows))


def _body(results: Results, tables: Sequence[Comparison], margin: float, plot: str) -> Iterator[str]:
    for table, row in zip(tables, results.rows, strict=True):
        yield from _section(table, _own(results, row))
    yield f"![gap over tokens]({plot})"
    yield ""
    yield from _reading(margin, any(line.bias_to_gradient is not None for table in tables for line in table.lines))
    yield ""
    yield from _not_shown(results, tables)


def _section(table: Comparison, own: str) -> Iterator[str]:
    scale = ""
    if table.noise_scale:
        share = table.tokens_per_step / table.noise_scale
        scale = f"; gradient noise scale {table.noise_scale:,.0f} tokens, tokens per step are {share:.2g} of it"
    yield f"## {table.row or 'Losses'}"
    yield ""
    yield f"{f'{own}; ' if own else ''}{table.tokens_per_step:,} tokens per step{scale}. {_bands(table)}"
    yield ""
    kinds = [kind for kind in LOSSES if table.baseline.losses[kind] is not None] or ["training"]
    biased = any(line.bias_to_gradient is not None for line in table.lines)
    head = ["", "seeds", *(column for kind in kinds for column in (f"{kind} loss", "verdict", "could see"))]
    head += [*([_BIAS] if biased else []), "tokens/s", "events"]
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for line in (table.baseline, *table.lines):
        yield f"| {' | '.join(_cells(line, kinds, biased))} |"
    yield ""


def _cells(line: Line, kinds: Sequence[str], biased: bool) -> Iterator[str]:
    yield line.variant
    yield f"{line.finished}"
    for kind in kinds:
        loss = line.losses[kind]
        yield "" if loss is None else f"{loss:.4f}"
        if kind in line.verdicts:
            yield line.verdict(kind)
            yield line.verdicts[kind].power
        else:
            yield "baseline" + (f"; diverged in {len(line.diverged)}" if line.diverged else "")
            yield ""
    if biased:
        yield "" if line.bias_to_gradient is None else f"{line.bias_to_gradient:.2g}"
    yield "" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}"
    yield ", ".join(f"{count} {kind}" for kind, count in sorted(line.events.items()))


def _bands(table: Comparison) -> str:
    """Return the spreads that a gap has to be compared with, as text."""
    parts = []
    for kind in LOSSES:
        seeds, rounding = table.baseline.seed_band[kind], table.rounding_band[kind]
        if seeds is not None:
            parts.append(f"seed band of the {kind} loss {seeds:.4f}")
        if rounding is not None:
            parts.append(f"rounding band {rounding:.4f} ({many(table.again, 'pair')})")
    return f"{', '.join(parts)}.".capitalize() if parts else "No band was measured: one seed, no run again."


def _reading(margin: float, biased: bool) -> Iterator[str]:
    bias = f" {_BIAS.capitalize()}: the square of what quantization adds to gradients, divided by their square."
    yield (
        "How to read it: losses are in nats per token; the training loss is the mean over the last 5 % of the tokens. "
        "A gap is the mean of the n differences to the baseline of the same seed (same initialization and samples). "
        "Its 95 % interval is ± t(0.975, n - 1) s / sqrt(n), with s their standard deviation. That is also the power: "
        "a smaller gap would not have been called. The seed band is the standard deviation of the baseline over seeds. "
        "The rounding band is the root mean square difference of two runs that differ in one rounding where they part: "
        f"no claim is made below it. Level: the whole interval lies within {margin:g}.{bias * biased}"
    )


def _not_shown(results: Results, tables: Sequence[Comparison]) -> Iterator[str]:
    """Yield what a reader must not conclude from the page, as far as the runs themselves show it."""
    yield "What it does not show:"
    yield ""
    yield "- Other models, data, lengths of training or tokens per step than those above."
    few = sorted({len(line.verdicts["training"].differences) for table in tables for line in table.lines} & {0, 1, 2})
    if few:
        yield f"- Settings with {' or '.join(map(str, few))} pairs: a claim that separates two settings needs three."
    if any(BRANCH in settings for settings in results.settings.values()):
        yield "- What variants do before runs part."
    if any(table.rounding_band["training"] is None for table in tables):
        yield (
            "- Whether chance in the rounding alone makes such gaps, where no rounding band was measured "
            f"({spelled('band')})."
        )
    totals = [results.of_baseline(row)["training.total_tokens"] for row in results.rows]
    if results.data_tokens and max(totals) > _MANY_PASSES * results.data_tokens:
        yield f"- Generalization: past {_MANY_PASSES} passes over the text validation losses are over-fitted."
    for status, meaning in ((STOPPED, "not finished"), (FAILED, "failed, not by its losses"), (DIVERGED, "diverged")):
        found = [str(job) for job, run in results.runs.items() if run.status == status]
        if found:
            yield f"- Runs that are in no mean ({meaning}): {', '.join(found)}."

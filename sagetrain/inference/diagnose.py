"""What INT8 attention loses on a checkpoint, layer by layer: the papers' Table 2 (arXiv 2603.02170, section 5.4).

The checkpoint's weights run forward and backward on the run's own data with attention of a recipe, observed as while
training (stability/monitor.py): cosine and relative L2 of O, delta, P, dP, dS, dQ, dK and dV against float32, from the
same Q, K, V and dO. So checkpoints trained with 16-bit attention can be asked too what a recipe would lose.
All layers run with the recipe: those further up read what the layers below them made with it.

Of each layer and micro-batch the sample has at most 2^28 scores: 16 heads of one sequence of 4,096 tokens, other
ones in every micro-batch (sagekernels/observe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import AttentionConfig, MonitorConfig
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.inference.load import TrainedRun
from sagetrain.model.backends import FIXED_RECIPE, Sage, attention_function
from sagetrain.model.selection import resolve_backend
from sagetrain.planning.tables import Table
from sagetrain.stability.monitor import Monitor

TENSORS = ("delta", "P", "dP", "dS", "O", "dQ", "dK", "dV")
RECIPES = tuple(name for name in get_args(AttentionConfig.model_fields["recipe"].annotation) if name != "auto")
_SCORES = 1 << 28


@dataclass(frozen=True)
class Diagnosis:
    """Of one checkpoint, the same data for every recipe."""

    step: int
    tokens: int
    sequences: int
    seq_length: int
    recipes: dict[str, list[dict[str, float]]]
    """By recipe and layer: the monitor's numbers, as "<tensor>/<metric>"."""

    def to_json(self) -> dict[str, Any]:
        """The same, of JSON types only."""
        return asdict(self)


def diagnose(
    run: TrainedRun, recipes: Sequence[str], num_sequences: int | None = None, report: Callable[[str], None] = print
) -> Diagnosis:
    """Errors of every layer with each of the recipes; of none: the one that the run was trained with, or else fine.

    num_sequences: of data.valid, or of data.train where there is none; whole micro-batches, and one at least. report:
    hears where the data has fewer. Changes the run's model: its attention, and no parameter wants a gradient any more.

    Raises:
        ConfigError: a recipe that there is not, INT8 attention that cannot run here, or data that cannot be read.
    """
    model, data = run.model, run.cfg.data
    trained = model.functions[0]
    for recipe in recipes:
        if recipe not in RECIPES:
            raise ConfigError(f"--recipe {recipe}: there is no such recipe; there are {', '.join(RECIPES)}")
    recipes = list(dict.fromkeys(recipes)) or [trained.recipe if isinstance(trained, Sage) else FIXED_RECIPE]
    attention = run.cfg.attention.model_copy(update={"backend": "sage"})
    try:
        resolve_backend(attention, run.cfg.model, device=run.device, dtype=model.embedding.weight.dtype)
    except ValueError as error:
        raise ConfigError(f"{error}; this checkpoint cannot be diagnosed here") from error
    size = data.micro_batch_size
    sources = data.valid or data.train
    sha256 = run.tokenizer.sha256 if run.tokenizer else None
    stream = SampleStream.configured(data, sources, run.cfg.training.seed, run.vocab_size, sha256)
    loader = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=size, num_workers=0)
    asked = -(-(num_sequences or size) // size) * size
    count = max(1, min(asked, loader.eval_size(asked)) // size * size)
    if count < (num_sequences or 1):
        report(f"{num_sequences} sequences were asked for, and the data has {count} in whole micro-batches of {size}")
    model.requires_grad_(False)
    found: dict[str, list[dict[str, float]]] = {}
    for recipe in recipes:
        function = attention_function("sage", attention.model_copy(update={"recipe": recipe}), run.device)
        model.functions = [function] * len(model.functions)
        monitor = Monitor(MonitorConfig(every_steps=1), model, model.named_parameters, _SCORES)
        for turn, batch in enumerate(loader.eval_batches(count)):
            with torch.enable_grad(), monitor.micro_batch(turn, *batch.tokens.shape):
                model(**batch.inputs(run.device)).backward()
        numbers = model.groups.metrics.reduce(run.device)
        at = [f"quant/{layer}/" for layer in range(len(model.functions))]
        found[recipe] = [
            {name.removeprefix(tag): value for name, value in numbers.items() if name.startswith(tag)} for tag in at
        ]
    return Diagnosis(run.step, run.tokens, count, data.seq_length, found)


def tables(diagnosis: Diagnosis) -> list[Table]:
    """For each recipe: cosine and relative L2 of the papers' Table 2, then what else the monitor measures."""
    return [table for recipe, layers in diagnosis.recipes.items() for table in _tables(diagnosis, recipe, layers)]


def _tables(diagnosis: Diagnosis, recipe: str, layers: list[dict[str, float]]) -> list[Table]:
    what = f"{diagnosis.sequences} sequences of {diagnosis.seq_length:,} tokens"
    title = f"Recipe {recipe}, step {diagnosis.step}, {what}: cosine / relative L2 against float32"
    worst = max(range(len(layers)), key=lambda layer: layers[layer]["dS/rel_l2"])
    said = f"largest relative L2 of dS: layer {worst}, {layers[worst]['dS/rel_l2']:.4f}"
    errors = [
        [str(layer), *(f"{found[f'{x}/cosine']:.4f} / {found[f'{x}/rel_l2']:.4f}" for x in TENSORS)]
        for layer, found in enumerate(layers)
    ]
    others = [[str(layer), *_others(found)] for layer, found in enumerate(layers)]
    legend = "gains of QK-norm: mean (largest); dS to 0: what INT8 rounds to zero of it; scales: those of INT8 codes"
    return [
        Table(title, ("layer", *TENSORS), errors, ("layer", *TENSORS), caption=said),
        Table("", ("layer", *_OTHERS), others, ("layer", *_OTHERS), caption=legend),
    ]


_OTHERS = (
    *("largest logit", "q gain", "k gain", "dS to 0 for dQ", "for dK"),
    *("scales of Q", "of K", "of dO", "of dS"),
)


def _others(found: dict[str, float]) -> list[str]:
    """Cells of _OTHERS; "-": the recipe or the model has no such thing."""

    def cell(names: Sequence[str], form: str) -> str:
        return form.format(*(found[name] for name in names)) if names[0] in found else "-"

    return [
        cell(["S/largest"], "{:.2f}"),
        *(cell([f"{x}/gain_mean", f"{x}/gain_max"], "{:.2f} ({:.2f})") for x in "QK"),
        *(cell([f"dS/zero_share_{x}"], "{:.1%}") for x in ("dQ", "dK")),
        *(cell([f"{x}/scale_min", f"{x}/scale_max"], "{:.0e} to {:.0e}") for x in ("Q", "K", "dO", "dS")),
    ]


def check_outputs(json_file: Path | None, picture: Path | None) -> None:
    """Raises ConfigError where what comes out could not be written, before anything is computed."""
    for option, path in (("--json", json_file), ("--plot", picture)):
        if path and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if picture is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot {picture}: matplotlib is not installed; pip install 'sagetrain[plots]', or leave it out"
        ) from error


def plot(diagnosis: Diagnosis, path: Path) -> None:
    """Relative L2 over layers, a panel for each tensor and a line for each recipe, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True).flatten()
    for panel, name in zip(panels, TENSORS, strict=True):
        for recipe, layers in diagnosis.recipes.items():
            panel.plot([found[f"{name}/rel_l2"] for found in layers], marker=".", label=recipe)
        panel.set_title(name, fontsize=10)
        panel.set_ylim(bottom=0)
    for panel in panels[4:]:
        panel.set_xlabel("layer")
    for panel in panels[::4]:
        panel.set_ylabel("relative L2")
    panels[0].legend(fontsize=8)
    figure.suptitle(f"INT8 attention against float32, step {diagnosis.step}", fontsize=11)
    figure.savefig(path, dpi=110)

"""The error of INT8 attention on a checkpoint, layer by layer, like the papers' Table 2 (arXiv 2603.02170, section
5.4).

The checkpoint's weights run forward and backward on the run's own data with the attention of a recipe, observed as in
training (stability/monitor.py): cosine and relative L2 of O, delta, P, dP, dS, dQ, dK and dV against float32, from the
same Q, K, V and dO. So the error of a recipe can also be measured on checkpoints that were trained with 16-bit
attention. All layers run with the recipe, and higher layers read what the layers below them computed with it.

Linear layers that the run multiplies in 8 bits are measured too, as in training, in a pass of their own with the
attention that the run was trained with (stability/linear_errors.py). This includes layers that the checkpoint has in 16
bits because its step is in a part of the run in 16 bits. While attention is measured, all linear layers are in 16 bits.

The sample of each layer and micro-batch has at most 2^28 scores: 16 heads of one sequence of 4,096 tokens. Every
micro-batch has another sample (sagekernels/observe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from sagekernels.matmul import Matmul
from sagetrain.config.arithmetic import low_bit_linear
from sagetrain.config.errors import ConfigError, many
from sagetrain.config.schema import AttentionConfig, MonitorConfig
from sagetrain.data.batch import Batch
from sagetrain.data.loader import Loader
from sagetrain.data.token_file import check_writable
from sagetrain.inference.load import TrainedRun
from sagetrain.inference.located import check_there
from sagetrain.model.backends import FIXED_RECIPE, AttentionFunction, Sage, attention_function
from sagetrain.model.delta_rule import DeltaRule
from sagetrain.model.selection import matmuls_of, resolve_backend
from sagetrain.model.transformer import gradients
from sagetrain.planning.tables import Table
from sagetrain.stability.linear_errors import LinearErrors
from sagetrain.stability.monitor import Monitor

TENSORS = ("delta", "P", "dP", "dS", "O", "dQ", "dK", "dV")
RECIPES = tuple(name for name in get_args(AttentionConfig.model_fields["recipe"].annotation) if name != "auto")
_SCORES = 1 << 28


@dataclass(frozen=True)
class Diagnosis:
    """The errors of one checkpoint, on the same data for every recipe."""

    step: int
    tokens: int
    sequences: int
    seq_length: int
    attention: list[str]
    """The attention of every layer of the checkpoint: "sage fine", "sdpa"."""
    recipes: dict[str, list[dict[str, float]]]
    """The monitor's numbers by recipe and layer, as "<tensor>/<metric>". A layer in 16 bits has none."""
    linear: dict[str, dict[str, float]]
    """The numbers of each linear layer in 8 bits, by its name: "0.attention.qkv"."""
    linear_precision: str
    """The precision of those layers: "fp8". It also says if the checkpoint's step is in a part of the run in 16
    bits."""


def diagnose(
    run: TrainedRun, recipes: Sequence[str], num_sequences: int | None = None, report: Callable[[str], None] = print
) -> Diagnosis:
    """Measure the errors of every layer with each of the recipes. The run's model changes: its attention, and its
    parameters no longer require gradients. Raises ConfigError if a recipe does not exist, INT8 attention cannot run
    here, or the data cannot be read.

    Args:
        recipes: names of recipes. None given: the recipe that the run was trained with, or else fine.
        num_sequences: sequences of data.valid, or of data.train if that is empty; rounded up to whole micro-batches.
        report: gets a message if the data has fewer.
    """
    model, data = run.model, run.cfg.data
    trained = model.functions
    for recipe in recipes:
        if recipe not in RECIPES:
            raise ConfigError(f"--recipe {recipe}: there is no such recipe; there are {', '.join(RECIPES)}")
    recipes = list(dict.fromkeys(recipes)) or [_own(trained)]
    attention = run.cfg.attention.model_copy(update={"backend": "sage"})
    try:
        resolve_backend(attention, run.cfg.model, device=run.device, dtype=model.embedding.weight.dtype)
        linear = _in_8_bits(run)
    except ValueError as error:
        raise ConfigError(f"{error}; this checkpoint cannot be diagnosed here") from error
    if data.missing:
        raise ConfigError(
            "an imported model has no data to be diagnosed on; train from it (training.init_from), diagnose that run"
        )
    sources = data.valid or data.train
    check_there("valid" if data.valid else "train", sources)
    stream = run.stream(sources)
    size = min(data.micro_batch_size, stream.num_windows)
    loader = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=size, num_workers=0)
    asked = -(-(num_sequences or size) // size) * size
    count = loader.eval_size(asked) // size * size
    if count < (num_sequences or 1):
        asked_for = many(num_sequences or 1, "sequence")
        report(f"asked for {asked_for}, and the data has {count} in whole micro-batches of {size}")
    errors = _linear_errors(run, linear, loader.eval_batches(count))
    model.requires_grad_(False)
    found: dict[str, list[dict[str, float]]] = {}
    for recipe in recipes:
        function = attention_function("sage", attention.model_copy(update={"recipe": recipe}), run.device)
        model.functions = [own if isinstance(own, DeltaRule) else function for own in trained]
        monitor = Monitor(MonitorConfig(every_steps=1), model, model.named_parameters, _SCORES)
        for turn, batch in enumerate(loader.eval_batches(count)):
            with torch.enable_grad(), monitor.micro_batch(turn, *batch.tokens.shape):
                model(**batch.inputs(run.device)).backward()
        numbers = model.groups.metrics.reduce(run.device)
        at = [f"quant/{layer}/" for layer in range(len(trained))]
        found[recipe] = [
            {name.removeprefix(tag): value for name, value in numbers.items() if name.startswith(tag)} for tag in at
        ]
    own = [" ".join([each.name, *filter(None, [getattr(each, "recipe", None)])]) for each in trained]
    settings = run.cfg.linear
    precision: str = settings.precision
    if settings.low_bit and not low_bit_linear(settings, run.tokens, run.cfg.training.total_tokens):
        precision += " as in the part of the run that has it, which this step is not in"
    return Diagnosis(run.step, run.tokens, count, data.seq_length, own, found, errors, precision)


def _in_8_bits(run: TrainedRun) -> Sequence[Mapping[str, Matmul]]:
    """Return how the linear layers of each block multiply that the run has in 8 bits. Raises ValueError if they
    cannot."""
    model, cfg = run.model, run.cfg
    place: dict[str, Any] = {"device": run.device, "dtype": model.embedding.weight.dtype}
    return matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=cfg.parallel.tensor_parallel_size, **place)[0]


def _linear_errors(
    run: TrainedRun, matmuls: Sequence[Mapping[str, Matmul]], batches: Iterable[Batch]
) -> dict[str, dict[str, float]]:
    model = run.model
    model.matmuls = matmuls
    errors = LinearErrors(model, range(len(model.blocks)))
    looked_at = errors.layers
    for batch in batches if looked_at else ():
        errors.measure([partial(gradients, partial(model, **batch.inputs(run.device)))])
    model.use_16_bits()
    numbers = model.groups.metrics.reduce(run.device)
    return {
        f"{number}.{path}": {name.removeprefix(tag): value for name, value in numbers.items() if name.startswith(tag)}
        for number, path in looked_at
        for tag in [f"{errors.tag(number, path)}."]
    }


def _own(functions: Sequence[AttentionFunction]) -> str:
    """Return the recipe that the layers were trained with, or else the one that never changes."""
    return next((function.recipe for function in functions if isinstance(function, Sage)), FIXED_RECIPE)


def tables(diagnosis: Diagnosis) -> list[Table]:
    """Build the tables of each recipe: cosine and relative L2 like the papers' Table 2, and then what else the monitor
    measures."""
    found = [table for recipe, layers in diagnosis.recipes.items() for table in _tables(diagnosis, recipe, layers)]
    return [*found, _linear_table(diagnosis)] if diagnosis.linear else found


def _linear_table(diagnosis: Diagnosis) -> Table:
    columns = ("linear layer", "Y", "dX", "dW", "dY to 0 for dX", "for dW")
    rows = [
        [
            name,
            *(_cell(found, [f"{x}/cosine", f"{x}/rel_l2"], "{:.4f} / {:.4f}") for x in ("Y", "dX", "dW")),
            *(_cell(found, [f"dY/zero_share_{x}"], "{:.1%}") for x in ("dX", "dW")),
        ]
        for name, found in diagnosis.linear.items()
    ]
    title = f"Linear layers, {diagnosis.linear_precision}: cosine / relative L2 against float32"
    caption = "measured in a pass of their own, and in 16 bits above; dY to 0: what 8 bits round to zero of it"
    return Table(title, columns, rows, columns, caption=caption)


def _tables(diagnosis: Diagnosis, recipe: str, layers: list[dict[str, float]]) -> list[Table]:
    what = f"{many(diagnosis.sequences, 'sequence')} of {diagnosis.seq_length:,} tokens"
    title = f"Recipe {recipe}, step {diagnosis.step}, {what}: cosine / relative L2 against float32"
    worst = max(range(len(layers)), key=lambda layer: layers[layer].get("dS/rel_l2", 0.0))
    said = f"largest relative L2 of dS: layer {worst}, {layers[worst]['dS/rel_l2']:.4f}"
    errors = [
        [str(layer), *(_cell(found, [f"{x}/cosine", f"{x}/rel_l2"], "{:.4f} / {:.4f}") for x in TENSORS)]
        for layer, found in enumerate(layers)
        if found  # A gated delta net has no errors.
    ]
    others = [[str(layer), *_others(found)] for layer, found in enumerate(layers) if found]
    legend = "gains of QK-norm: mean (largest); dS to 0: what INT8 rounds to zero of it; scales: those of INT8 codes"
    return [
        Table(title, ("layer", *TENSORS), errors, ("layer", *TENSORS), caption=said),
        Table("", ("layer", *_OTHERS), others, ("layer", *_OTHERS), caption=legend),
    ]


_OTHERS = (
    *("largest logit", "q gain", "k gain", "dS to 0 for dQ", "for dK"),
    *("scales of Q", "of K", "of dO", "of dS"),
)


def _cell(found: dict[str, float], names: Sequence[str], form: str) -> str:
    """Format numbers of a layer, or "-" if the layer, its recipe or the model has no such number."""
    return form.format(*(found[name] for name in names)) if names[0] in found else "-"


def _others(found: dict[str, float]) -> list[str]:
    return [
        _cell(found, ["S/largest"], "{:.2f}"),
        *(_cell(found, [f"{x}/gain_mean", f"{x}/gain_max"], "{:.2f} ({:.2f})") for x in "QK"),
        *(_cell(found, [f"dS/zero_share_{x}"], "{:.1%}") for x in ("dQ", "dK")),
        *(_cell(found, [f"{x}/scale_min", f"{x}/scale_max"], "{:.0e} to {:.0e}") for x in ("Q", "K", "dO", "dS")),
    ]


def check_outputs(json_file: Path | None, picture: Path | None) -> None:
    """Check, before anything is computed, that the outputs can be written. Raises ConfigError if not."""
    for option, path in (("--json", json_file), ("--plot", picture)):
        if path and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
        if path:
            check_writable(path)
    if picture is None:
        return
    from matplotlib.figure import Figure

    if picture.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise ConfigError(f"--plot {picture}: a picture's name ends in .png (or .pdf, .svg); give it such a name")


def plot(diagnosis: Diagnosis, path: Path) -> None:
    """Draw relative L2 over layers, with a panel for each tensor and a line for each recipe."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True).flatten()
    for panel, name in zip(panels, TENSORS, strict=True):
        for recipe, layers in diagnosis.recipes.items():
            errors = {layer: found[f"{name}/rel_l2"] for layer, found in enumerate(layers) if found}
            panel.plot(list(errors), list(errors.values()), marker=".", label=recipe)
        panel.set_title(name, fontsize=10)
        panel.set_ylim(bottom=0)
    for panel in panels[4:]:
        panel.set_xlabel("layer")
    for panel in panels[::4]:
        panel.set_ylabel("relative L2")
    panels[0].legend(fontsize=8)
    figure.suptitle(f"INT8 attention against float32, step {diagnosis.step}", fontsize=11)
    figure.savefig(path, dpi=110)

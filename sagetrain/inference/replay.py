"""Take a step that went wrong again from its bundle: in the precision that it had, and with another attention, or with
linear layers in 16 bits, or with both.

The run itself goes there, in a folder of its own in which there is nothing but the checkpoint before: the same
data, order, schedules, controllers and arithmetic. The step is then taken once each way, with updates refused: that
leaves the weights as they are.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from sagetrain.checkpoint import on_disk
from sagetrain.config.errors import CheckpointError, ConfigError, TrainingError
from sagetrain.config.load import load_config
from sagetrain.config.schema import AttentionConfig
from sagetrain.engines.protocol import Observers, StepResult
from sagetrain.inference.load import recorded_checkpoints
from sagetrain.inference.located import located
from sagetrain.model.backends import attention_function
from sagetrain.model.selection import resolve_backend
from sagetrain.parallel.rng import set_rng_state
from sagetrain.stability.controller import Event
from sagetrain.stability.spikes import METRIC, Verdict, plain
from sagetrain.storage.range_reader import fetch
from sagetrain.storage.url_path import Location, UrlPath
from sagetrain.training import failed_step, init_from
from sagetrain.training.build_run import build
from sagetrain.training.lr_schedule import learning_rate
from sagetrain.training.run import Run

CAUSES = {
    "data": "it comes back in the recorded precision and stays with {asked}: the data of the step, or weights that "
    "were bad before it",
    "data or linear layers": "it comes back in the recorded precision and stays with {asked}: the data of the step, or "
    "weights that were bad before it, or linear layers in 8 bits, which --linear bf16 tells from these",
    "precision": "it comes back in the recorded precision and goes away with {asked}: the precision",
    "hardware": "it does not come back in the recorded precision: hardware, or something that is not reproducible",
    "open": "it comes back, and {asked} is what it was recorded with: name another --attention, or --linear bf16 "
    "where linear layers are in 8 bits, to tell data from precision",
}


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of the step, taken in one way."""

    loss: float
    grad_norm: float
    layers: dict[str, float]
    """Gradient norm of each layer. Empty if DeepSpeed found a gradient that is not finite."""


@dataclass(frozen=True)
class Replay:
    """The numbers of a step as recorded, in the recorded precision again, and with the attention that was asked for."""

    step: int
    event: str
    attention: dict[str, str]
    """The attention of each entry of `numbers`, by the same keys: "sage fine", or several of them."""
    numbers: dict[str, StepNumbers]
    """The numbers by way: "recorded", "again" and "asked"."""
    limits: dict[str, float]
    """The limits of the loss and of the gradient norm ("grad_norm")."""
    drift: float
    """Largest relative difference between a loss of the steps before and the recorded one."""
    cause: str
    """The cause, a key of CAUSES."""

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        return CAUSES[self.cause].format(asked=self.attention["asked"])


def replay(folder: Path, backend: str, recipe: str | None = None, linear_in_16_bits: bool = False) -> Replay:
    """Take the step of a bundle again.

    Args:
        folder: folder of the bundle, in a run's folder.
        backend: attention backend to compare with.
        recipe: recipe of sage; None: the run's.
        linear_in_16_bits: compare with linear layers in 16 bits as well; otherwise they are as the run has them.

    Raises:
        ConfigError: there is no bundle, or the attention cannot run here.
        CheckpointError: no checkpoint is left to begin from.
    """
    content = failed_step.read(folder)
    if loss := content.get("loss"):
        raise ConfigError(
            f"{folder}: the step has the loss {loss} of a program, which `sagetrain replay` does not have"
        )
    recipes = get_args(AttentionConfig.model_fields["recipe"].annotation)
    if recipe is not None and recipe not in recipes:
        raise ConfigError(f"recipe {recipe!r}: it is one of {', '.join(recipes)}")
    if recipe is not None and backend != "sage":
        raise ConfigError(f"--recipe {recipe} is of --attention sage, and this is {backend}; add --attention sage")
    scratch, main = folder / "replay", os.environ.get("RANK", "0") == "0"
    start = _start(recorded_checkpoints(folder.absolute().parent.parent, folder / "config.yaml"), content)
    if main:
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / "checkpoints").mkdir(parents=True)
        if start is not None:
            there = scratch / "checkpoints" / on_disk.folder_name(on_disk.step_of(start))
            if isinstance(start, UrlPath):
                fetch(start, there)
            else:
                there.symlink_to(start, target_is_directory=True)
    try:
        return _replay(folder, content, scratch, backend, recipe, linear_in_16_bits)
    finally:
        if main:
            shutil.rmtree(scratch, ignore_errors=True)


def _start(checkpoints: Location, content: dict[str, Any]) -> Location | None:
    """Return the newest checkpoint before the step that has the history of the bundle. Return None if the run had none
    yet at the step."""
    if content["checkpoint"] is None:
        return None
    for folder in reversed(on_disk.published(checkpoints)):
        step = on_disk.step_of(folder)
        if step <= content["checkpoint"] and not on_disk.problems(folder):
            stored = on_disk.read_state(folder).ledger
            if stored and stored.dropped == [each for each in content["ledger"]["dropped"] if each <= step]:
                return folder
    raise CheckpointError(
        f"{checkpoints}: no checkpoint of step {content['checkpoint']} or before is left to replay step "
        f"{content['step']} from; the newest bundle keeps its own, checkpoint.keep_every_tokens others"
    )


def _replay(
    folder: Path, content: dict[str, Any], scratch: Path, backend: str, recipe: str | None, linear_in_16_bits: bool
) -> Replay:
    fresh, layers_of_tp = content["checkpoint"] is None, content["layout"]["tensor_parallel_size"]
    run = _built(folder, scratch, fresh, layers_of_tp)
    cfg, device = run.cfg, run.engine.device
    asked = cfg.attention.model_copy(update={"backend": backend, "recipe": recipe or cfg.attention.recipe})
    try:
        resolve_backend(asked, cfg.model, device=device, dtype=run.files.dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    drift = _go_there(run, content)
    again, model = _take(run, folder, content), run.engine.model
    before, other, low = model.functions[0], attention_function(backend, asked, device), any(model.matmuls)
    model.functions = [other] * len(model.functions)
    if linear_in_16_bits:
        model.use_16_bits()
    compared = _take(run, folder, content)
    limits = {name: float(content["event"][f"{name}_limit"]) for name in ("loss", "grad_norm")}
    metrics = content["metrics"]
    recorded = StepNumbers(
        float(metrics["train/loss"]),
        float(metrics["train/grad_norm"]),
        {name: float(value) for name, value in content["layer_grad_norms"].items()},
    )
    if not _wrong(again, limits):
        cause = "hardware"
    elif other == before and not (low and linear_in_16_bits):
        cause = "open"
    elif _wrong(compared, limits):
        cause = "data or linear layers" if low and not linear_in_16_bits else "data"
    else:
        cause = "precision"
    return Replay(
        step=content["step"],
        event=content["event"]["text"],
        attention={
            "recorded": " | ".join(dict.fromkeys(content["attention"])),
            "again": failed_step.describe(before),
            "asked": failed_step.describe(other) + (" and linear layers in 16 bits" if linear_in_16_bits else ""),
        },
        numbers={"recorded": recorded, "again": again, "asked": compared},
        limits=limits,
        drift=drift,
        cause=cause,
    )


def _built(folder: Path, scratch: Path, fresh: bool, layers_of_tp: int) -> Run:
    """Build the run's own trainer at the checkpoint. In one process it has no parallelism, which changes only the
    rounding. `fresh`: there is no checkpoint, so it begins as the run did. `layers_of_tp`: the run's tensor-parallel
    size."""
    cfg, run_dir = load_config(folder / "config.yaml"), folder.absolute().parent.parent
    data = located(cfg.data, cfg.training.run_dir, run_dir, {}, None, lambda said: None)
    cfg = cfg.model_copy(update={"data": data})
    if fresh and cfg.training.init_from is not None:
        # The key may name a run that has gone on since.
        begins_from = str(init_from.recorded(run_dir, cfg.training.init_from))
        cfg = cfg.changed({"training": {"init_from": begins_from}})
    parallel: dict[str, object] = {"world_size": None}
    if os.environ.get("WORLD_SIZE", "1") == "1":
        # At stage 0 the norms of layers are known even if a gradient is not finite.
        stage = 0 if cfg.training.dtype == "fp32" and cfg.parallel.offload == "none" else cfg.parallel.zero_stage
        parallel |= {"tensor_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False}
        parallel |= {"zero_stage": stage, "shard_size": None}
        parallel |= {"pipeline_parallel_size": 1, "pipeline_chunks": 1, "pipeline_blocks": "auto"}
    elif (stages := cfg.parallel.pipeline_parallel_size) > 1:
        raise ConfigError(
            f"{folder}: the run has a pipeline (parallel.pipeline_parallel_size {stages}), "
            "whose steps are taken again in one process: run `sagetrain replay` without a launcher"
        )
    cfg = cfg.changed({
        "parallel": parallel,
        "training": {"run_dir": str(scratch), "run_url": None},
        "checkpoint": {"resume": "auto"},
        "stability": {"spikes": cfg.stability.spikes.model_copy(update={"policy": "stop"})},
        "logging": {"wandb": None},
    })  # fmt: skip
    return build(cfg, layers_of_tp=layers_of_tp)


def _go_there(run: Run, content: dict[str, Any]) -> float:
    """Take the steps up to the bad one. Return the largest relative difference of a loss from the recorded one."""
    state, ledger, drift = run.resumed.state, failed_step.ledger_of(content), 0.0
    rows = {row["step"]: row for row in content["steps_between"]}
    for samples in ledger.samples_of_steps()[state.step :]:
        tokens, step = samples * run.cfg.data.seq_length, state.step + 1
        if step in ledger.dropped:
            state.advance(tokens, run.cfg.data.seq_length, dropped=True)
            run.controllers.ask(state, tokens, {} if step in run.cfg.training.drop_steps else {METRIC: 1.0})
            continue
        result = _step(run, tokens, partial(run.controllers.spikes.judge, tokens=tokens))
        if not result.applied:
            raise TrainingError(
                f"step {step}, on the way to step {content['step']}: {result.event and result.event.text}, which "
                "was finite when the run took it: it is not reproducible on this machine"
            )
        state.advance(tokens, run.cfg.data.seq_length)
        run.controllers.ask(state, tokens, result.metrics | ({METRIC: 1.0} if result.event else {}))
        if step in rows:
            # The loss is 0 if no token of the step counts.
            before = rows[step]["loss"]
            drift = max(drift, abs(result.loss - before) / (abs(before) or 1.0))
    return drift


def _step(run: Run, tokens: int, judge: Callable[[Mapping[str, float]], Verdict]) -> StepResult:
    cfg, state = run.cfg, run.resumed.state
    lr = learning_rate(cfg.optimizer, cfg.lr_schedule, state.tokens, tokens, cfg.training.total_tokens)
    number, counted = tokens // run.layout.micro_step, run.counted(state.sequences, tokens)
    while True:
        batches = run.loader.step_batches(state.sequences, tokens)
        result = run.engine.step(batches, number, lr, Observers(judge=judge), counted)
        if result.room is None:  # Rows of experts had room.
            return result


def _take(run: Run, folder: Path, content: dict[str, Any]) -> StepNumbers:
    """Take the step itself without an update."""
    rng = folder / f"rng-{run.engine.groups.rank:05d}.pt"
    if rng.is_file():
        set_rng_state(torch.load(rng, weights_only=True))
    refused = Verdict(False, Event("spike", content["event"]["text"]))
    result = _step(run, content["tokens_per_step"], lambda metrics: refused)
    return StepNumbers(result.loss, result.grad_norm, result.layer_norms)


def _wrong(numbers: StepNumbers, limits: dict[str, float]) -> bool:
    """Whether the step would be an event."""
    values = {"loss": numbers.loss, "grad_norm": numbers.grad_norm}
    return any(not math.isfinite(value) or value > limits[name] for name, value in values.items())


def to_json(found: Replay) -> dict[str, Any]:
    """Convert a replay to JSON types. Numbers that are not finite become text."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: known(each) for name, each in value.items()}
        return plain(value) if isinstance(value, float) else value

    return {**known(asdict(found)), "verdict": found.verdict}


def table(found: Replay) -> str:
    """Return the numbers of each way beside each other, and the verdict, as text for people."""
    titles = ["", "limit", "recorded", "again", found.attention["asked"]]
    rows = [["attention", "", *found.attention.values()]]
    ways = list(found.numbers.values())
    for key, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
        rows.append([name, _number(found.limits[key]), *(_number(getattr(way, key)) for way in ways)])
    layers = dict.fromkeys(name for way in ways for name in way.layers)
    for layer in layers:
        name = f"  layer {layer}" if layer.isdigit() else f"  {layer}"
        rows.append([name, "", *(_number(way.layers.get(layer)) for way in ways)])
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in (titles, *rows)]  # fmt: skip
    way = f"losses on the way there differ from the recorded ones by at most {found.drift:.1e} of their value"
    return "\n".join([f"step {found.step}: {found.event}", *lines, way, f"{found.cause}: {found.verdict}"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"

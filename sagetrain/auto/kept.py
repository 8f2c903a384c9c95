"""The choices of the run that wrote a checkpoint. A run that continues it keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sagekernels.call import RECIPES
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.state import RunState, SettledAttention, SettledLinear, SettledOverlap
from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.load import saved_config
from sagetrain.config.rules import fit
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import AttentionConfig, LinearConfig, RunConfig
from sagetrain.storage.url_path import Location


@dataclass(frozen=True)
class Kept:
    """The choices of a run. A choice that its checkpoint does not record is the one that its configuration asks for: an
    import decides nothing."""

    engine: Literal["deepspeed", "fsdp"]
    attention: SettledAttention
    linear: SettledLinear
    overlap: SettledOverlap | None
    """The choice about halves. None: the run has not decided."""
    tensor_parallel_size: int

    @classmethod
    def by(cls, folder: Location) -> Kept:
        """Read the choices of the run that wrote the checkpoint in `folder`."""
        return cls.of(on_disk.read_state(folder), saved_config(folder / "config.yaml"))

    @classmethod
    def of(cls, state: RunState, asked: dict[str, dict[str, Any]]) -> Kept:
        """Put together the choices of a state, and the configuration that its run was asked for."""
        attention, linear = {**_ATTENTION, **asked.get("attention", {})}, {**_LINEAR, **asked.get("linear", {})}
        parallel = asked.get("parallel", {})
        named = parallel.get("engine", "auto")
        return cls(
            # Before checkpoints recorded the engine, `auto` was DeepSpeed.
            state.engine or ("fsdp" if named == "fsdp" else "deepspeed"),
            state.attention or SettledAttention(attention["backend"], attention["recipe"]),
            state.linear or SettledLinear(linear["precision"], linear["keep_layers_below"]),
            state.overlap,
            parallel.get("tensor_parallel_size", 1),
        )


_ATTENTION, _LINEAR = AttentionConfig().model_dump(), LinearConfig().model_dump()


def kept_engine(asked: RunConfig, before: Kept) -> tuple[RunConfig, Finding | None]:
    """Return the configuration with engine `auto` as the run had it, and a finding where that is not what `auto` is in
    a new run. The engines add gradients up in different orders, so that only the same engine goes on to the last bit.
    If the run has been given a setting since that its engine does not have, the other engine goes on."""
    key, parallel, layout = "parallel.engine", asked.parallel, Layout.of(asked)
    usual = layout.engine
    if parallel.engine != "auto" or before.engine == usual:
        return asked, None
    kept = asked.changed({"parallel": {"engine": before.engine}})
    # Errors of both engines are found elsewhere.
    common = {finding.rule for finding in fit(asked, layout.world_size) if finding.level == "error"}
    for finding in fit(kept, layout.world_size):
        if finding.level == "error" and finding.rule not in common:
            why = f"is {usual} from here on: {before.engine}, the run's engine so far, has no {finding.key}"
            fix = f"set {key}: {usual} to say so, or take {finding.key} back"
            return asked, About("engine_changed", key, "auto").info(f"{why} {finding.value}", fix)
    why = f"is {before.engine} here, as the run had it when it began; in a new run it is {usual}"
    fix = f"set {key}: {usual} to go on by {usual} from the same checkpoint; losses then differ by rounding"
    return kept, About("engine_kept", key, "auto").info(why, fix)


def kept_attention(asked: AttentionConfig, before: SettledAttention) -> AttentionConfig:
    """Return the settings with `auto` as the run had it. How long a kernel took on some day should not change a run's
    arithmetic. A setting that the run does not record stays `auto`."""
    settled = {}
    if asked.backend == "auto":
        settled["backend"] = before.backend
    if asked.recipe == "auto" and before.backend == "sage" and before.recipe in RECIPES:
        settled["recipe"] = before.recipe
    return asked.model_copy(update=settled)


def kept_linear(asked: LinearConfig, before: SettledLinear) -> LinearConfig:
    """Return the settings with `auto` as the run had it. How much a layer gained on some day should not change a run's
    arithmetic. A larger keep_layers_below beside `auto` holds."""
    if asked.precision != "auto":
        return asked
    below = max(asked.keep_layers_below, before.keep_layers_below)
    return asked.model_copy(update={"precision": before.precision, "keep_layers_below": below})

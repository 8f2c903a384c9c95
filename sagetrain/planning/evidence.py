"""The recorded runs that a predicted speed rests on, how far predictions were from them, and what was tuned.

tests/planning/test_recorded_runs.py compares the prediction of every recorded run with the speed that the run reached.
MARGINS has the largest differences that it allows, by card and by what a run uses. If a run uses something that has no
margin, no prediction of its kind was ever compared with a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sagetrain.config.layout import Layout, by_rows
from sagetrain.config.schema import RunConfig
from sagetrain.costs.hardware import Hardware
from sagetrain.planning.prediction import StepPrediction

MARGINS: Mapping[str, Mapping[str, float]] = {
    "NVIDIA H200": {
        "sage": 0.1,
        "sage scores": 0.1,
        "sdpa": 0.1,
        "linear layers in fp8": 0.1,
        "linear layers in int8": 0.1,
        "output projection in fp8": 0.1,
        "output projection in int8": 0.1,
        "data parallelism": 0.1,
        "ZeRO 2": 0.1,
        "ZeRO 3": 0.15,
        "FSDP2": 0.1,
        "tensor parallelism": 0.15,
        "halves without sequence parallelism": 0.15,
        "context parallelism": 0.1,
        "experts": 0.1,
        "experts over ranks": 0.1,
        "all in the host's memory": 0.15,
        "state in the host's memory": 0.1,
    },
    "NVIDIA H100 SXM": {
        "sage": 0.1,
        "sage scores": 0.1,
        "sdpa": 0.1,
        "flash": 0.1,
        "linear layers in fp8": 0.1,
        "linear layers in int8": 0.1,
        "data parallelism": 0.1,
        "ZeRO 2": 0.1,
        "ZeRO 3": 0.15,
        "FSDP2": 0.1,
        "tensor parallelism": 0.1,
        "halves without sequence parallelism": 0.2,
        "pipeline parallelism": 0.05,
        "all in the host's memory": 0.1,
        "state in the host's memory": 0.1,
    },
}
"""The largest error of a prediction, as a share of the speed that was reached. The keys are Hardware.name and the names
of `_used`."""


class _Tuned(NamedTuple):
    """A search for the best settings of both optimizers, at one size of the model and one length of the runs."""

    parameters: int
    tokens: int
    what: str
    page: str


_TUNED = (
    _Tuned(43_000_000, 26_214_400, "rate, warm-up and the embedding's rate", "results/muon-loss"),
    _Tuned(325_000_000, 13_107_200, "the rate alone", "results/muon-loss"),
)
"""The searches. Each tuned AdamW and Muon alike."""

RANKS = 4
"""Number of GPUs of the largest recorded run, all in one host."""

NARROWEST = 1024
"""The smallest model.hidden_size of a recorded run."""


@dataclass(frozen=True)
class Evidence:
    """The evidence for a predicted speed."""

    margin: float | None
    """Largest error of the recorded runs of this kind. None where there are none."""
    missing: tuple[str, ...]
    """The features of the run that no recorded run of this card has. Empty if all of them were compared."""

    @property
    def mark(self) -> str:
        """The mark before a figure that was never compared with a run of its kind."""
        return "~" if self.missing else ""

    def explained(self, card: str) -> str:
        """Return one line for a reader of the figure. `card` is the name of the GPU."""
        if self.missing:
            return unrecorded(card, self.missing)
        return f"recorded runs of this kind on {card} were within {self.margin:.0%} of the prediction"


def unrecorded(card: str, missing: tuple[str, ...]) -> str:
    """Return one line about the mark of figures that no run stands behind. `missing` are the reasons."""
    return f"~: no recorded run on {card} stands behind this: {', '.join(missing)}"


def evidence(cfg: RunConfig, prediction: StepPrediction, hardware: Hardware) -> Evidence:
    """Return the evidence for the prediction of a configuration on this hardware."""
    if hardware.compute_scale != 1:
        return Evidence(None, ("scaled to a measured speed",))
    known = MARGINS.get(hardware.name)
    if known is None:
        other_kernels = hardware.int8_attention and prediction.attention_backend.startswith("sage")
        kernels = ("INT8 attention by the rate of Hopper's kernels",) if other_kernels else ()
        return Evidence(None, ("another card's rates, scaled by data sheets", *kernels))
    names = [*_used(cfg, prediction)]
    missing = [name for name in names if name not in known]
    hosts = -(-prediction.world_size // hardware.gpus_per_host)
    if hosts > 1:
        missing.append(f"{hosts} hosts")
    elif prediction.world_size > RANKS:
        missing.append(f"{prediction.world_size} GPUs (at most {RANKS} were)")
    return Evidence(None if missing else max(known[name] for name in names), tuple(missing))


def _used(cfg: RunConfig, prediction: StepPrediction) -> Iterator[str]:
    """Yield those features of a run that have rates of their own, by the names in MARGINS."""
    yield prediction.attention_backend
    if cfg.model.hidden_size < NARROWEST:
        yield f"model.hidden_size below {NARROWEST}"
    if cfg.training.dtype == "fp32":
        yield "training.dtype fp32"
    if cfg.parallel.offload != "none":
        yield "all in the host's memory" if cfg.parallel.offload == "all" else "state in the host's memory"
    if cfg.training.activation_offload:
        yield "activations in the host's memory"
    if cfg.linear.low_bit:
        yield f"linear layers in {cfg.linear.precision}"
    if cfg.linear.head != "bf16":
        yield f"output projection in {cfg.linear.head}"
    if cfg.model.experts:
        yield "experts"
        if cfg.parallel.expert_parallel_size > 1:
            by_row = by_rows(cfg.parallel.expert_parallel_size, cfg.model.experts.per_token)
            yield "rows of experts over ranks" if by_row else "experts over ranks"
    if cfg.parallel.tensor_parallel_size > 1:
        yield "tensor parallelism"
        if prediction.overlap and not cfg.parallel.sequence_parallel:
            yield "halves without sequence parallelism"
    if cfg.parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism"
    if cfg.parallel.context_parallel_size > 1:
        yield "context parallelism"
    if (layout := Layout.of(cfg, prediction.world_size)).data > 1:
        yield "data parallelism"
        if layout.zero_stage > 1:
            yield f"ZeRO {layout.zero_stage}"
        if layout.engine == "fsdp":
            yield "FSDP2"


def tuned(cfg: RunConfig, parameters: int) -> str:
    """Return what was tuned of the optimizers, at the number of parameters that is nearest to that of a run."""
    near = min(_TUNED, key=lambda each: abs(math.log(parameters / each.parameters)))
    at = f"{near.parameters / 1e6:.0f}M parameters and {near.tokens / 1e6:.0f}M tokens ({near.page})"
    larger, longer = parameters / near.parameters, cfg.training.total_tokens / near.tokens
    far = [name for name, ratio in (("size", larger), ("length", longer)) if not 0.5 < ratio < 2]
    if not far:
        return f"{near.what}, at {at}"
    size, length = (f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}" for ratio in (larger, longer))
    return (
        f"nothing at this {' and '.join(far)}; nearest: {near.what}, at {at}. This run has {size} times the parameters "
        f"and {length} times the tokens"
    )

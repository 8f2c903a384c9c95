"""Write and read the bundle of a step that went wrong: small files, without weights, to take the step again.

    run_dir/spikes/step-00000015/
      bundle.json      the step, its samples, its numbers beside their limits, the gradient norm of each layer, and from
                       which checkpoint and over which steps one gets there
      config.yaml      the resolved configuration, nothing left `auto`
      rng-00000.pt     random-number state of one rank (loaded with weights_only); nothing in a step draws from it today

The newest bundle keeps its checkpoint from being deleted. `sagetrain replay` (inference/replay.py) reads one.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sagetrain.checkpoint.ledger import Ledger, TrainState
from sagetrain.checkpoint.on_disk import folder_name, newest, step_of
from sagetrain.config.errors import ConfigError
from sagetrain.data.token_file import write_atomic
from sagetrain.engines.protocol import StepResult
from sagetrain.model.backends import AttentionFunction
from sagetrain.parallel.rng import rng_state
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.controller import Event
from sagetrain.stability.spikes import plain
from sagetrain.storage.url_path import Location

FORMAT = 1


def describe(function: AttentionFunction) -> str:
    """Describe an attention function in words: "sage fine", "sdpa"."""
    return " ".join([function.name, *filter(None, [getattr(function, "recipe", None)])])


def write(
    spikes: Path,
    checkpoints: Location,
    *,
    state: TrainState,
    samples: list[list[int]],
    tokens: int,
    lr: float,
    event: Event,
    result: StepResult,
    attention: list[str],
    groups: ParallelGroups,
    config_text: str,
    trail: list[dict[str, Any]],
    loss: str | None,
) -> Path:
    """Write the bundle of a step and return its folder. Every rank calls this after the saver has finished.

    Args:
        spikes: the folder run_dir/spikes.
        checkpoints: the folder of the checkpoints.
        state: the state before the step.
        samples: the source, and the window in it, of each of the step's samples. They follow `state.sequences`.
        event: the event that says what is wrong with the step.
        attention: the description of each layer's attention.
        trail: step, tokens per step, loss and gradient norm of the steps before, back to the newest checkpoint.
        loss: the name of the user's loss. None: the cross-entropy.
    """
    folder = spikes / folder_name(state.step + 1)
    folder.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    torch.save(rng_state(), packed)
    write_atomic(folder / f"rng-{dist.get_rank():05d}.pt", packed.getvalue())
    if dist.get_rank():
        return folder
    start = newest(checkpoints)
    content = {
        "format": FORMAT,
        "step": state.step + 1,
        "first_sample": state.sequences,
        "samples": samples,
        "tokens_seen": state.tokens,
        "tokens_per_step": tokens,
        "lr": lr,
        "event": {"text": event.text, **event.fields},
        "metrics": {name: plain(value) for name, value in result.metrics.items()},
        "layer_grad_norms": {name: plain(value) for name, value in result.layer_norms.items()},
        "attention": attention,
        "layout": {
            "tensor_parallel_size": groups.tp_size,
            "context_parallel_size": groups.cp_size,
            "data_parallel_size": groups.dp_size,
        },
        "checkpoint": step_of(start) if start else None,
        "steps_between": [row for row in trail if not start or row["step"] > step_of(start)],
        "ledger": asdict(state.ledger),
        "loss": loss,
    }
    write_atomic(folder / "config.yaml", config_text.encode())
    write_atomic(folder / "bundle.json", (json.dumps(content, indent=1) + "\n").encode())
    return folder


def read(folder: Path) -> dict[str, Any]:
    """Return the content of bundle.json. Raises ConfigError if the folder is not a bundle, or has another format."""
    try:
        content: dict[str, Any] = json.loads((folder / "bundle.json").read_text())
        found = content["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} is no replay bundle: bundle.json cannot be read ({error}); name a folder such as "
            "RUN/spikes/step-00000015"
        ) from error
    if found != FORMAT:
        raise ConfigError(f"{folder}: written in format {found}, this SageTrain reads format {FORMAT}")
    return content


def ledger_of(content: dict[str, Any]) -> Ledger:
    """Return the ledger of the samples that had been consumed before the step."""
    return Ledger(**content["ledger"])


def needed(spikes: Path) -> set[str]:
    """Return the names of the checkpoints that the newest bundle needs: one, or none."""
    bundles = sorted(spikes.glob("step-*/bundle.json"))
    try:
        step = json.loads(bundles[-1].read_text())["checkpoint"] if bundles else None
    except (OSError, ValueError, KeyError):
        return set()
    return set() if step is None else {folder_name(step)}

"""Weights & Biases, beside TensorBoard: the same numbers under the same names."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import WandbConfig
from sagetrain.data.token_file import write_atomic

ID_NAME = "wandb.json"
"""In the run folder: the id of the run there, so that a resume continues it."""


class WandbRun:
    """One run there, which every start in the same run folder continues.

    The step is a number of each row, not wandb's own count, which never goes back: a run that was killed takes the
    steps since its checkpoint again, and wandb would drop them.

    Args:
        tree: the resolved configuration.

    Raises:
        ConfigError: it cannot be begun (no login, no network).
    """

    def __init__(self, settings: WandbConfig, run_dir: Path, tree: Mapping[str, Any]) -> None:
        import wandb

        path = run_dir / ID_NAME
        if not path.exists():
            write_atomic(path, (json.dumps({"id": secrets.token_hex(4)}) + "\n").encode())
        name = settings.name or run_dir.absolute().name
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=name,
                mode=settings.mode,
                id=json.loads(path.read_text())["id"],
                resume="allow",
                dir=str(run_dir),
                config=dict(tree),
                settings=wandb.Settings(console="off", silent=True),  # what is said on stderr is ours
            )
        except wandb.Error as error:
            raise ConfigError(
                f"logging.wandb: {error}; log in with `wandb login` or WANDB_API_KEY, or set "
                "logging.wandb.mode=offline and upload later"
            ) from error
        self._run.define_metric("*", step_metric="step")
        folder = self._run.settings.sync_dir
        self.where = f"wandb sync {folder} uploads it" if settings.mode == "offline" else str(self._run.url)
        """For people: where to look, or how to get there."""

    def add(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """A row of numbers."""
        self._run.log({**values, "step": step, "tokens": tokens})

    def close(self) -> None:
        """Upload what is not there yet. Its service is waited for, which would write the last rows later."""
        import wandb

        self._run.finish()
        wandb.teardown()

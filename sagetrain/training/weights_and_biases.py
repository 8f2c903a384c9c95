"""Report the numbers of metrics.jsonl to Weights & Biases, under the same names."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import WandbConfig
from sagetrain.data.token_file import write_atomic
from sagetrain.training.callbacks import Callback, Position, RunStart

ID_NAME = "wandb.json"
"""The file in the run folder with the id of the run at Weights & Biases, so that a resume continues that run."""


class WeightsAndBiases(Callback):
    """A callback that reports to one run at Weights & Biases. Every start in the same run folder continues that run.
    Raises ConfigError if the run at Weights & Biases cannot be begun (no login, no network).

    The step is a number of each row, and not wandb's own count, because that count never goes back. A run that was
    killed takes the steps since its checkpoint again, and wandb would drop them.
    """

    def __init__(self, settings: WandbConfig) -> None:
        self._settings = settings
        self._run: Any = None

    def on_start(self, start: RunStart) -> None:
        """Begin or continue the run at Weights & Biases, on rank 0."""
        if not start.main:
            return
        import wandb

        settings, run_dir = self._settings, start.run_dir
        path = run_dir / ID_NAME
        if not path.exists():
            write_atomic(path, (json.dumps({"id": secrets.token_hex(4)}) + "\n").encode())
        name, known = settings.name or run_dir.absolute().name, _run_id(path)
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=name,
                mode=settings.mode,
                id=known,
                resume="allow",
                dir=str(run_dir),
                config=start.cfg.model_dump(mode="json"),
                # Only SageTrain writes to stderr.
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, ValueError) as error:
            raise ConfigError(_refused(str(error))) from error
        self._run.define_metric("*", step_metric="step")
        folder = self._run.settings.sync_dir
        where = f"wandb sync {folder} uploads it" if settings.mode == "offline" else self._run.url
        start.say(f"Weights & Biases: {where}")

    def on_row(self, position: Position, values: Mapping[str, float]) -> None:
        """Send a row of numbers."""
        self._run.log({**values, "step": position.step, "tokens": position.tokens})

    def on_end(self, position: Position, finished: bool) -> None:
        """Upload the rows that are not uploaded yet, and wait for wandb's service. The service would otherwise write
        the last rows later."""
        if self._run is None:
            return
        import wandb

        self._run.finish()
        wandb.teardown()


def _run_id(path: Path) -> str:
    """Return the id of the run at Weights & Biases. Raises ConfigError if the file does not have it."""
    try:
        known = json.loads(path.read_text())["id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        known = error
    if not isinstance(known, str):
        raise ConfigError(
            f"{path}: has no id of a run at Weights & Biases ({known!r}); restore the file, or delete it to begin a "
            "new run there"
        )
    return known


def check_login(settings: WandbConfig, run_dir: Path) -> None:
    """Check that Weights & Biases knows a login here, without a network and without a question at the terminal. Raises
    ConfigError if there is none, an environment variable of Weights & Biases has a value that it refuses, or the file
    in the run folder does not have the id of the run."""
    import wandb

    if (path := run_dir / ID_NAME).exists():
        _run_id(path)
    try:
        wandb.setup(wandb.Settings(silent=True, mode=settings.mode))
        known = settings.mode == "offline" or wandb.login(prompt=False, verify=False)
    except TypeError:  # Earlier releases of wandb have no `prompt` and always ask. on_start finds what is wrong.
        return
    except ValidationError as error:
        wrong = [f"WANDB_{str(each['loc'][0]).upper()} = {each['input']!r}: {each['msg']}" for each in error.errors()]
        raise ConfigError(f"logging.wandb: {'; '.join(wrong)}; unset that variable") from error
    except (wandb.Error, ValueError) as error:
        raise ConfigError(_refused(str(error))) from error
    if not known:
        raise ConfigError(_refused("there is no login here"))


def _refused(said: str) -> str:
    """Return the message for what Weights & Biases has refused."""
    return (
        f"logging.wandb: {' '.join(said.split()).rstrip('.')}; log in with `wandb login` or WANDB_API_KEY, or set "
        "logging.wandb.mode=offline and upload later"
    )

"""Runs wait for the tests that kill, signal or fill up something in mid-run: however late a test is, its run has not
ended."""

import os
import time
from contextlib import suppress
from pathlib import Path

LAST = 10**9


def file_of(config: Path) -> Path:
    return config.with_suffix(".held")


def hold(config: Path, step: int = LAST) -> None:
    """Let the run of a configuration wait before this step, or before its last one, until `release` or a signal. This
    may be said again, of a later step, while it runs."""
    (new := config.with_suffix(".new")).write_text(str(step))
    new.rename(file_of(config))


def release(config: Path) -> None:
    file_of(config).unlink(missing_ok=True)


def wait_here() -> None:
    """Let the runs of this process, and of its forks, wait as the file HELD of the environment says."""
    from sagetrain.training.trainer import Trainer

    plain, file = Trainer._step, Path(os.environ["HELD"])
    if plain.__name__ == "held":
        return

    def held(self: Trainer, size: int) -> bool:
        last = self.state.tokens + size >= self.cfg.training.total_tokens
        with suppress(FileNotFoundError):
            # A run that is asked to stop does so. No test has to know when a signal has come through its launchers.
            while (last or self.state.step + 1 >= int(file.read_text())) and not self.run.met.stop.name:
                file.stat()
                self._watchdog.begin("waiting for the test")
                time.sleep(0.005)
        return plain(self, size)

    Trainer._step = held

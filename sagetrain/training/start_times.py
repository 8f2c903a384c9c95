"""The seconds of a start: what they went into, from the death of the ranks before to the end of the first step."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sagetrain.cluster.lifeline import death, tell
from sagetrain.config.errors import many
from sagetrain.stability.controller import Event
from sagetrain.training.callbacks import Callback


def born() -> float:
    """Return the time at which this process began, as a program or as a fork, in seconds since 1970. Without Linux's
    /proc, it is the present time."""
    with suppress(OSError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(age, 0.0)
    return time.time()


class StartTimes:
    """The times at which the parts of a start ended. Each part begins where the one before it ends, so the seconds of
    all parts are the seconds of the start."""

    def __init__(self, began: float) -> None:
        self._began, self._ends = began, dict[str, float]()
        self.from_memory: bool = False
        """Whether the run continues from copies in memory and not from a checkpoint."""

    def ended(self, part: str) -> None:
        """Note that a part ends now."""
        self._ends[part] = time.time()

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part so far, in order."""
        return _between(self._began, self._ends)

    def restart(self, step: int, from_step: int, last_row: float | None) -> Event:
        """Return the event of a run that continues, after its first step.

        Args:
            from_step: the step of the checkpoint, or of copies in memory; 0: there was none.
            last_row: the time of the last row that the run before has written, in seconds since 1970. The seconds count
                from there if no keeper knows when a rank died.
        """
        died, ends = death(), {"processes begun": self._began, **self._ends}
        if died:
            ends = {"found": died.found, "all ranks down": died.down, **ends}
        since = died.time if died else self._began if last_row is None else last_row
        seconds = _between(since, ends)
        parts = ", ".join(f"{part} {took:.2f}" for part, took in seconds.items())
        what = f"after {died.said}" if died else "after the last row of the run before"
        again = f"; {many(died.step - step, 'step')} more to take again" if died and died.step > step else ""
        source = "copies in memory" if self.from_memory else "the checkpoint"
        begin = f"from {source} of step {from_step}" if from_step else "there was no checkpoint yet"
        total = self._ends["first step"] - since
        text = f"the step was done {total:.2f} s {what}: {parts}; {begin}{again}"
        facts: dict[str, Any] = vars(died) if died else {}
        fields: dict[str, Any] = {key: facts[key] for key in ("rank", "host", "why", "generation") if key in facts}
        fields |= {"since": since, "seconds": {part: round(took, 3) for part, took in seconds.items()}}
        return Event(
            "restart",
            text,
            fields | {"total": round(total, 3), "from_step": from_step, "from_memory": self.from_memory},
        )


def _between(begin: float, ends: dict[str, float]) -> dict[str, float]:
    seconds = {}
    for part, end in ends.items():
        # Clocks of two hosts may differ a little.
        seconds[part], begin = max(end - begin, 0.0), end
    return seconds


class SignsOfSteps(Callback):
    """The callback that tells the keeper of this rank (cluster/keeper.py) which step begins."""

    def on_step_begin(self, step: int) -> None:
        """Tell the keeper the number of the step."""
        tell({"step": step})

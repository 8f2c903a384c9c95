"""The decisions that follow from probes. The tests of controllers and of whole runs, on a CPU and on a GPU, expect
them."""

from sagetrain.config.schema import NoiseAwareTokens
from sagetrain.stability.controller import Event, Taken
from sagetrain.stability.noise_aware import NoiseAware

Probe = dict[str, tuple[float, float]]
"""The ratio and the bias_ratio of each layer at the present tokens per step."""
LOW: Probe = {"0": (0.001, 0.001)}


class ProbedRun:
    """A noise_aware run whose probes find the ratios that the test names."""

    def __init__(self, controller: NoiseAware) -> None:
        self.controller, self.step, self.tokens = controller, 0, 0
        self.sizes: list[int] = []
        """The tokens of each step taken."""
        self.events: list[Event] = []

    def take(self, probe: Probe | None) -> list[Event]:
        """Take a step and return the decisions after it. probe: the ratios that the step's probe finds. None: no
        probe."""
        size = self.controller.now
        metrics = {"train/loss": 3.0}
        for layer, (ratio, bias) in (probe or {}).items():
            metrics |= {f"quant_noise/{layer}/ratio": ratio, f"quant_noise/{layer}/bias_ratio": bias}
        self.step, self.tokens = self.step + 1, self.tokens + size
        self.sizes.append(size)
        events = self.controller.after_step(Taken(self.step, self.tokens, size, metrics))
        self.events += events
        return events


def run_with_room(schedule: NoiseAwareTokens, every_steps: int, total_tokens: int) -> ProbedRun:
    """Return a whole run in which each probe, one every `every_steps` steps, finds room for more tokens per step."""
    run = ProbedRun(NoiseAware(schedule))
    while run.tokens < total_tokens:
        run.take(None if (run.step + 1) % every_steps else LOW)
    return run


def changes(events: list[Event]) -> list[tuple[int, int, int]]:
    """Return the tokens per step before and after each decision, and the first step that has them."""
    return [(event.fields["from"], event.fields["to"], event.fields["first_step"]) for event in events]

"""The plan of a run, as `sagetrain.plan` returns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sagetrain.config.errors import Finding
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.config.tokens_per_step import ScheduleStage
from sagetrain.costs.accounting import MemoryItem, total_bytes
from sagetrain.costs.hardware import Hardware
from sagetrain.costs.host_memory import host_memory_per_rank
from sagetrain.planning.priced import PricedLayout, Target


@dataclass(frozen=True)
class Plan:
    """The plan of a configuration on a number of ranks. All figures are those of one layout, `shown`. Parts that errors
    leave without meaning are missing."""

    path: str | Path
    asked: RunConfig
    """The configuration as given."""
    configured: RunConfig
    """The configuration as given, with what `auto` comes to in its own layout. Proposals are changes of it."""
    world_size: int
    hardware: Hardware
    vocab_size: int
    """Padded vocabulary size."""
    assumed_vocab_size: bool
    span: float | None
    """Span of the documents of data.train (model.operations.Rank.span). None if the data is not there."""
    findings: list[Finding]
    memory: list[MemoryItem]
    """Memory of one rank. Empty without a valid layout."""
    schedule: list[ScheduleStage]
    """Schedule of tokens per step. Empty if the layout or the schedule is not valid."""
    chosen: PricedLayout | None
    """The configured layout. None if errors leave it without a speed."""
    shown: PricedLayout | None
    """The layout that all figures are for: the configured one if it can run or no other can, else the fastest."""
    proposed: list[PricedLayout] | None
    """The fastest layouts; empty if none fits. None if another layout would not correct the errors."""
    fewest: int | None = None
    """The fewest GPUs on which some layout fits, where none does on these."""
    larger: tuple[str, ...] = ()
    """Sentences that say what would fit where no layout does with the optimizer as configured."""
    later: tuple[Plan, ...] = ()
    """The plans of the later parts of the run, where stages have sequences of their own length. All findings are those
    of the first part's plan."""

    def __repr__(self) -> str:
        speed = f", {self.shown.prediction.tokens_per_second:,.0f} tokens/s predicted" if self.shown else ""
        memory = f", {total_bytes(self.memory) / 2**30:.2f} GiB per rank" if self.memory else ""
        found = f"{self.errors} errors and {len(self.findings) - self.errors} other findings"
        instead = f" with {self.name}" if self.shown and self.shown is not self.chosen else ""
        return f"Plan({self.path} on {self.world_size} x {self.hardware.name}: {found}{memory}{speed}{instead})"

    @property
    def cfg(self) -> RunConfig:
        """The configuration that the figures are for, with what `auto` comes to."""
        return self.shown.cfg if self.shown else self.configured

    @property
    def layout(self) -> Layout:
        """The ranks of `cfg` along the axes, and what its engine does when."""
        return Layout.of(self.cfg, self.world_size)

    @property
    def target(self) -> Target:
        """The ranks, the GPU and the data that layouts are priced for."""
        return Target(self.world_size, self.vocab_size, self.hardware, self.span)

    @property
    def errors(self) -> int:
        """The number of findings that would stop the run."""
        return sum(finding.level == "error" for finding in self.findings)

    @property
    def name(self) -> str:
        """The name of the shown layout in the output."""
        return "as configured" if self.shown is self.chosen else "layout 1"

    @property
    def where(self) -> str:
        """The name of the shown layout at the end of a sentence."""
        return self.name if self.shown is self.chosen else f"in {self.name}"

    @property
    def host_memory(self) -> list[MemoryItem]:
        """Memory of its host that one rank takes with parallel.offload and training.activation_offload, and for copies
        of the state. Empty without them."""
        one_host = self.world_size <= self.hardware.gpus_per_host
        return host_memory_per_rank(self.cfg, self.world_size, self.vocab_size, one_host) if self.memory else []

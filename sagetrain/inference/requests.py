"""The requests of `sagetrain generate` and `sagetrain eval`, from a command line or a call in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.data.chat_template import settled_template
from sagetrain.data.tokenizer import INSIDE, LEAVE_OUT

# These modules import torch.
if TYPE_CHECKING:
    from sagetrain.inference.evaluate import Evaluation
    from sagetrain.inference.generate import Completion, Sampling
    from sagetrain.inference.load import TrainedRun


@dataclass(frozen=True)
class GenerateRequest:
    """Prompts, and how they are continued."""

    prompts: Sequence[str]
    sampling: Sampling
    batch_size: int = 8
    """The number of prompts that are continued at the same time."""
    chat: bool = False
    """Answer each prompt as a message of a user, in a chat template."""
    template: str = ""
    """The chat template. Empty: the one that the data was made with, or the tokenizer's own."""

    def remarks(self, run: TrainedRun) -> list[str]:
        """Return a sentence for each prompt that ends in white space which the tokenizer joins to a word behind it."""
        if self.chat or not run.tokenizer:
            return []
        joined = filter(run.tokenizer.ends_inside, self.prompts)
        return [f"the prompt {prompt[-40:]!r}: {INSIDE}; {LEAVE_OUT}" for prompt in joined]

    def _template(self, run: TrainedRun) -> str | None:
        if not self.chat or not run.tokenizer:
            return None
        return settled_template(self.template or run.chat_template or "", run.tokenizer)

    def grown(self, run: TrainedRun) -> Iterator[tuple[Completion, str]]:
        """Continue the prompts, piece by piece, as `generate` does. Raises ConfigError if a prompt is too long."""
        from sagetrain.inference.generate import generate

        return generate(run, self.prompts, self.sampling, self.batch_size, self._template(run))

    def finished(self, run: TrainedRun) -> list[Completion]:
        """Return the finished completions in the order of the prompts."""
        from sagetrain.inference.generate import finished

        return finished(run, self.prompts, self.sampling, self.batch_size, self._template(run))


@dataclass(frozen=True)
class EvaluateRequest:
    """The text that a model is evaluated on. Raises ConfigError if settings contradict each other."""

    texts: Sequence[str] = ()
    """Token files without suffix, or text as `prepare` reads it. Empty: data.valid."""
    num_sequences: int | None = None
    """The number of sequences of data.valid. Default: evaluation.num_sequences of the run."""
    stride: int | None = None
    """Score all of the data in windows that begin this many tokens apart. Default with texts: half a window."""
    text_key: str = "text"
    """The field or column that holds the text."""

    def __post_init__(self) -> None:
        if self.whole and self.num_sequences:
            raise ConfigError(
                f"{spelled('num_sequences')} chooses among those of data.valid; with {spelled('texts')} or "
                f"{spelled('stride')} all are taken"
            )

    @property
    def whole(self) -> bool:
        """Whether all of the data is scored, in windows."""
        return bool(self.texts or self.stride)

    def windows(self, run: TrainedRun) -> int | None:
        """Return the tokens between two windows; None: sequences of data.valid are taken."""
        from sagetrain.inference.evaluate import default_stride

        return (self.stride or default_stride(run.cfg.data.seq_length)) if self.whole else None

    def measure(self, run: TrainedRun, say: Callable[[str], None]) -> list[Evaluation]:
        """Return the losses of each source. Raises ConfigError if the data cannot be read."""
        from sagetrain.inference.evaluate import evaluate, evaluate_texts

        if self.whole:
            return evaluate_texts(run, self.texts, self.windows(run), text_key=self.text_key, report=say)
        wanted = self.num_sequences or run.cfg.evaluation.num_sequences
        found = evaluate(run, wanted, say)
        if (taken := sum(part.sequences for part in found)) < wanted:
            say(f"{wanted:,} sequences were asked for, and the held-out data has {taken:,}: all are taken")
        return found

"""Write samples with a model while it trains. All ranks hold the model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sagetrain.checkpoint.state import Texts
from sagetrain.config.schema import DataConfig, EvaluationConfig
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.engines.step import Engine
from sagetrain.inference.generate import Sampling, generate
from sagetrain.inference.load import TrainedRun
from sagetrain.parallel.objects import of_every_rank
from sagetrain.training.inputs import check_prompts

Trained = Callable[[Engine, Tokenizer, Texts], TrainedRun]
"""The type of load.in_training for the run's configuration."""
Alive = Callable[[], None]
"""A function that is called as a sign of life."""


def samples_while_training(
    evaluation: EvaluationConfig, data: DataConfig, context: int, trained: Trained
) -> Callable[[Engine, Texts, Alive], list[tuple[str, str]]]:
    """Return the function that writes samples (Samples of training/trainer.py), for all ranks together. `context` is
    the number of tokens that a text of the run may have at once. Raises ConfigError if there is no tokenizer, or a
    prompt is too long."""
    tokenizer, prompts = Tokenizer.load(data.tokenizer_path), evaluation.samples_prompts
    check_prompts(prompts, tokenizer, context)
    sampling = Sampling(evaluation.samples_tokens)

    def write(engine: Engine, texts: Texts, alive: Alive) -> list[tuple[str, str]]:
        run = trained(engine, tokenizer, texts)
        return [*zip(prompts, completed(run, alive, prompts, sampling), strict=True)]

    return write


def completed(run: TrainedRun, alive: Alive, prompts: Sequence[str], sampling: Sampling) -> list[str]:
    """Return the texts that follow each of the prompts. Ranks that have whole weights between them take the same
    prompts, and others share the work. Collective."""
    groups = run.model.groups
    stage, together = groups.topology.stage_size, groups.topology.text_ranks
    share, shares = groups.rank % stage // together, stage // together
    # Equal prompts stay together, because generate lets each of them draw differently.
    turns = {prompt: turn for turn, prompt in enumerate(dict.fromkeys(prompts))}
    own = [number for number, each in enumerate(prompts) if turns[each] % shares == share]
    done: dict[int, str] = {}
    for text, _ in generate(run, [prompts[number] for number in own], sampling, run.cfg.data.micro_batch_size):
        alive()
        if text.finish:
            done[own[text.number]] = text.text
    done = {number: text for share in of_every_rank(done) for number, text in share.items()}
    return [done[number] for number in range(len(prompts))]

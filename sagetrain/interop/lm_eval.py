"""Evaluate models on downstream tasks with EleutherAI's lm-evaluation-harness. This needs the extra lm-eval."""

from __future__ import annotations

import io
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from sagetrain.checkpoint.state import Texts
from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import DataConfig, EvaluationConfig
from sagetrain.data.batch import Batch
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.engines.step import Engine
from sagetrain.inference.generate import Sampling, finished
from sagetrain.inference.load import TrainedRun
from sagetrain.inference.samples import Alive, Trained, completed
from sagetrain.inference.score import Scorer, encoded_pair, scorer_of
from sagetrain.training.inputs import refuse_generating, task_manager

TaskResults = dict[str, dict[str, float]]
"""Numbers by task and metric: acc, acc_stderr. If the harness filters answers, the filter's name follows:
acc/strict."""
# This is the number of resamplings where a standard error has no formula.
_BOOTSTRAP = 1000
# This is the harness's own default.
_MAX_TOKENS = 256


class Harness(TemplateLM):  # type: ignore[misc]
    """A model as the harness asks it: how likely a text is after another text, and what comes next."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        score: Scorer,
        complete: Callable[[Sequence[str], Sampling], list[str]],
        window: int,
        prefix: Sequence[int] = (),
    ) -> None:
        """Build the model for the harness.

        Args:
            score: computes log-likelihoods.
            complete: returns what follows each of some prompts.
            window: the number of tokens of the windows in which whole texts are scored.
            prefix: tokens that the model expects before a text.
        """
        super().__init__()
        self._tokenizer, self._score, self._complete, self._prefix = tokenizer, score, complete, prefix
        self._window = window
        # A text without context is scored after these tokens. In a token file, an eos precedes every document.
        self._start = [*prefix] or [tokenizer.eos_id]

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        return [*(() if add_special_tokens is False else self._prefix), *self._tokenizer.encode(string)]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a context and its continuation. White space between them belongs to the latter, as in the harness."""
        before = context.rstrip()
        pair = encoded_pair(self._tokenizer, before, context[len(before) :] + continuation)
        return [*self._prefix, *pair[0]], [*pair[1]]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        # White space before an answer belongs to the answer, so the context may be empty.
        return self._score([((text and context) or self._start, answer) for (text, _), context, answer in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        texts = [self._tokenizer.encode(request.args[0]) for request in requests]
        windows = [
            [make_disjoint_window(pair) for pair in get_rolling_token_windows(text, -1, self._window, 1)]
            for text in texts
        ]
        for pairs in windows:
            # These tokens stand in place of -1.
            pairs[:1] = [(self._start, answer) for _, answer in pairs[:1]]
        found = iter(self._score([pair for pairs in windows for pair in pairs]))
        return [math.fsum(next(found)[0] for _ in pairs) for pairs in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        wanted: dict[Sampling, list[int]] = {}
        for number, request in enumerate(requests):
            wanted.setdefault(_sampling(request.args[1]), []).append(number)
        found = [""] * len(requests)
        for sampling, numbers in wanted.items():
            prompts = [self._end(requests[number].args[0], sampling.max_tokens) for number in numbers]
            for number, text in zip(numbers, self._complete(prompts, sampling), strict=True):
                found[number] = text
        return found

    def _end(self, prompt: str, max_tokens: int) -> str:
        """Return the end of a prompt that leaves room in the context for an answer. At least half of the context is for
        the prompt."""
        size = self._score.context
        room = size - min(max_tokens, size // 2)
        starts = range(len(prompt))
        return prompt[bisect_left(starts, True, key=lambda start: len(self.tok_encode(prompt[start:])) <= room) :]


def _sampling(wanted: dict[str, Any]) -> Sampling:
    wanted = {key: value for key, value in wanted.items() if value is not None}
    until = wanted.get("until", [])
    given = normalize_gen_kwargs(wanted | {"until": [until] if isinstance(until, str) else [*until]}, _MAX_TOKENS)
    limit, stop = given["max_gen_toks"], tuple(text for text in given["until"] if text)
    if not given["do_sample"]:
        return Sampling(limit, temperature=0, stop=stop)
    temperature = float(wanted.get("temperature", 1.0))
    return Sampling(limit, temperature, wanted.get("top_k", 0), wanted.get("top_p", 1.0), stop)


class HarnessTasks:
    """Tasks of the harness, by name or as paths of YAML files that define others."""

    def __init__(self, names: Sequence[str], limit: int | None = None) -> None:
        """Load the tasks with their data, by names or as paths of YAML files. `limit` is the documents of each task;
        None: all. Raises ConfigError if a name does not exist, or a task cannot be loaded."""
        manager = task_manager(names)
        try:
            self._loaded = manager.load(list(names))
        except Exception as error:  # Tasks, and the libraries that fetch their data, may raise anything.
            raise ConfigError(f"tasks {', '.join(names)} cannot be loaded: {error}") from error
        self._limit = limit

    @property
    def generating(self) -> list[str]:
        """Names of the tasks that want generated text."""
        return [name for name, task in self._loaded["tasks"].items() if task.OUTPUT_TYPE == "generate_until"]

    def measure(self, model: Harness, errors: bool = False) -> TaskResults:
        """Return the metrics of the tasks and of their groups. With `errors`, their standard errors are included.
        Generators of random numbers are not changed."""
        for task in self._loaded["tasks"].values():
            # The examples are the same each time.
            task.set_fewshot_seed(DEFAULT_OTHER_SEED)
        # simple_evaluate is not used, because it also asks git, and the machine for seconds, for information that
        # nobody reads here.
        with redirect_stdout(sys.stderr):  # The harness prints what it resamples, and stdout may be JSON.
            found = evaluate(
                model, self._loaded, limit=self._limit, bootstrap_iters=_BOOTSTRAP * errors, log_samples=False
            )
        return {task: numbers for task, values in found["results"].items() if (numbers := _metrics(values))}


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    found = {}
    for key, value in values.items():
        name, comma, kind = key.partition(",")
        if comma and isinstance(value, int | float):
            name, error, _ = name.partition("_stderr")
            found[(name if kind == "none" else f"{name}/{kind}") + error] = float(value)
    return found


def tasks_while_training(
    evaluation: EvaluationConfig, data: DataConfig, trained: Trained | None
) -> Callable[[Engine, Texts, Alive], dict[str, float]]:
    """Load evaluation.tasks, and return a function that evaluates them (Tasks of training/trainer.py) on a model that
    all ranks hold together. It returns numbers by task/metric. Both calls are collective. `trained` gives the model in
    training as one that generates; None at ZeRO 3. Raises ConfigError if HarnessTasks refuses the tasks, a task wants
    generated text at ZeRO 3, or there is no tokenizer."""
    tasks = HarnessTasks(evaluation.tasks, evaluation.tasks_limit)
    if trained is None:
        refuse_generating(tasks.generating)
    tokenizer = Tokenizer.load(data.tokenizer_path)

    def ask(engine: Engine, texts: Texts, alive: Alive) -> dict[str, float]:
        def forward(batch: Batch) -> Tensor:
            alive()
            return engine.logits(batch)

        def complete(prompts: Sequence[str], sampling: Sampling) -> list[str]:
            assert trained is not None
            return completed(trained(engine, tokenizer, texts), alive, prompts, sampling)

        groups = engine.groups
        shape = data.seq_length, data.micro_batch_size
        score = Scorer(forward, groups, engine.device, *shape, tokenizer.vocab_size, texts.context)
        # The harness has a progress bar for each task. One process shows it.
        with redirect_stderr(io.StringIO()) if groups.rank else nullcontext():
            results = tasks.measure(Harness(tokenizer, score, complete, data.seq_length, texts.prefix))
        return {f"{task}/{name}": value for task, values in results.items() for name, value in values.items()}

    return ask


def harness_of(run: TrainedRun) -> Harness:
    """Build the harness's model of a checkpoint in this process. Raises ConfigError if it has no tokenizer."""
    if run.tokenizer is None:
        raise ConfigError(
            "the run was trained on token files without a tokenizer, so it cannot be asked tasks: put the "
            "tokenizer.model or tokenizer.json that made them into the run's folder"
        )

    def complete(prompts: Sequence[str], sampling: Sampling) -> list[str]:
        return [completion.text for completion in finished(run, prompts, sampling, 8)]

    score, window = scorer_of(run, run.tokenizer), run.cfg.data.seq_length
    return Harness(run.tokenizer, score, complete, window, run.texts.prefix)

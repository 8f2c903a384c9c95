"""Text from what a run has trained: of several prompts at once, each as if it were alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sagetrain.config.errors import ConfigError
from sagetrain.data.chat_template import answer_ends, chat_prompt
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.cache import CachedModel
from sagetrain.inference.trained_run import TrainedRun
from sagetrain.parallel.rng import named_generator


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and where a text ends. ConfigError for what is out of range, by the option's name."""

    max_tokens: int = 100
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int = 50
    """Only the k likeliest; 0: all."""
    top_p: float = 1.0
    """Of these only the fewest whose probabilities together reach p."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= 1e-6):  # logits over it would not be finite; nor is nan
            raise ConfigError(
                f"--temperature {self.temperature}: neither 0 nor at least 1e-6; 0 takes the likeliest token"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p}: not above 0 and at most 1; 1 leaves nothing out")
        if "" in self.stop:
            raise ConfigError("--stop '': every text ends before an empty one; leave the option out")


@dataclass
class Completion:
    """A prompt and what has followed it so far."""

    number: int
    """Of the prompt, from 0."""
    prompt: str
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    """Generated; without the one that ended it."""
    text: str = ""
    """Of the tokens, to the stop string. What might become one is held back until it is known."""
    finish: Literal["eos", "stop", "max_tokens"] | None = None
    """What ended it; None: it grows."""


def ending_tokens(tokenizer: Tokenizer, also: Sequence[int], template: str | None) -> list[int]:
    """The tokens that end a text, or with a chat template an answer: those of the model (`also`), the tokenizer's
    end-of-text token, and what the template puts behind an answer."""
    answer = answer_ends(template, tokenizer) if template else []
    return [*dict.fromkeys([*also, tokenizer.eos_id, *answer])]


@torch.no_grad()
def generate(
    run: TrainedRun, prompts: Sequence[str], sampling: Sampling, batch_size: int = 1, template: str | None = None
) -> Iterator[tuple[Completion, str]]:
    """Continue prompts, `batch_size` of them at a time: yields a completion and the text by which it has grown, the
    last time with its `finish`.

    A prompt is read alone, and a text that ends makes room for the next prompt. With a seed what a prompt becomes
    depends on nothing else, batch and other prompts included (up to float sums in another order, where two tokens are
    as likely); prompts that are the same draw differently. Keys and values are kept; when the context
    (TrainedRun.context) is full, its later half is read anew. What the model wants before a text is before each.

    Args:
        template: a chat template (data/chat_template.py): prompts are messages of a user's, which the model answers.
            What the template puts behind an answer ends one, too.

    Raises:
        ConfigError: the run has no tokenizer, a prompt is longer than the context, or the template refuses it.
    """
    tokenizer, context, prefix = run.tokenizer, run.context, run.text_prefix
    if tokenizer is None:
        raise ConfigError(
            "the run was trained on token files without a tokenizer, so there is no text for it: put the "
            "tokenizer.model or tokenizer.json that made them into the run's folder"
        )
    ends = {*ending_tokens(tokenizer, run.end_tokens, template)}
    known = min(run.vocab_size, tokenizer.vocab_size)
    waiting, growing = deque(_begin(run, prompts, tokenizer, sampling, template)), list[_Text]()
    longest = max((len(text.tokens) for text in waiting), default=0)
    model = CachedModel(run.model, batch_size, min(context, longest + sampling.max_tokens))

    def grow(texts: Sequence[_Text], logits: Tensor) -> Iterator[tuple[Completion, str]]:
        tokens = choose(logits[:, :known].float(), sampling, [text.generator for text in texts])
        for text, token in zip(texts, tokens, strict=True):
            yield text.completion, text.add(token, token in ends)

    while waiting or growing:
        while waiting and len(growing) < batch_size:
            text = waiting.popleft()
            growing.append(text)
            yield from grow([text], model.read(len(growing) - 1, text.tokens)[None])
            _drop_finished(model, growing)
        if not growing:
            continue
        for row, text in enumerate(growing):
            if model.lengths[row] == context:
                kept = context // 2 - len(prefix)
                model.read(row, [*prefix, *text.tokens[-kept - 1 : -1]])
        yield from grow(growing, model([text.tokens[-1] for text in growing]))
        _drop_finished(model, growing)


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """A token for each row of logits, float32 [rows, vocab], with one number drawn from each row's generator."""
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    few = min(sampling.top_k, logits.shape[-1])
    likeliest = logits.topk(few) if few else logits.sort(descending=True)
    values, ids = (x.cpu() for x in likeliest)  # a GPU's cumsum is not the same each time, and ranks must agree
    shares = (values.double() / sampling.temperature).softmax(-1).cumsum(-1)
    before = shares.roll(1, -1)
    before[:, 0] = 0
    kept = (before < sampling.top_p * shares[:, -1:]).sum(-1, keepdim=True)  # the first one always
    drawn = torch.stack([torch.rand(1, generator=each, dtype=torch.float64) for each in generators])
    places = torch.searchsorted(shares, drawn * shares.gather(-1, kept - 1), right=True)
    return ids.gather(-1, places.minimum(kept - 1))[:, 0].tolist()


class _Text:
    """A completion while it grows."""

    def __init__(
        self, completion: Completion, tokens: list[int], tokenizer: Tokenizer, sampling: Sampling, again: int
    ) -> None:
        self.completion, self.tokens = completion, tokens
        self._tokenizer, self._sampling = tokenizer, sampling
        self.generator = named_generator(sampling.seed, f"{again} {completion.prompt}")
        # The text of tokens[shown:] is told behind that of tokens[base:shown]: of a text's beginning some tokenizers
        # leave out the space.
        self._base, self._shown = 0, len(tokens)
        self._held = ""

    def add(self, token: int, ended: bool) -> str:
        """Take one more token, or end with it; the text that can be shown then."""
        done, sampling = self.completion, self._sampling
        if ended:
            done.finish = "eos"
        else:
            done.tokens.append(token)
            self.tokens.append(token)
            if len(done.tokens) == sampling.max_tokens:
                done.finish = "max_tokens"
        self._held += self._new_text(last=done.finish is not None)
        ends = [place for place in map(self._held.find, sampling.stop) if place >= 0]
        if ends:
            self._held, done.finish = self._held[: min(ends)], "stop"
        kept = 0 if done.finish else max((_begun(self._held, stop) for stop in sampling.stop), default=0)
        piece = self._held[: len(self._held) - kept]
        self._held = self._held[len(piece) :]
        done.text += piece
        return piece

    def _new_text(self, last: bool) -> str:
        decode = self._tokenizer.decode
        text = decode(self.tokens[self._base :])[len(decode(self.tokens[self._base : self._shown])) :]
        if text.endswith("�") and not last:  # a character may span several byte tokens
            return ""
        if text:
            self._base, self._shown = self._shown, len(self.tokens)
        return text


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text that begin a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _begin(
    run: TrainedRun, prompts: Sequence[str], tokenizer: Tokenizer, sampling: Sampling, template: str | None
) -> list[_Text]:
    texts, times, context = [], Counter[str](), run.context
    for number, prompt in enumerate(prompts):
        if template is None:
            tokens = [*run.text_prefix, *tokenizer.encode(prompt)]
        else:
            tokens = chat_prompt(template, tokenizer, prompt)
        tokens = tokens or [tokenizer.eos_id]  # which precedes every document in the token file
        if len(tokens) > context:
            which = f"prompt {number + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
            raise ConfigError(
                f"{which} has {len(tokens):,} tokens, {len(tokens) - context:,} more than the context of {context:,} "
                "that the model was trained with (its longest data.seq_length); shorten it"
            )
        texts.append(_Text(Completion(number, prompt, len(tokens)), tokens, tokenizer, sampling, times[prompt]))
        times[prompt] += 1
    return texts


def _drop_finished(model: CachedModel, growing: list[_Text]) -> None:
    for row in reversed(range(len(growing))):
        if growing[row].completion.finish:
            model.drop(row)
            growing[row] = growing[-1]
            growing.pop()

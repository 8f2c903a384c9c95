"""Generate text with a trained run, for several prompts at once. Each prompt gets the text that it would get alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.data.chat_template import answer_ends, chat_prompt
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.cache import CachedModel
from sagetrain.inference.load import TrainedRun
from sagetrain.parallel.rng import named_generator


@dataclass(frozen=True)
class Sampling:
    """The settings for choosing tokens and ending a text. Raises ConfigError, with the option's name, for a value out
    of range."""

    max_tokens: int = 100
    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int = 50
    """Only the k most likely tokens are drawn from; 0: all."""
    top_p: float = 1.0
    """The tokens that are drawn from are the fewest of these whose probabilities together reach p."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these."""
    seed: int = 0

    def __post_init__(self) -> None:
        # Otherwise logits divided by the temperature would not be finite. NaN is refused too.
        if not (self.temperature == 0 or self.temperature >= 1e-6):
            raise ConfigError(
                f"{spelled('temperature')} {self.temperature}: neither 0 nor at least 1e-6; 0 takes the likeliest token"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"{spelled('top_p')} {self.top_p}: not above 0 and at most 1; 1 leaves nothing out")
        if "" in self.stop:
            raise ConfigError(f"{spelled('stop')} '': every text ends before an empty one; leave the option out")


@dataclass
class Completion:
    """A prompt, and the text that has followed it so far."""

    number: int
    """Number of the prompt, counted from 0."""
    prompt: str
    """The prompt as it was given."""
    prompt_tokens: int
    """Number of tokens of the prompt, with those that the model expects before a text."""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens, without the token that ended the text."""
    text: str = ""
    """The text of the tokens, up to the stop string. Text that may become a stop string is held back until it is
    known."""
    finish: Literal["eos", "stop", "max_tokens"] | None = None
    """The reason for the end. None: the text is still growing."""


def ending_tokens(tokenizer: Tokenizer, also: Sequence[int], template: str | None) -> list[int]:
    """Return the tokens that end a text, or with a chat template an answer: those of the model (`also`), the
    tokenizer's end-of-text token, and the token that the template puts behind an answer."""
    answer = answer_ends(template, tokenizer) if template else []
    return [*dict.fromkeys([*also, tokenizer.eos_id, *answer])]


def finished(
    run: TrainedRun, prompts: Sequence[str], sampling: Sampling, batch_size: int = 1, template: str | None = None
) -> list[Completion]:
    """Continue prompts as `generate` does, and return the finished completions in the order of the prompts."""
    done = {each.number: each for each, _ in generate(run, prompts, sampling, batch_size, template) if each.finish}
    return [done[number] for number in range(len(prompts))]


@torch.no_grad()
def generate(
    run: TrainedRun, prompts: Sequence[str], sampling: Sampling, batch_size: int = 1, template: str | None = None
) -> Iterator[tuple[Completion, str]]:
    """Continue prompts, `batch_size` of them at a time. Yields a completion, and the text by which it has grown; the
    last time with its `finish`. Raises ConfigError if the run has no tokenizer, a prompt is longer than the context, or
    the template refuses it.

    A prompt is read alone, and a text that ends makes room for the next prompt. With a seed, the text of a prompt
    depends on nothing else, batch and other prompts included (up to float sums in another order, if two tokens are
    equally likely). Equal prompts draw differently. Keys and values are cached; when the context (TrainedRun.context)
    is full, its later half is read again. The tokens that the model expects before a text are put before each.

    With a chat template (data/chat_template.py), prompts are messages of a user, which the model answers, and the token
    that the template puts behind an answer ends one too.
    """
    tokenizer, context, prefix = run.tokenizer, run.context, run.texts.prefix
    if tokenizer is None:
        raise ConfigError(
            "the run was trained on token files without a tokenizer, so there is no text for it: put the "
            "tokenizer.model or tokenizer.json that made them into the run's folder"
        )
    ends = {*ending_tokens(tokenizer, run.texts.end_tokens, template)}
    known = min(run.vocab_size, tokenizer.vocab_size)
    waiting, growing = deque(_begin(run, prompts, tokenizer, sampling, template)), list[_Text]()
    longest = max((len(text.tokens) for text in waiting), default=0)
    model = CachedModel(run.model, batch_size, min(context, longest + sampling.max_tokens), run.call)

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
    """Choose a token for each row of logits, float32 [rows, vocab], with one number drawn from each row's generator."""
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    few = min(sampling.top_k, logits.shape[-1])
    likeliest = logits.topk(few) if few else logits.sort(descending=True)
    # A GPU's cumsum is not the same each time, and ranks must agree.
    values, ids = (x.cpu() for x in likeliest)
    shares = (values.double() / sampling.temperature).softmax(-1).cumsum(-1)
    before = shares.roll(1, -1)
    before[:, 0] = 0
    # The first token is always kept.
    kept = (before < sampling.top_p * shares[:, -1:]).sum(-1, keepdim=True)
    drawn = torch.stack([torch.rand(1, generator=each, dtype=torch.float64) for each in generators])
    places = torch.searchsorted(shares, drawn * shares.gather(-1, kept - 1), right=True)
    return ids.gather(-1, places.minimum(kept - 1))[:, 0].tolist()


class _Text:
    def __init__(
        self, completion: Completion, tokens: list[int], tokenizer: Tokenizer, sampling: Sampling, again: int
    ) -> None:
        self.completion, self.tokens = completion, tokens
        self._tokenizer, self._sampling = tokenizer, sampling
        self.generator = named_generator(sampling.seed, f"{again} {completion.prompt}")
        # The text of tokens[shown:] is what follows the text of tokens[base:shown], because some tokenizers leave out
        # the space at the beginning of a text.
        self._base, self._shown = 0, len(tokens)
        self._held = ""

    def add(self, token: int, ended: bool) -> str:
        """Add one more token, or end with it. Returns the text that can be shown then."""
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
        if text.endswith("�") and not last:  # A character may span several byte tokens.
            return ""
        if text:
            self._base, self._shown = self._shown, len(self.tokens)
        return text


def _begun(text: str, stop: str) -> int:
    """Return the number of characters at the end of a text that begin a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _begin(
    run: TrainedRun, prompts: Sequence[str], tokenizer: Tokenizer, sampling: Sampling, template: str | None
) -> list[_Text]:
    texts, times, context = [], Counter[str](), run.context
    for number, prompt in enumerate(prompts):
        if template is None:
            try:
                tokens = [*run.texts.prefix, *tokenizer.encode(prompt)]
            except ValueError as error:
                raise ConfigError(f"prompt {number + 1} of {len(prompts)}: {error}") from error
        else:
            tokens = chat_prompt(template, tokenizer, prompt)
        tokens = tokens or [tokenizer.eos_id]  # In a token file, an eos precedes every document.
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

"""Text from what a run has trained."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from sagetrain.config.errors import ConfigError
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.cache import CachedModel
from sagetrain.inference.load import TrainedRun


@torch.no_grad()
def generate(run: TrainedRun, prompt: str, max_tokens: int, temperature: float, top_k: int, seed: int) -> Iterator[str]:
    """Continue `prompt`, yielding the text piece by piece until `max_tokens` or the end-of-document token.

    temperature 0 takes the likeliest token; top_k 0 samples from all. Keys and values are kept, so a token costs one
    token's work; when the context (data.seq_length) is full, its later half is read anew. ConfigError if the run has no
    tokenizer, or the prompt is longer than the context.
    """
    if run.tokenizer is None:
        raise ConfigError(
            "the run was trained on token files without a tokenizer, so there is no text for it: put the "
            "tokenizer.model or tokenizer.json that made them into the run's folder"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = run.tokenizer.encode(prompt)
    if not tokens:
        tokens = [run.tokenizer.eos_id]  # what precedes every document in the token file
    start = shown = len(tokens)
    context = run.cfg.data.seq_length
    if start > context:
        raise ConfigError(
            f"the prompt has {start:,} tokens, more than the context of {context:,} that the run was trained with "
            "(data.seq_length); shorten it"
        )
    model, new = CachedModel(run.model, context), tokens
    said, known = "", min(run.vocab_size, run.tokenizer.vocab_size)
    for _ in range(max_tokens):
        if len(new) > model.room:
            model.forget()
            new = tokens[-(context // 2 + 1) :]
        logits = model(torch.tensor([new], device=run.device))[0, -1, :known].float().cpu()
        if temperature > 0:
            logits /= temperature
            if top_k:
                logits[logits < logits.topk(min(top_k, known)).values[-1]] = -math.inf
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == run.tokenizer.eos_id:
            break
        tokens.append(token)
        new = [token]
        text = _after(run.tokenizer, tokens, start)
        if not text.endswith("�"):  # a character may span several byte tokens
            yield text[len(said) :]
            said, shown = text, len(tokens)
    if shown < len(tokens):
        yield _after(run.tokenizer, tokens, start)[len(said) :]


def _after(tokenizer: Tokenizer, tokens: list[int], start: int) -> str:
    """The text of tokens[start:], behind the others: of a text's beginning some tokenizers leave out the space."""
    return tokenizer.decode(tokens)[len(tokenizer.decode(tokens[:start])) :]

"""A user's loss: its name, and a trial of it before the run starts."""

from __future__ import annotations

import torch
from torch import Tensor

from sagetrain.config.errors import ConfigError
from sagetrain.data.loader import MASKED
from sagetrain.parallel.cross_entropy import TokenLoss

_TOKENS = 4


def name_of(loss: TokenLoss) -> str:
    """Return the name by which checkpoints know a loss, such as "mine.label_smoothing"."""
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}.{named.__qualname__}"


def try_out(loss: object, vocab_size: int) -> None:
    """Call a loss with a few logits, as training will.

    Raises:
        ConfigError: the loss cannot be called, or does not return the loss of each token with a gradient.
    """
    if not callable(loss):
        raise ConfigError(f"loss: {loss!r} cannot be called; give a function of logits and labels")
    name, wanted = name_of(loss), f"return the loss of each token: a tensor [{_TOKENS}] for {_TOKENS} tokens"
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TOKENS, vocab_size, generator=generator).requires_grad_()
    labels = torch.tensor([0, vocab_size // 2, vocab_size - 1, MASKED])
    try:
        losses = loss(logits, labels)
    # Whatever the error is, the message says whose it is.
    except Exception as error:
        raise ConfigError(f"loss: {name} failed on a trial: {type(error).__name__}: {error}") from error
    if not isinstance(losses, Tensor) or losses.shape != (_TOKENS,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(f"loss: {name} returned {shape}; {wanted}, without a mean")
    if not losses.requires_grad or not losses[:-1].isfinite().all():
        raise ConfigError(f"loss: {name} returned {losses.tolist()}; {wanted}, finite and with a gradient for logits")

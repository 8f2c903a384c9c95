"""A user's loss: its name, and a trial of it before the run starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sagetrain.cluster.failures import Failures
from sagetrain.config.errors import ConfigError, many
from sagetrain.data.batch import MASKED
from sagetrain.parallel.cross_entropy import OwnLoss, is_by_sequence


def name_of(loss: OwnLoss) -> str:
    """Return the name by which checkpoints know a loss, such as "mine.label_smoothing"."""
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}.{named.__qualname__}"


class GuardedLoss:
    """A user's loss that raises no error inside of a step, where other ranks would wait for this one.

    After an error, which is kept, the losses are NaN and so is their gradient. No rank makes the update then.
    """

    def __init__(self, loss: OwnLoss, failures: Failures) -> None:
        self._loss, self._failures, self._failed = loss, failures, False
        self.by_sequence = is_by_sequence(loss)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not self._failed:
            try:
                losses = self._loss(logits, labels)
                _check_shape(losses, labels)
                # The loss's backward pass may fail as well, and only here can that be kept.
                counted = torch.ones_like(losses) if self.by_sequence else (labels >= 0).to(losses.dtype)
                (gradient,) = torch.autograd.grad(losses, logits, counted)
                known: Tensor = _Known.apply(logits, losses.detach(), gradient)  # type: ignore[no-untyped-call]
                return known
            except torch.OutOfMemoryError:  # This says more as it is.
                raise
            # Whatever the error is, the other ranks have to learn of it.
            except Exception as error:  # noqa: BLE001
                self._failed = True
                self._failures.keep(f"the loss {name_of(self._loss)} failed", error)
        return logits.flatten(1).sum(-1) * torch.nan


class _Known(torch.autograd.Function):
    """The losses of tokens or sequences, with a gradient that is known. Tokens that do not count have none."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, losses: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient, None, None


def _wanted(labels: Tensor) -> str:
    """Say what a user's loss has to return for labels [tokens] or [sequences, tokens]."""
    number, what = len(labels), "token" if labels.ndim == 1 else "sequence"
    length = "" if labels.ndim == 1 else f" of {many(labels.shape[1], 'token')}"
    return f"return the loss of each {what}: a tensor [{number}] for {many(number, what)}{length}"


def _check_shape(losses: object, labels: Tensor) -> None:
    """Raise ValueError if a user's loss returned something else than the loss of each token or sequence."""
    if not isinstance(losses, Tensor) or losses.shape != (len(labels),):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"returned {shape}; {_wanted(labels)}, without a mean")


def try_out(loss: object, vocab_size: int, sequences: int) -> None:
    """Call a loss with a few logits, as training will; a loss by sequence gets those of a micro-batch's sequences.
    Raises ConfigError if the loss cannot be called, or does not return the loss of each token or sequence with a
    gradient."""
    if not callable(loss):
        raise ConfigError(f"loss: {loss!r} cannot be called; give a function of logits and labels")
    name, whole = name_of(loss), is_by_sequence(loss)
    labels = torch.tensor([0, vocab_size // 2, vocab_size - 1, MASKED])
    labels = labels.repeat(sequences, 1) if whole else labels
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*labels.shape, vocab_size, generator=generator).requires_grad_()
    try:
        losses = loss(logits, labels)
    # Whatever the error is, the message says whose it is.
    except Exception as error:
        raise ConfigError(f"loss: {name} failed on a trial: {type(error).__name__}: {error}") from error
    try:
        _check_shape(losses, labels)
    except ValueError as error:
        raise ConfigError(f"loss: {name} {error}") from None
    if not losses.requires_grad or not (losses if whole else losses[:-1]).isfinite().all():
        wanted = f"{_wanted(labels)}, finite and with a gradient for logits"
        raise ConfigError(f"loss: {name} returned {losses.tolist()}; {wanted}")

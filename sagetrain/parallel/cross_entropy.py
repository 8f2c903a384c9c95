"""Cross-entropy over a vocabulary that is spread over the tensor-parallel group.

`linear_cross_entropy` joins the output projection to the loss. It walks over the tokens in chunks and computes the
gradients of a chunk while its logits are in memory, so that the logits of all tokens never exist at once.
`linear_token_losses` walks in the same way without gradients, and returns the loss of each token. For both, labels are
ids of the whole vocabulary and equal on all ranks. Both return the same values on all ranks. A user's loss takes the
place of the cross-entropy in the first walk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sagekernels.matmul import Matmul
from sagekernels.refusals import differentiated_once
from sagetrain.parallel.collectives import gather_from_region, reduce_from_region
from sagetrain.parallel.layers import local_ids
from sagetrain.parallel.topology import ParallelGroups

# The logits of one chunk take 0.5 GiB in bf16. That is enough for full-speed matmuls, and little beside the
# activations.
_CHUNK_LOGITS = 2**28
# A user's loss gets its logits in fp32, and autograd keeps several tensors of that size.
_CHUNK_OF_USERS = 2**26

Marked = TypeVar("Marked", bound=Callable[..., Any])
OwnLoss = Callable[[Tensor, Tensor], Tensor]
"""A user's loss: (logits fp32 [tokens, vocab], labels int64 [tokens]) -> the loss of each token, [tokens]. Labels of
tokens that do not count are -100, and what it returns for them is not used. A loss that is marked by `by_sequence` gets
[sequences, tokens, vocab] and [sequences, tokens], and returns the loss of each sequence."""


def by_sequence(loss: Marked) -> Marked:
    """Mark a loss for `sagetrain.train` as one of whole sequences. Use it as a decorator of a function or a class.

    The loss gets all sequences of a micro-batch at once: logits fp32 [sequences, tokens, vocab], and labels int64
    [sequences, tokens], which are -100 where a token does not count. It returns the loss of each sequence, [sequences],
    with a gradient for the logits. Every sequence counts, and training takes the mean over the sequences of a step.
    """
    loss.by_sequence = True  # type: ignore[attr-defined]
    return loss


def is_by_sequence(loss: OwnLoss | None) -> bool:
    """Return whether a loss is a user's and sees whole sequences."""
    return getattr(loss, "by_sequence", False) is True


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    groups: ParallelGroups,
    *,
    matmul: Matmul | None = None,
    kept: Sequence[Tensor] = (),
    chunk: int | None = None,
    compiled: bool = False,
    divisor: Tensor | float | None = None,
    known: int | None = None,
    loss: OwnLoss | None = None,
) -> Tensor:
    """Return the mean cross-entropy of hidden @ weight^T over the tokens, or their masked sum divided by `divisor`.

    Under tensor parallelism `hidden` must come out of `finish_enter`, because its gradient here is only this rank's
    part.

    Args:
        hidden: [tokens, hidden_size].
        weight: [vocab / tp, hidden_size], this rank's rows, in the dtype of `hidden`.
        labels: int64 [tokens]. For a loss by sequence [sequences, tokens].
        matmul: multiplies for logits and gradients (default: in the dtype of the operands).
        kept: the tensors that matmul.keep returned for the present weight, if it was called.
        chunk: the number of tokens whose logits exist at once (default: as many as fill 2^28 logits). A loss by
            sequence gets the logits of all tokens.
        compiled: fuse the softmax kernels with torch.compile (for CUDA).
        divisor: divides the sum over the tokens whose labels are not negative. Labels may be negative only if it is
            given.
        known: the size of the vocabulary. The rows behind it only pad the weight and belong to no token. None: every
            row is a token.
        loss: a user's loss in the place of the cross-entropy. Every rank of the group calls it with the logits of the
            whole vocabulary.

    Returns:
        fp32 scalar.
    """
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    if is_by_sequence(loss):
        chunk = hidden.shape[0]
    chunk, matmul = chunk or _chunk(hidden, weight, _CHUNK_OF_USERS if loss else _CHUNK_LOGITS), matmul or Matmul()
    judge = _Judge(groups, known, compiled, divisor is not None, loss)
    inputs = hidden, weight, labels, judge, matmul, kept or matmul.keep((weight.detach(),)), chunk, divisor
    found: Tensor = _LinearCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def linear_token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    groups: ParallelGroups,
    *,
    matmul: Matmul | None = None,
    kept: Sequence[Tensor] = (),
    chunk: int | None = None,
    compiled: bool = False,
    known: int | None = None,
) -> Tensor:
    """Return the loss of each token, fp32 [tokens], without a gradient. It is 0 where the label is negative.

    The arguments are those of linear_cross_entropy, which returns the mean of these losses.
    """
    matmul, judge = matmul or Matmul(), _Judge(groups, known, compiled, masked=True, loss=None)
    chunk, losses, kept = chunk or _chunk(hidden, weight), [], kept or matmul.keep((weight,))
    for some, some_labels in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        (logits,) = matmul.forward(matmul.operand(some), (weight,), kept)
        losses.append(judge(logits, some_labels)[0])
        del logits  # the next chunk's logits take its place
    return torch.cat(losses)


def _chunk(hidden: Tensor, weight: Tensor, logits: int = _CHUNK_LOGITS) -> int:
    """Return the number of tokens whose logits may exist at once, if there may be so many logits."""
    chunks = -(-hidden.shape[0] * weight.shape[0] // logits)
    return -(-hidden.shape[0] // chunks)


class _Judge(NamedTuple):
    """The loss of tokens from their logits, and the gradient of the logits."""

    groups: ParallelGroups
    known: int | None
    compiled: bool
    masked: bool
    """Whether labels may be negative."""
    loss: OwnLoss | None

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return the loss of each token, fp32 [tokens], and a function that returns the gradient of their sum in
        respect of this rank's logits."""
        return self._cross_entropy(logits, labels) if self.loss is None else self._of_user(self.loss, logits, labels)

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        statistics, logits_gradient = _compiled_kernels() if self.compiled else (_statistics, _logits_gradient)
        local, outside = local_ids(labels, logits.shape[1], self.groups)
        _leave_out(logits, self.known, self.groups)
        own_lse, target = statistics(logits, local)
        losses, lse = _token_losses(own_lse, target, outside, self.groups)
        if self.masked:  # exp(logits - inf) = 0: a masked row has no gradient either
            losses, lse = losses.masked_fill(labels < 0, 0), lse.masked_fill(labels < 0, math.inf)
        return losses, lambda: logits_gradient(logits, lse, local, outside)

    def _of_user(self, loss: OwnLoss, logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        groups, own = self.groups, logits.shape[1]
        whole = gather_from_region(logits.detach(), groups)[:, : self.known].float()
        whole = whole.unflatten(0, labels.shape).requires_grad_()
        with torch.enable_grad():
            losses = loss(whole, labels).float()
            losses = losses if is_by_sequence(loss) else losses.masked_fill(labels < 0, 0)

        def gradient() -> Tensor:
            (grad,) = torch.autograd.grad(losses, whole, torch.ones_like(losses))
            grad = grad.flatten(0, -2)
            padded = F.pad(grad, (0, own * groups.tp_size - grad.shape[1]))
            return padded.narrow(1, groups.tp_rank * own, own).to(logits.dtype)

        return losses.detach(), gradient


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        judge: _Judge,
        matmul: Matmul,
        kept: Sequence[Tensor],
        chunk: int,
        divisor: Tensor | float | None,
    ) -> Tensor:
        hidden_needs_grad, weight_needs_grad = ctx.needs_input_grad[:2]
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_grad = torch.empty_like(hidden) if hidden_needs_grad else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if weight_needs_grad else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            operand, saved = matmul.read(hidden[rows])
            (logits,) = matmul.forward(operand, (weight,), kept)
            losses, gradient = judge(logits, labels[rows])
            total += losses.sum()
            if hidden_needs_grad or weight_needs_grad:
                grad = matmul.prepare((gradient(),))
                del logits, gradient  # the next chunk's logits take their place
                if hidden_grad is not None:
                    matmul.input_gradient(grad, (weight,), out=hidden_grad[rows], kept=kept)
                if weight_grad is not None:
                    matmul.add_weight_gradient(weight_grad, grad, saved)
                del grad
        ctx.divisor = len(labels) if divisor is None else divisor  # tokens, or sequences
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        loss: Tensor = total / ctx.divisor
        return loss

    @staticmethod
    @differentiated_once("linear_cross_entropy", "F.cross_entropy of the logits")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grad / ctx.divisor
        return (
            None if hidden_grad is None else _scaled(hidden_grad, scale),
            None if weight_grad is None else _scaled(weight_grad, scale),
            *(None,) * 6,
        )


def _leave_out(logits: Tensor, known: int | None, groups: ParallelGroups) -> None:
    """Give probability 0 to the rows behind the vocabulary, which pad it to a multiple of 128 and are no tokens."""
    if known is not None and (own := max(0, known - groups.tp_rank * logits.shape[1])) < logits.shape[1]:
        logits[:, own:] = -math.inf


def _statistics(logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of this rank's logits, and the logit at the local id. Both are fp32 [tokens]."""
    logits = logits.float()
    return torch.logsumexp(logits, -1), logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)


def _token_losses(lse: Tensor, target: Tensor, outside: Tensor, groups: ParallelGroups) -> tuple[Tensor, Tensor]:
    """Return losses and log-sum-exps over the whole vocabulary, from those of this rank's share. Both are fp32
    [tokens]."""
    lse = torch.logsumexp(gather_from_region(lse.unsqueeze(-1), groups), -1)
    return lse - reduce_from_region(target.masked_fill(outside, 0), groups), lse


def _logits_gradient(logits: Tensor, lse: Tensor, local: Tensor, outside: Tensor) -> Tensor:
    """Return softmax(logits) - one_hot(label), in the dtype of the logits."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    is_label = columns == local.masked_fill(outside, -1).unsqueeze(-1)
    return (torch.exp(logits.float() - lse.unsqueeze(-1)) - is_label.float()).to(logits.dtype)


@functools.cache
def _compiled_kernels() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    return torch.compile(_statistics), torch.compile(_logits_gradient)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply x [rows, hidden_size] by an fp32 scalar, in fp32.

    To multiply a 16-bit x by a scalar, torch would round the scalar to 16 bits. All gradients of a step would then be
    wrong by one common factor. A tensor of two dims is no scalar: torch multiplies in fp32, and rounds as it writes.
    """
    return torch.mul(x, scale.view(1, 1), out=torch.empty_like(x))

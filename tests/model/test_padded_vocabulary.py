"""Rows that fill the vocabulary up to a multiple of 128 are no tokens and have no part in the loss."""

import pytest
import torch
import torch.nn.functional as F

import tiny
from distributed import run_distributed
from sagetrain.parallel.cross_entropy import linear_cross_entropy, linear_token_losses

PADDED, HIDDEN = 128, 8


def losses_and_gradients(known: int) -> list[float]:
    """Return the largest differences of this rank's losses and gradients from float64 without the rows that fill up."""
    groups = tiny.join(torch.distributed.get_world_size())
    torch.manual_seed(0)
    x = torch.randn(5, HIDDEN)
    weight = F.pad(torch.randn(known, HIDDEN) - 1, (0, 0, 0, PADDED - known))
    labels = torch.randint(known, (5,))
    exact_x, exact = x.double().requires_grad_(), weight.double().requires_grad_()
    truth = F.cross_entropy(exact_x @ exact[:known].t(), labels)
    truth.backward()
    rows = slice(PADDED // groups.tp_size * groups.tp_rank, PADDED // groups.tp_size * (groups.tp_rank + 1))
    own, seen = weight[rows].clone().requires_grad_(), x.clone().requires_grad_()
    loss = linear_cross_entropy(seen, own, labels, groups, known=known)
    loss.backward()
    partial = seen.grad.clone()
    torch.distributed.all_reduce(partial)
    each = linear_token_losses(x, own, labels, groups, known=known)
    some = torch.where(torch.arange(5) < 2, -1, labels)  # Two labels do not count.
    counted = linear_cross_entropy(x, own, some, groups, known=known, divisor=3.0)
    truth_of_some = F.cross_entropy((exact_x @ exact[:known].t())[2:], labels[2:])
    pairs = (loss, truth), (each.mean(), truth), (own.grad, exact.grad[rows]), (counted, truth_of_some)
    found = [(ours - theirs).abs().max().item() for ours, theirs in pairs]
    return [*found, min((grad - exact_x.grad).abs().max().item() for grad in (seen.grad, partial))]


# With 60 tokens, all rows of the second rank fill up.
@pytest.mark.parametrize(("known", "ranks"), [(100, 1), (100, 2), (60, 2)])
def test_rows_behind_the_vocabulary_have_no_part_in_the_loss(known: int, ranks: int) -> None:
    for differences in run_distributed(losses_and_gradients, ranks, known):
        assert max(differences) < 1e-6

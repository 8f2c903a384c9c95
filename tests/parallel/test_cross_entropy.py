"""The vocabulary-parallel loss, and the projection and loss in chunks, agree with F.cross_entropy in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distributed import run_distributed
from sagekernels.casts import quantize
from sagekernels.lowbit import HEADS, LowBit
from sagetrain.parallel.collectives import Region, finish_enter, start_enter
from sagetrain.parallel.cross_entropy import linear_cross_entropy, linear_token_losses
from sagetrain.parallel.layers import shard
from sagetrain.parallel.topology import ParallelGroups, Topology

TOKENS, HIDDEN, VOCAB = 37, 16, 48
SINGLE = ParallelGroups.single()


def _inputs(scale: float = 1.0, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g, dtype=torch.float64) * scale
    weight = torch.randn(vocab, HIDDEN, generator=g, dtype=torch.float64)
    labels = torch.randint(0, vocab, (TOKENS,), generator=g)
    labels[:2] = torch.tensor([0, vocab - 1])
    return hidden, weight, labels


def _dense(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (x.detach().double().clone().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.t(), labels)
    return loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight))


@pytest.mark.parametrize("chunk", [None, 1, 10, TOKENS, 1000])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_as_good_as_plain_torch(chunk: int | None, scale: float, dtype: torch.dtype) -> None:
    hidden, weight, labels = _inputs(scale)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    truth = _dense(hidden, weight, labels, scale=0.125)
    errors = []
    for function in (
        lambda h, w: linear_cross_entropy(h, w, labels, SINGLE, chunk=chunk),
        lambda h, w: F.cross_entropy(F.linear(h, w).float(), labels),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = function(h, w)
        (loss * 0.125).backward()
        assert (loss.dtype, h.grad.dtype, w.grad.dtype) == (torch.float32, dtype, dtype)
        errors.append([(x.double() - t).norm() / t.norm() for x, t in zip((loss, h.grad, w.grad), truth, strict=True)])
    # The log-sum-exp is rounded at the size of the logits.
    rounding = torch.finfo(torch.float32).eps * max(1.0, (hidden @ weight.t()).abs().max().item())
    for ours, torchs in zip(*errors, strict=True):
        assert ours <= 1.25 * torchs + (rounding if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("scale", [1 / 3, 1 / 7])
def test_16_bits_do_not_scale_gradients_by_another_factor(scale: float) -> None:
    """A factor that is rounded to 16 bits would make every gradient of a step wrong by up to 1 / 256."""
    hidden, weight, labels = (x.bfloat16() if x.is_floating_point() else x for x in _inputs())
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    (linear_cross_entropy(hidden, weight, labels, SINGLE) * scale).backward()
    for x, truth in zip((hidden, weight), _dense(hidden, weight, labels, scale=scale)[1:], strict=True):
        assert (x.grad.double() * truth).sum() / truth.square().sum() == pytest.approx(1.0, abs=5e-4)


@pytest.mark.parametrize("counted", [[], [3], [*range(5, 30, 2)]], ids=["none", "one", "some"])
def test_masked_tokens_have_neither_loss_nor_gradient(counted: list[int]) -> None:
    hidden, weight, labels = _inputs()
    masked = torch.full_like(labels, -100)
    masked[counted] = labels[counted]
    truth = [x.clone().requires_grad_() for x in (hidden, weight)]
    expected = F.cross_entropy(truth[0] @ truth[1].t(), masked, ignore_index=-100, reduction="sum") / 2.5
    expected.backward()
    h, w = hidden.float().requires_grad_(), weight.float().requires_grad_()
    loss = linear_cross_entropy(h, w, masked, SINGLE, chunk=10, divisor=2.5)
    loss.backward()
    for ours, theirs in ((loss, expected), (h.grad, truth[0].grad), (w.grad, truth[1].grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert not h.grad[masked < 0].any()
    assert counted or (loss == 0 and not w.grad.any())


def test_where_all_tokens_count_the_divisor_changes_no_bit() -> None:
    results = []
    for divisor in (None, float(TOKENS)):
        hidden, weight, labels = (x.float().requires_grad_() if x.is_floating_point() else x for x in _inputs())
        loss = linear_cross_entropy(hidden, weight, labels, SINGLE, divisor=divisor)
        loss.backward()
        results.append((loss, hidden.grad, weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_only_requested_gradients() -> None:
    hidden, weight, labels = _inputs()
    frozen = linear_cross_entropy(hidden.requires_grad_(), weight, labels, SINGLE)
    (grad,) = torch.autograd.grad(frozen, hidden)
    torch.testing.assert_close(grad, _dense(hidden.detach(), weight, labels)[1].to(grad.dtype), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight.requires_grad_(), labels, SINGLE).requires_grad


def test_non_finite_hidden_states_show_in_the_loss() -> None:
    hidden, weight, labels = _inputs()
    hidden[3, 0] = float("nan")
    assert linear_cross_entropy(hidden, weight, labels, SINGLE).isnan()


def _rounded(x: Tensor, name: str) -> Tensor:
    """Return what a rounded operand of a product of the head stands for, in float64."""
    if name == "none":
        return x.double()
    number = HEADS["fp8"].number if name == "fp8" else torch.int8
    codes, scale = quantize(x.float(), number)
    return codes.double() * scale.double()


@pytest.mark.parametrize("power", [0, -40, 40])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_8_bits_rounds_its_operands_and_nothing_else(name: str, power: int) -> None:
    """Operands are rounded along the dim that is summed over, with scales that follow any magnitude: 2^40 times the
    hidden states and 2^-40 times the weights give the same bits. Masked tokens have no gradient. What is kept of the
    weight changes no bit."""
    chunk, back = 10, "fp8" if name == "fp8" else "none"
    hidden, weight, labels = _inputs(0.3)
    hidden, weight = hidden.float() * 2.0**power, weight.float() * 2.0**-power
    labels[5:8] = -100
    expected, x_grads, w_grad = [], [], torch.zeros_like(weight, dtype=torch.float64)
    for x, own in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        logits = _rounded(x, name) @ _rounded(weight, name).t()
        expected.append(F.cross_entropy(logits, own, ignore_index=-100, reduction="none"))
        grad = (logits.softmax(-1) - F.one_hot(own.clamp(min=0), VOCAB)) * (own >= 0)[:, None]
        x_grads.append(_rounded(grad, back) @ _rounded(weight.t(), back).t())
        w_grad += _rounded(grad.t(), back) @ _rounded(x.t(), back).t()
    found = []
    for kept in ((), HEADS[name].keep((weight,))):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        how = {"matmul": HEADS[name], "kept": kept, "chunk": chunk}
        loss = linear_cross_entropy(h, w, labels, SINGLE, divisor=2.5, **how)
        found.append((loss, *torch.autograd.grad(loss, (h, w)), linear_token_losses(h, w, labels, SINGLE, **how)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    loss, h_grad, w_grad_found, losses = found[0]
    assert not h_grad[5:8].any()
    torch.testing.assert_close(losses.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    for ours, exact in (
        (loss, torch.cat(expected).sum() / 2.5),
        (h_grad, torch.cat(x_grads) / 2.5),
        (w_grad_found, w_grad / 2.5),
    ):
        # A softmax in fp32 may lie on the other side of the middle between two codes.
        assert (ours.double() - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_8_bits_is_near_to_one_in_16(name: str) -> None:
    hidden, weight, labels = _inputs(0.3, vocab=512)
    truth = _dense(hidden, weight, labels)
    h, w = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    loss = linear_cross_entropy(h, w, labels, SINGLE, matmul=HEADS[name])
    loss.backward()
    errors = [((x.double() - t).norm() / t.norm()).item() for x, t in zip((loss, h.grad, w.grad), truth, strict=True)]
    assert errors[0] < 2e-3 and 1e-4 < max(errors[1:]) < (0.05 if isinstance(HEADS[name], LowBit) else 0.02), errors


def _own_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a user's loss that is the cross-entropy."""
    assert logits.dtype == torch.float32
    return F.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("divisor", [None, 2.5])
@pytest.mark.parametrize("known", [None, 40])
def test_a_users_loss_is_judged_as_the_cross_entropy_is(divisor: float | None, known: int | None) -> None:
    """The loss is computed in chunks, with rows that pad the vocabulary, and with tokens that do not count."""
    results = []
    for loss in (None, _own_loss):
        hidden, weight, labels = (x.float().requires_grad_() if x.is_floating_point() else x for x in _inputs())
        labels = labels % (known or VOCAB)
        labels = labels.masked_fill(torch.arange(TOKENS) % 3 == 0, -100) if divisor else labels
        found = linear_cross_entropy(
            hidden, weight, labels, SINGLE, chunk=10, divisor=divisor, known=known, loss=loss
        )  # fmt: skip
        found.backward()
        results.append((found, hidden.grad, weight.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_users_loss_may_be_another_one() -> None:
    """The gradient is autograd's."""

    def squared(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.logsumexp(-1).square() - logits.gather(-1, labels[:, None])[:, 0]

    hidden, weight, labels = _inputs()
    truth = [x.clone().requires_grad_() for x in (hidden, weight)]
    expected = squared(truth[0] @ truth[1].t(), labels).mean()
    expected.backward()
    h, w = hidden.float().requires_grad_(), weight.float().requires_grad_()
    loss = linear_cross_entropy(h, w, labels, SINGLE, chunk=7, loss=squared)
    (loss * 3).backward()
    for ours, theirs in ((loss, expected), (h.grad / 3, truth[0].grad), (w.grad / 3, truth[1].grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def _check_sharded_in_8_bits(groups: ParallelGroups) -> None:
    """Compare a head in 8 bits with that of one rank. A row of the vocabulary has the same scale on any rank. A
    gradient of the logits and a column of the weight have finer ones."""
    hidden, weight, labels = _inputs(0.3, vocab=128)
    for matmul in HEADS.values():
        found = []
        for ranks in (SINGLE, groups):
            h, w = hidden.float().requires_grad_(), shard(weight, 0, ranks).float().requires_grad_()
            entered = finish_enter(start_enter(h, Region(ranks)), Region(ranks))
            loss = linear_cross_entropy(entered, w, labels, ranks, matmul=matmul, chunk=10)
            loss.backward()
            found.append((loss.detach(), h.grad, w.grad))
        (loss, h_grad, w_grad), (own_loss, own_h_grad, own_w_grad) = found
        torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=1e-6)
        for own, whole in ((own_h_grad, h_grad), (own_w_grad, shard(w_grad, 0, groups))):
            assert (own - whole).norm() < 0.02 * whole.norm()


def _check_sharded() -> None:
    groups = ParallelGroups.create(Topology(dist.get_world_size(), dist.get_world_size()))
    _check_sharded_in_8_bits(groups)
    for scale in (1.0, 10.0):
        hidden_full, weight_full, labels = _inputs(scale)
        loss_dense, hidden_grad, weight_grad = _dense(hidden_full, weight_full, labels)
        for chunk, own in ((None, None), (10, None), (10, _own_loss)):
            hidden = hidden_full.float().requires_grad_()
            weight = shard(weight_full, 0, groups).float().requires_grad_()
            entered = finish_enter(start_enter(hidden, Region(groups)), Region(groups))
            loss = linear_cross_entropy(entered, weight, labels, groups, chunk=chunk, loss=own)
            loss.backward()
            close = {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(loss.double(), loss_dense, **close)
            torch.testing.assert_close(hidden.grad.double(), hidden_grad, **close)
            torch.testing.assert_close(weight.grad.double(), shard(weight_grad, 0, groups), **close)

            losses = linear_token_losses(hidden_full.float(), weight, labels, groups, chunk=chunk)
            assert losses.dtype == torch.float32
            losses_dense = F.cross_entropy(hidden_full @ weight_full.t(), labels, reduction="none")
            torch.testing.assert_close(losses.double(), losses_dense, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_vocabulary_equals_dense(world_size: int) -> None:
    run_distributed(_check_sharded, world_size)


@pytest.mark.parametrize("chunk", [None, 1, 10])
def test_losses_by_token_are_those_of_float64(chunk: int | None) -> None:
    hidden, weight, labels = _inputs()
    losses = linear_token_losses(hidden.float(), weight.float().requires_grad_(), labels, SINGLE, chunk=chunk)
    assert losses.dtype == torch.float32 and not losses.requires_grad
    truth = F.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    torch.testing.assert_close(losses.double(), truth, atol=1e-5, rtol=1e-6)

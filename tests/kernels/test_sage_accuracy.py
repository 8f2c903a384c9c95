"""The claims about accuracy: `paper` reproduces the papers' tables, and `fine` beats them. Admission follows.

Every number is the error of the twin on random inputs, against float64, or by observe.py against float32, whose own
error is a thousand times smaller. Other tests hold that the kernels agree with the twin, so the numbers are true of the
kernels too.
"""

import functools
import math

import pytest
import torch

from sagekernels import attention_reference, sage_attention
from sagekernels.admission import LIMITS, admit
from sagekernels.call import Call
from sagekernels.observe import Sample, keep, measure, pooled_rel_l2
from sagekernels.reference import twin_backward, twin_forward
from sagekernels.testing import Shape, errors, exact_results, random_inputs, rel_l2, results_of

SEED = 1

TABLE_1 = {
    1: (0.0160, 0.0184, 0.0220, 0.0159),
    3: (0.0389, 0.0758, 0.0777, 0.0387),
    5: (0.0603, 0.2014, 0.2007, 0.0605),
    8: (0.0972, 0.4666, 0.4699, 0.0973),
    10: (0.1161, 0.6648, 0.6684, 0.1157),
}
"""Section 4.4 of arXiv 2603.02170: rel-L2 of O, dQ, dK and dV for Gaussian inputs. Q and K have the standard deviation
sigma, V and dO have 1."""
DQ_OF_FINE = {1: 0.0184, 2: 0.028, 3: 0.055}
"""The largest error that dQ of `fine` may have, by sigma."""


@functools.lru_cache(maxsize=1)
def gaussian_case(sigma, heads, n=1024):
    """Return inputs and their exact results, which take most of the time and which the recipes share."""
    inputs = random_inputs(Shape(1, n, n, heads, heads, 64, causal=False), sigma=sigma, seed=SEED)
    return inputs, exact_results(*inputs, causal=False)


def gaussian_errors(sigma, recipe, heads):
    """Return rel-L2 of O, dQ, dK and dV over `heads` heads of 64, for full attention: one row of Table 1."""
    inputs, exact = gaussian_case(sigma, heads)
    ours = results_of(sage_attention, *inputs, causal=False, recipe=recipe, backend="twin")
    return tuple(errors(ours, exact).values())


def trained_inputs(n):
    """Return q, k, v and do of one causal head with the root mean squares that section 4.2 has of a trained layer.

    The spread of the scores sets RMS(P); dO is small. V has a mean as large as its spread, so that dP is larger than dP
    - delta. Channels of Q are scaled by exp(z) and those of K by exp(-z), where z has the standard deviation 0.7. Q K^T
    stays as it is, but its quantization gets as hard as in that layer: P of `paper` errs as in Table 2 of section 5.4.
    """
    g = torch.Generator().manual_seed(SEED)

    def normal(*size):
        return torch.randn(size, generator=g)

    z = torch.special.ndtri((torch.arange(64) + 0.5) / 64)[torch.randperm(64, generator=g)]
    spread = 1.5 * torch.exp(0.7 * z)
    q, k = normal(1, n, 1, 64) * spread, normal(1, n, 1, 64) * 2.25 / spread
    v = normal(1, n, 1, 64) + normal(64)
    do = normal(1, n, 1, 64) * 4e-6
    return tuple(x.bfloat16() for x in (q, k, v, do))


def measured(inputs, recipe):
    """Return the errors of one causal head, of all tensors of Table 2."""
    q, k, v, do = inputs
    call = Call(q, k, v, None, True, q.shape[-1] ** -0.5, smooth_k=True, recipe=recipe, backend="twin")
    o, saved = twin_forward(call)
    backward = call.backward(do, o, saved)
    everything = Sample.of(q, k, 1, q.shape[1] ** 2, 0)
    return measure(backward, twin_backward(backward), keep(call, everything))


def zero_share(sigma, recipe, n=512):
    """Return the shares of the entries of dS that INT8 rounds to zero for dQ and for dK."""
    zeros = measured(random_inputs(Shape(1, n, n, 1, 1, 64), sigma=sigma, seed=SEED), recipe).zeros
    return tuple((zeros[name][0] / zeros[name][1]).item() for name in ("dQ", "dK"))


def bias(recipe, passes=16, n=128):
    """Return B err^2(B) / err^2(1) for dQ, dK and dV averaged over B passes: 1 for unbiased noise, B for pure bias.

    Attention does not change when Q and K, or V and dO, are rotated together, but every rounding does. Each pass
    therefore quantizes a random rotation of the same inputs, and rotates the gradients back before they are averaged.
    """
    g = torch.Generator().manual_seed(SEED)
    inputs = random_inputs(Shape(1, n, n, 4, 4, 64), sigma=1.5, seed=SEED, dtype=torch.float32)
    exact = exact_results(*inputs)
    sums, first = [torch.zeros_like(x) for x in exact], []
    for number in range(1, passes + 1):
        r, t = (torch.linalg.qr(torch.randn(64, 64, generator=g))[0] for _ in range(2))
        q, k, v, do = inputs
        rotated = results_of(sage_attention, q @ r, k @ r, v @ t, do @ t, recipe=recipe, backend="twin")
        for total, x, rotation in zip(sums, rotated, (t, r, r, t), strict=True):
            total += x.double() @ rotation.double().mT
        means = [rel_l2(total / number, right) ** 2 for total, right in zip(sums, exact, strict=True)]
        first = first or means
    return [passes * last / one for last, one in zip(means[1:], first[1:], strict=True)]


@pytest.mark.parametrize("sigma", [1, 2, 3, 5, 8, 10])
def test_paper_reproduces_table_1_and_fine_is_never_worse(sigma):
    heads = 4 if sigma < 8 else 8  # Heads differ in error by 1 % at sigma 1, and by 17 % at sigma 10.
    fine = gaussian_errors(sigma, "fine", heads)
    assert fine[1] <= DQ_OF_FINE.get(sigma, 1), (SEED, fine)
    if sigma in TABLE_1:
        printed = TABLE_1[sigma]
        assert all(got <= limit for got, limit in zip(fine, printed, strict=True)), (SEED, fine)
    if sigma >= 3:
        paper = gaussian_errors(sigma, "paper", heads)
        assert all(abs(got / limit - 1) < 0.2 for got, limit in zip(paper, printed, strict=True)), (SEED, paper)


def test_inputs_like_a_trained_layer():
    n = 1024
    inputs = trained_inputs(n)
    paper, fine = (measured(inputs, recipe).squares for recipe in ("paper", "fine"))
    paper, fine = ({name: pooled_rel_l2(*sums.tolist()) for name, sums in squares.items()} for squares in (paper, fine))
    assert 0.08 < paper["P"] < 0.18 and paper["dP"] < 1e-12
    of_ds = measured(inputs, "scores").squares["dS"][2].item()
    assert math.sqrt(of_ds / (n * (n + 1) / 2)) < 1e-6
    for name in ("delta", "P", "dS", "O", "dQ", "dK", "dV"):
        assert fine[name] < 0.7 * paper[name], (SEED, name)


def test_fine_rounds_less_of_ds_to_zero():
    for sigma in (1, 2):
        paper, fine = (zero_share(sigma, recipe) for recipe in ("paper", "fine"))
        assert all(a > b + 0.1 for a, b in zip(paper, fine, strict=True)), (SEED, paper, fine)


def test_fine_has_less_bias():
    paper, fine = bias("paper"), bias("fine")
    for more, less in zip(paper, fine, strict=True):
        assert less < 0.6 * more and less < 5, (SEED, paper, fine)


SMALL = Shape(2, 200, 200, 4, 2, 32)


def sage(q, k, v, cu_seqlens):
    return sage_attention(q, k, v, cu_seqlens=cu_seqlens)


def exact(q, k, v, cu_seqlens):
    return attention_reference(q, k, v, cu_seqlens=cu_seqlens)


def forgets_v(q, k, v, cu_seqlens):
    return sage_attention(q, k, v.detach() + 0 * v, cu_seqlens=cu_seqlens)


def ignores_documents(q, k, v, cu_seqlens):
    return sage_attention(q, k, v)


def refuses(q, k, v, cu_seqlens):
    raise NotImplementedError("no such GPU")


@pytest.mark.parametrize("documents", [(), (100, 100)])
@pytest.mark.parametrize("recipe", LIMITS)
def test_right_attention_is_admitted(recipe, documents):
    def attend(q, k, v, cu_seqlens):
        return sage_attention(q, k, v, cu_seqlens=cu_seqlens, recipe=recipe)

    shape = SMALL._replace(batch=1, documents=documents)
    verdict = admit(attend, shape, dtype=torch.bfloat16, device="cpu", limits=LIMITS[recipe])
    assert verdict.passed and verdict.reason == "admitted", verdict


@pytest.mark.parametrize(("attend", "reason"), [
    (forgets_v, "dv is zero in some head"), (ignores_documents, "o off by"),
    (refuses, "NotImplementedError: no such GPU"),
    (lambda q, k, v, cu_seqlens: exact(q, k, v, cu_seqlens) / 0, "o is not finite"),
])  # fmt: skip
def test_wrong_attention_is_not(attend, reason):
    shape = SMALL._replace(batch=1, documents=(100, 100))
    verdict = admit(attend, shape, dtype=torch.bfloat16, device="cpu")
    assert not verdict.passed and reason in verdict.reason

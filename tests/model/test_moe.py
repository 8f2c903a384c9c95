"""A mixture of experts computes what a loop over experts computes, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sagekernels.grouped_matmul import GROUPED_LOW_BIT
from sagekernels.lowbit import LOW_BIT
from sagetrain.config.layer_specs import layers
from sagetrain.config.schema import ModelConfig
from sagetrain.model.moe import MoE
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.layers import keep_weights
from sagetrain.parallel.topology import ParallelGroups

HIDDEN, INNER, EXPERTS, TOP = 32, 16, 6, 2
EXPERT = {"number": EXPERTS, "per_token": TOP, "ffn_size": INNER}
TENSORS = ("router.weight", "router.bias", "router.load", "experts.gate_up", "experts.down")


def mixture(dtype: torch.dtype, share: float = 1.0, matmuls: dict | None = None, **experts: object) -> MoE:
    cfg = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=48, num_attention_heads=2, experts={**EXPERT, **experts}
    )
    region = Region(ParallelGroups.single(), dtype=dtype)
    moe = MoE(layers(cfg)[0], region, matmuls=matmuls or {}, share=torch.tensor(share))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in moe.named_parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64) * (0.3 if "load" not in name else 1))
    return moe


def by_hand(moe: MoE, x: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output by a loop over tokens and experts, the balancing losses times a factor, and the loads."""
    cfg, p = moe.router.config, dict(moe.named_parameters())
    gate_up, down = p["experts.gate_up"].view(EXPERTS, 2, INNER, HIDDEN), p["experts.down"].view(EXPERTS, HIDDEN, INNER)
    rows, loads, losses = [], torch.zeros(EXPERTS, dtype=x.dtype), x.new_zeros(())
    for token in x:
        logits = p["router.weight"] @ token
        scores = logits.softmax(0) if cfg.scores == "softmax" else logits.sigmoid()
        biased = (scores + p["router.bias"]).tolist()
        chosen = sorted(range(EXPERTS), key=lambda expert: (-biased[expert], expert))[:TOP]
        total = scores[chosen].sum() if cfg.renormalize else 1.0
        row = torch.zeros_like(token)
        for expert in chosen:
            gate, up = gate_up[expert] @ token
            row = row + scores[expert] / total * cfg.scale * (down[expert] @ (F.silu(gate) * up))
            loads[expert] += 1
        shares = scores / scores.sum()
        losses = losses + cfg.balance.aux_weight * (1 + (shares * p["router.load"].detach()).sum())
        losses = losses + cfg.balance.z_weight * logits.logsumexp(0).square()
        if moe.shared is not None:
            gate, up = (getattr(moe.shared.gate_up, name) @ token for name in ("gate", "up"))
            row = row + moe.shared.down.weight @ (F.silu(gate) * up)
        rows.append(row)
    return torch.stack(rows), losses * factor, loads


@pytest.mark.parametrize("experts", [
    {"balance": {"aux_weight": 0.3, "z_weight": 0.2}, "shared": 2},
    {"scores": "sigmoid", "scale": 2.5, "balance": {"aux_weight": 0.3}},
    {"renormalize": False, "balance": {"aux_weight": 0}},
])  # fmt: skip
def test_outputs_and_gradients_equal_a_loop_over_experts(experts: dict) -> None:
    """Also where an expert gets no token: 17 tokens of 6 experts, and one whose bias keeps all away."""
    moe, share = mixture(torch.float64, share=0.25, **experts), 0.25
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(17, HIDDEN, generator=draw, dtype=torch.float64).requires_grad_()
    grad = torch.randn(17, HIDDEN, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        moe.router.bias[3] = -9.0
    leaves = [x, *moe.parameters()]
    made = moe(x, parts=2)
    found = torch.autograd.grad((made * grad).sum(), leaves)
    expected, losses, loads = by_hand(moe, x, share / (2 * 17))
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad((expected * grad).sum() + losses, leaves, allow_unused=True)
    assert loads.sum() == 17 * TOP
    assert loads[3] == 0
    for name, a, b in zip(["x", *(name for name, _ in moe.named_parameters())], found, wanted, strict=True):
        torch.testing.assert_close(
            a,
            loads if name in ("router.bias", "router.load") else b,
            rtol=1e-7,
            atol=1e-9,
            msg=lambda s, n=name: f"{n}: {s}",
        )
    again = mixture(torch.bfloat16, share=0.25, **experts)
    assert again.router.weight.dtype == again.router.bias.dtype == torch.float32


def test_equal_scores_choose_the_lower_expert() -> None:
    moe = mixture(torch.float32)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.zero_()
        x = torch.randn(5, HIDDEN)
        assert moe.router.chosen(moe.router.scored(x)[1]).tolist() == [[0, 1]] * 5
        moe.router.bias[4] = 1e-6
        assert moe.router.chosen(moe.router.scored(x)[1]).tolist() == [[4, 0]] * 5


LIMITS = {"int8": 0.04, "fp8": 0.12}
"""Largest relative errors of the output and of all gradients. 16 bits have 0.01."""


@pytest.mark.parametrize("precision", GROUPED_LOW_BIT)
def test_blocks_in_8_bits_are_judged_by_float64(precision: str) -> None:
    """The shared expert and the experts are in 8 bits, the router is not: choices, loads and its losses are those of 16
    bits. What is kept of weights changes no bit, and neither does another call."""
    low = {"experts": GROUPED_LOW_BIT[precision], **dict.fromkeys(("gate_up", "down"), LOW_BIT[precision])}
    moe, exact = mixture(torch.bfloat16, matmuls=low, shared=1), mixture(torch.float64, shared=1)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), moe.parameters(), strict=True):
            p.copy_(q)
        for one in (moe, exact):
            one.router.bias[3] = -9.0
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(67, HIDDEN, generator=draw).bfloat16() for _ in range(2))

    def results(one: MoE, dtype: torch.dtype) -> list[Tensor]:
        leaf = x.to(dtype).requires_grad_()
        y = one(leaf)
        return [y.detach(), *torch.autograd.grad((y * grad.to(dtype)).sum(), [leaf, *one.parameters()])]

    found, truth = results(moe, torch.bfloat16), results(exact, torch.float64)
    keep_weights(moe)
    assert len(moe.experts.kept) == 8
    assert all(map(torch.equal, found, results(moe, torch.bfloat16)))
    for name, a, b in zip(["y", "x", *(name for name, _ in moe.named_parameters())], found, truth, strict=True):
        if name in ("router.bias", "router.load"):
            assert torch.equal(a.double(), b), name
        else:
            error = ((a.double() - b).norm() / b.norm()).item()
            assert (0.004 if "router" not in name else 0) < error < LIMITS[precision], (name, error)

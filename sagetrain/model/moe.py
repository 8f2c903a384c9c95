"""A mixture of experts in the place of a block's MLP: a router sends each token to a few of many small MLPs.

No token is dropped, and no shape depends on what the router chooses, so the host never waits for the device. The router
is fp32 in a model of any dtype. Under tensor parallelism every rank has all experts whole, and routes its own tokens,
which sequence parallelism gives it. Engines sum the gradients of routers and experts over the tensor-parallel group.

What balances the router travels with the gradients, so it needs no collective and no rule of its own for micro-batches,
recomputed blocks, layouts, or passes that are no part of a step:

- The gradients of `bias` and of `load` are the numbers of tokens that chose each expert. A step's gradients are summed
  over all tokens of the step, and stability/balance.py moves both tensors by these sums.
- The auxiliary loss and the z loss have no value here. They add their gradients to that of the router's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sagekernels.grouped import Rows, plan_rows
from sagekernels.grouped_matmul import GroupedMatmul, grouped_gated, grouped_matmul
from sagekernels.grouped_swiglu import combined_bias
from sagekernels.router import router_logits
from sagetrain.config.layer_specs import LayerSpec
from sagetrain.config.schema import ExpertsConfig
from sagetrain.model.dispatch import among_ranks, of_same_tokens, parts_in
from sagetrain.model.mlp import MLP
from sagetrain.model.norm import complete
from sagetrain.parallel.collectives import Region, start_enter
from sagetrain.parallel.layers import LinearLayer
from sagetrain.parallel.topology import ParallelGroups

_LEAST = 1e-20
"""The least sum of scores that divides scores. Sigmoids may all be 0."""


class _Balanced(torch.autograd.Function):
    """Return the weights of choices as they are. The backward pass adds the gradient of the balancing losses, and the
    numbers of tokens as gradients of `bias` and `load`."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, losses: Tensor | None, factor: Tensor, counts: Tensor, bias: Tensor, load: Tensor
    ) -> Tensor:
        ctx.save_for_backward(factor, counts)
        ctx.losses = losses is not None
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, counts = ctx.saved_tensors
        # Autograd adds to a gradient in place, so each tensor has a gradient of its own.
        return grad, factor if ctx.losses else None, None, None, counts, counts.clone()


class Router(nn.Module):
    """The choice of each token's experts, and the factors of their outputs."""

    def __init__(self, hidden: int, experts: ExpertsConfig, region: Region, *, biased: bool) -> None:
        super().__init__()
        self.config = experts
        made = partial(region.parameter, experts.number, dtype=torch.promote_types(region.dtype, torch.float32))
        self.weight = made(hidden)
        self.logit_bias = made() if biased else None
        """The numbers that are added to logits. They are learned."""
        self.bias = made()
        """The numbers that are added to scores for the choice alone."""
        self.load = made()
        """The numbers of choices of each expert in the step before, on all ranks: multiples of the mean, less 1."""
        self.watch: Callable[[Tensor], None] | None = None
        """A function that is called with all choices. None: nobody watches them."""

    def scored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of tokens [T, hidden] and their scores, both fp32 [T, experts]."""
        logits = router_logits(x, self.weight)
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        return logits, logits.softmax(-1) if self.config.scores == "softmax" else logits.sigmoid()

    def chosen(self, scores: Tensor) -> Tensor:
        """Return the experts of each token, int64 [T, per token]: those with the largest sums of score and bias, the
        largest first. Of equal ones the lower numbers are taken."""
        biased = scores.detach() + self.bias.detach()
        choices = biased.sort(dim=-1, descending=True, stable=True).indices[:, : self.config.per_token]
        if self.watch is not None:
            self.watch(choices)
        return choices

    def weights(self, logits: Tensor, scores: Tensor, choices: Tensor) -> Tensor:
        """Return the factor of each chosen expert's output, fp32 [T, per token]."""
        cfg = self.config
        if not cfg.renormalize:
            found = scores.gather(-1, choices)
        elif cfg.scores == "softmax":
            found = logits.gather(-1, choices).softmax(-1)
        else:
            found = _shares(scores.gather(-1, choices))
        return found if cfg.scale == 1 else found * cfg.scale

    def losses(self, logits: Tensor, scores: Tensor) -> Tensor | None:
        """Return the weighted sum over tokens of both balancing losses, without what is constant in them. None: neither
        has a weight."""
        found, balance = [], self.config.balance
        if balance.aux_weight:
            shares = scores if self.config.scores == "softmax" else _shares(scores)
            found.append(balance.aux_weight * (shares * self.load.detach()).sum())
        if balance.z_weight:
            found.append(balance.z_weight * logits.logsumexp(-1).square().sum())
        return sum(found[1:], found[0]) if found else None

    def balanced(self, weights: Tensor, losses: Tensor | None, factor: Tensor, choices: Tensor) -> Tensor:
        """Return the weights. Their backward pass gives `bias` and `load` their gradients, and `losses` the gradient
        `factor`."""
        every = choices.flatten()
        counts = torch.zeros_like(self.bias.detach()).scatter_add(
            0, every, torch.ones_like(every, dtype=self.bias.dtype)
        )
        made: Tensor = _Balanced.apply(weights, losses, factor, counts, self.bias, self.load)  # type: ignore[no-untyped-call]
        return made


def _shares(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + _LEAST)


class Experts(LinearLayer[GroupedMatmul]):
    """The weights of this rank's experts, one above the other. In this form a shard of whole rows, as engines cut it,
    has a part of an expert where ranks outnumber experts."""

    def __init__(
        self,
        number: int,
        hidden: int,
        inner: int,
        region: Region,
        *,
        activation: str = "swiglu",
        biased: bool = False,
        matmul: GroupedMatmul | None,
    ) -> None:
        super().__init__(GroupedMatmul(), matmul)
        self.number, self.activation = number, activation
        self.gate_up = region.parameter(number * 2 * inner, hidden)
        """[experts x (gate, then up), hidden]"""
        self.down = region.parameter(number * hidden, inner)
        """[experts x hidden, inner]"""
        self.gate_up_bias = region.parameter(number * 2 * inner) if biased else None
        self.down_bias = region.parameter(number * hidden) if biased else None

    @property
    def weights(self) -> Sequence[Tensor]:
        """The matrices [experts x out, in]: gate with up, and down."""
        return self.gate_up, self.down

    def keep(self) -> None:
        """Make the tensors that the products keep of both weights, from the weights as they are now."""
        every = (weight.detach().view(self.number, -1, weight.shape[-1]) for weight in self.weights)
        self.kept = tuple(tensor for weight in every for tensor in self.matmul.keep(weight))

    def forward(self, x: Tensor, weights: Tensor, rows: Rows, tokens: int | None = None) -> Tensor:
        """Return the sum of each token's experts times their weights [T, per token]: [T, hidden] -> [T, hidden]. For
        `tokens` see grouped_matmul."""
        half = len(self.kept) // 2
        how: dict[str, Any] = {"gathers": True, "activation": self.activation, "bias": self.gate_up_bias}
        inner = grouped_gated(x, self.gate_up, weights, rows, self.matmul, self.kept[:half], **how, tokens=tokens)
        y = grouped_matmul(inner, self.down, rows, self.matmul, self.kept[half:], combines=True, tokens=tokens)
        return y if self.down_bias is None else y + combined_bias(self.down_bias, weights, rows)


class MoE(nn.Module):
    """The sum of each token's experts, times the router's weights, and of the shared experts, which are an ordinary
    MLP. It takes normalized tokens and returns what is added to the residual stream. Under sequence parallelism both
    are this rank's tokens.

    Args:
        share: an fp32 scalar, the factor with which a micro-batch's loss enters the step's (Transformer.share).
    """

    def __init__(self, layer: LayerSpec, region: Region, *, matmuls: Mapping[str, Any], share: Tensor) -> None:
        super().__init__()
        assert layer.experts is not None
        self.region, self.groups, self.share = region, region.groups, share
        self.router = Router(layer.hidden, layer.experts, region, biased=layer.biased_experts)
        self._own = _divide(layer.experts.number, region.groups)
        self.experts = Experts(
            self._own,
            layer.hidden,
            layer.experts.ffn_size,
            region,
            activation=layer.expert_activation,
            biased=layer.biased_experts,
            matmul=matmuls.get("experts"),
        )
        self.calls_experts: bool = False
        """Whether the hooks of experts run, which gather their weights and break a block's graph."""
        self.room: int | None = None
        """The rows that there is memory for, in hundredths of the mean over ranks that have experts between them.
        Without gradients, tokens go in so many parts that all rows fit. None: all rows that there can be."""
        self.same_tokens: bool = False
        """Whether all ranks that have experts between them read the same tokens, as those that write a text do."""
        self.lacking: Tensor | None = None
        """bool []: whether `room` was too small for any pass since it was set to False."""
        self.shared = None
        if layer.mlp.inner:
            self.shared = MLP(layer, region, matmuls=matmuls)

    @property
    def linear_layers(self) -> dict[str, LinearLayer[Any]]:
        """The experts and the linear layers of the shared ones, keyed by name."""
        return {**(self.shared.linear_layers if self.shared else {}), "experts": self.experts}

    def forward(self, x: Tensor, parts: int = 1) -> Tensor:
        """Return the output for tokens [T, hidden], which are one of so many parts of a micro-batch."""
        entered = start_enter(x, self.region) if self.shared else None
        tokens = parts * len(x) * self.groups.tp_size
        y = self._routed(x, self.share / tokens)
        if self.shared is None:
            return y
        assert entered is not None
        return y + complete(self.shared.down(self.shared(entered)), self.region)

    def _routed(self, x: Tensor, factor: Tensor) -> Tensor:
        router, experts = self.router, self.experts
        logits, scores = router.scored(x)
        choices = router.chosen(scores)
        weights = router.weights(logits, scores, choices)
        if torch.is_grad_enabled():
            # Otherwise each rank would have the gradient of all tokens, and engines would add them up.
            assert self.region.sharded or self.groups.tp_size == 1, "experts train with sequence parallelism"
            weights = router.balanced(weights, router.losses(logits, scores), factor, choices)
        run = experts if self.calls_experts else experts.forward
        if self.groups.ep_size == 1:
            return run(x, weights, plan_rows(choices, self._own))
        if self.same_tokens:
            return of_same_tokens(run, x, weights, choices, self._own, self.groups)
        if self.room is not None and not torch.is_grad_enabled():
            # Such a pass is not taken again if rows lack room.
            parts = min(len(x), parts_in(self.room, self.groups.ep_size, choices.shape[1], self._own))
            each = (tensor.tensor_split(parts) for tensor in (x, weights, choices))
            whole = [among_ranks(run, a, b, c, self._own, self.groups, None)[0] for a, b, c in zip(*each, strict=True)]
            return torch.cat(whole)
        y, lacking = among_ranks(run, x, weights, choices, self._own, self.groups, self.room)
        if self.lacking is not None:
            self.lacking.logical_or_(lacking)
        return y


def _divide(number: int, groups: ParallelGroups) -> int:
    if number % groups.ep_size:
        raise ValueError(f"{number} experts are not a multiple of expert_parallel_size ({groups.ep_size})")
    return number // groups.ep_size

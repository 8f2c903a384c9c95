"""Upcycling: a folder's dense model becomes a mixture. Each expert begins as a copy of the layer's MLP.

The weights of a token's experts sum to 1, so the mixture computes what the dense model computes, until training moves
the experts apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.config.layout import Layout
from sagetrain.config.rules import experts as rules
from sagetrain.config.schema import ExpertsConfig, ModelConfig, RunConfig
from sagetrain.interop.describe import Described
from sagetrain.interop.families import MixtureKeys
from sagetrain.model.tensors import TensorSpec
from sagetrain.parallel.rng import named_generator


@dataclass(frozen=True)
class _Copies(MixtureKeys):
    """The tensors of a dense model's layer, of which each expert is a copy. No tensor is a router."""

    def names(self, spec: TensorSpec) -> list[str] | None:
        """Return the names of the matrices of experts: see MixtureKeys."""
        if spec.kind == "router":
            return []
        if spec.cut != "experts":
            return None
        parts = ("down",) if spec.name.endswith("down") else ("gate", "up")
        return [f"mlp.{part}_proj.weight" for part in parts] * spec.shape[0]


def upcycled(described: Described, number: int, per_token: int, where: str) -> Described:
    """Return a dense model as a mixture of so many experts, so many of them a token. `where` is the path of its
    config.json, for messages. Raises ConfigError if the model has experts already, the numbers do not go together, or
    something of the model was not proven with experts."""
    option, model, name = spelled("experts"), described.model, described.family.name
    if model.experts is not None:
        raise ConfigError(f"{where}: {name} has experts already: leave {option} out")
    if number < 2:
        raise ConfigError(f"{option} {number}: a mixture has 2 experts or more")
    if not 1 <= per_token <= number:
        raise ConfigError(f"{spelled('per_token')} {per_token}: a token goes to 1 to {number} of {number} experts")
    experts = ExpertsConfig(number=number, per_token=per_token, ffn_size=model.ffn_hidden_size)
    mixture = model.model_copy(update={"experts": experts})
    family = replace(described.family, mixture=_Copies("", ""))
    return replace(described, model=mixture, family=family)


def check(cfg: RunConfig, where: str) -> None:
    """Check that the mixture's model was proven. Raises ConfigError if a size or a part of the model was not."""
    for finding in rules.findings(cfg, Layout.of(cfg)):
        if finding.level == "error" and finding.key.startswith("model."):
            raise ConfigError(f"{where}: as a mixture ({spelled('experts')}) {finding}")


def router(spec: TensorSpec, model: ModelConfig) -> Tensor:
    """Return the values of a router that begins, flattened. They depend on its name alone."""
    return torch.empty(spec.size).normal_(0, model.init_std, generator=named_generator(0, spec.name))

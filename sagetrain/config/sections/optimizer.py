"""The section `optimizer` of the YAML."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from sagetrain.config.sections.base import Fraction, Section


class MuonConfig(Section):
    """Muon, which orthogonalizes the momentum of each matrix of the blocks. AdamW updates embedding, output projection
    and norm gains, with the keys of `optimizer`."""

    momentum: Fraction = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Look ahead: orthogonalize the mean of gradient and momentum instead of the momentum."""
    steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz steps of the orthogonalization."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate for a matrix of m rows and n columns. match_rms_adamw: 0.2 x sqrt(max(m, n)), so that
    updates are as large as AdamW's and its learning rate and weight decay carry over. original: sqrt(max(1, m / n))."""
    adamw_matrices: list[Literal["q", "k", "v", "out", "gate", "up", "down"]] = []
    """Matrices of every block that AdamW updates as well."""

    def takes(self, kind: str, name: str) -> bool:
        """Whether Muon updates a tensor of this kind and name (model/tensors.TensorSpec), if it is the optimizer."""
        return kind == "matrix" and not {*self.adamw_matrices} & {*name.split(".")}


class LearningRates(Section):
    """Peak learning rates of some kinds of tensors. Default of each: optimizer.lr. Schedule and warm-up are those of
    optimizer.lr, scaled."""

    embedding: PositiveFloat | None = None
    """Input embedding, and the tables of model.value_embeddings. With model.tie_embeddings the input embedding is the
    output projection as well."""
    head: PositiveFloat | None = None
    """Output projection."""
    matrix: PositiveFloat | None = None
    """Matrices of the blocks."""
    gain: PositiveFloat | None = None
    """Gains of all norms, those of QK-norm included, biases, and the convolutions and vectors of a gated delta net."""
    router: PositiveFloat | None = None
    """Routers of experts (model.experts)."""


class OptimizerConfig(Section):
    """The optimizer: AdamW, or Muon with AdamW for what is no matrix of a block."""

    name: Literal["adamw", "muon"] = "adamw"
    """Update rule of the matrices of the blocks. muon: momentum, orthogonalized for each matrix as a whole, at every
    layout alike."""
    lr: PositiveFloat
    """Peak learning rate."""
    lr_of: LearningRates = LearningRates()
    lr_base_width: PositiveInt | None = None
    """The model.hidden_size at which the learning rates were found. At another width those of matrices, output
    projection and routers are scaled: by lr_base_width / hidden_size under AdamW, by the square root of that under Muon
    (by 1 with muon.adjust_lr original). Embedding, gains and biases keep theirs. Default: nothing is scaled."""
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)] = (
        0.9,
        0.95,
    )
    """AdamW's decay rates."""
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices and embeddings; norm gains, biases, routers and all others get none. A step
    takes away this part of a weight, times the weight's learning rate."""
    weight_decay_lr: PositiveFloat | None = None
    """Peak learning rate that weight decay is multiplied by, for all tensors, in place of their own: another lr, lr_of
    or lr_base_width then leaves the decay as it was. It follows the same schedule. Default: each tensor's own rate."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Memory of the moments. int8: 256 levels, with a scale for each 256 values, which takes a byte for each value.
    Checkpoints hold fp32 in any case, so the key may change at a resume."""
    master: Literal["fp32", "bf16_chance", "bf16_kahan"] = "fp32"
    """Memory of the master weights. bf16_chance: rounded up or down by chance, so that small updates add up on average;
    the model computes with the masters. bf16_kahan: in bf16, with a second number for what rounding has left. Neither
    goes with parallel.engine deepspeed."""
    muon: MuonConfig = MuonConfig()

    def is_muon(self, kind: str, name: str) -> bool:
        """Whether Muon updates a tensor of this kind and name (model/tensors.TensorSpec)."""
        return self.name == "muon" and self.muon.takes(kind, name)

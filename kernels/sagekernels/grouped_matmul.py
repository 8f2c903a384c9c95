"""The linear layers of a mixture of experts: each row times the weight of its expert, and both gradients.

A GroupedMatmul decides about rounding, as Matmul does for dense layers (matmul.py). The one in this file multiplies in
the dtype of its operands, GroupedLowBit in 8 bits as LowBit does (lowbit.py): a scale for each row, and for
the gradient of a weight one for each column and expert.

A whole mixture of SwiGLU experts is

    rows = plan_rows(choices, experts)
    inner = grouped_gated(x, gate_up, weights, rows, matmul, gathers=True)
    y = grouped_matmul(inner, down, rows, matmul, combines=True)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .casts import DTYPES, E4M3, INT8, MULTIPLE
from .grouped import COMBINE_ROWS, GATHER_ROWS, Rows
from .grouped_casts import grouped_casts, row_casts, weight_casts
from .grouped_products import (
    GROUPED_CODES_PRODUCT,
    GROUPED_CODES_WEIGHT_PRODUCT,
    GROUPED_PRODUCT,
    GROUPED_WEIGHT_PRODUCT,
)
from .grouped_swiglu import WEIGHTED_SWIGLU, WEIGHTED_SWIGLU_GRADIENTS, bias_gradient, check_swiglu, weighted_swiglu
from .int8_matmul import PIECE
from .matmul import Measured
from .refusals import differentiated_once, refuse_transforms


@dataclass(frozen=True)
class GroupedMatmul:
    """Grouped products in the dtype of their operands, for weights [E, N, K]."""

    def keep(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that the products read in place of the weight, as long as it does not change. This class
        keeps nothing."""
        return ()

    def check(self, weight: Tensor, tokens: int) -> None:
        """Raise ValueError where sizes are none that this class multiplies.

        Args:
            tokens: the most rows that an expert may have.
        """

    @property
    def measured(self) -> bool:
        """Whether `read` and `prepare` are spared work by the largest magnitudes of what they are given."""
        return False

    def read(
        self, x: Tensor, rows: Rows, gathers: bool, largest: Tensor | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the tensors that `forward` multiplies, and those that are kept for `weight_gradient`.

        Args:
            x: rows [R, K], or with `gathers` tokens [T, K].
            largest: the largest magnitudes of rows x (grouped_casts.grouped_largest_twin), if they are known.
        """
        return (_rows_of(x, rows, gathers),), (x,)

    def operand(self, x: Tensor, rows: Rows, gathers: bool) -> Sequence[Tensor]:
        """Return only the first tensors that `read` makes, for a forward pass without gradients."""
        return self.read(x, rows, gathers)[0]

    def forward(self, operand: Sequence[Tensor], weight: Tensor, rows: Rows, kept: Sequence[Tensor]) -> Tensor:
        """Return the outputs of the rows, [R, N]."""
        return GROUPED_PRODUCT(operand[0], weight.mT, rows.ends, rows.tiles)

    def prepare(self, grad: Tensor, rows: Rows, gathers: bool, largest: Tensor | None = None) -> Sequence[Tensor]:
        """Return the tensors from which both gradients are computed.

        Args:
            grad: the gradient of the outputs, of rows [R, N] or with `gathers` of tokens [T, N].
            largest: the largest magnitudes of rows `grad`, if they are known.
        """
        return (_rows_of(grad, rows, gathers),)

    def input_gradient(self, prepared: Sequence[Tensor], weight: Tensor, rows: Rows, kept: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the rows, [R, K]."""
        return GROUPED_PRODUCT(prepared[0], weight, rows.ends, rows.tiles)

    def weight_gradient(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], rows: Rows, gathers: bool, dtype: torch.dtype
    ) -> Tensor:
        """Return the gradient of the weight, [E, N, K]. saved: the second tensors of `read`."""
        return GROUPED_WEIGHT_PRODUCT(prepared[-1], _rows_of(saved[0], rows, gathers), rows.ends)


@dataclass(frozen=True)
class GroupedLowBit(GroupedMatmul):
    """Grouped products of operands in 8 bits.

    Args:
        number: the format of x, of weights and of gradients: torch.int8 or torch.float8_e4m3fn.
    """

    number: torch.dtype = INT8

    def keep(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return codes and scales of the weight, first as the output reads them, then transposed for the gradient of
        x."""
        return weight_casts(weight, self.number)

    def check(self, weight: Tensor, tokens: int) -> None:
        """Raise ValueError where a product sums over no multiple of 16, or over more than int32 holds."""
        _, outputs, inputs = weight.shape
        if outputs % MULTIPLE or inputs % MULTIPLE:
            raise ValueError(
                f"grouped_matmul in 8 bits takes sizes that are multiples of {MULTIPLE}, got {inputs} to {outputs}"
            )
        most = max(outputs, inputs, tokens)
        if self.number == INT8 and most > PIECE:
            raise ValueError(
                f"grouped_matmul in INT8 sums at most {PIECE:,} products, got {inputs} to {outputs} features and "
                f"{tokens:,} tokens; use smaller micro-batches"
            )

    @property
    def measured(self) -> bool:
        """Whether `read` and `prepare` are spared work by the largest magnitudes of what they are given."""
        return True

    def read(
        self, x: Tensor, rows: Rows, gathers: bool, largest: Tensor | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return codes and scales of the rows, and those of the rows transposed."""
        codes = grouped_casts(x, rows, self.number, gathers, largest)
        return codes[:2], codes[2:]

    def operand(self, x: Tensor, rows: Rows, gathers: bool) -> Sequence[Tensor]:
        """Return codes and scales of the rows."""
        return row_casts(x, rows, self.number, gathers)

    def forward(self, operand: Sequence[Tensor], weight: Tensor, rows: Rows, kept: Sequence[Tensor]) -> Tensor:
        """Return the outputs of the rows, [R, N]."""
        codes = (kept or self.keep(weight))[:2]
        return GROUPED_CODES_PRODUCT(*operand, *codes, rows.ends, rows.tiles, weight.dtype)

    def prepare(self, grad: Tensor, rows: Rows, gathers: bool, largest: Tensor | None = None) -> Sequence[Tensor]:
        """Return codes and scales of dY, followed by those of dY transposed."""
        return grouped_casts(grad, rows, self.number, gathers, largest)

    def input_gradient(self, prepared: Sequence[Tensor], weight: Tensor, rows: Rows, kept: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the rows, [R, K]."""
        codes = (kept or self.keep(weight))[2:]
        return GROUPED_CODES_PRODUCT(*prepared[:2], *codes, rows.ends, rows.tiles, weight.dtype)

    def weight_gradient(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], rows: Rows, gathers: bool, dtype: torch.dtype
    ) -> Tensor:
        """Return the gradient of the weight, [E, N, K]."""
        return GROUPED_CODES_WEIGHT_PRODUCT(*prepared[2:], *saved, rows.first, dtype)


GROUPED_LOW_BIT = {"fp8": GroupedLowBit(E4M3), "int8": GroupedLowBit(INT8)}
"""The products of experts, by precision as LOW_BIT (lowbit.py)."""


def grouped_matmul(
    x: Tensor | Measured,
    weight: Tensor,
    rows: Rows,
    matmul: GroupedMatmul | None = None,
    kept: Sequence[Tensor] = (),
    *,
    gathers: bool = False,
    combines: bool = False,
    tokens: int | None = None,
) -> Tensor:
    """Return each row times the weight of its expert, transposed: [R, K] -> [R, N]. Empty rows are zeros.

    Args:
        x: rows [R, K] in the dtype of the weight: bf16, fp16 or fp32. With `gathers` tokens [T, K]. Or the result of
            grouped_gated.
        weight: [E, N, K], or the same memory as a matrix [E N, K]. The gradient has its shape. The tensor itself is
            kept for the backward pass, and no view of it.
        rows: of plan_rows.
        matmul: how to multiply (default: in the dtype of x). GROUPED_LOW_BIT has those in 8 bits.
        kept: the tensors that matmul.keep([E, N, K]) returned for the present weight, if it was called.
        gathers: gather the rows of tokens on the way. The rows are then not kept for the backward pass.
        combines: return the sum of each token's rows, [T, N], as `combine` does.
        tokens: the number of tokens, each of which chooses an expert once (default: T). Rows that came from other ranks
            may be those of fewer tokens than T.

    Raises:
        TypeError: dtypes differ, or are none of these.
        ValueError: the shapes do not belong together, or the matmul does not take them.
        NotImplementedError: a second derivative, or a transform of torch.func.
    """
    x, largest = x if isinstance(x, Measured) else (x, None)
    (y,) = _node(x, largest, weight, (), "", rows, matmul, kept, gathers, combines, tokens)
    return y


def grouped_gated(
    x: Tensor,
    weight: Tensor,
    weights: Tensor,
    rows: Rows,
    matmul: GroupedMatmul | None = None,
    kept: Sequence[Tensor] = (),
    *,
    gathers: bool = False,
    activation: str = "swiglu",
    bias: Tensor | None = None,
    tokens: int | None = None,
) -> Tensor | Measured:
    """Return silu(gate) * up times the router's weight, of gate and up as halves of one product: [R, K] -> [R, N / 2].
    Arguments that are not named here are those of `grouped_matmul`, and errors are as there and in `weighted_swiglu`.

    Args:
        weight: [E, N, K] or [E N, K]: of each expert first the outputs of gate, then those of up.
        weights: [T, k], the router's weight of each choice. Gradients flow to it.
        activation: the name of another activation than SwiGLU, as in `weighted_swiglu`.
        bias: what is added to the product, as in `weighted_swiglu`.

    Returns:
        What grouped_matmul takes as x: a tensor, or if gradients are rounded the tensor with its largest magnitudes,
        in one node of autograd. That node's own gradients leave theirs for its casts.
    """
    if matmul is None or not (matmul.measured and torch.is_grad_enabled()):
        y = grouped_matmul(x, weight, rows, matmul, kept, gathers=gathers, tokens=tokens)
        return weighted_swiglu(y, weights, rows, activation, bias)
    gate = (weights,) if bias is None else (weights, bias)
    return Measured(*_node(x, None, weight, gate, activation, rows, matmul, kept, gathers, False, tokens))


def _node(
    x: Tensor,
    largest: Tensor | None,
    weight: Tensor,
    gate: Sequence[Tensor],
    activation: str,
    rows: Rows,
    matmul: GroupedMatmul | None,
    kept: Sequence[Tensor],
    gathers: bool,
    combines: bool,
    tokens: int | None,
) -> tuple[Tensor, ...]:
    """Check the arguments and call autograd's node. gate: weights, and perhaps the bias, of the activation behind the
    product, if there is one."""
    refuse_transforms(*_NAMED)
    matmul = GroupedMatmul() if matmul is None else matmul
    if x.dtype not in (*DTYPES, torch.float64) or x.dtype != weight.dtype:
        raise TypeError(f"grouped_matmul takes x and weight in one of bf16, fp16, fp32, got {x.dtype}, {weight.dtype}")
    experts, length = len(rows.ends), len(rows.slot) if gathers else len(rows.choice)
    if weight.dim() not in (2, 3) or weight.shape[0] % experts or (weight.dim() == 3 and weight.shape[0] != experts):
        raise ValueError(f"grouped_matmul takes weights [{experts}, N, K], got shape {tuple(weight.shape)}")
    if x.dim() != 2 or x.shape != (length, weight.shape[-1]):
        raise ValueError(f"grouped_matmul takes x [{length}, {weight.shape[-1]}], got shape {tuple(x.shape)}")
    whole = _weights_of(weight, experts)
    matmul.check(whole, len(rows.slot) if tokens is None else tokens)
    if gate:
        check_swiglu((len(rows.choice), whole.shape[1]), x.dtype, gate[0], rows, *gate[1:])
    known = () if largest is None or not matmul.measured else (largest,)
    plan = _Plan(matmul, gathers, combines, torch.is_grad_enabled(), len(known), len(gate), activation, len(kept))
    y: tuple[Tensor, ...] = _Grouped.apply(plan, x, weight, *known, *gate, *kept, *rows)
    return y


def _rows_of(x: Tensor, rows: Rows, gathers: bool) -> Tensor:
    return GATHER_ROWS(x, rows.choice, rows.slot.shape[1]) if gathers else x


def _weights_of(weight: Tensor, experts: int) -> Tensor:
    """View a weight as [E, N, K]."""
    return weight.view(experts, -1, weight.shape[-1])


_NAMED = "grouped_matmul", "a loop over experts"


class _Plan(NamedTuple):
    matmul: GroupedMatmul
    gathers: bool
    combines: bool
    backward: bool
    """Whether there will be a backward pass."""
    known: int
    """1 if the largest magnitudes of x are known, else 0."""
    gated: int
    """The tensors of the activation that follows with its largest magnitudes: its weights, and perhaps its bias."""
    activation: str
    kept: int


class _Grouped(torch.autograd.Function):
    """Autograd's node of grouped_matmul and grouped_gated. Like that of `linear` it keeps the weight itself."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x: Tensor, weight: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        known, read = tensors[: plan.known], tensors[plan.known :]
        gate, kept, rows = _split(plan, read)
        matmul, gathers = plan.matmul, plan.gathers
        operand, saved = (
            matmul.read(x, rows, gathers, *known) if plan.backward else (matmul.operand(x, rows, gathers), ())
        )
        y = matmul.forward(operand, _weights_of(weight, len(rows.ends)), rows, kept)
        ctx.plan, ctx.count = plan, len(saved)
        if not gate:
            ctx.save_for_backward(*saved, weight, *read)
            return (COMBINE_ROWS(y, rows.slot) if plan.combines else y,)
        ctx.save_for_backward(*saved, y, weight, *read)
        weights, bias = _with_bias(gate)
        inner, largest = WEIGHTED_SWIGLU(
            y, bias, weights, rows.choice, rows.ends, rows.tiles, plan.activation, True
        )  # fmt: skip
        ctx.mark_non_differentiable(largest)
        return inner, largest

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        plan, matmul = ctx.plan, ctx.plan.matmul
        every = ctx.saved_tensors  # Recomputed blocks give them once.
        saved, tensors = every[: ctx.count], every[ctx.count :]
        made, (weight, *read) = tensors[: plan.gated > 0], tensors[plan.gated > 0 :]
        gate, kept, rows = _split(plan, read)
        of_gate: tuple[Tensor | None, ...] = ()
        if gate:
            weights, bias = _with_bias(gate)
            places = rows.choice, rows.slot, rows.ends, rows.tiles, rows.first
            grad, of_weights, of_bias, largest = WEIGHTED_SWIGLU_GRADIENTS(
                grad, *made, bias, weights, *places, plan.activation, True
            )
            of_gate = (of_weights.to(weights.dtype), bias_gradient(of_bias, bias))[: plan.gated]
            prepared = matmul.prepare(grad, rows, False, largest)
        else:
            prepared = matmul.prepare(grad, rows, plan.combines)
        of_x = matmul.input_gradient(prepared, _weights_of(weight, len(rows.ends)), rows, kept)
        if plan.gathers:
            of_x = COMBINE_ROWS(of_x, rows.slot)
        of_weight = matmul.weight_gradient(prepared, saved, rows, plan.gathers, weight.dtype).view(weight.shape)
        return None, of_x, of_weight, *(None,) * plan.known, *of_gate, *(None,) * (len(read) - plan.gated)


def _with_bias(gate: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the weights of an activation and its bias, or None."""
    return gate[0], gate[1] if len(gate) > 1 else None


def _split(plan: _Plan, read: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Rows]:
    """Return weights and bias of the activation, the kept tensors and the rows."""
    gate, kept = read[: plan.gated], read[plan.gated : plan.gated + plan.kept]
    return gate, kept, Rows(*read[plan.gated + plan.kept :])

"""The vocabulary of every attention kernel: recipes, the two kinds of calls, the tensors kept in between, and backends.

Shapes: q, o, do [B, N_q, H, D]; k, v [B, N_k, H_kv, D]; codes int8 [B, heads, N, D]; scales, lse float32 [B, heads, N].
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .quantize import Codes

RecipeName = Literal["paper", "fine", "scores"]
"""A key of RECIPES."""
BackendName = Literal["twin", "triton", "mma", "hopper"]
"""A key of backends.NAMED."""


class Recipe(NamedTuple):
    """The choices that distinguish one quantization scheme from another; everything else is common to all of them."""

    per_tile: bool
    """Whether scales are per tile: one per tile of TILE tokens for Q, K and dO, and one per TILE x TILE tile for
    backward P and dS (A, Algorithms 1 and 2). Otherwise there is one scale per token for Q, K and dO, one per key and
    query tile (a column of the tile) for backward P and for the dS of dK, and one per query and key tile (a row of the
    tile) for the dS of dQ."""
    int8_pv: bool
    """Whether the forward P V is in INT8 (P per row and key tile, V per key tile). Otherwise it is in the 16 bits of V.
    O is then P V of the unquantized P, so that delta = rowsum(dO o O) is consistent with the P and dP of the
    backward."""
    int8_gradients: bool
    """Whether dV, dK and dQ are in INT8. Otherwise they are in 16 bits: P in those of V, dS and the dequantized Q and K
    in bfloat16 (float16 has no room for dS, of size 1e-7 in trained layers)."""

    @property
    def scale_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of rounded_tiles for sums over queries (dV, dK) and over keys (dQ)."""
        return ((-3, -1), (-3, -1)) if self.per_tile else ((-3,), (-1,))


RECIPES = {
    "paper": Recipe(per_tile=True, int8_pv=True, int8_gradients=True),
    "fine": Recipe(per_tile=False, int8_pv=False, int8_gradients=True),
    "scores": Recipe(per_tile=False, int8_pv=False, int8_gradients=False),
}


class Saved(NamedTuple):
    """The tensors that the forward keeps for the backward, beside v and o themselves. lse and o know of the sinks, if
    there are any."""

    lse: Tensor  # The natural logarithm of the softmax denominator, float32 [B, H, N_q].
    q: Codes  # INT8 [B, H, N_q, D] with float32 [B, H, N_q].
    k: Codes  # INT8 [B, H_kv, N_k, D] with float32 [B, H_kv, N_k]; K minus its mean when smoothed.
    k_mean: Tensor | None  # The value is float32 [B, H_kv, 1, D], when K is smoothed and there are sinks.
    # The score of the sink beside those of each query, in the unit of lse, float32 [B, H, N_q], if there are sinks.
    sink_scores: Tensor | None = None

    @classmethod
    def of(cls, lse: Tensor, *others: Tensor) -> "Saved":
        """Put together what `tensors` returned, for a call that has queries."""
        q_codes, q_scale, k_codes, k_scale, *rest = others
        return cls(lse, Codes(q_codes, q_scale), Codes(k_codes, k_scale), *(x if x.numel() else None for x in rest))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All tensors, as operators return them: a tensor that a call does not have is an empty one."""
        mean, own = (self.lse.new_empty(0) if x is None else x for x in (self.k_mean, self.sink_scores))
        return self.lse, *self.q, *self.k, mean, own


class Options(NamedTuple):
    """The options of one call of attention, checked, in the order of Call."""

    bounds: Tensor | None
    causal: bool
    scale: float
    smooth_k: bool
    recipe: str
    backend: str | None


class BackwardCall(NamedTuple):
    """The inputs and options of one backward pass, checked."""

    do: Tensor
    v: Tensor
    o: Tensor
    saved: Saved
    bounds: Tensor | None
    causal: bool
    scale: float
    recipe: str
    backend: str | None
    sink_terms: Tensor | None = None
    """Memory for the weight of the sink times delta of each query, float32 [B, H, N_q], if there are sinks. The pass
    writes them. Their sum over queries is the gradient of the sink, with the other sign."""

    @property
    def queries(self) -> Tensor:
        """A tensor that has the shape, dtype and device of q."""
        return self.do


class BackwardArguments(NamedTuple):
    """The arguments of a backward pass in the order of its operators, with the saved tensors one by one."""

    do: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    q_codes: Tensor
    q_scale: Tensor
    k_codes: Tensor
    k_scale: Tensor
    k_mean: Tensor
    sink_scores: Tensor
    bounds: Tensor | None
    causal: bool
    scale: float
    recipe: str
    backend: str | None

    def call(self) -> BackwardCall:
        """Return the call, which has queries."""
        saved = Saved.of(*self[3:10])
        options = (self.bounds, self.causal, self.scale, self.recipe, self.backend)
        return BackwardCall(self.do, self.v, self.o, saved, *options, empty_terms(saved))


class Call(NamedTuple):
    """The inputs and options of one forward pass, checked, in the order of the operator's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor | None
    """The result of document_bounds, int32 [2, N]: the first key that each token sees, and one past the last query that
    sees each token. All rows of the batch have the same ones."""
    causal: bool
    scale: float
    smooth_k: bool
    recipe: str
    """A key of RECIPES."""
    backend: str | None
    """The name of a backend, or None for the first of backends.BACKENDS that takes the call."""
    sinks: Tensor | None = None
    """One more score of each head, [H]."""

    @property
    def queries(self) -> Tensor:
        """A tensor that has the shape, dtype and device of q."""
        return self.q

    def empty_results(self) -> tuple[Tensor, Tensor, Codes]:
        """Return memory for o, for lse, and for the codes of q."""
        codes = Codes.empty_for(self.q)
        o = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        return o, torch.empty_like(codes.scale), codes

    def backward(self, do: Tensor, o: Tensor, saved: Saved) -> BackwardCall:
        """Return the call of the backward pass for the results of this forward pass."""
        options = (self.causal, self.scale, self.recipe, self.backend)
        return BackwardCall(do, self.v, o, saved, self.bounds, *options, empty_terms(saved))


def empty_terms(saved: Saved) -> Tensor | None:
    """Return memory for the sink_terms of a backward pass, or None if there are no sinks."""
    return None if saved.sink_scores is None else torch.empty_like(saved.lse)


Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients dq, dk and dv in the dtype of v."""


class Projection(NamedTuple):
    """The q and k of a call before QK-norm and rotary embedding, as a projection made them, and what became of them by
    qk_norm_rope.qk_norm_rope, which says more of each."""

    q: Tensor  # [B N, H D]
    k: Tensor  # [B N, H_kv D]
    q_gain: Tensor
    k_gain: Tensor
    cos: Tensor
    sin: Tensor
    eps: float


ProjectionGradients = tuple[Tensor, Tensor]
"""The gradient of q, k and v side by side, [B N, (H + 2 H_kv) D] in the dtype of v, and that of the gains, [2, D]."""


class Backend(NamedTuple):
    """The kernels of one kind of GPU. Forward and backward may come from different files: Saved is the same in all."""

    name: str
    serves: Callable[[tuple[int, int]], bool]
    """Whether the kernels run on a GPU of this compute capability; (0, 0) stands for no GPU."""
    head_dims: frozenset[int] | range
    takes: Callable[[Call | BackwardCall], bool]
    """Whether the kernels compute this call. Both passes of one call get the same answer."""
    forward: Callable[[Call], tuple[Tensor, Saved]]
    """The forward pass, with the results of reference.twin_forward up to the order of float32 sums."""
    backward: Callable[[BackwardCall], Gradients]
    """The backward pass, with the results of reference.twin_backward up to the order of float32 sums."""
    projection: Callable[[BackwardCall, Projection], ProjectionGradients] | None = None
    """The backward pass of recipes with gradients in 16 bits and then that of qk_norm_rope, where kernels do both in
    fewer passes over memory than qk_norm_rope.projection_gradients after `backward`. It tells observe.py of the
    gradients in between."""
    fastest: str | None = None
    """The recipe that was measured to be the fastest of those that are level with 16-bit attention in loss."""
    begin: Callable[[int, bool, bool, bool, bool], None] | None = None
    """Begins to compile the CUDA kernels of causal calls in threads (nvrtc.begin): head dimension, whether K is
    smoothed, whether there are bounds and sinks, and whether the inputs are float16."""


def scores_by_token(call: Call | BackwardCall) -> bool:
    """Return whether a call has one scale per token, 16-bit inputs of fewer than 2^31 elements, and queries and keys
    that are the same tokens where there are bounds. The CUDA kernels take these."""
    rules, queries, v = RECIPES[call.recipe], call.queries, call.v
    return (
        not rules.per_tile
        and not rules.int8_pv
        and queries.dtype == v.dtype
        and v.dtype in (torch.bfloat16, torch.float16)
        and max(queries.numel(), v.numel()) < 2**31
        and (call.bounds is None or call.bounds.shape[1] == queries.shape[1])
    )


def bounds_of_keys(bounds: Tensor | None, n_q: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the first query that sees each key, and one past the last one, from the bounds of a call with so many
    queries. Where queries and keys are different tokens, the bounds of keys follow those of queries."""
    if bounds is None:
        return None, None
    starts, ends = (bounds if bounds.shape[1] == n_q else bounds[:, n_q:]).unbind()
    return starts, ends

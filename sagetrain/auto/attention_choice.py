"""Choose the attention of a run whose settings say `auto`. The choice is made when the run begins, and kept when it
continues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from sagekernels.admission import LIMITS, Admission, Attend, admit, choose
from sagekernels.qk_norm_rope import qk_norm_rope
from sagekernels.testing import Shape
from sagetrain.auto.calls import RankCalls
from sagetrain.auto.kept import kept_attention
from sagetrain.checkpoint.state import SettledAttention
from sagetrain.config.arithmetic import attention_calls
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.backends import (
    FIXED_RECIPE,
    AttentionFunction,
    Projected,
    TokenLayout,
    attention_function,
    token_layout,
)
from sagetrain.model.selection import resolve_backend


def settle_attention(
    asked: AttentionConfig,
    model: ModelConfig,
    before: SettledAttention | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    choose: Callable[[AttentionConfig], AttentionConfig],
    say: Callable[[str], None],
) -> tuple[AttentionConfig, str]:
    """Return the settings with nothing left to decide, and one line that says why or how.

    Args:
        before: the attention that the run had, if it continues.
        choose: returns the fastest settings on this hardware. It is called where backend or recipe is still `auto`, by
            all ranks.
        say: receives the reason where the attention that the run had cannot be kept, for example on other hardware.

    Raises:
        ValueError: the backend cannot run here, see resolve_backend.
    """
    settled = kept_attention(asked, before) if before else asked
    try:
        backend, why = resolve_backend(settled, model, device=device, dtype=dtype)
    except ValueError as error:
        if settled == asked:
            raise
        say(f"attention.backend {settled.backend}, which auto was so far, cannot run here ({error}): decided anew")
        settled = asked
        backend, why = resolve_backend(settled, model, device=device, dtype=dtype)
    if settled != asked:
        why += "; as the run had it: auto decides once, names of backend and recipe change it"
    settled = settled.model_copy(update={"backend": backend})
    if to_be_chosen(settled, device):
        settled, why = choose(settled), "the fastest that was admitted"
        if settled.backend == "sage":
            why = f"INT8 recipe {settled.recipe}: {why}"
    if settled.recipe == "auto":
        settled = settled.model_copy(update={"recipe": FIXED_RECIPE})
    return settled, why


def to_be_chosen(attention: AttentionConfig, device: torch.device) -> bool:
    """Whether the resolved backend, or its recipe, is left to choose_attention."""
    sage = attention.backend == "sage" and torch.device(device).type == "cuda"
    return attention.backend == "auto" or (sage and attention.recipe == "auto")


def choose_attention(
    attention: AttentionConfig,
    model: ModelConfig,
    calls: RankCalls,
    *,
    documents: Sequence[Sequence[int]],
    cache: Path,
    say: Callable[[str], None],
) -> AttentionConfig:
    """Return the settings with the fastest backend and recipe for what `auto` leaves open.

    The candidates are sage, flash and sdpa. Each is timed forward and backward together, at the shape of one rank's
    calls, behind QK-norm and the rotary embedding where the run computes these in one kernel: with what sage quantizes,
    prepares and saves there. Only a candidate whose output and gradients pass sagekernels' admission test on this
    device is timed. Recipe paper is the least exact, so it is taken only where the settings name it. sage has to be
    faster than 16 bits by more than noise.

    The table of times goes to `say`. The table and the choice go to the file `cache`, and a second start at the same
    shape reads the choice from there.

    Args:
        documents: the lengths of the documents in each of some sequences of the data. The sequences whose attention
            costs about the median are timed. Empty: attention crosses documents.

    Raises:
        RuntimeError: no candidate is admitted; the message holds every candidate's reason.
    """
    device, dtype, tp_size = calls.device, calls.dtype, calls.tensor_parallel_size
    candidates, timed = {}, {}
    heads_split = tp_size * calls.context_parallel_size
    num_sequences = calls.num_sequences
    num_sequences //= attention_calls(num_sequences, calls.own_tokens, tp_size, calls.overlap)
    recipes = ("scores", "fine") if attention.recipe == "auto" else (attention.recipe,)
    settings = {f"sage {recipe}": {"backend": "sage", "recipe": recipe} for recipe in recipes}
    if attention.backend == "auto":
        settings |= {"flash": {"backend": "flash"}, "sdpa": {"backend": "sdpa"}}
    named = {name: attention.model_copy(update=update) for name, update in settings.items()}
    for name, settled in named.items():
        try:
            resolve_backend(settled, model, device=device, dtype=dtype)
        except ValueError:  # this backend is not installed here
            continue
        function = attention_function(settled.backend, settled, device)
        candidates[name] = _plain(function)
        if attention.qk_norm == "before_rope" and calls.context_parallel_size == 1:
            timed[name] = _behind_norm(function)
    packed = _typical(documents, num_sequences)
    row = num_sequences * calls.seq_length if packed else calls.seq_length
    shape = Shape(
        batch=1 if packed else num_sequences,
        n_q=row,
        n_k=row,
        heads=model.num_attention_heads // heads_split,
        kv_heads=model.num_key_value_heads // heads_split,
        head_dim=model.head_dim,
        documents=packed,
    )
    limits = {f"sage {recipe}": LIMITS[recipe] for recipe in recipes}
    name = choose(
        candidates, shape, dtype=dtype, device=device, cache=cache, limits=limits, timed=timed,
        in_16_bits=("flash", "sdpa"), options=repr(attention), say=say,
    )  # fmt: skip
    return named[name]


def admissions(
    attention: AttentionConfig, model: ModelConfig, *, heads_split: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Admission]:
    """Return sagekernels' verdict on every attention function that can run here.

    The test uses documents, and the share of this model's heads that a rank has: one of `heads_split` shares.
    """
    found = {}
    heads, kv_heads = model.num_attention_heads // heads_split, model.num_key_value_heads // heads_split
    shape = Shape(
        batch=1, n_q=517, n_k=517, heads=heads, kv_heads=kv_heads, head_dim=model.head_dim, documents=(400, 117)
    )
    for name in ("sage scores", "sage fine", "sage paper", "flash", "sdpa"):
        backend, _, recipe = name.partition(" ")
        settled = attention.model_copy(update={"backend": backend, "recipe": recipe or "fine"})
        try:
            resolve_backend(settled, model, device=device, dtype=dtype)
        except ValueError:  # this backend cannot run here
            continue
        function = _plain(attention_function(backend, settled, device))
        limits = LIMITS[recipe or "fine"]
        found[name] = admit(function, shape, dtype=dtype, device=device, limits=limits)
    return found


def _typical(documents: Sequence[Sequence[int]], num_sequences: int) -> tuple[int, ...]:
    """Return the document lengths of `num_sequences` sequences, from the middle of all sequences ordered by their
    work."""
    ordered = sorted(documents, key=lambda lengths: sum(n * n for n in lengths))
    first = max(0, len(ordered) - num_sequences) // 2
    return tuple(n for lengths in islice(cycle(ordered), first, first + num_sequences) for n in lengths)


def _plain(function: AttentionFunction) -> Attend:
    """Wrap an attention function for sagekernels' admission test, which describes documents by cu_seqlens alone."""
    layout_of = _layouts(function)

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return function(q, k, v, layout_of(q, cu_seqlens))

    return call


def _behind_norm(function: AttentionFunction) -> Attend:
    """Wrap an attention function as _plain, but behind QK-norm and the rotary embedding as model/attention.py has it
    there."""
    layout_of = _layouts(function)

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        layout, gain = layout_of(q, cu_seqlens), q.new_ones(q.shape[3])
        own_q, own_k, own_v = (x.flatten(0, 1).flatten(1) for x in (q, k, v))
        if function.normalizes:
            return function.normed(Projected(own_q, own_k, own_v, gain, gain, 1e-6), layout)
        normed = qk_norm_rope(own_q, own_k, own_v, gain, gain, layout.cos, layout.sin, 1e-6)
        normed_q, normed_k, normed_v = (x.unflatten(0, q.shape[:2]) for x in normed)
        return function(normed_q, normed_k, normed_v, layout)

    return call


def _layouts(function: AttentionFunction) -> Callable[[Tensor, Tensor | None], TokenLayout]:
    """Return what makes the layout of q and cu_seqlens. Its angles are zeros, which take as long as any."""

    # A problem has one tensor of lengths. Without the cache, waiting for the GPU would be timed as well.
    @functools.cache
    def longest(cu_seqlens: Tensor) -> int:
        return int(cu_seqlens.diff().max())

    @functools.cache
    def tables(num_tokens: int, half: int, device: torch.device) -> Tensor:
        return torch.zeros(num_tokens, 1, half, device=device)

    def layout_of(q: Tensor, cu_seqlens: Tensor | None) -> TokenLayout:
        num_sequences, num_tokens = q.shape[0], q.shape[0] * q.shape[1]
        max_seqlen = None if cu_seqlens is None else longest(cu_seqlens)
        angles = tables(num_tokens, q.shape[3] // 2, q.device)
        return token_layout({function.documents}, num_sequences, num_tokens, angles, angles, cu_seqlens, max_seqlen)

    return layout_of

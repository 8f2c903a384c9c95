"""Choose the attention of a run whose settings say `auto`."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from sagekernels.admission import LIMITS, Admission, Attend, admit, seconds_per_step
from sagekernels.backends import serving
from sagekernels.launch import capability
from sagekernels.qk_norm_rope import qk_norm_rope
from sagekernels.testing import Shape
from sagetrain.auto.kept import Kept, kept_attention
from sagetrain.auto.timed_choice import FASTEST, StartOfRun, TimeTable, as_before, by_first_rank, decide, fastest
from sagetrain.config.arithmetic import attention_calls
from sagetrain.config.layer_specs import layers
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.costs.accounting import overlaps, rank_of
from sagetrain.model.backends import (
    FIXED_RECIPE,
    AttentionFunction,
    Projected,
    TokenLayout,
    attention_function,
    find_flash,
    token_layout,
)
from sagetrain.model.selection import resolve_backend

GAIN = 1.01
"""Attention in 8 bits is chosen only if it is so many times as fast as 16 bits. A smaller gain is within the noise of
clocks, and 16 bits are exact."""


def settle_attention(
    start: StartOfRun, before: Kept | None, documents: Callable[[], Sequence[Sequence[int]]]
) -> tuple[AttentionConfig, str]:
    """Return the settings with nothing left to decide, and one line that says how attention runs and why; collective.
    Raises ValueError if the backend cannot run here, see resolve_backend, and RuntimeError if no candidate is admitted.

    The candidates are sage, flash and sdpa. Each is timed forward and backward together, at the shape of one rank's
    calls, behind QK-norm and the rotary embedding where the run computes these in one kernel: with what sage quantizes,
    prepares and saves there. Where some layers have a window, it is timed with the window and without, and its times
    count by the layers of each kind. Only a candidate whose output and gradients pass sagekernels' admission test on
    this device is timed. Recipe paper is the least exact, so it is taken only where the settings name it. sage has to
    be GAIN times as fast as 16 bits.

    Args:
        before: the choices that the run had, if it continues.
        documents: returns the lengths of the documents in each of some sequences of the data. The sequences whose
            attention costs about the median are timed. Empty: attention crosses documents.
    """
    key, asked = "attention.backend", start.cfg.attention
    resolve = partial(resolve_backend, model=start.cfg.model, device=start.device, dtype=start.dtype)

    def cannot_run(settings: AttentionConfig) -> str:
        try:
            resolve(settings)
        except ValueError as error:
            return str(error)
        return ""

    kept = kept_attention(asked, before.attention) if before else asked
    settled, why = as_before(key, asked, kept, start.say, cannot_run)
    backend, by_rule = resolve(settled)
    named = settled.model_copy(update={"backend": backend})
    if to_be_chosen(named, start.device):
        choose = partial(_fastest, start, settled, cannot_run, documents)
        settled, why = by_first_rank(f"{key} auto", choose, start.device), FASTEST
    else:
        settled, why = named, by_rule if settled.backend == "auto" else why
    if settled.recipe == "auto":
        settled = settled.model_copy(update={"recipe": FIXED_RECIPE})
    _, how = resolve(settled)
    return settled, f"{how}; {why}" if why else how


def _fastest(
    start: StartOfRun,
    settings: AttentionConfig,
    cannot_run: Callable[[AttentionConfig], str],
    documents: Callable[[], Sequence[Sequence[int]]],
) -> AttentionConfig:
    """Return the fastest settings among those that `settings` leave open, see settle_attention."""
    recipes = ("scores", "fine") if settings.recipe == "auto" else (settings.recipe,)
    updates = [{"backend": "sage", "recipe": recipe} for recipe in recipes]
    updates += [{"backend": "flash"}, {"backend": "sdpa"}] if settings.backend == "auto" else []
    named = {" ".join(update.values()): settings.model_copy(update=update) for update in updates}
    named = {name: candidate for name, candidate in named.items() if not cannot_run(candidate)}
    shape = _shape(start, documents())
    kinds = _kinds(start.cfg.model, shape, start.cfg.data.seq_length)
    # Other sequences of the same data have other documents, and nearly the same work: runs share a choice.
    work = round(4 * math.log2(sum(n * n for n in shape.documents) or 1))
    problems = tuple((str(each._replace(documents=())), share) for each, share in kinds.items())
    installed = _flash_attn(named, start.device)
    chosen = decide(
        "attention",
        start,
        partial(_measure, named, kinds, start),
        partial(fastest, gains={name: GAIN for name in named if name.startswith("sage")}),
        file=start.folder.attention,
        key=(problems, work, start.dtype, _with_norm(start), sorted(named), installed, settings),
    )
    return named[chosen]


def to_be_chosen(attention: AttentionConfig, device: torch.device) -> bool:
    """Whether the resolved backend, or its recipe, is left to choose_attention."""
    sage = attention.backend == "sage" and torch.device(device).type == "cuda"
    return attention.backend == "auto" or (sage and attention.recipe == "auto")


def _shape(start: StartOfRun, documents: Sequence[Sequence[int]]) -> Shape:
    """Return the shape of one rank's calls of attention. `documents`: see settle_attention."""
    cfg, rank, num_sequences = start.cfg, rank_of(start.cfg), start.cfg.data.micro_batch_size
    num_sequences //= attention_calls(num_sequences, rank.tokens, rank.tensor, overlaps(cfg))
    packed = _typical(documents, num_sequences)
    row = num_sequences * cfg.data.seq_length if packed else cfg.data.seq_length
    heads, kv_heads = layers(cfg.model)[0].attention.heads_of(rank.tensor * rank.context)
    return Shape(
        batch=1 if packed else num_sequences,
        n_q=row,
        n_k=row,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=cfg.model.head_dim,
        documents=packed,
    )


def _kinds(model: ModelConfig, shape: Shape, seq_length: int) -> dict[Shape, float]:
    """Return the shape of each kind of layer, by window, with its share of the layers."""
    every = [each.attention.reach.window for each in layers(model)]
    counts = Counter(None if window is None or window >= seq_length else window for window in every)
    return {shape._replace(window=window): count / len(every) for window, count in counts.items()}


def _with_norm(start: StartOfRun) -> bool:
    """Return whether attention is timed behind QK-norm and the rotary embedding, where a run computes these in a kernel
    of its own."""
    return start.cfg.parallel.context_parallel_size == 1


def _flash_attn(candidates: Mapping[str, AttentionConfig], device: torch.device) -> str:
    """Return which flash-attn a candidate has, with the time of its installation; an empty string without one."""
    found = find_flash(device) if any(each.backend == "flash" for each in candidates.values()) else None
    if found is None:
        return ""
    version, package = found
    return f"flash-attn {version}, {os.stat(package.__file__ or '').st_mtime_ns}"


def _measure(candidates: Mapping[str, AttentionConfig], kinds: Mapping[Shape, float], start: StartOfRun) -> TimeTable:
    """Time each candidate that is admitted, at each kind of layer."""
    seconds, remarks = dict[str, float](), list[str]()
    place: dict[str, Any] = {"dtype": start.dtype, "device": start.device}
    known = ""
    # No kernels serve some sizes of heads, for which no candidate is sage.
    if any(settings.backend == "sage" for settings in candidates.values()):
        known = f"sage {serving(capability(start.device), next(iter(kinds)).head_dim).fastest}"
    for name, settings in candidates.items():
        # The kernels of the other recipe take seconds to compile.
        if settings.backend == "sage" and name != known and math.isfinite(seconds.get(known, math.inf)):
            remarks.append(f"{name}: not timed, since {known} was measured to be faster on such GPUs")
            continue
        function = attention_function(settings.backend, settings, start.device)
        attend = _plain(function)
        limits = LIMITS[settings.recipe if settings.backend == "sage" else "fine"]
        verdicts = [admit(attend, shape, **place, limits=limits) for shape in kinds]
        verdict = next((each for each in verdicts if not each.passed), verdicts[0])
        if settings.qk_norm == "before_rope" and _with_norm(start):
            attend = _behind_norm(function)
        seconds[name] = math.inf
        if verdict.passed:
            seconds[name] = sum(share * seconds_per_step(attend, shape, **place) for shape, share in kinds.items())
        figures = "  ".join(f"{tensor} {error:.4f}" for tensor, error in verdict.errors.items())
        remarks.append(f"{name}: {figures if verdict.passed else f'not used: {verdict.reason}'}")
    about = f"{' and '.join(map(str, kinds))}, {start.dtype}: forward + backward, rel-L2 against float64"
    return TimeTable(about, {"attention": seconds}, remarks)


def admissions(
    attention: AttentionConfig, model: ModelConfig, *, heads_split: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Admission]:
    """Return sagekernels' verdict on every attention function that can run here.

    The test uses documents, and the share of this model's heads that a rank has: one of `heads_split` shares.
    """
    found = {}
    heads, kv_heads = layers(model)[0].attention.heads_of(heads_split)
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

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None = None) -> Tensor:
        return function(q, k, v, layout_of(q, cu_seqlens, window))

    return call


def _behind_norm(function: AttentionFunction) -> Attend:
    """Wrap an attention function as _plain, but behind QK-norm and the rotary embedding as model/attention.py has it
    there."""
    layout_of = _layouts(function)

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None = None) -> Tensor:
        layout, gain = layout_of(q, cu_seqlens, window), q.new_ones(q.shape[3])
        own_q, own_k, own_v = (x.flatten(0, 1).flatten(1) for x in (q, k, v))
        if function.normalizes:
            return function.normed(Projected(own_q, own_k, own_v, gain, gain, 1e-6), layout)
        normed = qk_norm_rope(own_q, own_k, own_v, gain, gain, layout.cos, layout.sin, 1e-6)
        normed_q, normed_k, normed_v = (x.unflatten(0, q.shape[:2]) for x in normed)
        return function(normed_q, normed_k, normed_v, layout)

    return call


def _layouts(function: AttentionFunction) -> Callable[[Tensor, Tensor | None, int | None], TokenLayout]:
    """Return what makes the layout of q, cu_seqlens and a window. Its angles are zeros, which take as long as any."""

    # A problem has one tensor of lengths. Without the cache, waiting for the GPU would be timed as well.
    @functools.cache
    def longest(cu_seqlens: Tensor) -> int:
        return int(cu_seqlens.diff().max())

    @functools.cache
    def tables(num_tokens: int, half: int, device: torch.device) -> Tensor:
        return torch.zeros(num_tokens, 1, half, device=device)

    def layout_of(q: Tensor, cu_seqlens: Tensor | None, window: int | None) -> TokenLayout:
        num_sequences, num_tokens = q.shape[0], q.shape[0] * q.shape[1]
        max_seqlen = None if cu_seqlens is None else longest(cu_seqlens)
        angles = tables(num_tokens, q.shape[3] // 2, q.device)
        wanted = {function.wants(window is not None)}
        return token_layout(wanted, num_sequences, num_tokens, angles, angles, cu_seqlens, max_seqlen, window)

    return layout_of

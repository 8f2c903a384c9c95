"""Which attention runs, and how linear layers multiply: what a name stands for on this device, and what `auto` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from sagekernels.admission import LIMITS, SOURCES, Admission, admit, choose, decided_once, median_seconds
from sagekernels.hopper_backward import KEYS
from sagekernels.launch import check_int8, is_hopper
from sagekernels.testing import Shape
from sagetrain.config.linear_sizes import AUTO_PRECISION, LOW_BIT_MULTIPLE, LinearSizes
from sagetrain.config.schema import AttentionConfig, LinearConfig, ModelConfig
from sagetrain.model import linear_choice
from sagetrain.model.accounting import attention_calls, parts_of
from sagetrain.model.backends import (
    FIXED_RECIPE,
    AttentionFunction,
    attention_function,
    find_flash,
    find_varlen_attn,
    token_layout,
)
from sagetrain.parallel.lowbit import RECIPES, LowBit

# The least compute capability whose matmuls take it: Ada and Hopper, Ampere.
_CAPABILITY = {"fp8": (8, 9), "int8": (8, 0)}


def resolve_backend(
    attention: AttentionConfig, model: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """The backend that will run, one of sage, sdpa, flash, reference and (for inference, by name alone) fp4, and one
    line that says why or how. `auto`: choose_attention has to tell.

    Raises:
        ValueError: the backend cannot run on this device or in this dtype, or its package is not installed.
    """
    on_gpu = torch.device(device).type == "cuda"
    sixteen_bit = dtype in (torch.bfloat16, torch.float16)
    match attention.backend:
        case "sage" | "fp4" as name if not 16 <= model.head_dim <= 256:
            raise ValueError(f"attention.backend {name} supports head_dim 16 to 256, not {model.head_dim}; use sdpa")
        case "sage" if not on_gpu:
            recipe = FIXED_RECIPE if attention.recipe == "auto" else attention.recipe
            return "sage", f"INT8 recipe {recipe}: its torch twin, since there is no GPU; exact but slow"
        case "sage" if not sixteen_bit:
            raise ValueError("attention.backend sage needs training.dtype bf16 on a GPU; use bf16, or backend sdpa")
        case "sage":
            try:
                if torch.cuda.is_available():
                    check_int8(torch.cuda.get_device_capability(device))
            except NotImplementedError as error:
                raise ValueError(f"attention.backend sage: {error}") from error
            faster = ""
            tuned = model.head_dim in KEYS and torch.cuda.is_available() and is_hopper(device)
            if tuned and attention.recipe not in ("scores", "auto"):
                faster = "; on this GPU recipe scores is much faster (README.md)"
            return "sage", f"INT8 recipe {attention.recipe}: sagekernels{faster}"
        case "flash":
            if not (on_gpu and sixteen_bit):
                raise ValueError("attention.backend flash needs a GPU and training.dtype bf16; use backend sdpa")
            flash = find_flash(torch.device(device))
            if flash is None:
                raise ValueError(
                    "attention.backend flash: no flash-attn package for this GPU; install flash-attn-4, or use sdpa"
                )
            return "flash", f"flash-attn {flash[0]}"
        case "sdpa" if on_gpu:
            documents = "varlen_attn" if find_varlen_attn() else "a mask (varlen_attn needs torch 2.10)"
            return "sdpa", f"torch's SDPA, cuDNN first, then flash; documents through {documents}"
        case "sdpa":
            return "sdpa", "torch's SDPA; documents through a mask"
        case "reference":
            return "reference", "plain matmuls"
        case "fp4":
            return "fp4", "FP4, forward only"
        case "auto" if on_gpu and sixteen_bit:
            return "auto", "the fastest that was admitted"
        case "auto":
            return "sdpa", "auto: nothing to choose from without a GPU and bf16"


def matmuls_of(
    linear: LinearConfig,
    model: ModelConfig,
    *,
    tensor_parallel_size: int,
    here: int | None = None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[dict[str, LowBit]], str]:
    """How linear layers multiply, by name for each block (others: in dtype; so do all with precision `auto`, for
    choose_linear has to tell), and one line that says so.

    Args:
        tensor_parallel_size: in training, where the sizes of a rank's layers decide which of them are in 8 bits.
        here: the ranks that share the model now, if they are others: their sides, too, must be such as 8 bits take.

    Raises:
        ValueError: there is no such recipe, or it cannot run on this device or in this dtype.
    """
    low = linear.low_bit_blocks(model.num_layers)
    if not low:
        return [{}] * model.num_layers, "in training.dtype"
    name = f"{linear.precision} {linear.recipe}"
    recipe = RECIPES.get((linear.precision, linear.recipe))
    if recipe is None:
        raise ValueError(f"linear.recipe {linear.recipe} is none of linear.precision {linear.precision}")
    how = "its torch twin, since there is no GPU"
    if torch.device(device).type == "cuda":
        if dtype != torch.bfloat16:
            raise ValueError(f"linear.precision {linear.precision} needs training.dtype bf16 on a GPU")
        needed, found = _CAPABILITY[linear.precision], torch.cuda.get_device_capability(device)
        if found < needed:
            instead = "bf16, or int8" if linear.precision == "fp8" and found >= _CAPABILITY["int8"] else "bf16"
            card = f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}"
            raise ValueError(
                f"linear.precision {linear.precision} needs a GPU of compute capability {'.'.join(map(str, needed))} "
                f"or more, {card}; use {instead}"
            )
        if linear.precision == "int8":
            try:
                check_int8(found, by_tensor_memory=True)
            except NotImplementedError as error:
                raise ValueError(f"linear.precision int8: {error}") from error
        how = "torch's kernels"
    blocks = f"{len(low)} of {model.num_layers} blocks" if len(low) < model.num_layers else "all blocks"
    layers, others = model.linear_layers(tensor_parallel_size), model.linear_layers(here or tensor_parallel_size)
    taken = [layer for layer, sizes in layers.items() if linear.takes(sizes) and not others[layer].odd]
    if linear.keep_layers_below:
        blocks += f", layers of {linear.keep_layers_below:,} weights and more ({', '.join(taken) or 'none'})"
    if odd := _odd({layer: sizes if sizes.odd else others[layer] for layer, sizes in layers.items()}):
        blocks += f", but for {odd}"
    if others != layers:
        blocks += f", by the sizes at tensor_parallel_size {tensor_parallel_size} in training and {here} here"
    matmuls: dict[str, LowBit] = dict.fromkeys(taken, recipe)
    return [matmuls if index in low else {} for index in range(model.num_layers)], f"{name} in {blocks} ({how})"


def _odd(layers: Mapping[str, LinearSizes]) -> str:
    """Which of them have sides that 8-bit matmuls do not take, in words, or nothing."""
    odd = [f"{name} {' and '.join(map(str, sizes.odd))}" for name, sizes in layers.items() if sizes.odd]
    return f"sides that are no multiples of {LOW_BIT_MULTIPLE} ({', '.join(odd)})" if odd else ""


def cannot_multiply(
    linear: LinearConfig, model: ModelConfig, *, tensor_parallel_size: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Why linear layers, not even one of them, cannot multiply as they should here, or nothing."""
    try:
        matmuls_of(linear, model, tensor_parallel_size=tensor_parallel_size, device=device, dtype=dtype)
    except ValueError as error:
        return str(error)
    layers = model.linear_layers(tensor_parallel_size)
    return f"all have {_odd(layers)}" if linear.low_bit and all(sizes.odd for sizes in layers.values()) else ""


def why_sixteen_bits(
    linear: LinearConfig, model: ModelConfig, *, tensor_parallel_size: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Why there is nothing for choose_linear to choose from, or nothing."""
    if torch.device(device).type != "cuda":
        return "nothing is timed without a GPU"
    low = linear.model_copy(update={"precision": AUTO_PRECISION})
    return cannot_multiply(low, model, tensor_parallel_size=tensor_parallel_size, device=device, dtype=dtype)


def choose_linear(
    linear: LinearConfig,
    model: ModelConfig,
    *,
    tensor_parallel_size: int,
    context_parallel_size: int,
    overlap: bool,
    num_sequences: int,
    seq_length: int,
    kept: bool,
    compiled: bool,
    device: torch.device,
    dtype: torch.dtype,
    cache: Path,
    say: Callable[[str], None],
) -> LinearConfig:
    """What `linear.precision: auto` stands for: int8 for the layers from a size on that gain, timed forward and
    backward at the shape of one rank's calls and compared with fp32 before, or bf16 (linear_choice.smallest has the
    rule).

    Not timed are collectives and, with `kept`, the rounding of weights once a step.

    The table goes to `say` and, with the choice, to the file `cache`, as choose_attention's does.
    """
    own_tokens = num_sequences * seq_length // context_parallel_size
    tokens = own_tokens // parts_of(own_tokens, tensor_parallel_size, overlap)
    layers = {name: sizes for name, sizes in model.linear_layers(tensor_parallel_size).items() if not sizes.odd}
    weights = {name: sizes.weights for name, sizes in layers.items()}
    way, least = f"{AUTO_PRECISION} {linear.recipe}", linear.keep_layers_below
    bf16, *low = linear.choices(layers.values())
    named = {"bf16": bf16, **{_name(way, choice.keep_layers_below): choice for choice in low}}

    how = {"tokens": tokens, "joined": tensor_parallel_size > 1, "kept": kept, "compiled": compiled, "dtype": dtype}

    def fastest() -> tuple[str, list[str]]:
        timer = partial(median_seconds, device=device)
        times, refused = linear_choice.time_layers(layers, [way], **how, device=device, seconds=timer)
        first = f"{tokens:,} tokens, {dtype}: forward + backward (times as fast as bf16)"
        below = linear_choice.smallest(times, way, weights, least)
        chosen = "bf16" if below is None else _name(way, below)
        return chosen, [first, *linear_choice.table(times, layers, refused)]

    key = " | ".join(map(str, (layers, how, way, least, linear_choice.GAIN)))
    sources = SOURCES, Path(linear_choice.__file__).parent.parent / "parallel"
    return named[decided_once("linear", key, fastest, sources=sources, device=device, cache=cache, say=say)]


def _name(way: str, below: int) -> str:
    return f"{way}, layers of {below:,} weights and more" if below else way


def to_be_chosen(attention: AttentionConfig, device: torch.device) -> bool:
    """Whether backend, as resolved, or recipe is left to choose_attention."""
    sage = attention.backend == "sage" and torch.device(device).type == "cuda"
    return attention.backend == "auto" or (sage and attention.recipe == "auto")


def choose_attention(
    attention: AttentionConfig,
    model: ModelConfig,
    *,
    tensor_parallel_size: int,
    context_parallel_size: int,
    overlap: bool,
    num_sequences: int,
    seq_length: int,
    documents: Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype,
    cache: Path,
    say: Callable[[str], None],
) -> AttentionConfig:
    """What backend and recipe `auto` stand for: the fastest of sage, flash and sdpa, forward and backward together, at
    the shape of one rank's calls, among those whose output and gradients pass sagekernels' admission test on this
    device. Recipe paper, the least exact, is taken by name alone.

    The table goes to `say` and, with the choice, to the file `cache`: a second start at the same shape takes that.

    Args:
        documents: of some sequences of the data, the lengths of the documents in each. Timed are those whose attention
            costs about the median. Empty: attention crosses documents.

    Raises:
        RuntimeError: none is admitted; the message holds every candidate's reason.
    """
    heads_split, candidates = tensor_parallel_size * context_parallel_size, {}
    own_tokens = num_sequences * seq_length // context_parallel_size
    num_sequences //= attention_calls(num_sequences, own_tokens, tensor_parallel_size, overlap)
    recipes = ("scores", "fine") if attention.recipe == "auto" else (attention.recipe,)
    settings = {f"sage {recipe}": {"backend": "sage", "recipe": recipe} for recipe in recipes}
    if attention.backend == "auto":
        settings |= {"flash": {"backend": "flash"}, "sdpa": {"backend": "sdpa"}}
    named = {name: attention.model_copy(update=update) for name, update in settings.items()}
    for name, settled in named.items():
        try:
            resolve_backend(settled, model, device=device, dtype=dtype)
        except ValueError:  # not installed here
            continue
        candidates[name] = _plain(attention_function(settled.backend, settled, device))
    packed = _typical(documents, num_sequences)
    row = num_sequences * seq_length if packed else seq_length
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
    how = {"cache": cache, "limits": limits, "options": repr(attention), "say": say}
    return named[choose(candidates, shape, dtype=dtype, device=device, **how)]


def admissions(
    attention: AttentionConfig, model: ModelConfig, *, heads_split: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Admission]:
    """sagekernels' verdict on every attention function that can run here, with documents and a rank's share of this
    model's heads, one of heads_split."""
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
        except ValueError:  # not here
            continue
        function = _plain(attention_function(backend, settled, device))
        limits = LIMITS[recipe or "fine"]
        found[name] = admit(function, shape, dtype=dtype, device=device, limits=limits)
    return found


def _typical(documents: Sequence[Sequence[int]], num_sequences: int) -> tuple[int, ...]:
    """Lengths of the documents of so many of these sequences, from the middle when they are ordered by their work."""
    ordered = sorted(documents, key=lambda lengths: sum(n * n for n in lengths))
    first = max(0, len(ordered) - num_sequences) // 2
    return tuple(n for lengths in islice(cycle(ordered), first, first + num_sequences) for n in lengths)


def _plain(function: AttentionFunction) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """A function as sagekernels' admission calls it: one row, documents by cu_seqlens alone."""

    @functools.cache  # a problem has one tensor of them, and waiting for the GPU would be timed
    def longest(cu_seqlens: Tensor) -> int:
        return int(cu_seqlens.diff().max())

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        num_sequences, num_tokens = q.shape[0], q.shape[0] * q.shape[1]
        max_seqlen = None if cu_seqlens is None else longest(cu_seqlens)
        wanted = {function.documents}
        return function(q, k, v, token_layout(wanted, num_sequences, num_tokens, None, None, cu_seqlens, max_seqlen))

    return call

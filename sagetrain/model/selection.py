"""Resolve the names of attention backends and of the precisions of linear layers on this device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sagekernels.backends import serving
from sagekernels.grouped_matmul import GROUPED_LOW_BIT
from sagekernels.launch import check_int8, half_sums
from sagekernels.lowbit import HEADS, LOW_BIT
from sagetrain.config.layer_specs import WITH_SINKS, linear_layers
from sagetrain.config.layer_specs import layers as layer_specs
from sagetrain.config.linear_sizes import EIGHT_BITS, LOW_BIT_MULTIPLE, LinearSizes
from sagetrain.config.schema import AttentionConfig, LinearConfig, ModelConfig
from sagetrain.model.backends import (
    FIXED_RECIPE,
    AttentionFunction,
    attention_function,
    find_flash,
    find_varlen_attn,
)
from sagetrain.model.delta_rule import delta_rule


def resolve_backend(
    attention: AttentionConfig, model: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """Return the backend that will run, and one line that says why or how. Raises ValueError if the backend, or a gated
    delta net, cannot run on this device or in this dtype, or its package is not installed.

    The backend is one of sage, sdpa, flash and reference. The result is `auto` where choose_attention has to decide.
    """
    backend, how = _resolved(attention, model, device, dtype)
    return backend, how + (f"; gated delta net {delta_rule(device, dtype).how}" if model.delta_net else "")


def _resolved(
    attention: AttentionConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    on_gpu = torch.device(device).type == "cuda"
    sixteen_bit = dtype in (torch.bfloat16, torch.float16)
    match attention.backend:
        case name if model.sinks and name not in WITH_SINKS:
            raise ValueError(f"attention.backend {name} has no sinks (model.sinks); use {' or '.join(WITH_SINKS)}")
        case "sage" if not 16 <= model.head_dim <= 256:
            raise ValueError(f"attention.backend sage supports head_dim 16 to 256, not {model.head_dim}; use sdpa")
        case "sage" if not on_gpu:
            recipe = FIXED_RECIPE if attention.recipe == "auto" else attention.recipe
            return "sage", f"INT8 recipe {recipe}: its torch twin, since there is no GPU; exact but slow"
        case "sage" if not sixteen_bit:
            raise ValueError("attention.backend sage needs training.dtype bf16 on a GPU; use bf16, or backend sdpa")
        case "sage":
            remark = ""
            if torch.cuda.is_available():
                capability = torch.cuda.get_device_capability(device)
                try:
                    check_int8(capability)
                except NotImplementedError as error:
                    raise ValueError(f"attention.backend sage: {error}") from error
                kernels = serving(capability, model.head_dim)
                if kernels.fastest not in (None, attention.recipe) and attention.recipe != "auto":
                    remark = f"; on this GPU recipe {kernels.fastest} is much faster (README.md)"
                elif kernels.name == "triton" and capability[0] == 10:
                    remark = (
                        "; by mma.sync, which reaches a part of this GPU's tensor cores: flash or sdpa may be faster"
                    )
            return "sage", f"INT8 recipe {attention.recipe}: sagekernels{remark}"
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
        case "auto" if on_gpu and sixteen_bit:
            return "auto", "the fastest that was admitted"
        case "auto":
            return "sdpa", "auto: nothing to choose from without a GPU and bf16"


def attention_functions(
    attention: AttentionConfig, model: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> list[AttentionFunction]:
    """Return the function of every layer: the one that attention.backend names here, or that of a gated delta net.
    Raises ValueError if the backend cannot run here, see resolve_backend."""
    backend, _ = resolve_backend(attention, model, device=device, dtype=dtype)
    every, function = layer_specs(model), attention_function(backend, attention, device)
    return [delta_rule(device, dtype) if layer.delta_net else function for layer in every]


def matmuls_of(
    linear: LinearConfig,
    model: ModelConfig,
    *,
    tensor_parallel_size: int,
    here: int | None = None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[dict[str, Any]], str]:
    """Return the low-bit Matmul of each linear layer, keyed by name for each block and for the end, and one line that
    says so. The entry "experts" is a GroupedMatmul. The end has an entry "head" if linear.head is in 8 bits. Raises
    ValueError if the precision cannot run on this device or in this dtype.

    A layer without an entry multiplies in dtype. With precision `auto` no layer has an entry, because choose_linear has
    to decide.

    Args:
        tensor_parallel_size: the tensor-parallel size in training. The sizes of a rank's layers at this size decide
            which layers are in 8 bits.
        here: the number of ranks that share the model now, if it is another. The sides of a layer at this size must
            suit 8 bits as well.
    """
    low = linear.low_bit_blocks(model.num_layers)
    if not low:
        return [{}] * (model.num_layers + 1), "in training.dtype"
    how, of_end = "its torch twin, since there is no GPU", dict[str, Any]()
    if linear.head != "bf16":
        of_end["head"] = HEADS[linear.head]
    if torch.device(device).type == "cuda":
        for key, precision in (("precision", linear.precision), *[("head", linear.head)] * len(of_end)):
            _check_gpu(f"linear.{key} {precision}", precision, device, dtype)
        how = "torch's kernels"
        if linear.precision == "fp8" and half_sums(torch.device(device)):
            how += "; this GPU adds FP8 products up at half rate: use linear.precision int8, twice as fast, or auto"
    blocks = f"{len(low)} of {model.num_layers} blocks" if len(low) < model.num_layers else "all blocks"
    layers, others = linear_layers(model, tensor_parallel_size), linear_layers(model, here or tensor_parallel_size)
    taken = [layer for layer, sizes in layers.items() if linear.takes(sizes) and not others[layer].odd]
    if linear.keep_layers_below:
        blocks += f", layers of {linear.keep_layers_below:,} weights and more ({', '.join(taken) or 'none'})"
    if odd := _odd({layer: sizes if sizes.odd else others[layer] for layer, sizes in layers.items()}):
        blocks += f", but for {odd}"
    if others != layers:
        blocks += f", by the sizes at tensor_parallel_size {tensor_parallel_size} in training and {here} here"
    if of_end:
        blocks += f", output projection in {linear.head}"
    matmuls: dict[str, Any] = {"experts": GROUPED_LOW_BIT[linear.precision]}
    of_blocks: list[dict[str, Any]] = [{} for _ in range(model.num_layers)]
    for index in low:
        layer = layer_specs(model)[index]
        own, now = layer.chosen_layers(tensor_parallel_size), layer.chosen_layers(here or tensor_parallel_size)
        taken = [name for name, sizes in own.items() if linear.takes(sizes) and not now[name].odd]
        of_blocks[index] = {name: matmuls.get(name, LOW_BIT[linear.precision]) for name in taken}
    if model.experts is not None:
        beside = "included" if any("experts" in of_block for of_block in of_blocks) else "in training.dtype"
        blocks += f", experts {beside}"
    return [*of_blocks, of_end], f"{linear.precision} in {blocks} ({how})"


def _check_gpu(setting: str, precision: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if a GPU cannot multiply in 8 bits as a setting asks."""
    if dtype != torch.bfloat16:
        raise ValueError(f"{setting} needs training.dtype bf16 on a GPU")
    needed, found = EIGHT_BITS[precision].capability, torch.cuda.get_device_capability(device)
    if found < needed:
        instead = ", or ".join(("bf16", *(name for name, each in EIGHT_BITS.items() if found >= each.capability)))
        card = f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}"
        raise ValueError(
            f"{setting} needs a GPU of compute capability {'.'.join(map(str, needed))} or more, {card}; use {instead}"
        )
    if precision == "int8":
        try:
            check_int8(found, by_tensor_memory=True)
        except NotImplementedError as error:
            raise ValueError(f"{setting}: {error}") from error


def _odd(layers: Mapping[str, LinearSizes]) -> str:
    """Name the layers whose sides 8-bit matmuls do not take, or return an empty string."""
    odd = [f"{name} {' and '.join(map(str, sizes.odd))}" for name, sizes in layers.items() if sizes.odd]
    return f"sides that are no multiples of {LOW_BIT_MULTIPLE} ({', '.join(odd)})" if odd else ""


def cannot_multiply(
    linear: LinearConfig, model: ModelConfig, *, tensor_parallel_size: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Return why no linear layer at all can multiply here as the settings ask, or an empty string."""
    try:
        matmuls_of(linear, model, tensor_parallel_size=tensor_parallel_size, device=device, dtype=dtype)
    except ValueError as error:
        return str(error)
    layers = linear_layers(model, tensor_parallel_size)
    return f"all have {_odd(layers)}" if linear.low_bit and all(sizes.odd for sizes in layers.values()) else ""

"""Begin what the choices of `auto` and the first step wait for, before anything is decided."""

from __future__ import annotations

import os
from importlib import import_module

import torch

from sagekernels import int8_matmul, nvrtc
from sagekernels.backends import BACKENDS
from sagekernels.launch import capability
from sagetrain.auto.timed_choice import StartOfRun
from sagetrain.config.layer_specs import layers
from sagetrain.model import initialization
from sagetrain.model.tensors import tensors
from sagetrain.parallel.host import memory_of_host, ranks_of_host


def begin(start: StartOfRun) -> None:
    """On a GPU, draw weights and compile CUDA kernels in threads, and import torch's compiler beside them, here and in
    the processes in which it will compile.

    The first rank of a host compiles kernels. The ranks that wait for its choices have imported the compiler meanwhile.
    Weights take up to a sixteenth of the host's memory.
    """
    cfg = start.cfg
    if start.device.type != "cuda":
        return
    if cfg.parallel.pipeline_parallel_size == 1:
        room = (memory_of_host() or 0) / (16 * (ranks_of_host() or 1))
        specs = tensors(cfg.model, cfg.attention, start.vocab_size)
        initialization.begin(specs, cfg.model, start.groups, cfg.training.seed, start.dtype, room)
    if os.environ.get("LOCAL_RANK", "0") == "0" and nvrtc.available():
        _begin_kernels(start)
    if start.compiled:
        # The processes that compile import as much as this one, so they begin first, as in torch.compile's own start.
        import_module("torch._inductor.async_compile").maybe_warm_pool()
        import_module("torch._inductor.compile_fx")


def _begin_kernels(start: StartOfRun) -> None:
    """Begin to compile what `auto` times first and what runs take that name it."""
    cfg, device, dtype = start.cfg, start.device, start.dtype
    found, attention = capability(device), cfg.attention
    serving = next((each for each in BACKENDS if each.serves(found) and cfg.model.head_dim in each.head_dims), None)
    named = attention.backend in ("auto", "sage") and dtype == torch.bfloat16
    if named and serving and serving.begin and attention.recipe in ("auto", serving.fastest):
        specs = {(layer.attention.reach.window, layer.attention.sinks) for layer in layers(cfg.model)}
        bounds = {cfg.data.document_attention or window is not None for window, _ in specs}
        for each in sorted(bounds):
            serving.begin(cfg.model.head_dim, attention.smooth_k, each, any(sinks for _, sinks in specs), False)
    if cfg.linear.precision in ("auto", "int8") or cfg.linear.head == "int8":
        int8_matmul.begin(device, dtype)

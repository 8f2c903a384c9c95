"""ZeRO 3 gives weights back after the forward pass. No tensor made of them may live until the backward pass."""

from __future__ import annotations

import gc

import pytest
import torch

import tiny
from distributed import run_distributed
from process_memory import resident, return_what_is_freed
from sagetrain.data.batch import Batch
from sagetrain.engines.build_engine import build_engine, partitioner
from sagetrain.model.selection import matmuls_of

# The weights take 5 MB in bf16.
MODEL = {"num_layers": 4, "hidden_size": 192, "ffn_hidden_size": 768, "num_attention_heads": 3}
# Only the norms' gains stay gathered from one use to the next.
ZERO = {"stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
CASES = [
    ("bf16", "rowwise", "aot_eager", "none"),
    ("fp8", "tensorwise", None, "full"),
    ("fp8", "rowwise", None, "none"),
    ("fp8", "rowwise", "aot_eager", "selective"),
]


def between_passes(cases: list[tuple[str, str, str | None, str]]) -> list[tuple[float, float]]:
    """Return two numbers for each case: the loss, and the memory that is live between forward and backward beyond the
    memory before, as a share of the 16-bit weights of the whole model."""
    return_what_is_freed()
    groups, found = tiny.join(1), []
    tokens = torch.arange(tiny.SEQ)[None]
    batch = Batch(tokens, tokens + 1, positions=None, cu_seqlens=None, max_seqlen=None, sample_ids=[])
    for precision, recipe, backend, again in cases:
        torch._dynamo.reset()
        sections = {"linear": {"precision": precision, "recipe": recipe}}
        cfg = tiny.config(3, "bf16", model=MODEL, **sections)
        cfg = cfg.model_copy(update={"deepspeed": {"zero_optimization": ZERO}})
        place = {"vocab_size": tiny.VOCAB, "groups": groups, "dtype": torch.bfloat16}
        how = {"tensor_parallel_size": 1, "device": torch.device("cpu"), "dtype": torch.bfloat16}
        place["matmuls"], _ = matmuls_of(cfg.linear, cfg.model, **how)
        model = tiny.transformer(
            cfg.model,
            cfg.attention,
            seed=3,
            activation_checkpointing=again,
            partition=partitioner(tiny.on(cfg, groups), groups),
            **place,
        )
        if backend:
            tiny.compile_first_rank(model, backend)
        engine = build_engine(tiny.on(cfg, groups), model, groups, 1)
        for step in range(2):  # DeepSpeed learns the order of its modules, and torch compiles.
            tiny.global_step(engine, step, sequences=2)
        gc.collect()
        before = resident()
        loss = engine.forward(batch)
        gc.collect()
        held = resident() - before
        found.append((held / 2 / sum(p.ds_numel for p in model.parameters()), loss.item()))
    return found


def test_no_weight_lives_from_forward_to_backward() -> None:
    found = run_distributed(between_passes, 2, CASES)[0]
    for case, (held, _) in zip(CASES, found, strict=True):
        print(case, held)
        # Codes of the blocks' weights alone would be half of the weights. Activations are a tenth here at most.
        assert held < 0.2, f"{case}: {held:.2f} of the weights"
    (_, eager), (_, compiled) = found[2:]
    assert eager == pytest.approx(compiled, abs=1e-6)

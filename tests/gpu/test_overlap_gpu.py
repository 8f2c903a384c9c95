"""DeepSpeed's ZeRO 3, which gathers and reduces on streams of its own, learns on two GPUs as it does without overlap. A
collective that overtook an update or a kernel would use weights of the step before, no gradient, or no weights."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from on_gpu import needs_gpu
from sagetrain.corpus.token_writer import TokenFileWriter

pytestmark = [*needs_gpu(gpus=2), pytest.mark.long]
SEQ, VOCAB, STEPS = 256, 512, 60


def losses(folder: Path, overlap: bool) -> list[float]:
    """Return the losses of every step of a run with two micro-batches a step, and of evaluations on the way."""
    name = f"overlap-{overlap}".lower()
    tree = {
        "model": {
            "num_layers": 8,
            "hidden_size": 1024,
            "ffn_hidden_size": 2816,
            "num_attention_heads": 8,
            "vocab_size": VOCAB,
        },
        "attention": {"backend": "sdpa"},
        "parallel": {"zero_stage": 3},
        "data": {
            "train": [{"path": str(folder / "train")}],
            "valid": [{"path": str(folder / "train")}],
            "seq_length": SEQ,
            "micro_batch_size": 8,
            "document_attention": False,
            "document_positions": False,
        },
        "tokens_per_step": {"schedule": "constant", "tokens": 32 * SEQ},
        "optimizer": {"lr": 1e-3},
        "lr_schedule": {"shape": "constant", "warmup_tokens": 10 * 32 * SEQ},
        "training": {"run_dir": str(folder / name), "total_tokens": STEPS * 32 * SEQ, "dtype": "bf16", "compile": "on"},
        "evaluation": {"every_tokens": 20 * 32 * SEQ, "num_sequences": 32},
        "logging": {"every_steps": 1, "tensorboard": False},
        "deepspeed": {"zero_optimization": {"overlap_comm": overlap}},
    }
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tree))
    words = "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sagetrain", "train", "--config", str(config)
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("train/loss", "valid/loss") if key in row]


def test_losses_are_those_of_collectives_between_the_kernels(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    tokens = np.cumsum(draw.integers(0, 3, size=4_000 * SEQ)) % VOCAB  # A random walk is easy to learn.
    writer = TokenFileWriter(tmp_path / "train").begin(VOCAB)
    writer.add(tokens.astype(np.uint16), np.full(len(tokens) // 100, 100))
    writer.finish()
    writer.publish({})
    (tmp_path / "train.json").unlink()  # Megatron's files come without a tokenizer too.
    beside, between = (losses(tmp_path, overlap) for overlap in (True, False))
    assert len(beside) == len(between) == STEPS + 3
    fall = [before - after for before, after in itertools.pairwise(between)]
    assert max(fall[5:]) > 0.1  # Losses fall so much that a delay by a step would show.
    for step, (ours, theirs) in enumerate(zip(beside, between, strict=True), 1):
        assert ours == pytest.approx(theirs, abs=0.02), step

"""Train a model whose first half is common, with the output projection in 16 bits and in 8 (linear.head).

    PYTHONPATH=.:kernels:tests/support python results/head-loss/arms.py TEXT OUT --seconds 120

results/experts/runs.py does the work and says what TEXT is and what the options do. The model is dense, of 43M
parameters; its blocks are in INT8 with INT8 attention in all arms. No test runs this script. results/log/step.md has
its results ("Then with a common half") and names its commit.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experts"))

import runs
from sagetrain.config import RunConfig
from sagetrain.engines.step import Engine
from sagetrain.model.transformer import changed

SHAPE = {"num_layers": 12, "hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8}
ATTENTION = {"backend": "sage", "recipe": "scores"} if torch.cuda.is_available() else {"backend": "reference"}
if runs.SMALL:
    SHAPE = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 2}
HEADS = {"bf16": "bf16", "band": "bf16", "fp8": "fp8", "int8": "int8"}
ARMS = {arm: (ATTENTION, {"precision": "int8", "head": head}) for arm, head in HEADS.items()}


def config(arm: str, tokens: int) -> RunConfig:
    return runs.config_of(ARMS[arm], tokens, SHAPE, "bf16", qk_norm="before_rope")


def evaluated(engine: Engine, cfg: RunConfig, valid: runs.Text, exact: bool) -> dict:
    """Evaluate a finished run, and one with a head in 8 bits with a head in 16 bits as well."""
    head = engine.model.head
    ways = {"own": nullcontext(), "sixteen": changed({(head, "matmul"): head.in_dtype})} if exact else {}
    return runs.evaluated_in(engine, valid, ways)


def table(rows: list[dict]) -> None:
    """Print the differences to 16 bits of the same seed."""
    runs.compared(rows, ARMS, "", "head")


if __name__ == "__main__":
    runs.main(runs.Study(ARMS, config, evaluated, table))

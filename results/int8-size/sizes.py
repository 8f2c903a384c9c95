"""Train a dense model of one of several sizes whose first half is common, in 16 bits and in INT8.

    PYTHONPATH=.:kernels:tests/support python results/int8-size/sizes.py TEXT OUT/130m --size 130m --steps 60

results/experts/runs.py does the work and says what TEXT is and what the other options do. INT8 means attention (scores)
and linear layers, as in the default where it gains. The peak learning rate is 1e-3 at a width of 512, and falls with
the width. No test runs this script, and the page names its commit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experts"))

import runs
from sagetrain.config import RunConfig

SIZE = os.environ.get("SIZE", "43m")
# Layers, width, width of the MLP, heads of queries and of keys, and whether the output projection is the embedding.
SIZES = {
    "43m": (12, 512, 1536, 8, 8, True),
    "130m": (16, 768, 2304, 12, 12, True),
    "325m": (20, 1024, 3072, 16, 16, True),
    "1b": (20, 2048, 5632, 16, 4, False),
}
KEYS = "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "tie_embeddings"
SHAPE = dict(zip(KEYS, (2, 64, 128, 2, 2, SIZES[SIZE][5]) if runs.SMALL else SIZES[SIZE], strict=True))
ARMS = {name: runs.ARMS[name] for name in ("bf16", "band", "int8")}
runs.RATES = {16384: 1e-3 * 512 / SIZES[SIZE][1]}


def config(arm: str, tokens: int) -> RunConfig:
    return runs.config_of(ARMS[arm], tokens, SHAPE, qk_norm="before_rope")


def table(rows: list[dict]) -> None:
    """Print the differences to 16 bits of the same seed."""
    runs.compared(rows, ARMS, f"{SIZE}, ", "arithmetic")


if __name__ == "__main__":
    if "--size" in sys.argv:  # Of all processes that this one starts.
        place = sys.argv.index("--size")
        os.environ["SIZE"] = sys.argv[place + 1]
        del sys.argv[place : place + 2]
        os.execv(sys.executable, [sys.executable, *sys.argv])
    runs.main(runs.Study(ARMS, config, runs.evaluated_dense, table))

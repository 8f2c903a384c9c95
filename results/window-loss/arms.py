"""Train a model with windows, or the same one without, whose first half is common: attention in 16 bits and in INT8.

    PYTHONPATH=.:kernels:tests/support python results/window-loss/arms.py TEXT OUT --window 256 --steps 80 --seconds 120

results/experts/runs.py does the work and says what TEXT is and what the other options do. The model is dense, of 43M
parameters: with a window, three of four layers have it, the fourth has full attention. Linear layers are in 16 bits in
all arms. No test runs this script, and the page names its commit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experts"))

import runs
from sagetrain.config import RunConfig

WINDOW = int(os.environ.get("WINDOW", "0"))
SHAPE = {"num_layers": 12, "hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8}
if runs.SMALL:
    SHAPE = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 2}
SIXTEEN = {"precision": "bf16"}
ARMS = {
    "bf16": ({"backend": "sdpa"}, SIXTEEN),
    "band": ({"backend": "sdpa"}, SIXTEEN),
    "scores": ({"backend": "sage", "recipe": "scores"}, SIXTEEN),
    "paper": ({"backend": "sage", "recipe": "paper"}, SIXTEEN),
}


def config(arm: str, tokens: int) -> RunConfig:
    windows = {"tokens": WINDOW, "pattern": "WWWF"} if WINDOW else None
    return runs.config_of(ARMS[arm], tokens, {**SHAPE, "windows": windows}, qk_norm="before_rope")


def table(rows: list[dict]) -> None:
    """Print the differences to 16 bits of the same seed."""
    runs.compared(rows, ARMS, f"window {WINDOW or 'none'}, ", "attention")


if __name__ == "__main__":
    if "--window" in sys.argv:  # Of all processes that this one starts.
        place = sys.argv.index("--window")
        os.environ["WINDOW"] = sys.argv[place + 1]
        del sys.argv[place : place + 2]
        WINDOW = int(os.environ["WINDOW"])
    runs.main(runs.Study(ARMS, config, runs.evaluated_dense, table))

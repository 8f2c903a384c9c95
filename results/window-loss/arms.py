"""Train a model with windows, or the same one without, whose first half is common: attention in 16 bits and in INT8.

    PYTHONPATH=.:kernels:tests/support python results/window-loss/arms.py TEXT OUT --window 256 --steps 80 --seconds 120

results/experts/runs.py does the work and says what TEXT is and what the other options do. The model is dense, of 43M
parameters: with a window, three of four layers have it, the fourth has full attention. Linear layers are in 16 bits in
all arms. No test runs this script, and the page names its commit.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experts"))

import runs
import tiny
from sagetrain.config import RunConfig
from sagetrain.engines.protocol import Engine
from sagetrain.model.selection import attention_functions

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
    attention, linear = ARMS[arm]
    windows = {"tokens": WINDOW, "pattern": "WWWF"} if WINDOW else None
    return tiny.config(
        1,
        "bf16" if torch.cuda.is_available() else "fp32",
        model={**SHAPE, "vocab_size": runs.VOCAB, "windows": windows},
        attention={**attention, "qk_norm": "before_rope"},
        linear=linear,
        data={"seq_length": runs.LENGTH, "micro_batch_size": runs.MICRO},
        tokens_per_step={"tokens": tokens},
        optimizer={"lr": 1e-3},
        parallel={"engine": "fsdp"},
        training={"total_tokens": 10**9, "cuda_graphs": "off"},
    )


@torch.no_grad()
def evaluated(engine: Engine, cfg: RunConfig, valid: runs.Text, exact: bool) -> dict:
    """Evaluate a finished run in its own arithmetic, and one in INT8 in 16 bits as well, both not compiled."""
    found = {"valid": engine.evaluate(valid.batches(list(range(runs.VALID))))["valid/loss"]}
    if not exact:
        return found
    dtype = torch.bfloat16 if engine.device.type == "cuda" else torch.float32
    sdpa = cfg.attention.model_copy(update={"backend": "sdpa"})
    (reference, *_) = attention_functions(sdpa, cfg.model, device=engine.device, dtype=dtype)
    for name, how in (("own", nullcontext()), ("sixteen", engine.model.exact(reference))):
        with torch.compiler.set_stance("force_eager"), how:
            found[name] = engine.evaluate(valid.batches(list(range(runs.VALID))))["valid/loss"]
    return found


def table(rows: list[dict]) -> None:
    """Print the differences to 16 bits of the same seed."""
    runs.compared(rows, ARMS, f"window {WINDOW or 'none'}, ", "attention")


if __name__ == "__main__":
    if "--window" in sys.argv:  # Of all processes that this one starts.
        place = sys.argv.index("--window")
        os.environ["WINDOW"] = sys.argv[place + 1]
        del sys.argv[place : place + 2]
        WINDOW = int(os.environ["WINDOW"])
    runs.main(runs.Study(ARMS, config, evaluated, table))

"""configs/24gb.yaml trains 1B on a GPU whose memory is limited to 22 GiB, CUDA's context included."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from on_gpu import needs_gpu

ROOT = Path(__file__).parents[2]
pytestmark = [*needs_gpu(), pytest.mark.long]
LIMIT, CONTEXT = 22.0, 1.5
"""GiB of the card, and of them CUDA's context with its kernels, which torch's limit does not count: 1.48 on an H100."""
STEPS = 2
INT8 = "linear.precision=int8", "attention.backend=sage", "attention.recipe=scores"


def test_1b_trains_on_a_card_of_24_gb() -> None:
    """torch raises an error in the process if it needs more than the limit. INT8 layers take more than 16-bit ones."""
    how = [
        "--gib",
        str(LIMIT - CONTEXT),
        "--steps",
        str(STEPS),
        "--tokens",
        "65536",
        "checkpoint.every_tokens=131072",
        *INT8,
    ]
    run = subprocess.run(
        [sys.executable, "results/small-card/train.py", *how], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    reserved = [float(gib) for gib in re.findall(r"GiB allocated, ([\d.]+) reserved", run.stdout)]
    assert len(reserved) == STEPS and 15 < max(reserved) <= LIMIT - CONTEXT

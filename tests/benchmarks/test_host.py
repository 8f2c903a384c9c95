"""The benchmark of the host's time runs without a GPU, as one rank of two, alone."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import torch.distributed as dist

from distributed import run_distributed
from sagetrain.parallel import copies

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("benchmark_host", ROOT / "benchmarks/host.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)


def measure() -> tuple[str, int]:
    """Return the benchmark's output, and the number of collectives that went by copies."""
    dist.destroy_process_group()  # The benchmark makes its own process group.
    with contextlib.redirect_stdout(io.StringIO()) as out:
        benchmark.main(["--steps", "2", "--compile", "aot_eager", "model.num_layers=2"])
    (connected,) = copies.connected.values()
    return out.getvalue(), connected._count


def test_it_times_every_micro_step_with_its_collectives() -> None:
    ((text, count),) = run_distributed(measure, 1)
    losses = re.search("losses (.*)", text)[1].split()
    assert len({*losses}) == benchmark.WARM_UP
    assert all(4 < float.fromhex(loss) < 6 for loss in losses)  # The vocabulary has 128 words.
    times = [float(ms) for ms in re.findall(r"(?:median|least|step) +([\d.]+) ms", text)]
    assert len(times) == 5
    assert all(ms > 0 for ms in times)
    # With two halves there are 4 collectives a block and 2 around the blocks, forward and backward.
    assert count == (benchmark.WARM_UP + 2 * 2) * 2 * 2 * (4 * 2 + 2)

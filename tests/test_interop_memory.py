"""Export and import take the memory of one file of weights and a layer: measured by the kernel, with a model large
enough to show."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from distributed import run_distributed
from sagetrain.interop.exporting import export
from sagetrain.interop.importing import import_folder
from saved_runs import config, save_runs

SHAPE = {"num_layers": 10, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8, "head_dim": 64}
LAYER = 4 * (2 * 512 * (512 + 128) + 3 * 512 * 2048)  # bytes
SHARD = 2 * LAYER
SLACK = 24 * 2**20  # what is read at a time, three times over, and as much that the allocator gives back late


def memory(key: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM, its peak."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def taken(act: Callable[[Path], object], folder: Path) -> int:
    """How many bytes more than before an action took at its peak: the least of three times, each into a folder of its
    own. Before each the allocator gives back what it has: that would count for nothing."""
    peaks = []
    for time in range(3):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        act(folder / str(time))
        peaks.append(memory("VmHWM") - before)
    return min(peaks)


def measure(root: str, tokenizer: str) -> list[int]:
    run = Path(root) / "run"
    small = Path(root) / "small"
    save_runs([(str(small), config(small), 1), (str(run), config(run, **SHAPE), 1)], Path(tokenizer))
    export(small, small / "out")  # what the first call of all takes
    import_folder(small / "out", small / "in")
    return [
        taken(lambda out: export(run, out, shard_bytes=SHARD), Path(root) / "out"),
        taken(lambda run: import_folder(Path(root) / "out/0", run, shard_bytes=SHARD), Path(root) / "in"),
    ]


def test_a_file_of_weights_and_a_layer_at_a_time(tmp_path: Path, model: Path) -> None:
    for more in run_distributed(measure, 1, str(tmp_path), str(model))[0]:
        print(f"{more / 2**20:.0f} MiB, files of {SHARD / 2**20:.0f} MiB, layers of {LAYER / 2**20:.0f} MiB")
        assert more < SHARD + LAYER + SLACK < 5 * LAYER

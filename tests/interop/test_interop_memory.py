"""Export and import take the memory of one file of weights and a layer. The kernel measures it with a model that is
large enough to show."""

from __future__ import annotations

from pathlib import Path

from distributed import run_distributed
from process_memory import peak_of, return_what_is_freed
from sagetrain.interop.exporting import export
from sagetrain.interop.importing import import_folder
from saved_runs import config, save_runs

SHAPE = {"num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8, "head_dim": 64}
LAYER = 4 * (2 * 512 * (512 + 128) + 3 * 512 * 2048)  # The unit is bytes.
SHARD = 2 * LAYER


def measure(root: str, tokenizer: str) -> list[int]:
    return_what_is_freed()
    run, small, out = Path(root) / "run", Path(root) / "small", Path(root) / "out"
    save_runs([(str(small), config(small), 1), (str(run), config(run, **SHAPE), 1)], Path(tokenizer))
    export(small, small / "out")  # The first call takes memory that later calls do not take.
    import_folder(small / "out", small / "in")
    return [
        peak_of(lambda: export(run, out, shard_bytes=SHARD)),
        peak_of(lambda: import_folder(out, Path(root) / "in", shard_bytes=SHARD)),
    ]


def test_a_file_of_weights_and_a_layer_at_a_time(tmp_path: Path, model: Path) -> None:
    for more in run_distributed(measure, 1, str(tmp_path), str(model))[0]:
        print(f"{more / 2**20:.0f} MiB, files of {SHARD / 2**20:.0f} MiB, layers of {LAYER / 2**20:.0f} MiB")
        assert more < SHARD + LAYER  # The model has six layers.

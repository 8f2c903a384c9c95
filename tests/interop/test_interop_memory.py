"""Export and import take the memory of one file of weights and a layer, and with experts that of two layers. The kernel
measures it with models that are large enough to show."""

from pathlib import Path

from distributed import run_distributed
from process_memory import peak_of, return_what_is_freed
from sagetrain.interop.exporting import export
from sagetrain.interop.importing import import_folder
from saved_runs import config, save_runs

SHAPE = {"num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8, "head_dim": 64}
EXPERTS = {"number": 32, "per_token": 4, "ffn_size": 64, "renormalize": True}
LAYER = 4 * (2 * 512 * (512 + 128) + 3 * 512 * 2048)  # The unit is bytes. The 32 experts have as many as the dense MLP.
SHARD = 2 * LAYER


def measure(root: str, tokenizer: str) -> list[int]:
    return_what_is_freed()
    small, runs = Path(root) / "small", {name: Path(root) / name for name in ("dense", "mixture")}
    shapes = {"dense": SHAPE, "mixture": SHAPE | {"experts": EXPERTS}}
    saved = [(str(run), config(run, **shapes[name]), 1) for name, run in runs.items()]
    save_runs([(str(small), config(small), 1), *saved], Path(tokenizer))
    export(small, small / "out")  # The first call takes memory that later calls do not take.
    import_folder(small / "out", small / "in")
    return [
        peak_of(call)
        for run in runs.values()
        for call in (
            lambda: export(run, run / "out", shard_bytes=SHARD),  # noqa: B023
            lambda: import_folder(run / "out", run / "in", shard_bytes=SHARD),  # noqa: B023
        )
    ]


def test_a_file_of_weights_and_a_layer_at_a_time(tmp_path: Path, model: Path) -> None:
    *dense, out, into = run_distributed(measure, 1, str(tmp_path), str(model))[0]
    for more, layers in ((dense[0], 3), (dense[1], 3), (out, 2), (into, 2)):
        print(f"{more / 2**20:.0f} MiB, files of {SHARD / 2**20:.0f} MiB, layers of {LAYER / 2**20:.0f} MiB")
        assert more < layers * LAYER  # The model has six layers.

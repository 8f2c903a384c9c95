"""Loading a checkpoint at any layout takes little memory beside the state itself. The kernel measures it with a model
that is large enough to show."""

from functools import partial
from pathlib import Path

import tiny
from distributed import run_distributed
from process_memory import peak_of, return_what_is_freed
from sagetrain.checkpoint import on_disk, reading
from sagetrain.engines.step import Engine

MODEL = {"num_layers": 1, "hidden_size": 768, "ffn_hidden_size": 2048, "num_attention_heads": 12}


def engine_of(tp_size: int, stage: int, dtype: str, name: str = "fsdp"):
    # There are two tensors with 6.3M values each, so the test would show if one were read whole or kept.
    tiny.VOCAB = 8192
    return tiny.engine(tiny.config(stage, dtype, model=MODEL, parallel={"engine": name}), tiny.join(tp_size))


def write(root: str, tp_size: int, stage: int) -> None:
    """Write a checkpoint of step 1."""
    engine = engine_of(tp_size, stage, "fp32")
    tiny.save(Path(root), engine.groups, tiny.run_state(1, tiny.SEQ), engine.owned())


def load_engine(root: str, engine: Engine) -> None:
    reading.load_engine(reading.Reader(Path(root) / on_disk.folder_name(1)), engine, 1)


def load(root: str, layouts: list[tuple[int, int, str, str]]) -> dict[tuple, tuple[int, int]]:
    """Return, for each (tp, stage, dtype, engine), the bytes of this rank's state, and the additional bytes that
    loading took."""
    return_what_is_freed()
    sizes = {}
    for tp_size, stage, dtype, name in layouts:
        engine = engine_of(tp_size, stage, dtype, name)
        tensors = [tensor for shard in engine.owned() for tensor in map(shard.read, shard.kinds)]
        model = [*engine.leaves().values()]
        for tensor in tensors:  # The whole state is in memory before, so that only loading itself adds to it.
            tensor.data.fill_(1.0)
        state = sum(t.numel() * t.element_size() for t in [*tensors, *model])
        sizes[root[-1], tp_size, stage, dtype, name] = (state, peak_of(partial(load_engine, root, engine)))
        del engine, tensors, model
    return sizes


def write_and_load(root: str) -> dict[tuple, tuple[int, int]]:
    """Write two checkpoints on two ranks and load them: a tensor-parallel one at ZeRO 1, and a data-parallel one at
    ZeRO 3."""
    write(f"{root}/a", 2, 1)
    write(f"{root}/b", 1, 3)
    tensor = load(f"{root}/a", [(2, 1, "fp32", "fsdp"), (1, 2, "bf16", "deepspeed")])
    return tensor | load(f"{root}/b", [(2, 1, "bf16", "deepspeed")])


def test_loading_takes_at_most_1_3_times_the_state(tmp_path) -> None:
    for sizes in run_distributed(write_and_load, 2, str(tmp_path)):
        for layout, (state, more) in sizes.items():
            print(f"{layout}: state {state / 2**20:.0f} MiB, loaded in {1 + more / state:.3f} times that")
            assert state > 110 * 2**20
            assert 1 + more / state <= 1.3, f"{layout}: {more / 2**20:.0f} MiB beside {state / 2**20:.0f} MiB"

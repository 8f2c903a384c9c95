"""A GPU runs out of memory: the message, and the snapshot. The error is an artificial one, because there is no GPU
here."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from distributed import run_distributed
from sagetrain.cli import exits
from sagetrain.config import RunConfig
from sagetrain.config.errors import TrainingError
from sagetrain.training import build_run as building
from sagetrain.training import out_of_memory
from sagetrain.training.out_of_memory import memory_explained, record_allocations


def without_room_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has more to say")


def in_folder(folder: Path) -> RunConfig:
    return tiny.config(1, training={"run_dir": str(folder)}, data={"micro_batch_size": 8})


def run_out(folder: Path) -> str:
    with pytest.raises(TrainingError) as raised, memory_explained(in_folder(folder), tiny.VOCAB):
        without_room_on_a_gpu()
    return str(raised.value)


def test_the_message_has_prediction_advice_and_snapshot(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"blocks"))
    monkeypatch.setattr(out_of_memory, "rank_and_world_size", lambda: (3, 4))
    monkeypatch.setattr(out_of_memory, "total_bytes", lambda parts: 61.24 * 2**30)
    said = run_out(tmp_path)
    assert said.startswith("rank 3 is out of GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB. ")
    assert "predicts 61.2 GiB" in said and "up to data.micro_batch_size (now 8), training.activation_" in said
    assert str(tmp_path / "memory/rank-3.pickle") in said and "more to say" not in said
    assert (tmp_path / "memory/rank-3.pickle").read_bytes() == b"blocks"


def test_a_snapshot_that_cannot_be_written_hides_nothing(tmp_path, monkeypatch) -> None:
    def full(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    said = run_out(tmp_path)
    assert "Tried to allocate 2.00 GiB" in said and "no snapshot of the memory could be written" in said


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other"), memory_explained(in_folder(tmp_path), tiny.VOCAB):
        raise ValueError("other")
    assert not list(tmp_path.iterdir())


def test_the_latest_allocations_are_recorded_with_their_lines(monkeypatch) -> None:
    asked: list[dict] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: asked.append(how))
    record_allocations(torch.device("cpu"))
    assert asked == []
    record_allocations(torch.device("cuda", 0))
    assert asked == [{"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": 50_000}]


def start_without_memory(corpus: str, run_dir: str) -> None:
    order: list[str] = []

    def full(*_: object) -> None:
        order.append("model")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    building.record_allocations = lambda device: order.append(f"recording on {device}")
    building.make_engine = full
    torch.cuda.memory._dump_snapshot = lambda path: Path(path).write_bytes(b"blocks")
    data, training = {"train": [{"path": f"{corpus}/train"}]}, {"run_dir": run_dir}

    def said(stage: int = 1, dtype: str = "fp32", **sections: dict) -> str:
        order.clear()
        with pytest.raises(TrainingError) as raised:
            building.build(tiny.config(stage, data=data, training={**training, "dtype": dtype}, **sections))
        return str(raised.value)

    window = {"from_step": 1, "steps": 1}
    for more, expected in (({}, ["model"]), ({"profile": window}, ["recording on cpu", "model"])):
        assert re.match(r"rank 0 is out of GPU memory: .* predicts 0\.0 GiB", said(**more))
        assert order == expected and Path(run_dir, "memory/rank-0.pickle").exists()
    # The ZeRO stage in the message is the one that runs: DeepSpeed's bf16 at stage 0 is stage 1.
    assert "parallel.zero_stage (now 1)" in said(0, "bf16", parallel={"engine": "deepspeed"})
    priced: list[str] = []
    out_of_memory.memory_per_rank = lambda cfg, *_: priced.append(cfg.linear.precision) or []
    said(linear={"precision": "auto"})
    assert priced == ["bf16"]  # The prediction is for what auto has become. FP8 keeps weights in 8 bits as well.


def test_out_of_memory_before_the_first_step_is_explained_too(tmp_path: Path, corpus: Path) -> None:
    """The optimizer's state is most of the memory of a run, and is allocated before the first step."""
    run_distributed(start_without_memory, 1, str(corpus), str(tmp_path / "run"))


@pytest.mark.parametrize("asks", [without_room_on_a_gpu, lambda: torch.empty(1 << 50, dtype=torch.int8)])
def test_eval_and_generate_say_what_helps(capsys: pytest.CaptureFixture, asks: Callable[[], object]) -> None:
    with pytest.raises(SystemExit) as ended, exits.Errors():
        asks()
    assert ended.value.code == 4
    said = capsys.readouterr().err
    assert re.match(r"error: .*[Tt]ried to allocate .*[^.]\. Take less at a time .*eval: --context", said)
    assert "--batch-size" in said and said.count("\n") == 1

"""training.perturb rounds the weights that a run begins or goes on with in another way."""

import shutil
from pathlib import Path

import pytest
import torch

import tiny
from distributed import run_distributed
from runs import finish, log_of, training_rows, write_config
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.on_disk import folder_name
from sagetrain.checkpoint.reading import Reader
from sagetrain.training.perturb import GAINS, perturb

GAIN = GAINS[0]
LAYOUTS = {
    "fp32": [(1, 1, 0, "fsdp"), (1, 2, 1, "deepspeed"), (2, 1, 3, "fsdp")],
    "bf16": [(2, 1, 1, "fsdp"), (1, 1, 2, "deepspeed"), (1, 1, 3, "fsdp")],
}
"""The values are the tensor parallel and context parallel size, the ZeRO stage and the engine of two ranks."""


def saved(root: Path, engine, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return weights and moments by kind and name, as a checkpoint has them."""
    folder = tiny.save(root, engine.groups, tiny.run_state(step, 0, optimizer_steps=step), engine.owned())
    torch.distributed.barrier()
    reader = Reader(folder)
    return {kind: {name: reader.local(name, kind, 0, 1) for name in reader.tensors} for kind in KINDS}


def perturb_everywhere(root: str, dtype: str) -> dict:
    """Return, for every layout, the changes in a checkpoint, the gains before and after, and the gains that compute."""
    found = {}
    for *sizes, stage, name in LAYOUTS[dtype]:
        engine = tiny.engine(tiny.config(stage, dtype, parallel={"engine": name}), tiny.join(*sizes))
        for step in range(2):
            tiny.global_step(engine, step)
        place = Path(root) / f"{sizes}-{stage}"
        before = saved(place, engine, 1)
        perturb(engine, 0)
        none = saved(place, engine, 2)
        perturb(engine, 3)
        after = saved(place, engine, 3)
        computing = engine.gathered()[GAIN].detach().clone()
        alike = all(torch.equal(none[kind][name], value) for kind in KINDS for name, value in before[kind].items())
        differing = [(k, name) for k in KINDS for name, value in before[k].items() if not after[k][name].equal(value)]
        gains = before["weight"][GAIN], after["weight"][GAIN]
        found[(*sizes, stage)] = alike, differing, *gains, computing, tiny.global_step(engine, 2).loss
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_gain_gets_the_next_number_above_at_every_layout(tmp_path: Path, dtype: str) -> None:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for rank in run_distributed(perturb_everywhere, 2, str(tmp_path), dtype):
        for alike, differing, before, after, computing, loss in rank.values():
            assert alike and differing == [("weight", GAIN)]
            own = before.to(kind, copy=True)
            own[2] = torch.nextafter(own[2], torch.tensor(9, dtype=kind))
            assert own[2] > before[2] and torch.equal(computing.to(kind), own)
            expected = before.clone()
            expected[2] = own[2]
            assert torch.equal(after, expected) and loss == loss


def perturb_gemma(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gains that compute, before and after, where norms multiply by 1 + gain."""
    engine = tiny.engine(tiny.config(1, dtype, model={"conventions": "gemma"}), tiny.join(1))
    before = engine.gathered()[GAIN].detach().clone()
    perturb(engine, 3)
    return before, engine.gathered()[GAIN].detach().clone()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gains_near_zero_change_what_norms_multiply_by(dtype: str) -> None:
    before, after = run_distributed(perturb_gemma, 1, dtype)[0]
    assert not before.any()
    expected = torch.ones_like(before)
    expected[2] = torch.nextafter(expected[2], expected[2] + 1)
    assert torch.equal(1 + after, expected)


SAVES = {"every_tokens": 1024, "keep_last": 9}


def trained(tmp_path: Path, corpus: Path, name: str, perturb: int) -> dict[int, float]:
    """Train in a folder of that name, from a checkpoint if there is one. Return the losses by step."""
    training = {"total_tokens": 2560, "perturb": perturb}
    config = write_config(tmp_path / f"{name}.yaml", corpus, tmp_path / name, training=training, checkpoint=SAVES)
    finish("sagetrain", config)
    return {row["step"]: row["train/loss"] for row in training_rows(tmp_path / name)}


def test_a_run_begins_or_goes_on_in_another_rounding(corpus: Path, tmp_path: Path) -> None:
    plain, other = (trained(tmp_path, corpus, name, number) for name, number in (("plain", 0), ("other", 2)))
    assert other != plain and other == pytest.approx(plain, abs=1e-3)
    place = tmp_path / "on" / "checkpoints"
    shutil.copytree(tmp_path / "plain/checkpoints" / folder_name(4), place / folder_name(4))
    on = trained(tmp_path, corpus, "on", 2)
    rest = {step: plain[step] for step in range(5, 11)}
    assert on != rest and on == pytest.approx(rest, abs=1e-3)
    assert "changed since that checkpoint: training.perturb: 0 -> 2" in log_of(tmp_path / "on.yaml")

    for name in ("twice", "whole"):  # A checkpoint that has that rounding already is not rounded again.
        shutil.copytree(place / folder_name(8), tmp_path / name / "checkpoints" / folder_name(8))
    twice, whole = (trained(tmp_path, corpus, name, number) for name, number in (("twice", 2), ("whole", 0)))
    assert list(twice) == [9, 10] and twice == whole

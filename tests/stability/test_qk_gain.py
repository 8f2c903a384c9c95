"""A cap on the gains of QK-norm, and their weight decay, work at every ZeRO stage and layout, and through a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from distributed import run_distributed
from sagetrain.checkpoint import on_disk, reading
from sagetrain.checkpoint.reading import Reader
from sagetrain.config import RunConfig
from sagetrain.engines.protocol import Engine, Observers, Owned, StepResult
from sagetrain.model.tensors import TensorSpec, tensors
from sagetrain.optim.build import groups
from sagetrain.optim.pieces import TensorPiece
from sagetrain.optim.weights import ChanceWeights, KahanWeights
from sagetrain.parallel.rng import rng_state
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.gain_cap import GainCap
from sagetrain.stability.spikes import Verdict
from sagetrain.training.controllers import updates_of

CAP = 1.02  # The cap is no bf16 number.
STEPS = 4


def capped(stage: int, dtype: str, **qk_gain: Any) -> RunConfig:
    return tiny.config(stage, dtype, stability={"qk_gain": qk_gain or {"cap": CAP}}, optimizer={"eps": 1e-6})


def step_of(engine: Engine, cfg: RunConfig, step: int, sequences: int = 4) -> StepResult:
    """Take a step as the trainer does, which gives the engine the observers of updates."""
    return tiny.global_step(engine, step, sequences, Observers(updates=updates_of(cfg, engine)))


def is_qk_gain(spec: TensorSpec) -> bool:
    return spec.kind == "qk_gain"


def masters_of(engine: Engine) -> list[torch.Tensor]:
    return [kept.weight.clone() for kept in engine.owned(is_qk_gain) if len(kept.weight)]


def copies_of(engine: Engine) -> list[torch.Tensor]:
    """Return whole gains as the model computes with them. At ZeRO 3 they stay gathered, being small."""
    return [gain.detach().clone() for name, gain in engine.gathered().items() if is_qk_gain(engine.model.specs[name])]


def steps_of(tp_size: int, stage: int, dtype: str, qk_gain: dict) -> dict[str, Any]:
    cfg = capped(stage, dtype, **qk_gain)
    engine = tiny.engine(cfg, tiny.join(tp_size))
    seen: dict[str, Any] = {"masters": [], "copies": [], "shares": [], "losses": [], "rounded": True}
    for step in range(STEPS):
        result = step_of(engine, cfg, step, 2 * engine.groups.dp_size)
        seen["shares"].append(result.metrics.get("qk_gain/capped_share"))
        seen["losses"].append(result.loss)
        seen["masters"].append(masters_of(engine))
        seen["copies"].append(copies_of(engine))
        parameters = engine.gathered()
        for shard in engine.owned(is_qk_gain):  # The model's values are the masters', rounded.
            copy = parameters[shard.name].data.view(-1)[shard.start : shard.stop]
            seen["rounded"] &= torch.equal(shard.weight.to(copy.dtype), copy)
    return seen


def free_and_capped(tp_size: int, stage: int, dtype: str) -> list[dict]:
    return [steps_of(tp_size, stage, dtype, keys) for keys in ({"decay": 0.0}, {})]


def test_masters_in_bf16_are_clipped_whole() -> None:
    """Masters in two parts hold the cap to the last bit of both, and read the same after a resume. Masters in one part
    hold its rounding, which counts as capped."""
    groups, cpu = ParallelGroups.single(), torch.device("cpu")
    for cap, kahan in ((2.0, True), (1.9, True), (1.9, False)):
        values = torch.tensor([3.0, -2.0, 0.5, 2.003])
        piece = TensorPiece(tiny.spec(4), 0, 1, 0, 4, values.bfloat16())
        masters = KahanWeights(piece) if kahan else ChanceWeights(piece, 0)
        masters.write(values)
        gain = Owned(piece.spec, 0, 4, piece.weight, {}, masters=masters)
        observer = GainCap(cap, lambda gain=gain: [gain], groups, cpu)
        observer.after_update()
        most = torch.tensor(cap).bfloat16().float()
        assert gain.read("weight").tolist() == [most, -most, 0.5, most]
        model = gain.weight.clone()
        gain.write("weight", gain.read("weight"))
        assert torch.equal(gain.weight, model)
        observer.before_update()
        assert groups.metrics.reduce(cpu)["qk_gain/capped_share"] == 0.75


@pytest.mark.parametrize(
    ("world", "tp_size", "stage", "dtype"),
    [(1, 1, 0, "fp32"), (2, 1, 1, "bf16"), (2, 2, 1, "bf16"), (2, 1, 2, "fp32"), (2, 1, 3, "bf16"), (2, 2, 3, "fp32")],
)
def test_no_gain_is_above_the_cap_at_any_stage(world: int, tp_size: int, stage: int, dtype: str) -> None:
    found = run_distributed(free_and_capped, world, tp_size, stage, dtype)
    free, ranks = found[0][0], [capped_steps for _, capped_steps in found]
    assert max(x.abs().max() for x in free["copies"][-1]) > 1.03 and free["shares"] == [None] * STEPS
    for seen in ranks:
        assert all((gain.abs() <= torch.tensor(CAP)).all() for step in seen["masters"] for gain in step)
        assert seen["rounded"]
        # Values that are replicated over tensor- and data-parallel ranks stay the same bits.
        assert all(
            torch.equal(a, b)
            for ours, theirs in zip(seen["copies"], ranks[0]["copies"], strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
        assert seen["shares"] == ranks[0]["shares"] and seen["losses"] == ranks[0]["losses"]
    whole = torch.cat(ranks[0]["copies"][-2])
    at_cap = (whole.float() >= torch.tensor(CAP).to(whole.dtype).float()).double().mean().item()
    assert ranks[0]["shares"][0] == 0.0 < ranks[0]["shares"][-1]
    if dtype == "fp32":  # In bf16, values just below the cap are rounded to it too.
        assert ranks[0]["shares"][-1] == pytest.approx(at_cap)
    assert ranks[0]["losses"][0] == free["losses"][0] and ranks[0]["losses"][-1] != free["losses"][-1]


def test_the_cap_is_one_of_magnitude() -> None:
    cfg = capped(1, "fp32")
    engine = tiny.engine(cfg, tiny.join(1))
    for shard in engine.owned(is_qk_gain):
        for values in (shard.weight, *shard.copies):
            values.fill_(-2 * CAP)
    refuse = Observers(updates=updates_of(cfg, engine), judge=lambda metrics: Verdict(apply=False))
    assert tiny.global_step(engine, 0, observers=refuse).metrics["qk_gain/capped_share"] == 1.0
    assert all((gain == -2 * CAP).all() for gain in masters_of(engine))  # A refused step changes no gain.
    shares = [step_of(engine, cfg, step).metrics["qk_gain/capped_share"] for step in range(2)]
    assert shares == [1.0, 1.0] and all((gain >= -torch.tensor(CAP)).all() for gain in masters_of(engine))


def test_gains_alone_decay() -> None:
    """The decay is lr x decay of AdamW, compared with the same updates without decay."""
    plain, decayed = (
        run_distributed(steps_of, 1, 1, stage, "fp32", {"decay": decay})[0] for stage, decay in ((1, 0.0), (1, 0.5))
    )
    for before, after in zip(plain["copies"][0], decayed["copies"][0], strict=True):
        torch.testing.assert_close(before - after, torch.full_like(before, 1e-2 * 0.5), atol=2e-6, rtol=0)
    cfg = capped(0, "fp32", decay=0.5)
    specs = list(tensors(cfg.model, cfg.attention, tiny.VOCAB))
    held = {group.weight_decay: {*group.names} for group in groups(specs, cfg)}
    gains = {spec.name for spec in specs if is_qk_gain(spec)}
    assert held[0.5] == gains and len(gains) == 4
    assert sum(map(len, held.values())) == len(specs)
    assert held[0] == {spec.name for spec in specs if spec.is_gain} - gains


def save_and_go_on(root: str, stage: int, dtype: str) -> list[torch.Tensor]:
    cfg = capped(stage, dtype)
    engine = tiny.engine(cfg, tiny.join(1))
    for step in range(3):
        step_of(engine, cfg, step)
    writer = tiny.saver(Path(root), engine.groups)
    writer.start(tiny.run_state(3, 192), "{}", engine.owned(), rng_state())
    writer.wait()
    for step in range(3, STEPS):
        step_of(engine, cfg, step)
    return [*masters_of(engine), *copies_of(engine)]


def load_and_go_on(root: str, tp_size: int, stage: int, dtype: str) -> list[torch.Tensor]:
    cfg = capped(stage, dtype)
    engine = tiny.engine(cfg, tiny.join(tp_size), seed=99)
    reading.load_engine(Reader(Path(root) / on_disk.folder_name(3)), engine, optimizer_steps=3)
    for step in range(3, STEPS):
        step_of(engine, cfg, step)
    return [*masters_of(engine), *copies_of(engine)]


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (3, "bf16")])
def test_a_capped_run_resumes_bitwise_and_at_another_layout(tmp_path: Path, stage: int, dtype: str) -> None:
    through = run_distributed(save_and_go_on, 2, str(tmp_path), stage, dtype)
    again = run_distributed(load_and_go_on, 2, str(tmp_path), 1, stage, dtype)
    for ours, theirs in zip(again, through, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for rank in run_distributed(load_and_go_on, 2, str(tmp_path), 2, 1, "fp32"):
        assert all((gain.abs() <= torch.tensor(CAP)).all() for gain in rank)

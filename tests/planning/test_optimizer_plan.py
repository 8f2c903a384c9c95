"""The plan of optimizers: memory by moments and masters, and the time that Muon takes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from sagetrain.config.load import load_config
from sagetrain.hardware import HARDWARE
from sagetrain.model.accounting import memory_per_rank, muon_parameters, save_host_bytes, total_bytes
from sagetrain.planning.layouts import overrides_to, usable_memory
from sagetrain.planning.performance import predict
from sagetrain.planning.plan import make_plan
from sagetrain.planning.show import show_plan

CONFIG, VOCAB = Path(__file__).parents[2] / "configs/1b.yaml", 32_768
PARAMETERS, MATRICES = 1_036_082_176, 901_775_360
FSDP = "parallel.engine=fsdp"


def optimizer_bytes(*overrides: str) -> int:
    items = memory_per_rank(load_config(CONFIG, overrides), 1, VOCAB)
    return next(item.bytes for item in items if item.name == "optimizer")


def test_memory_follows_moments_and_masters() -> None:
    """AdamW has two moments of each weight. Muon has one, of the matrices of blocks."""
    cases = {
        (): 12 * PARAMETERS,
        ("optimizer.moments=bf16",): 8 * PARAMETERS,
        ("optimizer.moments=int8",): 6 * PARAMETERS + 2 * PARAMETERS // 64,
        ("optimizer.name=muon",): 12 * PARAMETERS - 4 * MATRICES,
        ("optimizer.name=muon", "optimizer.muon.adamw_matrices=[q,k,v,out,gate,up,down]"): 12 * PARAMETERS,
        (FSDP, "optimizer.master=bf16_chance"): 10 * PARAMETERS,
        (FSDP, "optimizer.master=bf16_kahan", "optimizer.moments=bf16"): 8 * PARAMETERS,
    }
    for overrides, expected in cases.items():
        assert optimizer_bytes(*overrides) == pytest.approx(expected, abs=4), overrides
    muon = load_config(CONFIG, ["optimizer.name=muon"])
    assert muon_parameters(muon) == MATRICES
    saved = [save_host_bytes(load_config(CONFIG, more), 8, VOCAB) for more in ([], ["optimizer.name=muon"])]
    assert saved[0] - saved[1] == pytest.approx(4 * MATRICES / 8, abs=4)


def test_a_small_model_has_no_whole_round_of_muon() -> None:
    """A round of Muon holds no more matrices than the model has, and so a small model stays small."""
    quickstart = CONFIG.with_name("quickstart.yaml")
    adamw, muon = (
        sum(item.bytes for item in memory_per_rank(load_config(quickstart, [f"optimizer.name={name}"]), 2, 2048))
        for name in ("adamw", "muon")
    )
    assert muon < 1.1 * adamw


def test_muon_takes_the_time_of_its_matmuls_shared_by_all_ranks() -> None:
    """44 TFLOP at 1B are 72 ms at the rate of large matmuls on an H100, and every owner has its share of them."""
    gpu, cfg = HARDWARE["h100"], load_config(CONFIG, ["optimizer.name=muon"])
    alone, two, eight = (predict(cfg, ranks, VOCAB, gpu) for ranks in (1, 2, 8))
    assert 0.05 < alone.orthogonalizing < 0.12
    assert alone.orthogonalizing / two.orthogonalizing == pytest.approx(2, rel=0.05)
    assert alone.orthogonalizing / eight.orthogonalizing == pytest.approx(8, rel=0.1)
    assert alone.seconds == pytest.approx(
        predict(load_config(CONFIG), 1, VOCAB, gpu).seconds + alone.orthogonalizing, rel=1e-6
    )
    sent = [c for c in two.collectives if c.kind == "all-to-all"]
    assert [c.purpose for c in sent] == ["matrices of Muon"]
    assert sent[0].count * sent[0].payload == pytest.approx(2 * 2 * MATRICES / 2, rel=0.01)
    unsharded = load_config(CONFIG, ["optimizer.name=muon", "training.dtype=fp32", "parallel.zero_stage=0"])
    assert predict(unsharded, 2, VOCAB, gpu).orthogonalizing == pytest.approx(alone.orthogonalizing)


def proposals(name: str, gpu: str, *overrides: str, ranks: int = 1) -> list[list[str]]:
    """Return the settings to paste for the layouts that `plan` proposes."""
    made = make_plan(CONFIG.with_name(f"{name}.yaml"), overrides, ranks, HARDWARE[gpu])
    return [overrides_to(made.cfg, item.cfg) for item in made.proposed or []]


def fits(name: str, gpu: str, *overrides: str, ranks: int = 1) -> bool:
    """Whether a configuration with these overrides fits, without an error of its own."""
    made = make_plan(CONFIG.with_name(f"{name}.yaml"), overrides, ranks, HARDWARE[gpu])
    return not made.errors and total_bytes(made.memory) <= usable_memory(HARDWARE[gpu])


@pytest.mark.parametrize(("name", "gpu", "ranks", "states"), [
    ("1b", "h100", 1, [set()] * 5),
    ("1b", "rtx4090", 1, [{"optimizer.moments=int8"}] * 5),
    ("8b", "h200", 1, [{"optimizer.moments=int8"}] * 5),
    ("8b", "h100", 1, [
        {"parallel.engine=fsdp", "optimizer.moments=int8", "optimizer.master=bf16_chance"},
        {"parallel.engine=fsdp", "optimizer.moments=int8", "optimizer.master=bf16_kahan"},
    ]),
    ("8b", "l40s", 2, [
        {"parallel.engine=fsdp", "optimizer.moments=int8", "optimizer.master=bf16_chance"},
        {"parallel.engine=fsdp", "optimizer.moments=int8", "optimizer.master=bf16_kahan"},
    ]),
])  # fmt: skip
def test_plan_proposes_smaller_states_where_nothing_fits(name: str, gpu: str, ranks: int, states: list[set]) -> None:
    """Moments in 8 bits come first, and masters in 16 bits only where these do not suffice. What is proposed fits when
    it is pasted."""
    keys = "optimizer.", "parallel.engine"
    proposed = proposals(name, gpu, ranks=ranks)
    assert [{text for text in each if text.startswith(keys)} for each in proposed] == states
    assert not fits(name, gpu, "parallel.tensor_parallel_size=1", ranks=ranks) or states[0] == set()
    assert all(fits(name, gpu, *each, ranks=ranks) for each in proposed)


def test_a_plan_says_from_how_many_gpus_on_it_fits() -> None:
    """A run that fits nowhere has the number of GPUs with the optimizer as configured, and with a smaller state."""
    printed = io.StringIO()
    show_plan(CONFIG.with_name("8b.yaml"), [], 1, Console(file=printed, width=400), HARDWARE["l40s"])
    assert "in less memory it fits from 2 GPUs on (--world-size 2). With the optimizer as" in printed.getvalue()
    assert "as configured it fits from 4 GPUs on." in printed.getvalue()
    # A section for DeepSpeed excludes the other engine, and with it masters in 16 bits.
    assert proposals("8b", "h100", "deepspeed.wall_clock_breakdown=true") == []

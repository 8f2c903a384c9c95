"""The plan of optimizers: memory by moments and masters, and the time that Muon takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sagetrain.config.load import load_config
from sagetrain.hardware import HARDWARE
from sagetrain.model.accounting import memory_per_rank, muon_parameters, save_host_bytes
from sagetrain.planning.performance import predict

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

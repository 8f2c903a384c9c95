"""The monitor measures the errors of INT8 attention in a training step. The numbers are the same at every layout."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch

import tiny
from distributed import run_distributed
from kernel_inputs import cosine
from runs import rows_of
from sagekernels.testing import exact_results, rel_l2
from sagetrain.config import RunConfig
from sagetrain.config.check import check
from sagetrain.config.schema import MonitorConfig
from sagetrain.data.batch import Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers
from sagetrain.engines.step import Engine
from sagetrain.model.backends import Sage, Sdpa
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.monitor import Monitor
from trained import make_trainer

LENGTH, SEQUENCES = 64, 4
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DOCUMENTS = torch.tensor([0, 20, 64, 128, 150, 192, 256, 256], dtype=torch.int32)
TENSORS = {"O", "delta", "P", "dP", "dS", "dQ", "dK", "dV"}


def config(stage: int = 0, recipe: str = "paper", **sections: dict) -> RunConfig:
    sections["model"] = HEADS | sections.get("model", {})
    sections["data"] = {"seq_length": LENGTH, "micro_batch_size": SEQUENCES}
    sections["tokens_per_step"] = {"tokens": LENGTH * SEQUENCES}
    return tiny.config(stage, attention={"backend": "sage", "recipe": recipe}, **sections)


def batch(groups: ParallelGroups, documents: bool) -> Batch:
    """Return this rank's share of four sequences. Documents need a data-parallel size of one."""
    text = torch.randint(0, tiny.VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    text = text.chunk(groups.dp_size)[groups.dp_rank]
    return Batch(text[:, :-1], text[:, 1:], None, DOCUMENTS if documents else None, LENGTH if documents else None, [])


def built(cfg: RunConfig, groups: ParallelGroups, compiled: bool = False) -> tuple[Engine, Monitor]:
    model = tiny.model(cfg, groups)
    if compiled:
        again = groups.tp_size > 1 and cfg.training.activation_checkpointing != "none"
        tiny.compile_first_rank(model, "aot_eager", ranks=groups.tp_size if again else 1)
    engine = build_engine(tiny.on(cfg, groups), model)
    for i, own in enumerate(own for own in engine.owned() if own.name.endswith("k_norm.gain")):
        own.write("weight", torch.linspace(1, 2 + i, own.spec.size)[own.start : own.stop])
    engine.state_changed()
    return engine, monitor_of(cfg, engine)


def monitor_of(cfg: RunConfig, engine: Engine) -> Monitor:
    """Build the monitor as the trainer does."""
    return Monitor(cfg.stability.monitor, engine.model, lambda: ((x.name, x.weight) for x in engine.owned()))


def step(engine: Engine, data: Batch, monitor: Monitor | None) -> dict[str, float]:
    watch = monitor.watch(100) if monitor else None
    return engine.step([data], 1, 1e-2, Observers(watch=watch)).metrics


Place = tuple[int, int, int, bool, bool, dict]
"""A layout is its tensor and context parallel size, ZeRO stage, documents, whether it is compiled, and sections."""


def numbers(places: list[Place]) -> list[dict[str, float]]:
    """Return the numbers of the monitor in a first step, and the loss, at each layout of a world."""
    return [numbers_at(*place) for place in places]


def numbers_at(tp: int, cp: int, stage: int, documents: bool, compiled: bool, sections: dict) -> dict[str, float]:
    torch._dynamo.reset()
    groups = tiny.join(tp, cp)
    cfg = config(stage, **sections)
    engine, monitor = built(cfg, groups, compiled)
    found = step(engine, batch(groups, documents), monitor)
    return {name: x for name, x in found.items() if name.startswith("quant/") or name == "train/loss"}


@pytest.fixture(scope="module")
def one_rank() -> dict[bool, dict[str, float]]:
    """Return the numbers of one rank, keyed by whether there are documents."""
    (found,) = run_distributed(numbers, 1, [(1, 1, 0, documents, False, {}) for documents in (False, True)])
    return dict(zip((False, True), found, strict=True))


def test_the_names_and_their_ranges(one_rank) -> None:
    found = one_rank[False]
    for layer in (0, 1):
        tags = {name.removeprefix(f"quant/{layer}/") for name in found if name.startswith(f"quant/{layer}/")}
        assert tags == {
            *(f"{tensor}/{metric}" for tensor in TENSORS for metric in ("cosine", "rel_l2")),
            *(f"{tensor}/{metric}" for tensor in ("Q", "K", "dO", "dS") for metric in ("scale_min", "scale_max")),
            *(f"{tensor}/{metric}" for tensor in ("Q", "K") for metric in ("gain_mean", "gain_max")),
            *("dS/zero_share_dQ", "dS/zero_share_dK", "S/largest"),
        }
        at = f"quant/{layer}/"
        assert found[at + "dP/rel_l2"] == 0 and found[at + "dP/cosine"] == 1
        for tensor in TENSORS - {"dP"}:
            assert 1e-3 < found[f"{at}{tensor}/rel_l2"] < 0.3, tensor
            assert 0.95 < found[f"{at}{tensor}/cosine"] < 1, tensor
        assert found[at + "Q/gain_mean"] == found[at + "Q/gain_max"] == 1
        assert found[at + "K/gain_max"] == 2 + layer and found[at + "K/gain_mean"] == pytest.approx(1.5 + layer / 2)
        assert 0 < found[at + "Q/scale_min"] < found[at + "Q/scale_max"] < 1
        assert 0 < found[at + "dS/zero_share_dQ"] < 1


LAYOUTS = {  # The values are: tensor and context parallel size, ranks, ZeRO stage, documents, compiled, sections.
    "halves": (2, 1, 2, 0, False, False, {"parallel": {"tensor_parallel_overlap": "on"}}),
    "sequence parallel": (2, 1, 2, 1, False, False, {"parallel": {"sequence_parallel": True}}),
    "context parallel": (1, 2, 2, 1, False, False, {}),
    "context parallel, documents": (1, 2, 2, 2, True, False, {}),
    "compiled, documents": (1, 1, 1, 1, True, True, {}),
    "ZeRO 2, data parallel, recomputed": (1, 1, 2, 2, False, False, {"training": {"activation_checkpointing": "full"}}),
    "ZeRO 3": (1, 1, 2, 3, False, False, {"parallel": {"engine": "fsdp"}}),
    "ZeRO 3, compiled": (1, 1, 2, 3, False, True, {"parallel": {"engine": "fsdp"}}),
    "in part recomputed": (1, 1, 1, 1, False, False, {"training": {"activation_checkpointing": "selective"}}),
    "the first block recomputed": (1, 1, 1, 1, False, False, {"training": {"activation_checkpointing": 1}}),
    "recomputed, halves": (
        *(2, 1, 2, 0, False, False),
        {"training": {"activation_checkpointing": "full"}, "parallel": {"tensor_parallel_overlap": "on"}},
    ),
}


@pytest.fixture(scope="module")
def many_ranks() -> dict[str, list[dict[str, float]]]:
    """Return the numbers of every rank, keyed by layout. All layouts of as many ranks share a world."""
    found: dict[str, list[dict[str, float]]] = {}
    for world in (1, 2):
        places = {name: (tp, cp, *how) for name, (tp, cp, ranks, *how) in LAYOUTS.items() if ranks == world}
        ranks = run_distributed(numbers, world, [*places.values()])
        found |= {name: list(each) for name, each in zip(places, zip(*ranks, strict=True), strict=True)}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_numbers_at_every_layout(layout, one_rank, many_ranks) -> None:
    first, *others = many_ranks[layout]
    assert all(found == first for found in others)
    assert first == pytest.approx(one_rank[LAYOUTS[layout][4]], rel=1e-3 if "ZeRO 3" in layout else 2e-3)


def by_hand() -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return the pooled numbers of O, dQ, dK and dV of a step, and those of all tensors that passed `attend`."""
    groups = tiny.join(1)
    engine, monitor = built(config(recipe="fine"), groups)
    seen: dict[int, list[torch.Tensor]] = {}
    for layer, block in enumerate(engine.model.blocks):

        def tapped(q, k, v, layout, layer=layer, attention=block.attention):
            for x in (q, k, v):
                x.retain_grad()
            o = attention.function(q, k, v, layout)
            o.retain_grad()
            seen[layer] = [q, k, v, o]
            return o

        block.attention.attend = tapped
    with mock.patch.object(Sage, "normalizes", False):  # q and k pass `attend` normalized then.
        found = step(engine, batch(groups, False), monitor)
    pairs = []
    for layer, (q, k, v, o) in seen.items():
        exact = exact_results(q, k, v, o.grad)
        ours = {"O": o, "dQ": q.grad, "dK": k.grad, "dV": v.grad}
        truth = {}
        for (name, x), y in zip(ours.items(), exact, strict=True):
            truth |= {f"{name}/cosine": cosine(x, y), f"{name}/rel_l2": rel_l2(x, y)}
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) / 4
        truth["S/largest"] = scores.tril().masked_fill(scores.tril() == 0, -math.inf).max().item()
        pairs.append(({name: found[f"quant/{layer}/{name}"] for name in truth}, truth))
    return pairs


def test_the_statistics_are_those_of_float64() -> None:
    pairs = run_distributed(by_hand, 1)[0]
    assert len(pairs) == 2
    for found, truth in pairs:
        assert found == pytest.approx(truth, rel=2e-3)


def chosen_layers() -> list[set[str]]:
    """Return the layers with numbers: first chosen from the end, then with a layer that quantizes nothing at the
    time."""
    groups, found = tiny.join(1), []
    cfg = config(model={"num_layers": 3}, stability={"monitor": {"layers": [0, -1]}})
    engine, monitor = built(cfg, groups)
    for function in (Sage("fine"), Sdpa()):
        engine.model.blocks[2].attention.function = function
        metrics = step(engine, batch(groups, False), monitor)
        found.append({name.split("/")[1] for name in metrics if name.startswith("quant/")})
    for block in engine.model.blocks:
        block.attention.function = Sdpa()
    assert monitor.watch(100) is None
    return found


def test_layers_that_quantize_nothing_are_passed_over() -> None:
    assert run_distributed(chosen_layers, 1)[0] == [{"0", "2"}, {"0"}]


def test_missing_calls_are_an_error() -> None:
    """If the number of calls is not the model's, nobody can tell which layer a call belongs to."""
    groups = ParallelGroups.single()
    model = tiny.model(config(), groups)
    monitor = Monitor(MonitorConfig(every_steps=1), model, lambda: [])
    with pytest.raises(RuntimeError, match="0 forward passes"), monitor.micro_batch(0, SEQUENCES, LENGTH):
        pass


def test_steps_that_are_measured() -> None:
    model = tiny.model(config(), ParallelGroups.single())
    for every, due in (("auto", [100, 200]), (50, [50, 100, 150, 200]), (None, [])):
        monitor = Monitor(MonitorConfig(every_steps=every), model, lambda: [])
        assert [step for step in range(1, 201) if monitor.watch(step)] == due


def train(corpus: str, run_dir: str) -> None:
    make_trainer(
        corpus, run_dir, 4, attention={"backend": "sage"}, model=HEADS, data={"micro_batch_size": 2},
        stability={"monitor": {"every_steps": 2}}, logging={"every_steps": 3},
        checkpoint={"every_tokens": 10**9},  # A save would have a row, too.
    ).train()  # fmt: skip


def test_a_run_writes_what_it_measured(corpus: Path, tmp_path: Path) -> None:
    """In 16 bits nothing is measured: test_a_run_writes_what_it_measured_and_what_vanishes."""
    run_distributed(train, 1, str(corpus), str(tmp_path / "run"))
    measured = [row for row in rows_of(tmp_path / "run") if "quant/1/dS/rel_l2" in row]
    # Step 2 is in the next row, and step 4 in the last row.
    assert [row["step"] for row in measured] == [3, 4]


def found_of(**sections: dict) -> dict[str, str]:
    cfg = tiny.config(1, **sections)
    return {f.rule: str(f) for f in check(cfg, 1, files=False) if f.key.startswith("stability.monitor")}


def test_what_cannot_be_measured_is_said() -> None:
    for backend in ("sdpa", "flash", "reference"):
        found = found_of(attention={"backend": backend}, stability={"monitor": {"every_steps": 10}})
        assert f"attention.backend {backend} quantizes nothing" in found["monitor_of_nothing"]
        assert found_of(attention={"backend": backend}) == {}
        assert found_of(attention={"backend": backend}, stability={"monitor": {"every_steps": None}}) == {}
    assert found_of(attention={"backend": "sage"}, stability={"monitor": {"every_steps": 10}}) == {}
    outside = found_of(attention={"backend": "sage"}, stability={"monitor": {"layers": [0, 2]}})
    assert "the model has 2 layers, 2 is none of them" in outside["monitor_layers"]
    assert "use numbers from -2 to 1; -1 is the last layer" in outside["monitor_layers"]
    off = {"monitor": {"layers": [0], "every_steps": None}}
    assert set(found_of(attention={"backend": "sage"}, stability=off)) == {"no_effect"}

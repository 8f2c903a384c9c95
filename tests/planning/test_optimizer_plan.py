"""The plan of optimizers: memory by moments and masters, and the time that Muon takes."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from sagetrain.config.load import load_config
from sagetrain.costs.accounting import elements, muon_shapes, num_parameters, save_host_bytes, total_bytes
from sagetrain.costs.hardware import HARDWARE, Hardware, cluster_of
from sagetrain.costs.memory import memory_per_rank
from sagetrain.planning.changes import overrides_to
from sagetrain.planning.performance import predict
from sagetrain.planning.plan import make_plan
from sagetrain.planning.priced import Target
from sagetrain.planning.show import show_plan

CONFIG, VOCAB = Path(__file__).parents[2] / "configs/1b.yaml", 32_768
PARAMETERS, MATRICES = 1_036_082_176, 901_775_360
FSDP = "parallel.engine=fsdp"
CHANCE, KAHAN = ({"optimizer.moments=int8", f"optimizer.master=bf16_{way}"} for way in ("chance", "kahan"))


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
    assert elements(muon_shapes(muon)) == MATRICES
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
    """The update of 1B takes 81 ms more than AdamW's on an H100, and every owner has its share of that."""
    gpu, cfg = HARDWARE["h100"], load_config(CONFIG, ["optimizer.name=muon"])
    alone, two, eight = (predict(cfg, ranks, VOCAB, gpu) for ranks in (1, 2, 8))
    assert alone.orthogonalizing == pytest.approx(0.081, rel=0.03)
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


def proposals(name: str, gpu: Hardware, *overrides: str) -> list[list[str]]:
    """Return the settings to paste for the layouts that `plan` proposes."""
    made = make_plan(CONFIG.with_name(f"{name}.yaml"), overrides, 1, gpu)
    return [overrides_to(made.configured, item.cfg) for item in made.proposed or []]


def fits(name: str, gpu: Hardware, *overrides: str) -> bool:
    """Whether a configuration with these overrides fits, without an error of its own."""
    made = make_plan(CONFIG.with_name(f"{name}.yaml"), overrides, 1, gpu)
    return not made.errors and total_bytes(made.memory) <= Target(1, 128, gpu).usable


@pytest.mark.parametrize(("name", "gpu", "states"), [
    ("1b", "h100", [set()] * 3),
    ("1b", "rtx4090", [{"optimizer.moments=int8"}] * 3),
    ("8b", "h100", [CHANCE, {"parallel.offload=optimizer"}, KAHAN]),
])  # fmt: skip
def test_plan_proposes_smaller_states_where_nothing_fits(name: str, gpu: str, states: list[set]) -> None:
    """Moments in 8 bits come first, and masters in 16 bits only where these do not suffice. What is proposed fits when
    it is pasted."""
    keys, card = ("optimizer.", "parallel.offload"), HARDWARE[gpu]
    proposed = proposals(name, card)
    assert [{text for text in each if text.startswith(keys)} for each in proposed] == states
    assert not fits(name, card, "parallel.tensor_parallel_size=1") or states[0] == set()
    assert all(fits(name, card, *each) for each in proposed)


def test_a_plan_says_from_how_many_gpus_on_it_fits() -> None:
    """A run that fits nowhere has the number of GPUs with the optimizer as configured, and with a smaller state, and
    the memory of a host that takes the state."""
    printed = io.StringIO()
    show_plan(CONFIG.with_name("8b.yaml"), [], 1, Console(file=printed, width=400), HARDWARE["l40s"])
    text = printed.getvalue()
    assert "in less memory it fits from 2 GPUs on (--world-size 2). With parallel.offload it fits where a host" in text
    assert "With the optimizer as configured it fits from 4 GPUs on." in text
    need = float(re.search(r"\(--host-memory (\d+)\)", text)[1])
    assert proposals("8b", cluster_of("l40s", 8, 400, need)) and not proposals(
        "8b", cluster_of("l40s", 8, 400, need - 2)
    )
    # Gradients that travel in bf16 exclude the other engine, and with it masters in 16 bits.
    assert proposals("8b", HARDWARE["h100"], "parallel.gradient_reduction=bf16") == []


def test_guide_says_what_fits_on_one_gpu() -> None:
    """The rows of docs/optimizers.md have what `plan` proposes first, and its speed."""
    guide = CONFIG.parents[1] / "docs/optimizers.md"
    rows = re.findall(
        r"^\| (\d+B), \d+ GB \| `sagetrain plan (.+?)` \| `(.+?)` \| ([\d,]+) \|$", guide.read_text(), re.M
    )
    assert [name for name, *_ in rows] == ["1B", "3B", "8B", "8B"]
    for size, command, settings, speed in rows:
        words = command.split()
        options = {words[i]: words[i + 1] for i in range(1, len(words)) if words[i].startswith("--")}
        overrides = [word for word in words if "=" in word]
        memory = float(options.get("--host-memory", 0)) or None
        gpu = cluster_of(options["--gpu"], 8, 400, memory)
        made = make_plan(CONFIG.with_name(f"{words[0]}.yaml"), overrides, 1, gpu)
        assert 0.9 < num_parameters(made.cfg.model, made.cfg.attention, made.vocab_size) / 1e9 / int(size[:-1]) < 1.1
        assert overrides_to(made.configured, made.proposed[0].cfg) == settings.split()
        assert f"{made.proposed[0].prediction.tokens_per_second:,.0f}" == speed
        assert fits(words[0], gpu, *overrides, *settings.split())

"""linear.precision `auto` is chosen by times, recorded, and kept when the run continues."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from sagekernels.grouped_matmul import GroupedLowBit
from sagetrain.auto import linear_choice
from sagetrain.auto.kept import Kept
from sagetrain.auto.linear_choice import settle_linear, smallest, time_layers
from sagetrain.checkpoint.state import SettledLinear
from sagetrain.config.layer_specs import linear_layers
from sagetrain.config.load import load_config
from sagetrain.config.schema import SIXTEEN_BITS, ExpertsConfig, LinearConfig, ModelConfig, RunConfig
from sagetrain.model.moe import Experts
from sagetrain.model.selection import matmuls_of

CONFIGS = Path(__file__).parents[2] / "configs"
GPU, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = ModelConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, num_key_value_heads=4, head_dim=16
)
AUTO = LinearConfig(precision="auto")
CHOSEN = {"precision": "int8", "keep_layers_below": 8192}
DECIDED = "int8, layers of 8,192 weights and more"

# The speed-ups of INT8 over bf16 on an H200, casts included, are from results/log/kernels.md.
MEASURED = {
    "1b": {"qkv": 1.25, "out": 1.12, "gate_up": 1.25, "down": 1.30},
    "7b": {"qkv": 1.49, "out": 1.42, "gate_up": 1.59, "down": 1.55},
}


# -- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MEASURED)
def test_measured_times_put_all_layers_in_int8_that_may_be(model: str) -> None:
    times = {name: {"bf16": 1.0, "int8": 1 / gain} for name, gain in MEASURED[model].items()}
    layers = linear_layers(load_config(CONFIGS / f"{model}.yaml").model, 1)
    weights = {name: layer.weights for name, layer in layers.items()}
    assert smallest(times, "int8", weights, 0) == 0
    assert smallest(times, "int8", weights, 12_000_000) == 12_000_000
    assert smallest(times, "int8", weights, 10**9) is None


@pytest.mark.parametrize(("spent", "expected"), [
    ((9.6, 9.6), None),  # The gain is too small.
    ((9.5, 9.5), 0),
    ((9.0, 12.0), 200),  # Only the larger layer gains.
    ((12.0, 5.0), None),  # The larger layer loses.
    ((float("inf"), 5.0), None),  # The larger layer is wrong.
])  # fmt: skip
def test_a_layer_and_all_larger_ones_must_gain(spent: tuple[float, float], expected: int | None) -> None:
    times = {name: {"bf16": 10.0, "int8": row} for name, row in zip(("large", "small"), spent, strict=True)}
    assert smallest(times, "int8", {"large": 200, "small": 100}, 0) == expected


def test_layers_of_equal_size_are_one_decision() -> None:
    times = {"a": {"bf16": 10.0, "int8": 5.0}, "b": {"bf16": 10.0, "int8": 10.0}}
    assert smallest(times, "int8", {"a": 100, "b": 100}, 0) is None


def test_layers_are_those_of_a_rank() -> None:
    assert linear_layers(SHAPE, 2) == {
        "qkv": (64, {"q": 64, "k": 32, "v": 32}),
        "out": (64, {"out": 64}),
        "gate_up": (64, {"gate": 48, "up": 48}),
        "down": (48, {"down": 64}),
    }


# -- timing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """The layers that were made to be timed. The FP8 gate and up layer keeps wrong weights."""
    made, right = [], linear_choice.layer_of

    def spoiled(inputs: int, sizes: dict, weights: list, matmul: object, *, kept: bool) -> torch.nn.Module:
        made.append(right(inputs, sizes, weights, matmul, kept=kept))
        if "gate" in sizes and kept and matmul == linear_choice.LOW_BIT["fp8"]:
            made[-1].kept[1].neg_()
        return made[-1]

    monkeypatch.setattr(linear_choice, "layer_of", spoiled)
    return made


def timed(seconds: Callable, **changes: bool) -> tuple[dict, list[str]]:
    how = {"tokens": 32, "joined": False, "kept": True, "compiled": False, "dtype": torch.bfloat16, **changes}
    return time_layers(linear_layers(SHAPE, 1), ["fp8", "int8"], **how, device=CPU, seconds=seconds)


def test_wrong_layers_are_not_timed_and_others_run_both_passes(layers: list) -> None:
    grads = []

    def seconds(action: Callable[[], None]) -> float:
        assert all(p.grad is None for p in layers[-1].parameters())
        action()
        grads.append([p.grad for p in layers[-1].parameters()])
        return 8.0

    times, refused = timed(seconds)
    assert [list(row) for row in times.values()] == [["bf16", "fp8", "int8"]] * 4
    assert len(grads) == 11 and all(g is not None and g.abs().sum() > 0 for found in grads for g in found)
    assert times["gate_up"]["fp8"] == float("inf") and times["down"]["fp8"] == 1.0
    assert len(refused) == 1 and refused[0].startswith("gate_up in fp8: the output is wrong by")


def test_what_is_no_number_or_raises_is_not_used_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear_choice.layer_of

    def spoiled(inputs: int, sizes: dict, weights: list, matmul: object, *, kept: bool) -> torch.nn.Module:
        layer = right(inputs, sizes, weights, matmul, kept=kept)
        if matmul == linear_choice.LOW_BIT["fp8"] and "gate" in sizes:
            layer.kept[1].fill_(torch.nan)
        if matmul == linear_choice.LOW_BIT["int8"] and "down" in sizes:
            layer.kept = layer.kept[:1]
        return layer

    monkeypatch.setattr(linear_choice, "layer_of", spoiled)
    times, (gate_up, down) = timed(lambda action: 8.0)
    assert gate_up.startswith("gate_up in fp8: the output is wrong by nan")
    assert down.startswith("down in int8: TypeError: ")
    infinite = [(name, way) for name, row in times.items() for way, seconds in row.items() if seconds == float("inf")]
    assert infinite == [("gate_up", "fp8"), ("down", "int8")]


@pytest.mark.parametrize("kept", [True, False])
def test_weights_are_rounded_beforehand_where_a_run_keeps_them(layers: list, kept: bool) -> None:
    timed(lambda action: 1.0, kept=kept)
    assert [len(layer.kept) for layer in layers] == [0, 0, 4 * kept, 4 * kept] * 4


@pytest.mark.parametrize(("kept", "joined", "compiled"), [(True, True, 0), (True, False, 2), (False, True, 12)])
def test_layers_are_compiled_where_that_fuses_something(
    layers: list, monkeypatch: pytest.MonkeyPatch, kept: bool, joined: bool, compiled: int
) -> None:
    """Compiled are the sums of products of qkv and of gate and up in 16 bits, and layers that round their weights."""
    noted = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: noted.append(layers.index(layer)))
    timed(lambda action: 1.0, kept=kept, joined=joined, compiled=True)
    assert len(noted) == compiled and (compiled != 2 or noted == [1, 9])


# -- the choice ------------------------------------------------------------------------------------------------------


def configured(asked: LinearConfig, shape: ModelConfig, micro_batch_size: int = 2, **parallel: object) -> RunConfig:
    cfg = tiny.config(1, "bf16", data={"micro_batch_size": micro_batch_size}, parallel=parallel)
    return cfg.model_copy(update={"linear": asked, "model": shape})


def choose(
    folder: Path, said: list[str], asked: LinearConfig = AUTO, shape: ModelConfig = SHAPE, **changes: object
) -> LinearConfig:
    """Choose as on a GPU. Changes are those of tiny.start, of the section parallel, and of data.micro_batch_size."""
    others = {name: changes.pop(name) for name in ("dtype",) if name in changes}
    cfg = configured(asked, shape, changes.pop("micro_batch_size", 2), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_choice, "why_sixteen_bits", lambda *_, **__: "")
        return settle_linear(tiny.start(cfg, folder, said.append, **others), None)[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """A timer that returns the given times of the ways in turn, layer by layer."""

    def set_to(*times: float) -> list[float]:
        left = list(times) * 4
        monkeypatch.setattr(linear_choice, "median_seconds", lambda action, device: left.pop(0))
        return left

    return set_to


def test_the_choice_follows_the_times_and_is_made_once(tmp_path: Path, clock: Callable) -> None:
    said: list[str] = []
    left = clock(10.0, 8.0)
    found = choose(tmp_path, said)
    assert (found.precision, found.keep_layers_below) == ("int8", 0) and not left
    table = said[1].splitlines()
    assert table[0].startswith("linear on cpu, 32 tokens, torch.bfloat16: forward + backward")
    assert [line.split()[0] for line in table[2:6]] == ["qkv", "out", "gate_up", "down"]
    assert "fp8" not in said[1]  # FP8 is never chosen: GeForce cards add its products up at half rate.
    clock(10.0, 20.0)
    assert choose(tmp_path, said) == found
    for changes in (  # A choice that was made for something else is not taken over.
        {"micro_batch_size": 4},
        {"tensor_parallel_size": 2},
        {"zero_stage": 3},  # Weights are rounded in every pass.
        {"dtype": torch.float32},
        {"asked": AUTO.model_copy(update={"keep_layers_below": 1})},
    ):
        clock(10.0, 20.0)
        assert choose(tmp_path, said, **changes).precision == "bf16" and said[-1].endswith("chosen: bf16")
    clock(10.0, 8.0)
    found = choose(tmp_path, said, AUTO.model_copy(update={"keep_last_blocks": 1}))
    assert (found.precision, found.keep_last_blocks) == ("int8", 1)


@pytest.mark.parametrize(("changes", "tokens", "joined"), [
    ({}, 32, False),
    ({"tensor_parallel_overlap": "on"}, 32, False),  # Only tensor parallelism computes in halves.
    ({"context_parallel_size": 2}, 16, False),
    ({"tensor_parallel_size": 2}, 32, True),
    ({"tensor_parallel_size": 2, "tensor_parallel_overlap": "on"}, 16, True),
    ({"tensor_parallel_size": 2, "context_parallel_size": 4, "tensor_parallel_overlap": "on"}, 4, True),
])  # fmt: skip
def test_layers_are_timed_on_the_tokens_of_one_of_their_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, tokens: int, joined: bool
) -> None:
    told = {}

    def time_layers(layers: dict, ways: list, **how: object) -> tuple[dict, list]:
        told.update(how)
        return {name: dict.fromkeys(("bf16", *ways), 1.0) for name in layers}, []

    monkeypatch.setattr(linear_choice, "time_layers", time_layers)
    choose(tmp_path, [], **changes)
    assert (told["tokens"], told["joined"]) == (tokens, joined)


@pytest.mark.parametrize("name", ["casts.py", "lowbit.py"])
def test_other_casts_or_products_are_timed_anew(tmp_path: Path, clock: Callable, monkeypatch, name: str) -> None:
    """The cache key contains the sources of both packages, so a changed file leads to a new choice."""
    said, read, files = [], Path.read_bytes, {}
    monkeypatch.setattr(Path, "read_bytes", lambda path: files.get(path.name) or read(path))
    for files[name] in (b"as it was", b"otherwise"):
        clock(10.0, 8.0)
        choose(tmp_path, said)
        assert "chosen before" not in said[-1]


def test_small_layers_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers have these weights: qkv 16,384, gate_up 12,288, out 8,192, down 6,144."""
    times = [10.0, 8.0, 10.0, 9.9, 10.0, 8.0, 10.0, 8.0]
    monkeypatch.setattr(linear_choice, "median_seconds", lambda action, device: times.pop(0))
    said: list[str] = []
    found = choose(tmp_path, said)
    assert (found.precision, found.keep_layers_below) == ("int8", 12_288)
    assert said[1].endswith("chosen: int8, layers of 12,288 weights and more")
    assert choose(tmp_path, said) == found


def test_layers_with_odd_sides_keep_no_other_layer_out(tmp_path: Path, clock: Callable) -> None:
    """Layers with odd sides are not timed, even if they are the largest ones. The others still get 8 bits."""
    said: list[str] = []
    left = clock(10.0, 8.0)
    found = choose(tmp_path, said, shape=SHAPE.model_copy(update={"ffn_hidden_size": 1000}))
    assert (found.precision, found.keep_layers_below) == ("int8", 0) and len(left) == 4
    assert [line.split()[0] for line in said[1].splitlines()[2:-1]] == ["qkv", "out"]


@pytest.mark.parametrize(("spent", "below", "taken", "ranks"), [
    (8.0, 0, ["experts", "out", "qkv"], 2), (9.9, 8192, ["out", "qkv"], 1), (float("inf"), 8192, ["out", "qkv"], 1)
])  # fmt: skip
def test_experts_are_timed_as_one_layer(tmp_path: Path, monkeypatch, spent, below: int, taken: list, ranks) -> None:
    """An expert is smaller than attention's projections here, so they can gain alone. Experts that are wrong are not
    timed. Ranks that have experts between them time their own."""
    made = []
    monkeypatch.setattr(
        linear_choice, "Experts", lambda number, *how, **more: made.append(number) or Experts(number, *how, **more)
    )
    times = [10.0, 8.0, 10.0, 8.0, 10.0, spent]
    monkeypatch.setattr(linear_choice, "median_seconds", lambda action, device: action() or times.pop(0))
    if spent == float("inf"):
        monkeypatch.setitem(linear_choice.GROUPED_LOW_BIT, "int8", Spoiled(torch.int8))
    experts = ExpertsConfig(number=4, per_token=2, ffn_size=32)
    shape, said = SHAPE.model_copy(update={"experts": experts}), []
    found = choose(tmp_path, said, shape=shape, expert_parallel_size=ranks)
    assert (found.precision, found.keep_layers_below) == ("int8", below) and {*made} == {4 // ranks}
    assert ("experts in int8: the output is wrong" in said[1]) == (spent == float("inf"))
    matmuls, how = matmuls_of(found, shape, tensor_parallel_size=1, device=CPU, dtype=torch.bfloat16)
    assert all(sorted(of_block) == taken for of_block in matmuls[:-1]) and ("included" in how) == ("experts" in taken)


class Spoiled(GroupedLowBit):
    """Experts that keep wrong weights."""

    def keep(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, *others = super().keep(weight)
        return codes.neg(), *others


# -- runs ------------------------------------------------------------------------------------------------------------


def had(linear: dict) -> Kept:
    """Return the choices of a run on one tensor-parallel rank that had these linear layers."""
    return Kept.of(tiny.run_state(linear=SettledLinear(**linear)), {})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    """A GPU of a compute capability."""

    def of(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")

    of(9, 0)
    return of


def settled(
    asked: LinearConfig, before: Kept | None = None, *, device: torch.device = GPU, shape: ModelConfig = SHAPE,
    dtype: torch.dtype = torch.bfloat16, tp_size: int = 1,
) -> tuple[LinearConfig, str, list]:  # fmt: skip
    """Settle linear layers where INT8 from 8,192 weights on is the fastest. Return also the reason and what was
    heard: the settings to choose from, and the lines printed."""
    heard, cfg = [], configured(asked, shape, tensor_parallel_size=tp_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_choice, "decide", lambda *_, **__: heard.append(asked) or DECIDED)
        found, why = settle_linear(tiny.start(cfg, say=heard.append, device=device, dtype=dtype), before)
    return found, why, heard


def test_a_run_that_begins_chooses_where_it_says_auto_alone(card) -> None:
    found, why, heard = settled(AUTO)
    assert found == AUTO.model_copy(update=CHOSEN) and why == "auto: the fastest" and heard == [AUTO]
    for named in (SIXTEEN_BITS, LinearConfig(precision="int8"), LinearConfig(precision="fp8")):
        assert settled(named) == (named, "", [])


def test_without_a_choice_it_is_bf16_and_says_why(card) -> None:
    for case, says in (
        ({"device": CPU}, "auto: nothing is timed without a GPU"),
        ({"dtype": torch.float32}, "auto: linear.precision int8 needs training.dtype bf16 on a GPU"),
        (
            {"shape": SHAPE.model_copy(update={"hidden_size": 100})},
            "auto: all have sides that are no multiples of 16 (qkv 100, out 100, gate_up 100, down 100)",
        ),
    ):
        found, why, heard = settled(AUTO, **case)
        assert found.precision == "bf16" and says in why and heard == []
    card(8, 0)
    assert settled(AUTO)[0].precision == "int8"
    card(7, 5)
    found, why, _ = settled(AUTO)
    assert found.precision == "bf16" and "needs a GPU of compute capability 8.0 or more, A card has 7.5" in why


def test_a_run_that_continues_keeps_what_it_had(card) -> None:
    found, why, heard = settled(AUTO, had(CHOSEN))
    assert found == AUTO.model_copy(update=CHOSEN) and "as the run had it" in why and heard == []
    wide = {"precision": "bf16", "keep_layers_below": 0}
    found, why, heard = settled(AUTO, had(wide))
    assert found.precision == "bf16" and "as the run had it" in why and heard == []
    assert settled(SIXTEEN_BITS, had(CHOSEN)) == (SIXTEEN_BITS, "", [])
    fp8 = {**CHOSEN, "precision": "fp8"}
    assert settled(AUTO, had(fp8))[0] == AUTO.model_copy(update=fp8)


def test_named_keys_beside_auto_hold_when_a_run_continues(card) -> None:
    """A smaller keep_layers_below does not bring back layers that were not worth it."""
    for named, expected in (
        ({"keep_layers_below": 10_000}, {"keep_layers_below": 10_000}),
        ({"keep_layers_below": 1}, {}),
    ):
        found, why, heard = settled(AUTO.model_copy(update=named), had(CHOSEN))
        assert found.model_dump(include={*CHOSEN}) == {**CHOSEN, **expected} and heard == []
        assert "as the run had it" in why


def test_what_cannot_run_any_more_is_chosen_anew_and_said(card) -> None:
    card(8, 0)
    found, why, said = settled(AUTO, had({**CHOSEN, "precision": "fp8"}))
    assert said[0].startswith(
        "linear.precision: what auto was so far cannot run here (linear.precision fp8 needs a GPU"
    )
    assert said[1:] == [AUTO] and found.precision == "int8" and why == "auto: the fastest"


def test_a_layer_with_odd_sides_at_a_new_tp_size_is_left_out(card) -> None:
    every = {**CHOSEN, "keep_layers_below": 0}
    found, why, (said,) = settled(AUTO, had(every), tp_size=4)
    assert found.precision == "int8" and "as the run had it" in why
    assert said.endswith("at tensor_parallel_size 4 qkv, out, so far, at 1, qkv, out, gate_up, down")


def test_a_new_tp_size_that_leaves_no_layer_is_decided_anew(card) -> None:
    found, why, (said,) = settled(AUTO, had(CHOSEN), tp_size=16)
    sides = "all have sides that are no multiples of 16 (qkv 4 and 8, out 8, gate_up 6, down 6)"
    assert f"what auto was so far cannot run here ({sides}): decided anew" in said
    assert found.precision == "bf16" and why == f"auto: {sides}"


@pytest.mark.parametrize("asked", [AUTO, LinearConfig(**CHOSEN)])
def test_layers_too_small_at_a_new_tp_size_are_named(asked, card) -> None:
    found, _, heard = settled(asked, had(CHOSEN), tp_size=2)
    assert found.model_dump(include={*CHOSEN}) == CHOSEN
    assert heard == [
        "a rank's sizes decide which linear layers are in 8 bits (linear.keep_layers_below 8,192, sides of multiples "
        "of 16): at tensor_parallel_size 2 qkv, so far, at 1, qkv, out, gate_up"
    ]
    assert settled(asked, had({**CHOSEN, "keep_layers_below": 0}), tp_size=2)[2][1:] == []

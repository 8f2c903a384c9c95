"""`python -m sagekernels.tune` chooses tiles, refuses others, and finds a choice again."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from sagekernels import bench, launch, report, tune
from sagekernels.launch import TABLE, Tiles, launch_tiles
from sagekernels.testing import Shape, call_of

CARD = torch.device("cuda", 0)
FIRST, FASTER, FASTEST, TOO_LARGE = (Tiles(rows, 64, 8, 2) for rows in (128, 64, 32, 256))
SECONDS = {FIRST: 1.0, FASTER: 0.9, FASTEST: 0.8, TOO_LARGE: 0.1}


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A GPU by its name, for which nothing is kept yet."""
    monkeypatch.setenv("SAGEKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    for function in (launch.tuned, launch.tuned_key, launch.capability):
        function.cache_clear()
    yield
    for function in (launch.tuned, launch.tuned_key, launch.capability):
        function.cache_clear()


def compared(monkeypatch, other_bits: set[Tiles] = frozenset(), later: set[Tiles] = frozenset()):
    """Run tune.compare on kernels that take SECONDS. Some of them give other bits, at once or only in small calls."""
    q = torch.empty(1, 1, 1, 128)
    timed, checked = (tune.Trial(call_of(Shape(), q, q, q, "fine"), None) for _ in range(2))
    active = []

    def results(kernel, trial):
        tiles = launch_tiles(kernel, q.device, 128)
        active.append(tiles)
        if tiles == TOO_LARGE:
            raise triton.runtime.errors.OutOfResources(200, 99, "shared memory")
        wrong = tiles in other_bits or (trial is checked and tiles in later)
        return (torch.ones(2) * (1 + 2.0**-20 * wrong),)

    monkeypatch.setattr(tune, "results", results)
    tiles = [FIRST, FASTER, FASTEST, TOO_LARGE]

    def seconds(action):
        action()
        return SECONDS[active[-1]]

    found = tune.compare("dq", tiles, timed, [checked], seconds)
    assert launch_tiles("dq", q.device, 128) == TABLE["dq"]["portable"][128]
    return found


@pytest.mark.parametrize(
    ("other_bits", "later", "expected"),
    [
        ({}, {}, FASTEST),
        ({FASTEST}, {}, FASTER),
        ({}, {FASTEST}, FASTER),
        ({FASTER}, {FASTEST}, FIRST),
    ],
)
def test_the_fastest_that_changes_no_bit(monkeypatch, other_bits, later, expected):
    best, times, refused = compared(monkeypatch, set(other_bits), set(later))
    assert best == expected and TOO_LARGE not in times and "shared memory" in refused[TOO_LARGE]
    assert {one for one, reason in refused.items() if "bits" in reason} == {*other_bits, *later}
    assert times[FIRST] == SECONDS[FIRST]


def test_a_gain_within_noise_is_none(monkeypatch):
    monkeypatch.setitem(SECONDS, FASTER, 0.99)
    monkeypatch.setitem(SECONDS, FASTEST, 0.985)
    assert compared(monkeypatch)[0] == FIRST


def test_a_choice_is_kept_for_the_same_card_alone(card, monkeypatch):
    ours = TABLE["dq"]["portable"][128]
    assert launch_tiles("dq", CARD, 128) == ours
    chosen = Tiles(64, 64, 4, 2)
    tune.keep({("dq", 80): chosen}, ["a table"], CARD)
    launch.tuned.cache_clear()
    assert launch_tiles("dq", CARD, 128) == chosen and launch_tiles("forward", CARD, 128) != chosen
    assert launch_tiles("dq", CARD, 128, exact=True) == ours._replace(block_m=64, block_n=64)
    assert "a table" in launch.tuned_file().read_text()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    for function in (launch.tuned, launch.tuned_key):
        function.cache_clear()
    assert launch_tiles("dq", CARD, 128) == ours
    tune.keep({}, [], CARD)  # The entry lies beside the other card's.
    assert "4090" in launch.tuned_file().read_text()


def test_candidates_keep_the_order_of_sums():
    for kernel, head_dims in tune.OWNED.items():
        for head_dim in head_dims:
            tiles = tune.candidates(kernel, head_dim)
            assert TABLE[kernel]["portable"][head_dim] in tiles
            assert {one.block_m if kernel == "dkdv" else one.block_n for one in tiles} == {64}


@pytest.mark.parametrize(("name", "half"), [("NVIDIA GeForce RTX 3090", True), ("NVIDIA L40S", False)])
def test_cards_that_add_up_in_float16(monkeypatch, name, half):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    launch.half_sums.cache_clear()
    assert launch.half_sums(CARD) == half and not launch.half_sums(torch.device("cpu"))
    launch.half_sums.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("command", "what"), [(bench, "the benchmark"), (tune, "tuning"), (report, "the report")])
def test_without_a_gpu_it_says_so(monkeypatch, capsys, command, what):
    monkeypatch.setattr(sys, "argv", [command.__name__])
    with pytest.raises(SystemExit) as done:
        command.main()
    assert done.value.code == 2 and capsys.readouterr().err.startswith(f"{what} needs an NVIDIA GPU")


def test_rates_of_products_are_reported_or_why_not(monkeypatch):
    monkeypatch.setattr(report, "SIDE", 32)
    bf16, int8 = report.product_rates(torch.device("cpu"))
    assert "bf16 product: " in bf16 and int8.endswith(" T/s")

    def refused(*_):
        raise NotImplementedError("compute capability 10.3")

    monkeypatch.setattr(report, "int8_product", refused)
    assert report.product_rates(torch.device("cpu"))[1].endswith("INT8 product: compute capability 10.3")


def test_the_report_is_one_page_with_errors_and_ratios(monkeypatch):
    """The page of the machine's CPU: attention by the twin, and what does not run there is named with the reason."""
    monkeypatch.setattr(report, "SIDE", 32)
    monkeypatch.setattr(report, "time_attention", lambda attend, **_: bench.Times(1.0, 3.0))
    card = SimpleNamespace(name="A card", major=8, minor=9, total_memory=24 << 30)
    lines = list(report.page(torch.device("cpu"), card, [64]))
    assert lines[0] == "A card, compute capability 8.9, 24 GiB"
    assert lines[2] == "tiles tuned: no (python -m sagekernels.tune)"
    errors = [line for line in lines if line.startswith("errors of fine: o 0.0")]
    assert len(errors) == 2 and all(name in line for line in errors for name in ("dq", "dk", "dv"))
    timed = [line.split() for line in lines if " ms " in line]
    assert {"fine", "scores", "(torch)"} <= {row[1] for row in timed}
    assert sum("x1.00 forward  x1.00 both" in line for line in lines) >= 4
    assert any("not timed" in line for line in lines if line.strip().startswith("cuDNN"))


def test_tune_keeps_its_choice_with_the_table(card, monkeypatch, capsys):
    chosen = Tiles(64, 64, 4, 2)

    def tuned(head_dims, shape, device, say):
        say(f"dq, head_dim {head_dims[0]}: {shape(head_dims[0])}")
        return {("dq", head_dims[0]): chosen}

    monkeypatch.setattr(tune, "tune", tuned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["tune", "--head-dims", "128", "--tokens", "2048"])
    tune.main()
    said = capsys.readouterr().out
    assert "4090" in said and "dq, head_dim 128: B1 N2048 H16/16 D128 causal" in said and "kept in" in said
    launch.tuned.cache_clear()
    assert launch_tiles("dq", CARD, 128) == chosen
    assert "dq, head_dim 128" in launch.tuned_file().read_text()

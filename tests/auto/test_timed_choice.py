"""A choice of `auto` is made once, by times, by one rank, and kept when the run continues."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton

import tiny
from distributed import run_distributed
from sagetrain.auto import timed_choice
from sagetrain.auto.timed_choice import StartOfRun, TimeTable, as_before, by_first_rank, decide, fastest
from sagetrain.config.errors import TrainingError
from sagetrain.config.sections.data import cache_folder

CPU = torch.device("cpu")


def start(say: Callable[[str], None] = print, device: torch.device = CPU) -> StartOfRun:
    return tiny.start(tiny.config(1), say=say, device=device)


@pytest.mark.parametrize(("asked", "kept", "expected", "why"), [
    ("auto", "slow", "slow", "as the run had it: auto decides once, naming the.key changes it"),
    ("auto", "other GPU", "auto", ""), ("auto", "auto", "auto", ""), ("slow", "slow", "slow", ""),
])  # fmt: skip
def test_a_run_chooses_once_unless_it_cannot_run_so_any_more(asked: str, kept: str, expected: str, why: str):
    said: list[str] = []
    cannot_run = lambda settings: "no such GPU" if settings == "other GPU" else ""  # noqa: E731
    assert as_before("the.key", asked, kept, said.append, cannot_run) == (expected, why)
    anew = "the.key: what auto was so far cannot run here (no such GPU): decided anew"
    assert said == ([anew] if kept == "other GPU" else [])


@pytest.mark.parametrize(("seconds", "chosen"), [
    ({"sage scores": 1.668, "sdpa": 1.455}, "sdpa"),  # An H100 at 32 x 1K.
    ({"sage scores": 2.174, "sdpa": 2.209}, "sage scores"),  # The same at 16 x 2K.
    ({"sage scores": 1.000, "sdpa": 1.005}, "sdpa"),  # A gain within the noise of clocks is none.
    ({"sage scores": math.inf, "sdpa": 1.0}, "sdpa"),
    ({"off": 1.0, "on": 1.0}, "off"),
])  # fmt: skip
def test_the_fastest_is_taken_if_it_gains_enough(seconds: dict[str, float], chosen: str) -> None:
    assert fastest({"attention": seconds}, {"sage scores": 1.01}) == chosen


def measured(fast: float) -> TimeTable:
    return TimeTable("32 tokens", {"qkv": {"bf16": 0.01, "int8": fast}}, ["int8: o off by 0.5"] * math.isinf(fast))


def test_the_table_and_the_choice_are_kept_in_a_file(tmp_path: Path) -> None:
    cache, said = tmp_path / "cache" / "linear.json", list[str]()
    choose = partial(decide, "linear", start(said.append), file=cache)
    assert choose(lambda: measured(0.008), key=(1, "a")) == "int8"
    waits, table = said[0], said[1].splitlines()
    assert (
        waits.startswith("linear auto: candidates are compiled")
        and table[0] == "linear on cpu, 32 tokens"
        and table[1].split() == ["bf16", "int8"]
    )
    assert table[2].split() == ["qkv", "10.000", "ms", "8.000", "ms", "(1.25)"] and table[-1] == "  chosen: int8"
    (kept,) = json.loads(cache.read_text()).values()
    assert kept == {"chosen": "int8", "table": table[:-1], "refused": False}
    assert choose(lambda: measured(0.02), key=(1, "a")) == "int8"
    of_host = cache_folder("choices") / "linear.json"
    assert said[2] == f"linear: int8 (chosen before, {cache}; to time again, remove {cache} and {of_host})"
    assert choose(lambda: measured(math.inf), key=(1, "b")) == "bf16"
    assert "not used\n  int8: o off by 0.5\n  chosen: bf16" in said[4] and len(json.loads(cache.read_text())) == 2
    # It may be half of a file, or another program's.
    for text in ("[1]", json.dumps(dict.fromkeys(json.loads(cache.read_text()), "int8"))):
        cache.write_text(text)
        assert choose(lambda: measured(0.008), key=(1, "b")) == "int8"
    with pytest.raises(RuntimeError, match=r"(?s)no candidate may be used.*linear on cpu.*o off by"):
        choose(lambda: TimeTable("", {"qkv": {"int8": math.inf}}, ["o off by"]), key=(1, "c"))


def test_runs_of_a_host_share_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run takes the choice of the first one, unless a candidate failed. Users without a home folder share
    none."""
    said = list[str]()

    def choose(run: str, fast: float) -> str:
        return decide("linear", start(said.append), lambda: measured(fast), file=tmp_path / run / "linear.json")

    monkeypatch.setenv("SAGETRAIN_CACHE", str(tmp_path))
    assert [choose("a", 0.008), choose("b", 0.02)] == ["int8", "int8"]
    of_host, own = tmp_path / "choices/linear.json", tmp_path / "b/linear.json"
    assert said[-1] == f"linear: int8 (chosen before, {of_host}; to time again, remove {of_host} and {own})"
    assert (tmp_path / "a/linear.json").read_text() == (tmp_path / "b/linear.json").read_text()
    monkeypatch.setenv("SAGETRAIN_CACHE", str(tmp_path / "other"))
    assert [choose("d", math.inf), choose("d", 0.008), choose("e", 0.008)] == ["bf16", "bf16", "int8"]
    monkeypatch.delenv("SAGETRAIN_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    assert [choose("c", 0.02), choose("a", 0.02), choose("c", 0.008)] == ["bf16", "int8", "bf16"]


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_choice_belongs_to_one_kind_of_device_and_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The version is that of the driver, torch, Triton and the sources."""
    sources, made, driver = tmp_path / "sources", [], tmp_path / "version"
    sources.mkdir()
    monkeypatch.setattr(timed_choice, "SOURCES", [sources / "none", sources])
    monkeypatch.setattr(timed_choice, "DRIVER", driver)

    def measure() -> TimeTable:
        made.append(len(made))
        return measured(1.0)

    changes = [lambda: None, lambda: (sources / "kernel.py").write_text("other"), lambda: driver.write_text("580")]
    changes += [partial(monkeypatch.setattr, module, "__version__", "0") for module in (torch, triton)]
    for number, change in enumerate(changes):
        change()
        for name in ("H200", "H100", "H200"):
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
            decide("x", start(device=torch.device("cuda")), measure, key=["key"], file=tmp_path / "cache.json")
        assert len(made) == 2 * (number + 1)


def chosen_on_a_rank(folder: str) -> list[str]:
    """Return the rank that has chosen, the error where the first rank fails to choose, and what ranks that measure
    together choose twice where each has a folder of its own."""
    found = [by_first_rank("attention auto", lambda: f"rank {dist.get_rank()}", CPU)]
    try:
        by_first_rank("attention auto", lambda: {}["sdpa"], CPU)
    except (KeyError, TrainingError) as error:
        found.append(f"{type(error).__name__} {error}")
    cache, made = Path(folder) / f"{dist.get_rank()}" / "overlap.json", list[int]()

    def measure() -> TimeTable:
        dist.all_reduce(torch.ones(1))
        made.append(1)
        return measured(0.008)

    choose = partial(decide, "halves", start(), measure, file=cache, together=True)
    found += [choose(key=[key]) for key in "ab"]
    if dist.get_rank() == 1:
        cache.unlink(missing_ok=True)
    found += [choose(key="a"), f"{len(made)} {cache.exists()}"]
    return found


def test_one_rank_chooses_and_all_hear_where_it_fails(tmp_path: Path) -> None:
    first, second = run_distributed(chosen_on_a_rank, 2, str(tmp_path))
    assert first == ["rank 0", "KeyError 'sdpa'", *["int8"] * 3, "2 True"]
    failed = "TrainingError rank 0: attention auto: KeyError: 'sdpa'"
    assert second == ["rank 0", failed, *["int8"] * 3, "2 False"]

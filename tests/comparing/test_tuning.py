"""`sagetrain compare --tune` finds the lowest point of a known curve of losses. Its runs only write their numbers."""

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runs import ended, sagetrain, write_config, write_metrics
from sagetrain.comparing import runner
from sagetrain.comparing.command import Places
from sagetrain.comparing.halving import Halving, flatness
from sagetrain.comparing.tuning import TuneRequest, failed, tune
from sagetrain.comparing.tuning_page import Round, page
from sagetrain.config import ConfigError
from sagetrain.config.arithmetic import decay_tokens
from sagetrain.config.load import load_config

SEARCH = Halving("optimizer.lr", 1e-4, 1e-2, False, 6400, 100, 4, 126_400)
LONG = ["tokens_per_step={schedule: constant, tokens: 256}", "lr_schedule.warmup_tokens=0", "lr_schedule.warmup=0.1"]
LONG.append("training.total_tokens=25600")
RAMP = "tokens_per_step={schedule: ramp, start: 256, end: 512, ramp_tokens: 2560}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    return write_config(folder / "base.yaml", corpus, folder / "run", attention={"recipe": "fine"})


def runs_of(curve: Callable[[float, int, int], float], started: list[str], broken: str = "") -> runner.Start:
    """Return a function in place of runner.start_process. Its runs end at once, at the loss that `curve` has of
    rate, seed and tokens. Those in whose folder `broken` is fail."""

    def start(words: Sequence[str], env: Mapping[str, str], log: Path) -> SimpleNamespace:
        cfg = load_config(words[0], list(words[1:]))
        folder, tokens = Path(cfg.training.run_dir), cfg.training.total_tokens
        started.append(str(folder))
        if broken and broken in str(folder):
            return ended(1)
        # The last step may pass the end of the run.
        write_metrics(folder, -(-tokens // 256) * 256, curve(cfg.optimizer.lr, cfg.training.seed, tokens))
        return ended(0)

    return start


def square(lr: float, seed: int, tokens: int = 0) -> float:
    """Return a loss that is lowest at 1.2e-3, and the same distance from the lowest loss at all seeds."""
    return 3 + 0.1 * math.log(lr / 1.2e-3) ** 2 + 0.01 * seed if lr < 8e-3 else math.nan


def go(
    base: Path, output: Path, start: runner.Start, budget: int = 761_600, seeds: int = 6, more: Sequence[str] = ()
) -> tuple[list, list[str]]:
    request = TuneRequest(str(base), "optimizer.lr=1e-4:1e-2", budget, [*LONG, *more], seeds)
    said: list[str] = []
    where = Places(output, output / "runs", (), 2, "CPU")
    return tune(request, where, said.append, command="the command", margin=0.01, start=start), said


def test_a_search_finds_the_lowest_point_and_how_flat_it_is(base: Path, tmp_path: Path) -> None:
    """A search whose runs fail in the second round goes on there, and repeats no run that has ended."""
    started: list[str] = []
    found, said = go(base, tmp_path, runs_of(square, started, "round-2"))
    first = [folder for folder in started if "round-1" in folder]
    assert failed(found) == len(started) - len(first) == 6 and len(first) == 11
    assert "Not finished: optimizer.lr=0.001 is the best after runs of 6,400 tokens" in said
    started.clear()
    found, said = go(base, tmp_path, runs_of(square, started))
    assert failed(found) == 0 and not any("round-1" in folder for folder in started)
    assert sorted(Path(folder).parent.name for folder in started if "round-3" in folder) == sorted(
        ["lr=0.000631", "lr=0.001", "lr=0.00158"] * 6
    )
    tree, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "README.md").read_text()
    assert tree["best"] == 1e-3 and tree["lowest"] == pytest.approx(1.2e-3, rel=0.01)
    # The parabola reaches beyond the last value that was measured.
    assert tree["within"] == pytest.approx([1.2e-3 * math.exp(-(0.1**0.5)), 1.58e-3], rel=0.02)
    assert tree["tokens"] == 11 * 6400 + 6 * 12800 + 18 * 25600 <= 761_600
    assert f"half or twice of it costs {0.1 * math.log(2) ** 2:.3f}" in said[-2] and said[-2] in page
    assert "| **0.001** | 3.0033 | 3.0033 | 3.0283 (6 seeds) |  |" in page
    assert "| 0.01 | diverged |  |  |  |" in page
    assert "| 0.00158 | 3.0076 | 3.0076 | 3.0326 (6 seeds) | 0.0042 ± 0.0000 |" in page
    assert "Those of 6,400 tokens (25 steps) have a whole schedule" in page and "Below 400 steps the best" in page
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    request = TuneRequest(str(base), "optimizer.lr=1e-4:1e-2", 761_600, LONG, 1)
    with pytest.raises(ConfigError, match=r"tune.json is of another search:\n  seeds: 6 there, 1 now"):
        tune(request, Places(tmp_path, tmp_path, (), 1, "CPU"), said.append, command="", margin=0.01)


def test_a_search_says_that_its_best_value_is_at_the_edge(base: Path, tmp_path: Path) -> None:
    _, said = go(base, tmp_path, runs_of(lambda lr, seed, tokens: 3 - lr, []))
    assert "it is the highest value of the range, so the best one may lie beyond; widen 0.0001:0.01" in said[-2]
    with pytest.raises(ConfigError, match="every run of round-1 diverged"):
        go(base, tmp_path / "nan", runs_of(lambda lr, seed, tokens: math.nan, []))


def later(lr: float, seed: int, tokens: int) -> float:
    """Return a loss that is lowest at 5e-4 in short runs, and at 2.5e-3 at full length."""
    return 3 + 0.1 * math.log(lr / (5e-4 if tokens < 25_600 else 2.5e-3)) ** 2


@pytest.mark.parametrize(("budget", "rounds"), [(761_600, ["1", "2", "3", "4"]), (768_000, ["1"]), (10**9, ["1"])])
def test_a_longer_run_may_like_another_value(base: Path, tmp_path: Path, budget: int, rounds: list[str]) -> None:
    """The search follows the best value as far as the budget pays. It needs no short runs where it pays for five values
    at full length."""
    started: list[str] = []
    _, said = go(base, tmp_path, runs_of(later, started), budget)
    assert sorted({folder.partition("round-")[2][0] for folder in started}) == rounds
    tree, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "README.md").read_text()
    assert tree["tokens"] <= budget and ("Short runs chose" in page) == (len(rounds) > 1)
    if len(rounds) > 1:  # One value more could be paid for, and is still at the edge.
        assert len(tree["rounds"][-1]["losses"]) == 4 and tree["best"] == 1e-3
        assert "it is the highest value of the last round" in said[-2] and "search on with --tune" in said[-2]
    else:
        nearest = min(map(float, tree["rounds"][0]["losses"]), key=lambda lr: abs(math.log(lr / 2.5e-3)))
        assert tree["best"] == nearest and tree["lowest"] == pytest.approx(2.5e-3, rel=0.01)


def test_the_best_of_the_last_round_may_be_at_its_edge() -> None:
    """Longer runs may like a value that is no longer between two others: the verdict says where to search on."""
    rounds = [Round(100, {value: [loss] for value, loss in zip(SEARCH.values()[2:5], losses, strict=True)}, 0)
              for losses in ((3.1, 3.0, 3.1), (3.1, 3.0, 3.1), (3.0, 3.2, 3.1))]  # fmt: skip
    said = page(SEARCH, rounds, 0.01, "", "loss")[1]["verdict"]
    assert "it is the lowest value of the last round" in said and "search on with --tune optimizer.lr=0.00023" in said


def test_the_values_fill_the_budget() -> None:
    """Five values cost 5 / 4 + 3 / 2 + 12 whole runs with four seeds, two more values cost one more run, and one run a
    seed is left for a value beyond the last round. With one seed all five at full length are cheaper."""
    assert SEARCH.cost(5) == 8000 + 3 * 3200 + 12 * 6400 and len(SEARCH.values()) == 7 and SEARCH.rounds == 3
    assert SEARCH.planned == SEARCH.cost(7) == SEARCH.budget - 4 * 6400
    alone = replace(SEARCH, seeds=1, budget=5 * 6400)
    assert (alone.rounds, alone.tokens(0), alone.planned) == (1, 6400, alone.cost(5)) == (1, 6400, 5 * 6400)
    assert SEARCH.values()[::3] == [1e-4, 1e-3, 1e-2]
    assert len(replace(SEARCH, budget=10**9).values()) == 17
    steps = replace(SEARCH, low=1, high=12, whole=True, budget=10**9).values()
    assert steps == sorted(set(steps)) and all(isinstance(value, int) for value in steps) and steps[-1] == 12
    assert replace(SEARCH, low=0, high=0.6).values() == pytest.approx([n / 10 for n in range(7)])
    every = SEARCH.values()
    best = lambda place: SEARCH.next_round(1, {every[place]: 1.0, every[3]: 2.0})  # noqa: E731
    assert [best(place) for place in (0, 2, 6)] == [every[:3], every[1:4], every[4:]]


def test_whole_numbers_may_be_large(base: Path) -> None:
    request = TuneRequest(str(base), "checkpoint.every_tokens=1e6:2e6", 10**9, LONG, 1)
    search = request.search()
    last = request.question(search, 0, search.values()).variants[-1]
    assert last.overrides == ("checkpoint.every_tokens=2000000",)


def test_the_short_recipe_is_searched_with_its_whole_schedule() -> None:
    request = TuneRequest("short", "optimizer.lr=1e-3:1.6e-2", 1_500_000_000)
    search = request.search()
    for number, decay in enumerate((76_677_120 // 4, 76_677_120 // 2, 76_677_120)):
        cfg = load_config("short", request.question(search, number, [4e-3]).overrides)
        assert decay_tokens(cfg.lr_schedule, cfg.training.total_tokens) == decay


def verdict(losses: Sequence[Sequence[float]], low: float = 1e-3, high: float = 1.6e-2, whole: bool = False) -> str:
    """Return what the page says of five values at full length, with these losses of their seeds."""
    search = Halving("optimizer.lr", low, high, whole, 6400, 100, len(losses[0]), 5 * len(losses[0]) * 6400)
    return page(search, [Round(6400, dict(zip(search.values(), losses, strict=True)), 0)], 0.01, "", "loss")[1][
        "verdict"
    ]


def test_a_flat_range_holds_no_value_with_a_higher_loss() -> None:
    """The parabola through the best value and its neighbours is within the margin up to 6 times the best value, where
    the loss was measured at 4 times."""
    assert "From 0.002 to 0.008 the loss is less than 0.01" in verdict([[3.05], [3.001], [3.0], [3.001], [3.05]])
    assert "From 0.001 to 0.008 the loss is less than 0.01" in verdict([[3.004], [3.001], [3.0], [3.001], [3.05]])


def test_values_that_seeds_do_not_tell_apart_are_named() -> None:
    said = verdict([[3.4, 3.4, 3.4], [3.2, 3.2, 3.2], [3.0, 3.1, 3.2], [3.3, 2.9, 3.2], [3.4, 3.4, 3.5]])
    assert "0.004 is the best of those measured, with a loss of 3.1000 (not told apart from 0.002, 0.008 by 3" in said
    assert "told apart" not in verdict([[3.4], [3.2], [3.1], [3.2], [3.4]])


def test_no_value_is_below_zero_and_whole_ones_have_all_digits() -> None:
    assert verdict([[3.0], [3.1], [3.2], [3.3], [3.4]], 0, 0.8).endswith("a loss of 3.0000, and none is below")
    said = verdict([[3.0], [3.1], [3.2], [3.3], [3.4]], 2**20, 2**24, whole=True)
    assert said.startswith("optimizer.lr=1048576 is the best") and said.endswith("widen 1048576:16777216")


def test_the_tokens_of_last_steps_count(base: Path, tmp_path: Path) -> None:
    """97.7 steps of 256 tokens are 98 steps. A budget of five such runs pays for no sixth one."""
    go(base, tmp_path, runs_of(square, []), 5 * 25_088, 1, ["training.total_tokens=25000"])
    assert json.loads((tmp_path / "results.json").read_text())["tokens"] == 5 * 25_088
    with pytest.raises(ConfigError, match="takes 125,440 tokens; use a larger budget"):
        go(base, tmp_path / "less", runs_of(square, []), 5 * 25_088 - 1, 1, ["training.total_tokens=25000"])


def test_a_search_that_cannot_begin_takes_no_folder(base: Path, tmp_path: Path) -> None:
    """The corrected command may have the same output. A key that no tensor reads makes runs that are all the same."""
    started: list[str] = []
    for wrong in ("lr_schedule.min_lr=1e-3", "model.num_layers=0"):
        with pytest.raises(ConfigError):
            go(base, tmp_path, runs_of(square, started), more=[wrong])
    request = TuneRequest(str(base), "optimizer.lr_of.router=1e-4:1e-2", 10**9, LONG)
    start = runs_of(square, started)
    with pytest.raises(ConfigError, match=r"=0.0075, router=0.01: the same runs .* has no effect with a model without"):
        tune(request, Places(tmp_path, tmp_path, (), 1, "CPU"), print, command="", margin=0.01, start=start)
    assert not started and not [*tmp_path.iterdir()]
    go(base, tmp_path, runs_of(square, started))
    assert started


@pytest.mark.parametrize("losses", [(3.0, 3.1, 3.0), (3.0, math.inf, 3.1)])
def test_losses_that_bend_the_other_way_have_no_range(losses: Sequence[float]) -> None:
    found = flatness(SEARCH, dict(zip(SEARCH.values()[2:5], losses, strict=True)), 0.01)
    assert (found.lowest, found.within, found.twice) == (None, None, None) and not found.at_edge


@pytest.mark.parametrize(("range_", "budget", "overrides", "said"), [
    ("optimizer.lr", 10**9, [], "is written KEY=LOW:HIGH, for example optimizer.lr=1e-4:1e-2"),
    ("optimizer.lr=1e-4:nan", 10**9, [], "is written KEY=LOW:HIGH"),
    ("optimizer.lr=1e-2:1e-4", 10**9, [], "the first value is not below the second one"),
    ("optimizer.lr_off=1e-4:1e-2", 10**9, [], "unknown key; did you mean"),
    ("optimizer.lr=1e-4:1e-2", 1000, [], "takes 300,800 tokens; use a larger budget, --seeds 1 (128,000 tokens)"),
    ("optimizer.lr=1e-4:1e-2", 36_000, ["training.total_tokens=2560"], "use at least 4,096 tokens"),
    ("optimizer.lr=1e-4:1e-2", 310_000, ["lr_schedule.warmup_tokens=256", "lr_schedule.warmup=0"],
     "lr_schedule.warmup_tokens = 256: does not shrink with the runs of early rounds; use lr_schedule.warmup, a share "
     "of the run, or --budget 384,000, which pays for 5 values at full length"),
    ("optimizer.lr=1e-4:1e-2", 310_000, ["lr_schedule.shape=wsd", "lr_schedule.decay_tokens=2560"],
     "lr_schedule.decay_tokens = 2560: does not shrink with the runs of early rounds; use lr_schedule.decay, a share"),
    ("lr_schedule.warmup_tokens=256:2560", 310_000, ["lr_schedule.warmup=0"], "warmup_tokens = 2560: does not shrink"),
    ("optimizer.lr=1e-4:1e-2", 310_000, [RAMP], "schedule = ramp: does not shrink with the runs of early rounds"),
    ("training.total_tokens=1e4:1e5", 10**9, [], "is what rounds differ in"),
    ("training.restarts=0:3", 10**9, [], "has 4 values; name a range with 5 or more"),
    ("training.restarts=0.4:30", 10**9, [], "takes whole numbers; write training.restarts=1:30"),
    ("data.train.0.weight=1:9", 10**9, [], "is no number that can be searched"),
])  # fmt: skip
def test_searches_that_cannot_be_made(base: Path, range_: str, budget: int, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TuneRequest(str(base), range_, budget, [*LONG, *overrides], 3).search()
    assert said in str(caught.value)


def test_one_round_takes_every_schedule(base: Path) -> None:
    """Runs of one round are as long as the run that the search is for."""
    more = [RAMP, "lr_schedule.warmup=0", "lr_schedule.warmup_tokens=256", "lr_schedule.shape=wsd",
            "lr_schedule.decay_tokens=16640"]  # fmt: skip
    search = TuneRequest(str(base), "optimizer.lr=1e-4:1e-2", 400_000, [*LONG, *more], 3).search()
    assert (search.rounds, search.step_tokens, len(search.values())) == (1, 512, 5)


def test_the_command_takes_a_search_alone(base: Path) -> None:
    words = shlex.split("--tune optimizer.lr=1e-4:1e-2 --budget 1e6 --variant 'a: optimizer.lr=1' --band 1")
    done = sagetrain("compare", base, *words)
    assert done.returncode == 2 and "with one configuration and overrides; leave out --variant, --band" in done.stderr
    words = shlex.split("--tune optimizer.lr=1e-4:1e-2 --tune lr_schedule.warmup=0.1:0.5 --budget 1")
    done = sagetrain("compare", base, *words)
    assert done.returncode == 2 and "leave out a second --tune (one key at a time)" in done.stderr

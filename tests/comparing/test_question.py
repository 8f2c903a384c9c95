"""The question of a comparison: the runs that exist and the pairs that may be compared are known before anything
starts."""

from pathlib import Path

import pytest

from runs import write_config
from sagetrain.comparing.compare_request import CompareRequest
from sagetrain.comparing.question import Job
from sagetrain.comparing.results import Results, load, together
from sagetrain.config import ConfigError


@pytest.fixture
def base(tmp_path: Path, corpus: Path) -> Path:
    return write_config(tmp_path / "base.yaml", corpus, tmp_path / "run", attention=FINE)


def question(*configs: Path, variants=(), rows=(), overrides=(), seeds=2, band=0, allow=(), baseline=None, branch=0):
    names = list(map(str, configs))
    return CompareRequest(names, variants, rows, overrides, baseline, seeds, band, allow, branch).question()


FINE = {"recipe": "fine"}
PAPER = "paper: attention.recipe=paper attention.smooth_k=true"


def test_the_runs_of_a_question(base: Path, tmp_path: Path) -> None:
    asking = question(base, variants=[PAPER], rows=["low: optimizer.lr=1e-3", "high: optimizer.lr=2e-3"], band=1)
    asking.check()
    assert list(map(str, asking.jobs())) == [
        "low base seed 0", "low base seed 0 again", "low paper seed 0",
        "high base seed 0", "high base seed 0 again", "high paper seed 0",
        "low base seed 1", "low paper seed 1", "high base seed 1", "high paper seed 1",
    ]  # fmt: skip
    assert asking.command(Job("high", "paper", 1), "runs/x") == [
        str(base), "optimizer.lr=2e-3", "attention.recipe=paper", "attention.smooth_k=true",
        "training.seed=1", 'training.run_dir="runs/x"', "training.perturb=0",
    ]  # fmt: skip
    assert asking.command(Job("low", "base", 0, again=True), "runs/x")[-1] == "training.perturb=1"
    assert Job("low", "base", 0, again=True).folder == "low/base/seed-0-again"
    Results(asking, {}, 0, 0, []).save(tmp_path)
    assert load(tmp_path).question == asking
    assert str(asking.default_output()).endswith("run-compare")


def test_a_later_call_adds_seeds(base: Path) -> None:
    asking = question(base, variants=[PAPER], overrides=["training.seed=4"])
    assert sorted({job.seed for job in asking.jobs()}) == [4, 5]


def test_a_value_may_hold_spaces(base: Path) -> None:
    (_, other) = question(
        base, variants=["big: tokens_per_step={schedule: constant, tokens: 512} optimizer.lr=1"]
    ).variants
    assert other.overrides == ("tokens_per_step={schedule: constant, tokens: 512}", "optimizer.lr=1")


@pytest.mark.parametrize(("override", "key"), [
    ("data.seq_length=16", "data.seq_length"),
    ("training.seed=3", "training.seed"),
    ("model.init_std=0.01", "model.init_std"),
    ("training.total_tokens=5120", "training.total_tokens"),
    ("tokens_per_step={schedule: constant, tokens: 512}", "tokens_per_step.schedule"),
    ("attention.qk_norm=none", "attention.qk_norm"),
    ("evaluation.num_sequences=4", "evaluation.num_sequences"),
    ("training.drop_steps=[3]", "training.drop_steps"),
    ("logging.every_steps=10", "logging.every_steps"),
])  # fmt: skip
def test_what_pairs_share_is_an_error_that_says_what_differs(base: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match="nothing was started") as error:
        question(base, variants=[f"other: {override}"]).check()
    (line,) = (line for line in str(error.value).splitlines() if line.startswith(f"  {key}: "))
    assert "in base," in line and "in other:" in line
    assert ("--allow" in line) == (key != "training.seed")  # Two runs with different seeds are never a pair.


@pytest.mark.parametrize("override", [
    "attention.backend=sdpa", "optimizer.lr=1e-3", "lr_schedule.warmup_tokens=0",
    "training.dtype=bf16 linear.precision=bf16",
    "data.micro_batch_size=2", "evaluation.every_tokens=2560", "training.run_dir=elsewhere",
])  # fmt: skip
def test_everything_else_may_differ(base: Path, override: str) -> None:
    question(base, variants=[f"other: {override}"]).check()


def test_a_difference_may_be_allowed(base: Path) -> None:
    bare = ["bare: attention.qk_norm=none"]
    question(base, variants=bare, allow=["attention.qk_norm"]).check()
    question(base, variants=bare, allow=["attention"]).check()
    with pytest.raises(ConfigError, match="--allow optimizer: what may not differ is model"):
        question(base, variants=bare, allow=["attention", "optimizer"]).check()


def test_runs_that_decide_their_tokens_per_step_are_no_pairs(base: Path) -> None:
    aware = "tokens_per_step={schedule: noise_aware, start: 512, floor: 512, ceiling: 4096, hold_tokens: 512}"
    more = [aware, "stability.quant_noise.every_steps=2", "attention.backend=sage"]
    with pytest.raises(ConfigError, match=r"paper: tokens_per_step\.schedule noise_aware: each run would"):
        question(base, variants=[PAPER], overrides=more).check()
    question(base, variants=[PAPER], overrides=more, allow=["tokens_per_step"]).check()


def test_weights_to_start_from_are_shared(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.init_from: None in base, 'runs/x' in other"):
        question(base, variants=["other: training.init_from=runs/x"]).check()


def test_files_are_variants_and_differ_like_them(base: Path, tmp_path: Path, corpus: Path) -> None:
    other = write_config(
        tmp_path / "other.yaml",
        corpus,
        tmp_path / "b",
        attention=FINE,
        training={"seed": 1, "run_dir": "b", "total_tokens": 5120, "dtype": "fp32"},
    )
    with pytest.raises(ConfigError, match="nothing was started") as error:
        question(base, other).check()
    assert "training.total_tokens: 15360 in base, 5120 in other" in str(error.value)
    assert "training.seed: 0 in base, 1 in other" in str(error.value)
    asking = question(base, other, overrides=["training.total_tokens=5120", "training.seed=0"])
    asking.check()
    assert [variant.name for variant in asking.variants] == ["base", "other"]


@pytest.mark.parametrize(("override", "key"), [
    ("attention={backend: auto, recipe: fine}", "attention.backend"),
    ("linear.precision=auto training.dtype=bf16", "linear.precision"),
])  # fmt: skip
def test_what_a_run_would_time_for_itself_has_to_be_named(base: Path, override: str, key: str) -> None:
    question(base, variants=["other: attention.backend=sdpa attention.recipe=auto"]).check()
    with pytest.raises(ConfigError, match=f"other: {key} auto is timed when a run begins"):
        question(base, variants=[f"other: {override}"]).check()


def test_all_runs_have_the_same_recipe_where_auto_would_time_it(base: Path) -> None:
    """auto is the default, so that a variant need not name a recipe."""
    asking = question(base, variants=["int8: attention.backend=sage attention.recipe=auto"])
    asking.check()
    job = next(job for job in asking.jobs() if job.variant == "int8")
    assert asking.config(job).attention.recipe == "fine" and "attention.recipe=fine" in asking.command(job, "run")
    assert asking.settings()["/int8"]["attention.recipe"] == "fine"


def test_a_variant_that_could_not_start_stops_the_comparison(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"wide: .*tensor_parallel_size"):
        question(base, variants=["wide: parallel.tensor_parallel_size=2"]).check()
    with pytest.raises(ConfigError, match=r"did you mean attention\.recipe"):
        question(base, variants=["typo: attention.recip=paper"]).check()


@pytest.mark.parametrize(("wrong", "said"), [
    ({"variants": ["paper attention.recipe=paper"]}, "is written 'NAME: KEY=VALUE'"),
    ({"variants": ["paper:"]}, "is written 'NAME: KEY=VALUE'"),
    ({"variants": ["a/b: optimizer.lr=1"]}, "becomes that of a folder"),
    ({"variants": [PAPER, PAPER]}, "'paper' names two"),
    ({"variants": [PAPER], "baseline": "paper"}, "'paper' names two"),
    ({"variants": [PAPER], "band": 3}, "at most all"),
    ({}, "alone: name another configuration"),
])  # fmt: skip
def test_questions_that_cannot_be_asked(base: Path, wrong: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        question(base, **wrong)


def test_a_baseline_alone_is_compared_with_itself(base: Path) -> None:
    assert len(list(question(base, band=2, baseline="sdpa").jobs())) == 4


def test_baselines_of_two_names_are_not_one_question(base: Path) -> None:
    now, before = (Results(question(base, band=2, baseline=name), {}, 0, 0, []) for name in (None, "sdpa"))
    with pytest.raises(ConfigError, match="out with sdpa: not one question; take --baseline sdpa, or use an"):
        together([("this command", now), ("out", before)])


def test_pairs_part_where_the_baseline_saves(base: Path) -> None:
    saves = ["checkpoint.every_tokens=1536", "training.total_tokens=7680"]
    asking = question(base, variants=[PAPER], overrides=saves, branch=3000)
    asking.check()
    assert asking.parting("") == range(3000, 3072 + 512)
    with pytest.raises(
        ConfigError, match=r"--branch 6,145: .* saves every 1,536 of its 7,680 .* before its end at 6,144"
    ):
        question(base, variants=[PAPER], overrides=saves, branch=6145).check()
    # The runs part at a checkpoint that lies exactly at the branch.
    aligned = ["checkpoint.every_tokens=1280", "training.total_tokens=7680"]
    assert question(base, variants=[PAPER], overrides=aligned, branch=2560).parting("") == range(2560, 3072)
    # The runs never part at the end, where nothing is left to train.
    last = ["checkpoint.every_tokens=1000", "training.total_tokens=7680"]
    assert question(base, variants=[PAPER], overrides=last, branch=6900).parting("") == range(6900, 7512)
    # The only checkpoint after the branch is the one at the end.
    for every, branch in ((2500, 7500), (3800, 7000), (7300, 3000)):
        late = [f"checkpoint.every_tokens={every}", "training.total_tokens=7680"]
        with pytest.raises(ConfigError, match=f"--branch {branch:,}: the baseline saves every {every:,}"):
            question(base, variants=[PAPER], overrides=late, branch=branch).check()
    both = [*last, "checkpoint.keep_every_tokens=1000"]
    with pytest.raises(ConfigError, match=r"keep_every_tokens 1,000: the baseline keeps what --branch 6,900 needs by"):
        question(base, variants=[PAPER], overrides=both, branch=6900).check()

"""The statistics of `sagetrain compare`, against known values."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sagetrain.comparing import run_records
from sagetrain.comparing.analysis import LOSSES, Comparison, Line
from sagetrain.comparing.comparison_page import _section
from sagetrain.comparing.question import Job
from sagetrain.comparing.statistics import end_of, gap_curve, judge, rounding_band, spread, t, thinned


def test_quantiles_are_those_of_the_tables() -> None:
    known = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 5: 2.57058, 7: 2.36462, 10: 2.22814, 120: 1.97993}
    assert {freedom: t(freedom) for freedom in known} == pytest.approx(known, rel=5e-6)


def test_four_pairs_that_spread_by_4e_3_can_show_6e_3() -> None:
    """The plan of our experiments has this example: s = 0.004 and n = 4 give 0.0064."""
    differences = [0.004 * x * math.sqrt(3) / 2 for x in (1, 1, -1, -1)]
    assert spread(differences) == pytest.approx(0.004)
    verdict = judge(differences, margin=0.005)
    assert verdict.uncertainty == pytest.approx(0.00636, abs=1e-5)
    assert (verdict.call, verdict.gap) == ("undecided", pytest.approx(0))
    assert str(verdict) == "not decided (+0.0000): could have seen no less than 0.0064"


@pytest.mark.parametrize(("differences", "margin", "band", "call", "text"), [
    ([0.020, 0.022, 0.024], 0.01, None, "worse", "worse by 0.0220 ± 0.0050"),
    ([-0.020, -0.022, -0.024], 0.01, None, "better", "better by 0.0220 ± 0.0050"),
    ([0.020, 0.022, 0.024], 0.03, None, "level", "level within 0.03 (+0.0220 ± 0.0050)"),
    ([0.020, 0.022, 0.024], 0.01, 0.03, "undecided", "not decided (+0.0220): could have seen no less than 0.0300"),
    ([0.01, -0.02, 0.05], 0.01, 0.001, "undecided", "not decided (+0.0133): could have seen no less than 0.0872"),
    ([-2e-5, 0.0, 0.0], 0.01, None, "level", "level within 0.01 (+0.0000 ± 0.0000)"),
    ([0.02, 0.02], 0.01, 0.03, "undecided", "not decided (+0.0200): could have seen no less than 0.0300"),
    ([0.02, -0.02], 0.01, None, "undecided",
     "not decided (+0.0000): could have seen no less than 0.2541 (2 pairs alone, which may agree by chance)"),
    ([0.02], 0.1, None, "undecided", "not decided: one pair (+0.0200) has no uncertainty"),
    ([], 0.1, None, "undecided", "no pair"),
])  # fmt: skip
def test_verdicts(differences: list[float], margin: float, band: float | None, call: str, text: str) -> None:
    verdict = judge(differences, margin, band)
    assert (verdict.call, str(verdict)) == (call, text)


def test_two_pairs_that_agree_by_chance_claim_no_perfect_sight() -> None:
    assert judge([0.02, 0.020001], 0.01).power == "< 0.0001 (2 pairs alone, which may agree by chance)"
    assert judge([0.02, 0.020001, 0.02], 0.01).power == "< 0.0001"
    assert judge([0.02, 0.020001], 0.01, 0.003).power == "0.0030"


def test_the_rounding_band_is_about_zero_not_about_the_mean() -> None:
    assert rounding_band([]) is None
    assert rounding_band([0.003, 0.003]) == pytest.approx(0.003)
    assert rounding_band([0.003, -0.004]) == pytest.approx(math.sqrt(12.5e-6))


def test_the_end_of_a_run_is_its_last_twentieth_by_tokens() -> None:
    points = [(100 * n, 100, float(n)) for n in range(1, 101)]
    assert end_of(points) == pytest.approx(98)  # The end is the mean of steps 96 to 100.
    # The last twentieth, after 9,785 tokens, has three small steps and a large one.
    ramped = [*points, (10_300, 300, 4.0)]
    assert end_of(ramped) == pytest.approx((100 * (98 + 99 + 100) + 300 * 4.0) / 600)
    assert end_of(points[:3]) == 3.0


def test_thinned_curves_keep_every_step() -> None:
    points = [(n, 100 * n, float(n)) for n in range(1, 26)]
    assert thinned(points) == [(1000, 5.5), (2000, 15.5), (2500, 23.0)]


def test_a_branched_run_is_compared_over_the_same_steps() -> None:
    """Groups of steps of the branch alone would be compared with a line between two points of the baseline, while both
    fall."""
    points = [(n, 100 * n, 10.0 / n) for n in range(1, 61)]
    branch = thinned([(step, tokens, loss + 0.5) for step, tokens, loss in points if step > 18])
    assert gap_curve(branch, thinned(points)) == [(n, pytest.approx(0.5)) for n in (3000, 4000, 5000, 6000)]
    whole = thinned([point for point in points if point[0] > 20])
    # The run reports every tenth step (logging.every_steps 10).
    seldom = thinned([point for point in points if point[0] % 10 == 0])
    assert (whole[0][0], seldom[0][0], len(seldom)) == (3000, 1000, 6)


def test_the_gap_of_two_curves() -> None:
    baseline = [(100 * n, 5.0 - 0.01 * n) for n in range(1, 121)]
    above = [(tokens, loss + 0.5) for tokens, loss in baseline]
    curve = gap_curve(above, baseline, points=60)
    assert [tokens for tokens, _ in curve] == [200 * n for n in range(1, 61)]
    assert [gap for _, gap in curve] == pytest.approx([0.5] * 60)
    # The curves have different steps. The baseline is interpolated between its steps and not extended beyond them.
    coarse = [point for point in above if point[0] % 1000 == 0]
    assert gap_curve(coarse, baseline, points=1000)[0] == (1000, pytest.approx(0.5))
    assert gap_curve(coarse, baseline, points=1000)[-1] == (12_000, pytest.approx(0.5))
    assert gap_curve([], baseline) == []


def test_where_a_run_was_stopped_changes_no_loss_of_it(tmp_path: Path) -> None:
    """The run was stopped between two reported steps. Only this run of the pair has a row for that step, and only a
    last row counts."""
    losses = {step: 3.0 + step % 7 / 10 for step in (*range(10, 201, 10), 205)}
    found = []
    for name, more in (("whole", {}), ("stopped", {193: 9.0})):
        (tmp_path / name).mkdir()
        told = {"train/tokens_per_step": 10, "perf/tokens_per_second": 9.0}
        rows = [
            {"step": step, "tokens": 10 * step, "train/loss": loss, **told}
            for step, loss in sorted((losses | more).items())
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found.append(run_records.read_run(Job("", "base", 0), tmp_path / name, 2050, False, every_steps=10))
    whole, stopped = found
    assert stopped == whole
    assert whole.train_end == pytest.approx((losses[200] + losses[205]) / 2)


def test_the_bias_that_probes_have_measured_is_kept_and_shown(tmp_path: Path) -> None:
    told = {"train/loss": 3.0, "train/tokens_per_step": 10, "perf/tokens_per_second": 9.0}
    bias = {2: 0.001, 4: 0.003}
    rows = [
        {"step": n, "tokens": 10 * n, **told} | ({"quant_noise/all/bias_to_gradient": bias[n]} if n in bias else {})
        for n in range(1, 6)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_records.read_run(Job("", "paper", 0), tmp_path, 50, False)
    assert run.bias_to_gradient == 0.002
    run_records.save(tmp_path / "losses.jsonl", [run])
    assert run_records.load(tmp_path / "losses.jsonl") == [run]
    base = Line("sdpa", {"training": 3.0, "validation": None}, {}, 1, (), (), 9.0, {}, dict.fromkeys(LOSSES), None)
    paper = replace(base, variant="paper", verdicts={"training": judge([0.1], 0.01, None)}, bias_to_gradient=0.002)
    bands = dict.fromkeys(LOSSES)
    shown = "\n".join(_section(Comparison("", 10, None, base, bands, 0, (paper,)), ""))
    assert "| could see | squared bias | tokens/s |" in shown and "| 0.002 | 9 |" in shown
    without = "\n".join(
        _section(Comparison("", 10, None, base, bands, 0, (replace(paper, bias_to_gradient=None),)), "")
    )
    assert "squared bias" not in without

"""The stability that a run measured is kept over its length, in its folder, and read by the next run's plan."""

import io
import json
import math
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from runs import rows_of, write_config
from sagetrain.config import ConfigError, load_config
from sagetrain.config.earlier_run import Ratio, critical_in_words, critical_tokens, read_measured
from sagetrain.config.guidance import guidance
from sagetrain.config.schema import LinearConfig
from sagetrain.planning.show import show_plan
from sagetrain.stability.controller import Taken
from sagetrain.stability.measured import Measured


def after(steps: dict[int, dict[str, float]], keeper: Measured) -> Measured:
    for step, metrics in steps.items():
        assert keeper.after_step(Taken(step, 100 * step, 100 + step, metrics)) == []
    return keeper


def test_last_values_and_extremes_survive_a_checkpoint() -> None:
    name = "quant/0/dS/rel_l2"
    first = {10: {name: 0.2, "train/loss": 3.0}, 11: {"train/loss": 3.0}, 20: {name: 0.5}, 30: {name: float("nan")}}
    then = {40: {name: 0.1}, 50: {name: 0.3, "noise/all/scale_tokens": 1e5}}
    whole = after(first | then, Measured())
    before = json.loads(json.dumps(after(first, Measured()).state()))
    resumed = Measured()
    resumed.restore(before)
    assert after(then, resumed).state() == whole.state()
    assert whole.state()["metrics"] == {
        name: {
            "count": 4, "mean": pytest.approx(0.275), "last": 0.3, "step": 50, "tokens_per_step": 150,
            "min": 0.1, "min_step": 40, "max": 0.5, "max_step": 20,
        },
        "noise/all/scale_tokens": {
            "count": 1, "mean": 1e5, "last": 1e5, "step": 50, "tokens_per_step": 150,
            "min": 1e5, "min_step": 50, "max": 1e5, "max_step": 50,
        },
    }  # fmt: skip


def test_a_run_leaves_what_it_measured_in_its_folder(pair: Path) -> None:
    told = json.loads((pair / "stability.json").read_text())
    rows = rows_of(pair)
    scales = {row["step"]: row["noise/all/variance"] for row in rows if "noise/all/variance" in row}
    assert told["step"] == 40 and told["tokens"] == rows[-1]["tokens"]
    entry = told["metrics"]["noise/all/variance"]
    assert (entry["count"], entry["step"], entry["last"]) == (len(scales), max(scales), scales[max(scales)])
    assert (entry["min"], entry["max"]) == (min(scales.values()), max(scales.values()))
    assert {name.split("/")[1] for name in told["metrics"] if name.startswith("noise/")} >= {"0", "1", "head", "all"}
    assert not any(name.startswith("train/") for name in told["metrics"])


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Path:
    attention, schedule = {"recipe": "fine"}, {"warmup_tokens": 1024}
    return write_config(tmp_path / "run.yaml", corpus, tmp_path / "next", attention=attention, lr_schedule=schedule)


def run_folder(folder: Path, metrics: dict[str, float], tokens_per_step: int = 512, **sections: dict) -> Path:
    """Make the folder of a run that has measured these metrics."""
    folder.mkdir()
    entries = {
        name: {"last": value, "mean": value, "tokens_per_step": tokens_per_step} for name, value in metrics.items()
    }
    (folder / "stability.json").write_text(json.dumps({"metrics": entries}))
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    return folder


MEASURED = {
    "quant_noise/all/ratio": 0.3, "quant_noise/all/bias_ratio": 0.2, "quant_noise/all/bias_to_gradient": 0.0125,
    "quant_noise/0/ratio": 0.1, "quant_noise/0/bias_ratio": 0.0,
    "quant_noise/1/ratio": 0.5, "quant_noise/1/bias_ratio": 0.4,
    "noise/all/scale_tokens": 1024.0,
    "quant/0/O/rel_l2": 0.02, "quant/1/dS/rel_l2": 0.25, "quant/1/dS/cosine": 0.9,
    "quant/0/down.dW/rel_l2": 0.31, "quant/1/qkv.Y/rel_l2": 0.03, "quant/1/qkv.dY/zero_share_dX": 0.4,
}  # fmt: skip


def test_the_bias_alone_grows_with_the_tokens_per_step() -> None:
    ratio = Ratio(0.3, 0.2, 262_144)
    assert ratio.at(262_144) == pytest.approx(0.3)
    assert ratio.at(1_048_576) == pytest.approx(0.1 + 4 * 0.2)
    assert ratio.at(131_072) == pytest.approx(0.1 + 0.1)
    assert Ratio(0.3, -0.01, 1000).at(8000) == 0.3


def test_a_ratio_reaches_the_margin_where_its_bias_does() -> None:
    ratio = Ratio(0.05, 0.02, 1000)
    assert ratio.critical(0.1) == pytest.approx(3500) and ratio.at(3500) == pytest.approx(0.1)
    # The ratio is too large already; with fewer tokens it would be within the margin.
    assert Ratio(0.3, 0.25, 1000).critical(0.1) == pytest.approx(200)
    assert Ratio(0.3, 0.15, 1000).critical(0.1) == 0  # No number of tokens changes the 0.15 of bias.
    assert Ratio(0.05, -0.01, 1000).critical(0.1) == math.inf and Ratio(0.3, 0.0, 1000).critical(0.1) == 0
    ratios = {"all": ratio, "0": Ratio(0.05, 0.0, 1000), "3": Ratio(0.06, 0.04, 1000)}
    found = critical_tokens(ratios, 0.1)
    assert found == {"margin": 0.1, "all": 3500, "layer": "3", "worst": 2000}
    assert critical_in_words(found) == "T_x 3,500 (layer 3: 2,000) tokens per step, where it is 0.1"
    never = critical_tokens({"all": ratios["0"], "0": ratios["0"]}, 0.2)
    assert never == {"margin": 0.2, "all": None, "layer": "0", "worst": None}
    assert critical_in_words(never).startswith("T_x infinite (layer 0: infinite) tokens")
    assert critical_tokens({}, 0.1) is None


def test_a_plan_says_what_the_ratio_of_an_earlier_run_would_be(tmp_path: Path, config: Path) -> None:
    settings = {"attention": {"recipe": "paper"}, "linear": {"precision": "fp8"}, "optimizer": {"lr": 3e-3}}
    earlier = run_folder(tmp_path / "earlier", MEASURED, **settings)
    text = io.StringIO()
    console = Console(file=text, width=10_000)
    assert (
        show_plan(config, ["tokens_per_step={schedule: constant, tokens: 2048}"], None, console, measured=earlier) == 0
    )
    (line,) = (line for line in text.getvalue().splitlines() if "[measured_ratio]" in line)
    for part in (
        "info ", "override tokens_per_step={schedule: constant, tokens: 2048}: tokens_per_step.tokens = 2048: ",
        f"measured in {earlier}: quantization added 0.3 of the noise", "at 512 tokens per step, 0.2 of it bias; "
        "at 2,048 it would be 0.9 (largest in layer 1: 1.7); T_x 0 (layer 1: 0) tokens per step, where it is 0.1; "
        "on average its bias was 0.013 of the gradient, both squared, with which went what INT8 attention cost",
        "noise scale was 1,024 tokens: 2,048 tokens per step are 2",
        "largest relative error was 0.25, of dS in layer 1", "differs: attention.recipe paper there, fine here",
        "linear.precision fp8 there, auto here",
    ):  # fmt: skip
        assert part in line, part
    assert "optimizer.lr" not in line and "linear layers was" not in line
    assert f"source: {earlier}, measured; ratio' = " in text.getvalue()


def test_a_ratio_above_one_is_a_warning_with_ways_out(tmp_path: Path, config: Path) -> None:
    earlier = read_measured(run_folder(tmp_path / "earlier", MEASURED))
    cfg = load_config(config, ["tokens_per_step={schedule: constant, tokens: 4096}"])
    (finding,) = (f for f in guidance(cfg, earlier) if f.rule == "measured_ratio")
    assert finding.level == "warning" and "at 4,096 it would be 1.7" in finding.message
    assert "fewer tokens per step" in finding.fix
    accepted = cfg.model_copy(update={"guidance": cfg.guidance.model_copy(update={"override": ["measured_ratio"]})})
    assert [f.level for f in guidance(accepted, earlier) if f.rule == "measured_ratio"] == ["info"]


def test_of_a_run_in_16_bits_the_noise_alone_is_told_and_why(tmp_path: Path, config: Path) -> None:
    earlier = read_measured(run_folder(tmp_path / "earlier", MEASURED))
    plain = load_config(config, ["attention.backend=sdpa", "tokens_per_step={schedule: constant, tokens: 4096}"])
    (finding,) = guidance(plain, earlier)
    assert (finding.rule, finding.level, finding.fix) == ("measured_ratio", "info", "")
    assert "the gradient noise scale was 1,024 tokens: 4,096 tokens per step are 4 of it" in finding.message
    assert "what quantization added is not shown: attention.backend sdpa is in 16 bits" in finding.message
    assert "it would be" not in finding.message and "largest relative" not in finding.message
    (finding,) = guidance(plain.model_copy(update={"linear": LinearConfig(precision="fp8")}), earlier)
    assert "largest relative error of linear layers was 0.31, of down.dW in layer 0" in finding.message


def test_the_noise_scale_alone_is_told(tmp_path: Path, config: Path) -> None:
    earlier = read_measured(run_folder(tmp_path / "earlier", {"noise/all/scale_tokens": 256.0}))
    (finding,) = (f for f in guidance(load_config(config), earlier) if f.rule == "measured_ratio")
    assert "gradient noise scale was 256 tokens: 512 tokens per step are 2 of it" in finding.message


@pytest.mark.parametrize(("make", "said"), [
    (lambda folder: None, r"stability\.json: No such file or directory; name the folder of a run"),
    (lambda folder: run_folder(folder, {}), "measured neither its gradient noise nor what INT8 attention loses"),
    (lambda folder: run_folder(folder, {"quant_noise/all/ratio": 1.0}), "is not what a run writes"),
])  # fmt: skip
def test_folders_that_say_nothing(tmp_path: Path, config: Path, make, said: str) -> None:
    make(tmp_path / "earlier")
    with pytest.raises(ConfigError, match=f"--measured .*earlier.*{said}"):
        show_plan(config, [], None, Console(file=io.StringIO()), measured=tmp_path / "earlier")

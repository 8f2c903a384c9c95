"""The page of `sagetrain report`, also in a real browser where this machine has one."""

import html
import json
import math
import re
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from forked import PATIENCE
from runs import sagetrain
from sagetrain.cli import main as cli
from sagetrain.config.errors import ConfigError
from sagetrain.report import read
from sagetrain.report.page import render, write_report
from sagetrain.report.read import MAX_POINTS, averaged, different_settings, read_runs, thinned
from sagetrain.stability.controller import Event
from sagetrain.storage.local import read_rows
from sagetrain.training.writers import MetricsWriter

STEPS = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs as the trainer's own writer leaves them."""
    folders = []
    for k, (name, backend) in enumerate([("sdpa", "sdpa"), ("</script><b>sage", "sage")]):
        folder = tmp_path_factory.mktemp("runs") / name.replace("/", "-")
        folder.mkdir()
        writer = MetricsWriter(folder, 0, 0, 1000 * STEPS)
        for step in range(1, STEPS + 1):
            values = {
                "train/loss": 3 + math.exp(-step / 10) + 0.01 * k,
                "train/grad_norm": 1.0 + (step == 30) * 9,
                "train/lr": 1e-3,
                "train/tokens_per_step": 1000,
                "perf/tokens_per_second": 5e4,
            }
            if k:
                values |= {f"quant/{layer}/dS/{what}": 0.1 * (layer + 1) for layer in (0, 1) for what in ("rel_l2",)}
                values |= {f"quant/{layer}/dS/cosine": 0.9 - 0.1 * layer for layer in (0, 1)}
                values |= {f"quant/{layer}/down.dY/zero_share_dX": 0.3 - 0.1 * layer for layer in (0, 1)}
            writer.write(step, 1000 * step, values)
        for step, loss in ((20, 3.3), (STEPS, 3.1)):
            writer.write(step, 1000 * step, {"valid/loss": loss})
        writer.write(30, 30_000, {"perf/save_stall_seconds": 0.25, "perf/save_publish_seconds": 2.0})
        writer.sample(STEPS, 1000 * STEPS, 1, "Once", " upon a <b>time</b>,\n  there was")
        writer.event(30, 30_000, Event("spike", "gradient norm 10 <is> far above 1", {}))
        writer.close()
        settings = {"attention": {"backend": backend}, "training": {"seed": 0, "run_dir": str(folder)}}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        folders.append(folder)
    return folders


def test_rows_that_are_not_whole_are_passed_over(tmp_path: Path) -> None:
    """A killed run, a full disk, or a run that is writing right now leaves such rows. Where only the end of a file is
    read, the first line may be cut."""
    path, row = tmp_path / "metrics.jsonl", '{"step": 1, "tokens": 8}\n'
    assert read_rows(path) == []
    path.write_bytes(f'{row}{{"step": 2, "tok\n7\n{{"step": 3}}\n{row}'.encode() + b'{"step": 4, "tokens": 9, "\xc3')
    whole = {"step": 1, "tokens": 8}
    assert read_rows(path) == [whole, whole]
    assert [read_rows(path, last_bytes=size) for size in (2, 60, 1000)] == [[], [whole], [whole, whole]]


def test_sources_with_numbers_for_names_keep_their_curves(tmp_path: Path) -> None:
    row = {"step": 1, "tokens": 8, "valid/2023/loss": 2.0, "valid/2024/loss": 3.0, "quant/0/dS/rel_l2": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run,) = read_runs([tmp_path])
    assert set(run.curves) == {"valid/2023/loss", "valid/2024/loss", "quant/*/dS/rel_l2"}


def test_what_is_read_of_a_run(runs: list[Path]) -> None:
    sdpa, sage = read_runs(runs)
    assert (sdpa.name, sage.name) == ("sdpa", "<-script><b>sage")
    tokens, norms = sdpa.curves["train/grad_norm"]
    assert tokens == [1000 * step for step in range(1, STEPS + 1)] and norms[29] == 10 and max(norms[30:]) == 1
    assert set(sage.curves["quant/*/dS/rel_l2"][1]) == {0.2}, "of several layers the worst"
    assert set(sage.curves["quant/*/dS/cosine"][1]) == {0.8}
    assert set(sage.curves["quant/*/down.dY/zero_share_dX"][1]) == {0.3}
    assert [(event["tokens"], event["kind"]) for event in sdpa.events] == [(30_000, "save"), (30_000, "spike")]
    assert different_settings([sdpa, sage]) == {"attention.backend": ["sdpa", "sage"]}
    assert sdpa.summary["validation loss (last)"] == "3.1000" and sdpa.summary["steps"] == "60"


def test_a_thinned_curve_keeps_its_spikes() -> None:
    count = 50 * MAX_POINTS
    values = [math.sin(i / 1000) for i in range(count)]
    values[12_345], values[54_321] = 99.0, -99.0
    tokens, kept = thinned(range(count), values)
    assert len(kept) <= MAX_POINTS and tokens == sorted(tokens)
    assert (max(kept), min(kept)) == (99.0, -99.0) and kept[tokens.index(12_345)] == 99.0
    assert thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])
    ends, means = averaged(range(count), values)
    assert len(means) == MAX_POINTS // 2 and ends[-1] == count - 1
    assert sum(means) / len(means) == pytest.approx(sum(values) / count), "of all, not of the extremes"


def test_numbers_that_are_not_finite_leave_the_page_whole(tmp_path: Path) -> None:
    """The validation of a run that diverges, or the least scale of a gradient that is 0, is not finite. JSON has no
    such numbers."""
    writer = MetricsWriter(tmp_path, 0, 0, 3000)
    for step, loss in enumerate((3.0, math.nan, math.inf), 1):
        writer.write(step, 1000 * step, {"train/loss": 3.0, "valid/loss": loss, "quant/0/dO/scale_min": math.inf})
    writer.close()
    page = render(read_runs([tmp_path]))
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1],
        parse_constant=lambda name: pytest.fail(f"{name} in the page's JSON"),
    )
    (loss,) = (trace for chart in data["charts"] for trace in chart["traces"] if trace["metric"] == "valid/loss")
    assert loss["curve"] == [[1000], [3.0]]
    assert "<td>nan</td>" in page or "<td>inf</td>" in page, "the table says how it ended"


def test_the_page_needs_no_network_and_trusts_no_name(runs: list[Path]) -> None:
    page = render(read_runs(runs))
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", outside) and "@import" not in outside
    assert "<b>sage" not in outside.partition('id="data"')[0] and "gradient norm 10 &lt;is&gt; far" in outside
    assert "{{" not in outside
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["runs"] == ["sdpa", "<-script><b>sage"]
    assert {chart["title"] for chart in data["charts"] if chart["first"]} >= {
        *("Loss", "Gradient norm", "dY of linear layers that rounds to zero")
    }
    assert all(chart["unit"] for chart in data["charts"])
    assert "upon a &lt;b&gt;time&lt;/b&gt;,\n  there was</td>" in outside


@pytest.mark.parametrize("text", ["{{data}} {{plotly}} {{title}}", "<!-- <script></script> \u2028\u2029", "{{{{x}}}}"])
def test_texts_of_a_run_stay_texts(tmp_path: Path, text: str) -> None:
    """They are not taken for places of the template, and do not end the element that they are in."""
    pages = []
    for number, each in enumerate(("plain", text)):
        (folder := tmp_path / str(number) / "run").mkdir(parents=True)
        writer = MetricsWriter(folder, 0, 0, 1000)
        writer.write(1, 1000, {"train/loss": 3.0})
        writer.sample(1, 1000, 1, each, each)
        writer.event(1, 1000, Event(each, each, {}))
        writer.close()
        pages.append(render(read_runs([folder])))
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', pages[1], re.DOTALL)[1]
    assert json.loads(data)["events"] == [[[1000, text, text]]] and not {*data} & {*"<\u2028\u2029"}
    shown, as_data = (html.escape(text), json.dumps(text)[1:-1].replace("<", r"\u003c"))
    assert pages[0].replace("<td>plain</td>", f"<td>{shown}</td>").replace('"plain"', f'"{as_data}"') == pages[1]


def test_a_run_says_how_many_parameters_it_has(pair: Path) -> None:
    (run,) = read_runs([pair])
    shapes = json.loads((max(pair.glob("checkpoints/step-*")) / "manifest.json").read_text())["tensors"]
    assert int(run.summary["parameters"].replace(",", "")) == sum(math.prod(each["shape"]) for each in shapes.values())
    assert run.samples and run.samples[-1]["prompt"] == ""


@pytest.mark.parametrize(("found", "said"), [
    (None, "there is no metrics.jsonl in it"), ("", "it holds no metrics yet"),
    ('{"step": 1, "tok', "it holds no metrics yet"),
    ('{"tokens": 8}\n{"step": 1, "tokens": null}\n{"step": 1, "tokens": "x"}', "it holds no metrics yet"),
])  # fmt: skip
def test_a_folder_without_metrics_is_an_error_that_names_it(tmp_path: Path, found: str | None, said: str) -> None:
    if found is not None:
        (tmp_path / "metrics.jsonl").write_text(found)
    with pytest.raises(ConfigError, match=f"{tmp_path} is no run to report on: {said}"):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_file_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 8, "train/loss": 1.0}\n')
    for name in ("first.html", "first.html", "metrics.jsonl"):
        with (
            nullcontext() if name == "first.html" else pytest.raises(ConfigError, match=f"{name} is no page, and would")
        ):
            write_report([tmp_path], tmp_path / name)


def test_a_large_file_in_the_place_of_the_page_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 26)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="large is no page"):
            write_report([tmp_path], tmp_path / "large")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_configuration_that_is_cut_off_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 8, "train/loss": 1.0}\n')
    (tmp_path / "config.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match=f"{tmp_path}/config.yaml:1: cannot be read: not valid YAML"):
        write_report([tmp_path], tmp_path / "report.html")
    (tmp_path / "config.yaml").unlink()
    refused = sagetrain("report", tmp_path, "-o", tmp_path)
    assert refused.returncode == 2 and f"error: {tmp_path} cannot be written: Is a directory" in refused.stderr


def test_legends_explain_marks_and_metrics(tmp_path: Path) -> None:
    """The summary has a column for each run, and so fits a phone."""
    writer = MetricsWriter(tmp_path, 0, 0, 10)
    writer.write(1, 1, {"train/loss": 1.0, "train/tokens_per_step": 1, "noise/all/scale_tokens": 2.0})
    writer.close()
    assert 'class="event"' not in render(read_runs([tmp_path]))
    (tmp_path / "events.jsonl").write_text(json.dumps({"step": 1, "tokens": 1, "kind": "spike", "text": "high"}) + "\n")
    page = render(read_runs([tmp_path]))
    assert '<ul id="legend"><li class="event">an event: the table below says which</li></ul>' in page
    assert '"metric": "noise/all/scale_tokens", "meaning": "gradient noise scale"' in page
    assert f"<th></th><th>{tmp_path.name}</th>" in page and "<tr><td>tokens</td><td>1</td></tr>" in page


def test_one_run_named_twice_is_an_error(runs: list[Path]) -> None:
    with pytest.raises(ConfigError, match="the same run is named twice"):
        read_runs([runs[0], runs[0]])


def test_the_command_says_what_it_wrote(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(cli.app, ["report", *map(str, runs), "-o", str(page)])
    assert result.exit_code == 0 and result.output.startswith(f"{page}: 2 runs, ") and page.exists()


# -- in a browser ------------------------------------------------------------------------------------------------


def lines(driver) -> list[int]:
    """Return the number of lines in each of the first charts. All are long enough to be seen."""
    charts = driver.execute_script(
        "return [...document.querySelectorAll('#first .chart')].map(c => "
        "[...c.querySelectorAll('.scatterlayer path.js-line')].map(p => p.getTotalLength()))"
    )
    assert all(length > 100 for lengths in charts for length in lengths), "pixels"
    return [len(lengths) for lengths in charts]


def overlapping(driver) -> list[list[str]]:
    """Return the pairs of texts in the same chart where one covers a part of the other."""
    return driver.execute_script("""
        const pairs = [];
        for (const chart of document.querySelectorAll(".chart")) {
          const texts = [...chart.querySelectorAll("text")].filter((text) => text.textContent.trim());
          const boxes = texts.map((text) => text.getBoundingClientRect());
          for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
            const [a, b] = [boxes[i], boxes[j]];
            const both = (low, high) => a[low] < b[high] - 1 && b[low] < a[high] - 1;
            const covered = both("left", "right") && both("top", "bottom");
            if (covered) pairs.push([texts[i], texts[j]].map((x) => x.textContent));
          }
        }
        return pairs;""")


@pytest.mark.parametrize(("width", "values"), [(1280, [1.4]), (390, [1e-9, 40.0])], ids=str)
def test_labels_of_charts_with_few_points_do_not_overlap(
    tmp_path: Path, driver, monkeypatch: pytest.MonkeyPatch, width: int, values: list[float]
) -> None:
    """A map of the loads of experts is among them, as a checkpoint would give it."""
    loads = {layer: [(expert * 7 % 64) / 31.5 for expert in range(64)] for layer in range(1, 16)}
    monkeypatch.setattr(read, "_loads", lambda root: (loads, 1234))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"experts": {"number": 64}}}))
    writer = MetricsWriter(tmp_path, 0, 0, 3000)
    for step, value in enumerate(values, 1):
        names = (
            "train/loss",
            "train/grad_norm",
            "train/lr",
            "train/tokens_per_step",
            "quant/0/dS/rel_l2",
            "other/some",
        )
        writer.write(step, 1_234_567 * step, dict.fromkeys(names, value) | {"quant_noise/0/ratio": value})
    writer.close()
    write_report([tmp_path], tmp_path / "report.html")
    screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.get((tmp_path / "report.html").as_uri())
    open_all(driver)
    assert overlapping(driver) == []
    assert driver.execute_script("return document.querySelectorAll('#first .heatmaplayer image').length") == 1


def open_all(driver) -> None:
    driver.execute_script("document.getElementById('more').open = true")
    driver.execute_script("document.getElementById('more').dispatchEvent(new Event('toggle'))")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_curves_are_drawn_at_every_width_in_light_and_dark(
    runs: list[Path], tmp_path: Path, driver, width: int, scheme: str
) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    page = tmp_path / "report.html"
    write_report(runs, page)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["http://*", "https://*"]})
    driver.get(page.as_uri())
    script = driver.execute_script
    assert script("return document.getElementsByTagName('b').length") == 0
    assert lines(driver) == [6, 4, 2, 2, 4, 2, 2], "with smooth ones where there is noise"
    titles = "[...c.querySelectorAll('.xtitle, .ytitle')].map(t => t.textContent)"
    named = script(f"return [...document.querySelectorAll('#first .chart')].map(c => {titles})")
    assert named[0] == ["tokens seen", "nats per token"] and all(len(pair) == 2 and all(pair) for pair in named)
    assert overlapping(driver) == []
    slider = "document.querySelector('#smooth input')"
    script(f"{slider}.value = 0; {slider}.dispatchEvent(new Event('change'))")
    assert lines(driver) == [4, 2, 2, 2, 2, 1, 1]
    fit = "c => c.querySelector('.main-svg').getBoundingClientRect().width <= c.clientWidth"
    assert script(f"return [...document.querySelectorAll('.chart')].every({fit})"), "each within its frame"
    assert script("return document.documentElement.scrollWidth") <= width, "nothing to scroll to the side"
    background = script("return getComputedStyle(document.body).backgroundColor")
    paper = script("return document.querySelector('.chart .main-svg').style.background")
    assert background == paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 23, 29)"}[scheme]
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    script("document.querySelector('#first .modebar-btn[data-title^=\"Download\"]').click()")
    (picture,) = WebDriverWait(driver, PATIENCE).until(lambda _: [*tmp_path.glob("*.png")])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stem == "loss"
    open_all(driver)
    assert script("return document.querySelectorAll('#others .scatterlayer').length") > 0
    assert [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []

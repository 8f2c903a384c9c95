"""The printed plan is about one layout, and fits terminals and pages of any width."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from sagetrain.config.reference import keys, markdown
from sagetrain.costs.hardware import H200, HARDWARE
from sagetrain.planning.changes import overrides_to
from sagetrain.planning.plan import make_plan
from sagetrain.planning.show import show_key_reference, show_plan
from sagetrain.planning.tables import PAGE, Table, console, print_table

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(("name", "world_size", "gpu", "overrides"), [
    ("1b", 8, "h100", []),  # It runs as configured.
    ("1b", 64, "h100", []),  # Tokens per step are too few for its micro-batches.
    ("1b", 1, "rtx4090", []),  # It fits with another optimizer's state alone.
    ("24gb", 1, "rtx4090", ["attention.backend=sage", "attention.recipe=scores"]),
    ("7b", 512, "h100", []),
    ("8b", 8, "rtx4090", []),  # Memory lacks.
])  # fmt: skip
def test_one_plan_is_about_one_layout(name, world_size, gpu, overrides):
    """The figures are those of the configured layout if it can run, and of layout 1 otherwise. All findings name a key
    of the YAML, its value and its place, and all lines fit a page."""
    made = make_plan(CONFIGS / f"{name}.yaml", overrides, world_size, HARDWARE[gpu])
    assert made.shown is (made.proposed[0] if made.errors else made.chosen)
    assert made.cfg == made.shown.cfg and sum(item.bytes for item in made.memory) == made.shown.memory
    assert max(row.tokens_per_step for row in made.schedule) == made.shown.prediction.tokens_per_step
    (priced,) = (finding for finding in made.findings if finding.rule == "linear_precision_auto")
    assert priced.message.startswith(f"is priced as {made.cfg.linear.precision}")
    for finding in made.findings:
        value = made.asked
        for part in finding.key.split("."):
            value = value[int(part)] if isinstance(value, list) else getattr(value, part)
        assert value == finding.value and finding.where, finding
    out = io.StringIO()
    show_plan(CONFIGS / f"{name}.yaml", overrides, world_size, console(out, PAGE), HARDWARE[gpu])
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert ("figures below are of layout 1" in " ".join(text.split())) == (made.name == "layout 1") == bool(made.errors)
    for line in ("Step time, predicted: {} on ", "Communication per step and rank: {}\n", "estimated: {}\n"):
        assert line.format(made.name) in text
    row = "1" if made.name == "layout 1" or made.chosen.key == made.proposed[0].key else "now"
    (speed,) = re.findall(rf"^{row} .* {made.cfg.linear.precision}  +(~?[\d,]+)  ", text, re.MULTILINE)
    assert f"micro-steps: {speed} tokens/s" in " ".join(text.split())
    assert f"at the predicted {speed} tokens/s" in " ".join(text.split())
    pasted = re.search(r"^1: ((?:.* \\\n)*.*)$", text, re.MULTILINE)[1].replace("\\\n", "").split()
    assert pasted == (overrides_to(made.configured, made.proposed[0].cfg) or ["as", "configured"])


def test_a_fall_to_16_bits_has_its_reason_and_a_cure_that_holds():
    """Micro-steps of one sequence are too short for the host to launch INT8's kernels in time, unless CUDA graphs
    replay them."""
    assert make_plan(CONFIGS / "1b.yaml", [], 64, HARDWARE["h100"]).cfg.linear.precision == "int8"
    made = make_plan(CONFIGS / "1b.yaml", ["training.cuda_graphs=off"], 64, HARDWARE["h100"])
    priced, cure = (next(f for f in made.findings if f.rule == rule)
                    for rule in ("linear_precision_auto", "short_micro_steps"))  # fmt: skip
    assert "is priced as bf16" in priced.message and "wait 9.5 ms longer for the host" in priced.message
    words = [word for word in cure.fix.split() if re.match(r"\w+\.\w+\S*=", word)]
    cured = make_plan(CONFIGS / "1b.yaml", [*words, "training.cuda_graphs=off"], 64, HARDWARE["h100"])
    assert not cured.errors and cured.cfg.linear.precision == "int8"
    assert f"is predicted at {cured.chosen.prediction.tokens_per_second:,.0f} tokens/s" in cure.fix
    assert cured.chosen.prediction.tokens_per_second > 1.03 * made.shown.prediction.tokens_per_second
    # Where the GPU is the limit, more tokens are not proposed.
    assert "short_micro_steps" not in {f.rule for f in make_plan(CONFIGS / "1b.yaml", [], 8, H200).findings}


def test_an_mfu_above_1_is_explained_where_it_stands():
    out = io.StringIO()
    for gpu, above in (("rtx4090", True), ("h200", False)):
        show_plan(CONFIGS / "24gb.yaml", [], 1, Console(file=out, width=400), HARDWARE[gpu])
        said = re.search(r"perf/mfu_full_attention: ([\d.]+)(.*)\)$", out.getvalue(), re.MULTILINE)
        assert (float(said[1]) > 1) == above == (said[2] == "; above 1 where products in 8 bits pass the 16-bit peak")
        out.seek(out.truncate(0))


WIDTHS = (60, 80, 120)
# There are errors with long fixes and overrides to paste, and a long ramp under tensor and context parallelism.
CASES = {
    "7b": (1024, []),
    "1b": (
        16,
        [
            "parallel={tensor_parallel_size: 2, context_parallel_size: 2}",
            "tokens_per_step={schedule: ramp, start: 262144, end: 8388608, ramp_tokens: 1e10}",
        ],
    ),
}


def printed(show, width: int | None) -> str:
    """Return the output as on a terminal of this width, or as piped."""
    out = io.StringIO()
    show(Console(file=out, width=width) if width else console(out))
    return out.getvalue()


def words(text: str) -> set[str]:
    """Return the words of a text, without the punctuation that lists and tables have between cells."""
    return {word.strip(",:;()") for word in text.replace("─", " ").split()} - {"", "\\"}


@pytest.mark.parametrize("name", CASES)
def test_no_word_is_cut_at_any_width(monkeypatch, name):
    """Keys, numbers and overrides that are whole without a limit are whole at every width, and lines fit."""
    path, (world_size, overrides) = CONFIGS / f"{name}.yaml", CASES[name]
    made = make_plan(path, overrides, world_size, H200)  # The plan is made once for all of them.
    monkeypatch.setattr("sagetrain.planning.show.make_plan", lambda *_: made)
    for brief in (False, True):

        def show(console: Console, brief: bool = brief) -> None:
            show_plan(path, overrides, world_size, console, brief=brief)

        piped = printed(show, None)
        assert not {word for word in words(piped) if word.endswith("…")}
        for width in WIDTHS:
            text = printed(show, width)
            assert words(piped) - words(text) == set(), (brief, width)
            too_long = [line for line in text.splitlines() if len(line) > width]
            assert all(len(line.removesuffix(" \\").split()) <= 2 for line in too_long), too_long
            assert not [line for line in text.splitlines() if line.endswith(" ")]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_of_the_key_reference_is_cut(width):
    piped, text = printed(show_key_reference, None), printed(show_key_reference, width)
    assert {key.name for key in keys()} <= words(piped)
    assert words(piped) - words(text) == set()
    assert max(map(len, text.splitlines())) <= width


def test_a_terminal_sets_the_width_and_a_pipe_none(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert console(Terminal()).width == width
        assert console(io.StringIO()).width > 1000


def test_numbers_keep_their_units_and_tables_become_lists():
    table = Table("Sizes", ("name", "size", "why"), [("a", "12.5 GiB", "of three words")], numbers=("size",))
    wide, narrow, list_ = (printed(lambda out: print_table(out, table), width) for width in (60, 21, 19))
    assert wide.splitlines()[1:] == ["name      size  why", "─" * 30, "a     12.5 GiB  of three words"]
    assert narrow.splitlines()[-3:] == ["a     12.5 GiB  of", " " * 16 + "three", " " * 16 + "words"]
    assert list_.splitlines() == ["Sizes", "name a", "    size 12.5 GiB;", "    why of three", "    words"]


def test_the_key_reference_names_every_key_in_a_pipe_too():
    text = printed(show_key_reference, None)
    page = markdown()
    for key in keys():
        assert f"\n{key.name}  (" in f"\n{text}"
        assert f"### `{key.name}` {{" in page
        assert key.doc
    assert max(map(len, text.splitlines())) <= 100
    assert "optimizer.lr  (required)\n    a number above 0\n    Peak learning rate.\n" in text
    assert "\n\nPeak learning rate.\n\nTakes a number above 0; required.\n" in page
    assert "tokens_per_step.schedule  (required)\n    one of constant, ramp, stages, noise_aware\n" in text
    assert "data.train.0.weight  (default 1.0)\n    a number above 0 or proportional\n" in text

"""docs/ and results/ as readers meet them: commands run, pages render, plots and tables agree."""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

from documented import split
from forked import PATIENCE, Command
from runs import ROOT
from sagetrain import api, config
from sagetrain.config import yaml_nodes
from sagetrain.config.check import check
from sagetrain.config.load import flat
from sagetrain.config.reference import keys
from sagetrain.config.schema import LinearConfig

GUIDES = sorted(ROOT.glob("docs/*.md"))
LOGS = sorted(ROOT.glob("results/log/*.md"))
RESULTS = sorted({*ROOT.glob("results/*/README.md")} - {*LOGS})
SCRIPT = r"\b(?:benchmarks|launch|results)/[\w/-]+\.(?:py|sh)\b"


def blocks(path: Path) -> list[tuple[str, str]]:
    """Return the (language, text) pairs of the fenced blocks of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.M | re.S)


def lines(block: str) -> list[list[str]]:
    """Return the commands of a block, in words."""
    return [words for line in block.replace("\\\n", " ").splitlines() for words in split(line)]


@pytest.mark.parametrize("guide", GUIDES, ids=[path.stem for path in GUIDES])
def test_every_command_of_a_guide_is_run_or_says_what_it_needs(guide: Path) -> None:
    for language, block in blocks(guide):
        # test_documented_commands.py runs these commands.
        elsewhere = all(words[:2] == ["sagetrain", "plan"] for words in lines(block))
        if language != "bash" and not elsewhere:
            assert block.startswith("# needs "), f"{guide.name}: mark it ```bash to have it run, or say what it needs"


SHORTER = {f"training.total_tokens={tokens}": "training.total_tokens=5120" for tokens in (30720, 10240)}
"""The lengths of runs in guides, and those of the tests' runs."""


@pytest.mark.parametrize("guide", [g for g in GUIDES if any(language == "bash" for language, _ in blocks(g))],
                         ids=lambda path: path.stem)  # fmt: skip
def test_commands_of_a_guide_run_one_after_the_other(guide: Path, tmp_path: Path) -> None:
    for folder in ("configs", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for language, block in blocks(guide):
        for words in lines(block) if language == "bash" else []:
            log = tmp_path / "log"
            log.unlink(missing_ok=True)
            assert words[0] == "sagetrain", words
            words = [SHORTER.get(word, word) for word in words]
            assert Command(words, env, log, tmp_path).wait(PATIENCE) == 0, f"{' '.join(words)}\n{log.read_text()}"


def alternatives(block: str) -> list[str]:
    """Return the settings of a block one by one if the block shows several for the same key, or else the block."""
    parts = re.split(r"^(?=\w)", block, flags=re.M)
    keys_of_parts = [part.partition(":")[0] for part in parts]
    return [block] if len({*keys_of_parts}) == len(parts) else [part for part in parts if part]


YAML = [
    (path, each)
    for path in GUIDES
    for language, block in blocks(path)
    if language == "yaml"
    for each in alternatives(block)
]


@pytest.mark.parametrize(("guide", "block"), YAML, ids=[f"{path.stem}-{n}" for n, (path, _) in enumerate(YAML)])
def test_settings_of_a_guide_are_those_of_a_run_without_errors(guide: Path, block: str) -> None:
    sections, _, problems = yaml_nodes.parse(block)
    assert problems == []
    whole = {
        key: sections.pop(key) for key in [*sections] if key == "tokens_per_step"
    }  # Another schedule has other keys.
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**whole, **flat(sections)}.items()]
    findings = check(config.load_config("325m", overrides), 8, path="325m", overrides=overrides, files=False)
    assert [str(finding) for finding in findings if finding.level == "error"] == []


@pytest.mark.parametrize("guide", ["stability", "gradients", "tokens-per-step", "low-bit-linear", "int8-attention"])
def test_a_guide_begins_with_what_to_do(guide: str) -> None:
    assert re.findall(r"^## (.*)", (ROOT / f"docs/{guide}.md").read_text(), re.M)[0] == "What to do"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES], ids=lambda path: path.stem)
def test_a_page_is_written_in_short_sentences_and_whole_numbers(page: Path) -> None:
    """No sentence has more than 40 words. A number is written 0.0038 ± 0.0010 and not .0038 +- .0010."""
    text = re.sub(r"^(```.*?^```|(\||    )[^\n]*|[^\n]* · [^\n]*)", "", page.read_text(), flags=re.M | re.S)
    paragraphs = re.split(r"\n\s*\n|\n(?=(?:[-*]|\d+\.) )", re.sub(r"\]\([^)]*\)", "]", text))
    sentences = [each for part in paragraphs for each in re.split(r"(?<=[.!?:])\)?\s+(?=[A-Z`*\[(])", part)]
    assert [" ".join(sentence.split()) for sentence in sentences if len(sentence.split()) > 40] == []
    assert re.findall(r"\+-|(?<![\w.)/])\.\d+\b", re.sub(r"`[^`]*`", "", page.read_text())) == []


def test_links_to_headings_work_on_github_too() -> None:
    """The site's build checks its own names of headings. GitHub makes other names of `&` and similar characters."""

    def name(heading: str) -> str:
        return re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", heading).lower()).strip().replace(" ", "-")

    def headings(path: Path) -> set[str]:
        return {name(line) for line in re.findall(r"^#+ (.*)", path.read_text(), re.M)}

    broken = [
        (path.name, target, anchor)
        for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES)
        for target, anchor in re.findall(r"\]\(((?!\w+:)[^)#\s]*)#([^)]+)\)", path.read_text())
        if (there := path.parent / target if target else path).is_file() and anchor not in headings(there)
    ]
    assert broken == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # The build fails at a link to nowhere.
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def test_the_site_renders_with_every_page_link_and_key(site: Path) -> None:
    listed = re.findall(r"[\w./-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert {path.name for path in GUIDES} < set(listed)
    assert {str(path.relative_to(ROOT)) for path in RESULTS} | {"results/log/README.md"} < set(listed)
    reference = (site / "reference/index.html").read_text()
    assert [key.name for key in keys() if f"<code>{key.name}</code>" not in reference] == []
    assert "googleapis" not in reference, "a page that needs another server"
    described = set(re.findall(r'<h\d id="sage\w+\.[\w.]*?(\w+)"', (site / "api/index.html").read_text()))
    assert {*api.__all__} - described == {"RunConfig"}, "names of the library that docs/api.md leaves out"
    assert {"convert", "Linear8bit", "sage_attention", "swiglu", "qk_norm_rope", "register", "graphed"} < described


@pytest.mark.parametrize("page", [".", "reference", "data", "api"])
def test_the_site_cuts_no_code_and_breaks_no_name_of_a_key(site: Path, driver, page: str) -> None:
    for width in (1280, 500):
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.get((site / page / "index.html").as_uri())
        blocks = "[...document.querySelectorAll('pre > code')]"
        assert driver.execute_script(f"return {blocks}.filter(b => b.scrollWidth > b.clientWidth).length") == 0
        names = "[...document.querySelectorAll('h3 code')].filter(n => n.getClientRects().length > 1)"
        assert width < 1280 or driver.execute_script(f"return {names}.map(n => n.textContent)") == []


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The address of the site, which is served because a search loads its index."""
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_search_finds_guides_first_by_other_libraries_words(served: str, driver) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    driver.get(served)
    found = f"[...document.querySelectorAll('.md-search-result__link')].map(a => a.href.replace('{served}', ''))"
    typed = """
        const box = document.querySelector('.md-search__input')
        box.focus(); box.value = arguments[0]; box.dispatchEvent(new Event('keyup'))"""

    def search(words: str) -> list[str]:
        """Type into the search box and return the results. The list of the last search is emptied first."""
        for text, ready in (("", f"!{found}.length"), (words, f"{found}.length")):
            driver.execute_script(typed, text)
            WebDriverWait(driver, PATIENCE, 0.05).until(lambda _, ready=ready: driver.execute_script(f"return {ready}"))
        return driver.execute_script(f"return {found}")

    for query, first in {
        "OOM": "troubleshooting/", "out of memory": "troubleshooting/", "FSDP": "cluster/", "multi node": "cluster/",
        "epochs": "data/", "global batch size": "tokens-per-step/", "keep_last": "reference/",
        "speed": ("generation/", "low-bit-linear/"), "resume": "resuming/", "nan loss": "troubleshooting/",
        "loss spike": "stability/", "NCCL timeout": "troubleshooting/", "wandb": "run-folder/",
        "fine-tune": "finetuning/", "learning rate": "tokens-per-step/", "MFU": "metrics/",
        "disk full": "troubleshooting/", "Muon": "optimizers/", "glossary": "words/",
    }.items():  # fmt: skip
        pages = search(query)
        assert pages[0].startswith(first), (query, pages[:5])


def test_the_page_on_linear_layers_has_every_key() -> None:
    page = ROOT / "docs/low-bit-linear.md"
    keys_of_page = yaml.safe_load(next(block for language, block in blocks(page) if language == "yaml"))["linear"]
    assert LinearConfig(**keys_of_page) == LinearConfig()
    assert keys_of_page.keys() == LinearConfig.model_fields.keys()


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 700


@pytest.mark.parametrize("page", RESULTS, ids=[path.parent.name for path in RESULTS])
def test_a_result_answers_one_question_on_one_page(page: Path) -> None:
    text = page.read_text()
    question, answer = text.split("\n\n")[:2]
    assert question.startswith("# ") and question.endswith("?") and answer.startswith("**")
    assert len(text.split()) <= 600
    assert len(re.findall(r"(?:^\|.*\n)+", text, re.M)) == 1, "one table"
    (plot,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert (page.parent / plot).is_file()
    assert "**What it does not show:**" in text
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", text) and re.search(r"H[12]00|CPU", text)
    command = r"(?:^|[\s\"])(?:sagetrain|python3?|make|torchrun|results/\S+\.sh) \S"
    assert any(re.search(command, block) for _, block in blocks(page)), "no command"
    assert f"({page.parent.name}/README.md)" in (ROOT / "results/README.md").read_text()


def test_every_script_that_a_page_names_is_there() -> None:
    pages = (*ROOT.glob("*.md"), *GUIDES, *RESULTS, *LOGS, ROOT / "kernels/NOTES.md")
    named = {name for page in pages for name in re.findall(SCRIPT, page.read_text())}
    assert len(named) > 10 and [name for name in named if not (ROOT / name).is_file()] == []


def test_every_log_is_listed_and_numbers_are_written_in_full() -> None:
    """A number has a digit before its point, and an interval has its sign."""
    index = ROOT / "results/log/README.md"
    assert [path.name for path in LOGS if path != index and f"({path.name})" not in index.read_text()] == []
    for page in (*RESULTS, *LOGS, ROOT / "results/README.md", ROOT / "kernels/NOTES.md"):
        prose = re.sub(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", "", page.read_text(), flags=re.M | re.S)
        assert re.findall(r"(?<![\w.)*])[-+]?\.\d+|\+-", prose) == [], page


def test_every_result_that_code_and_findings_name_is_there() -> None:
    sources = [
        path.read_text() for room in ("sagetrain", "benchmarks", "tests") for path in ROOT.glob(f"{room}/**/*.py")
    ]
    named = {name for text in sources for name in re.findall(r"\bresults/[a-z][\w-]+(?:(?:/[\w-]+)?\.\w+)?", text)}
    assert len(named) > 10 and [name for name in named if not (ROOT / name).exists()] == []


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plots", ROOT / "results/plots.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plots_are_drawn_from_the_tables_of_their_pages(plots: ModuleType, tmp_path: Path) -> None:
    for page in plots.PLOTS:
        assert plots.draw(page, tmp_path).stat().st_size > 5000
        assert (ROOT / "results" / page / plots.PLOTS[page][0]).is_file()
    assert [plots.number(cell) for cell in ("65,247", ".449", "59.9 GiB", "**1.128**")] == [65247, 0.449, 59.9, 1.128]
    with pytest.raises(AssertionError, match="no number in 'none'"):
        plots.number("none")

"""The drawn pictures of docs/ are what the code says today, and can be read."""

import importlib
import re
import sys
from types import ModuleType

import pytest

from runs import ROOT


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("pictures")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_the_files_are_what_the_code_draws_today(pictures: ModuleType) -> None:
    """After a change of a recipe, a group, a file's name or a prediction, draw the pictures again: python3
    docs/pictures.py."""
    drawn = {name: draw().svg() for name, draw in pictures.PICTURES.items()}
    there = {path.stem: path.read_text() for path in (ROOT / "docs/pictures").glob("*.svg")}
    assert there.keys() == drawn.keys()
    assert [name for name in drawn if drawn[name] != there[name]] == []


def test_every_picture_is_on_a_page_with_a_description(pictures: ModuleType) -> None:
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
    assert set(re.findall(r"!\[[^\]]{20,}\]\((?:docs/)?pictures/(\w+)\.svg\)", pages)) == pictures.PICTURES.keys()


def test_the_chart_has_figures_that_stand_in_results(pictures: ModuleType) -> None:
    plain = {".0": r"\b0\.0", "±": r"\+-|\+/-", "": r"[ *+]"}
    text = "".join(path.read_text() for path in sorted(ROOT.glob("results/**/*.md")))
    for short, written in plain.items():
        text = re.sub(written, short, text)
    wanted = {f"{rate:,}" for *_, rate, peer in pictures.GAINS for rate in (rate, peer)}
    wanted |= {f"{cost:.4f}±{interval:.4f}".replace("0.", ".") for _, cost, interval, _ in pictures.COSTS}
    assert {figure for figure in wanted if figure not in text} == set()


def test_the_words_of_a_picture_lie_inside_in_both_colours(pictures: ModuleType, driver) -> None:
    for name in pictures.PICTURES:
        driver.get((ROOT / f"docs/pictures/{name}.svg").as_uri())
        papers = []
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            papers.append(driver.execute_script("return getComputedStyle(document.querySelector('.paper')).fill"))
        assert papers[0] != papers[1], name
        outside = """
            const [, , width, height] = document.documentElement.getAttribute('viewBox').split(' ').map(Number)
            return [...document.querySelectorAll('text')].filter(text => {
                const box = text.getBBox()
                return box.x < 0 || box.x + box.width > width || box.y < 0 || box.y + box.height > height
            }).map(text => text.textContent)"""
        assert driver.execute_script(outside) == [], name
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

"""setup.cfg names every package and only those that exist; the pinned versions satisfy its ranges."""

from __future__ import annotations

import configparser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_package_is_listed() -> None:
    folders = {p.parent.relative_to(ROOT) for p in (ROOT / "sagetrain").rglob("*.py")}
    expected = {str(folder).replace("/", ".") for folder in folders} | {"sagekernels", "sagetrain.configs"}
    assert set(setup()["options"]["packages"].split()) == expected


def test_both_packages_say_that_they_are_typed() -> None:
    data = setup()["options.package_data"]
    for package, folder in (("sagetrain", "sagetrain"), ("sagekernels", "kernels/sagekernels")):
        assert (ROOT / folder / "py.typed").is_file()
        assert "py.typed" in data.get(package, "").split(", ")


def test_pins_are_within_the_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    options = setup()["options"], setup()["options.extras_require"]
    wanted = [Requirement(line) for text in (options[0]["install_requires"], options[1]["dev"])
              for line in text.splitlines() if line]  # fmt: skip
    ranges = {requirement.name: requirement.specifier for requirement in wanted}
    for pin in pins:
        version = next(iter(pin.specifier)).version
        assert version in ranges[pin.name], f"{pin.name} {version} is outside {ranges[pin.name]}"
    unpinned = {requirement.name for requirement in wanted} - {pin.name for pin in pins}
    assert unpinned == {"pre-commit", "nvidia-cuda-nvrtc"}

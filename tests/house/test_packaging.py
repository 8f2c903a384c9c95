"""setup.cfg names exactly the packages that exist, the pinned versions satisfy its ranges, and a wheel works."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from forked import PATIENCE, Command
from runs import BIN
from sagetrain import __version__
from sagetrain.doctor import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("sagetrain", "kernels", "configs", "launch", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
"""The folders and files from which a wheel is built."""


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_package_is_listed() -> None:
    roots = (ROOT / "sagetrain", ROOT), (ROOT / "kernels/sagekernels", ROOT / "kernels")
    folders = {p.parent.relative_to(start) for package, start in roots for p in package.rglob("*.py")}
    expected = {str(folder).replace("/", ".") for folder in folders} | {"sagetrain.configs"}
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
    extras = {name: text for name, text in options[1].items() if name != "all"}
    assert options[1]["all"].strip() == f"sagetrain[{','.join(sorted(EXTRAS))}]" and {*EXTRAS, "dev"} == {*extras}
    wanted = [Requirement(line) for text in (options[0]["install_requires"], *extras.values())
              for line in text.splitlines() if line]  # fmt: skip
    wanted = [requirement for requirement in wanted if requirement.name != "sagetrain"]
    ranges = {requirement.name: requirement.specifier for requirement in wanted}
    for pin in pins:
        version = next(iter(pin.specifier)).version
        assert version in ranges[pin.name], f"{pin.name} {version} is outside {ranges[pin.name]}"
    unpinned = {requirement.name for requirement in wanted} - {pin.name for pin in pins}
    assert unpinned == {"pre-commit", "nvidia-cuda-nvrtc"}


@pytest.mark.parametrize(("targets", "installs"), [
    (("install", "quickstart"), ["torch", "-e ."]),
    (("test", "coverage", "check", "fmt", "docs"), ["torch", "-e .", "-e '.[dev]'"]),
])  # fmt: skip
def test_make_installs_what_a_target_needs_and_no_more(
    tmp_path: Path, targets: tuple[str], installs: list[str]
) -> None:
    for target in targets:
        words = ["make", "-n", f"VENV={tmp_path}", target]
        told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        assert re.findall(r"pip install -q -c constraints.txt (.*)", told.stdout) == installs
    tools = {"mypy", "lm_eval", "mkdocs-material", "wandb", "pytest"}
    assert not tools & {Requirement(line).name for line in setup()["options"]["install_requires"].splitlines() if line}


def test_the_wheel_alone_has_what_its_help_names(tmp_path: Path) -> None:
    """The wheel is built from a copy and runs in an environment of its own, which has our libraries and nothing of the
    checkout."""
    source, new = tmp_path / "source", tmp_path / "new"
    source.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(source)]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = tmp_path.glob("sagetrain-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(new)], check=True)
    (packages,) = new.glob("lib/python*/site-packages")
    libraries = [folder for folder in sys.path if folder.endswith("-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    install = [*pip, "--python", str(new / "bin/python"), "install", "--no-deps", "--no-index", "--no-compile"]
    install += ["--ignore-installed"]
    subprocess.run([*install, str(built)], check=True)
    path = f"{new / 'bin'}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}

    def said(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    names = {file.name for file in (ROOT / "configs").iterdir()}
    assert names == {file.name for file in (packages / "sagetrain/configs").iterdir()}
    listed = [line.split()[0] for line in said("sagetrain", "config").splitlines()[1:]]
    assert sorted(listed) == sorted(["finetune", *(name.partition(".")[0] for name in names)])
    assert said("python", "-m", "sagetrain", "config", "325m") == (ROOT / "configs/325m.yaml").read_text()
    assert "parameters" in said("sagetrain", "plan", "325m", "--brief", "data.valid=[]")
    place = said("python", "-c", "import sagetrain, sagekernels; print(sagetrain.__file__, sagekernels.__file__)")
    assert all(file.startswith(str(packages)) for file in place.split())


def test_deepspeeds_launcher_runs_the_package_as_a_module(tmp_path: Path) -> None:
    words = ["deepspeed", "--num_accelerators", "2", "--module", "sagetrain", "config", "slurm"]
    command = Command(words, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, tmp_path / "log", tmp_path)
    assert command.wait(PATIENCE) == 0
    assert (tmp_path / "log").read_text().count("exec python -m sagetrain train") == 2


ALONE = """
import sys, torch, sagekernels
q, k, v = (torch.randn(32, 64, requires_grad=True) for _ in range(3))
gain, angles = torch.ones(16), torch.zeros(32, 1, 8)
heads = sagekernels.qk_norm_rope(q, k, v, gain, gain, angles.cos(), angles.sin(), 1e-6)
o = sagekernels.sage_attention(*(x[None] for x in heads), causal=True)
model = sagekernels.convert(torch.nn.Sequential(torch.nn.Linear(64, 96)))
gate, up = model(o.flatten(2)[0]).chunk(2, -1)
sagekernels.swiglu(gate, up).sum().backward()
assert all(x.grad.abs().sum() > 0 for x in (q, k, v, *model.parameters()))
print(sagekernels.__file__, *[m for m in sys.modules if m.startswith(("sagetrain", "transformers", "deepspeed"))])
"""
"""A program that uses the kernels. It prints where they are, and which modules they loaded that they should not."""


def test_the_kernels_have_a_wheel_of_their_own(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "kernels", source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*pip, "install", *how, str(source)], check=True, capture_output=True)
    assert {path.name for path in target.glob("sage*")} == {"sagekernels", f"sagekernels-{__version__}.dist-info"}
    sources, copies = (
        {path.relative_to(root) for path in root.rglob("*.*") if path.suffix != ".pyc"}
        for root in (ROOT / "kernels/sagekernels", target / "sagekernels")
    )
    assert copies == sources
    alone = subprocess.run(
        [sys.executable, "-c", ALONE], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert alone.stdout.split() == [str(target / "sagekernels/__init__.py")]
    (metadata,) = target.glob("*.dist-info/METADATA")
    wanted = set(setup()["options"]["install_requires"].replace('"', "'").splitlines())
    needs = [line.removeprefix("Requires-Dist: ").replace('"', "'") for line in metadata.read_text().splitlines()
             if line.startswith("Requires-Dist: ") and "extra ==" not in line]  # fmt: skip
    assert {Requirement(need).name for need in needs} == {"torch", "triton"}
    assert {str(Requirement(need)) for need in needs} <= {str(Requirement(line)) for line in wanted if line}


def test_the_dockerfile_takes_constraints_and_a_wheels_parts() -> None:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    installs = [line for line in lines if "pip install" in line]
    assert installs and all("-c constraints.txt" in line and "==" not in line for line in installs)
    (base,) = [line for line in lines if line.startswith("FROM")]
    assert re.fullmatch(r"FROM nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu24\.04", base)  # Ubuntu 24.04 has Python 3.12.
    assert "3.12" in SpecifierSet(setup()["options"]["python_requires"])
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == {"constraints.txt", *PARTS}
    assert all((ROOT / name).exists() for name in copied)

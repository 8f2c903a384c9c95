"""Fixtures shared by the tests."""

import fcntl
import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import frozen_text
import plenty  # noqa: F401 - runs in this process have plenty of memory, too
from forked import Command
from prepare_inputs import TEXTS, prepare
from runs import finish, write_config
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.costs.accounting import flops_per_token
from sagetrain.costs.operations import block_operations
from sagetrain.data.tokenizer import Tokenizer

# The slowest files come first. Files are dealt out to processes whole, and the suite would wait for a slow file that
# begins last.
SLOW = """
mixture pipeline fsdp faults stores accounting replayed optimizers hosts resume guides linear_precision transformer plan
families context_parallel engine engine_options loading_memory linear_schedule compare hopper_backward mma_backward
hopper_forward hopper_int8 spare_hosts keeper chaos parallel checkpoint report replay kinds layouts spike_policies
monitor copies watched_steps mma_forward packaging sources quant_noise noise_runs lm_eval init_from experts run_parts
api architecture in_memory_restarts layer_norms huggingface qk_norm_rope saving first_pass sage_accuracy notebooks
noise_scale linear_errors pipeline_plan printed_plan spikes
"""

# Runs would learn from earlier ones on this machine what `auto` has chosen. Tests name a folder if they mean one.
os.environ["SAGETRAIN_CACHE"] = os.devnull
# On a busy machine neither an example nor the drawing of examples says anything by its time.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")
torch.set_num_threads(1)  # On a busy machine two threads wait for each other and reach a sixth of the speed of one.


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze all that collection imports, so that no garbage collection looks at it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Each command in this process asks whether anything is frozen. Counting takes as long as a garbage collection.
        gc.get_freeze_count = lambda: 1
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let what a test draws not depend on the tests that its process ran before."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Freeze what a file leaves behind, mostly late imports. Garbage collections would look at it for an eighth of the
    time of later files."""
    try:
        return (yield)
    finally:
        # The first count is of objects, up to 10,000. The others say how often it was reached.
        if (nextitem is None or nextitem.path != item.path) and any(gc.get_count()[1:]):
            gc.collect()
            gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files. The order inside a file does not change."""
    slow = [f"test_{name}" for name in SLOW.split()]
    items.sort(key=lambda item: slow.index(item.path.stem) if item.path.stem in slow else len(slow))


@pytest.fixture(autouse=True)
def _no_command_outlives_its_test() -> Iterator[None]:
    yield
    Command.end_all()


@pytest.fixture(autouse=True)
def _this_process_is_no_rank() -> Iterator[None]:
    """Remove the variables of ranks after each test. A world of one that a test made here would hand its port, which it
    holds, on to the commands of later tests."""
    yield
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text as token files: train, valid and tokenizer.model (512 tokens). It is the same under every
    Python, because some tests ask for what happens in a certain step."""
    how = {"glob": "*.txt", "vocab_size": 512, "valid_fraction": 0.2, "say": lambda text: None}
    return in_common(
        tmp_path_factory,
        "corpus",
        lambda folder: prepare([str(frozen_text.write(folder.with_name("text")))], folder / "train", **how),
    )


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The run folder of the undisturbed run of two ranks, tensor parallel, which writes samples. Other runs must end as
    it does."""
    evaluation = {"samples_every_tokens": 6000, "samples_prompts": ["def ", ""], "samples_tokens": 8}
    return undisturbed(tmp_path_factory, "pair", "ranks", corpus, tp_size=2, evaluation=evaluation)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The run folder of the undisturbed run of one process, with its newest three checkpoints."""
    return undisturbed(tmp_path_factory, "alone", "sagetrain", corpus, checkpoint={"keep_last": 3})


def undisturbed(factory: pytest.TempPathFactory, name: str, launcher: str, corpus: Path, **how: Any) -> Path:
    """Return the folder of a finished run, which no test may change."""

    def run(folder: Path) -> None:
        finish(launcher, write_config(folder / "run.yaml", corpus, folder / "run", **how))

    return in_common(factory, name, run) / "run"


def in_common(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], Any]) -> Path:
    """Return a folder that the first process of workers.py which asks for it fills for all of them. No test may change
    it."""
    root = factory.getbasetemp()
    folder = (root.parent if root.name.startswith("worker-") else root) / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            fill(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model file of 350 tokens, trained on prepare_inputs.TEXTS."""
    path = tmp_path_factory.mktemp("tokenizer") / "my.model"
    path.write_bytes(train_tokenizer(TEXTS, 350))
    return path


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


@pytest.fixture
def other_operations() -> Iterator[None]:
    """Forget the listed operations before and after a test that changes what a block computes."""
    for listed in (block_operations, flops_per_token):
        listed.cache_clear()
    yield
    for listed in (block_operations, flops_per_token):
        listed.cache_clear()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"a full disk needs a small tmpfs, which only root may mount: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def driver(chromium) -> object:
    """The machine's Chromium, with a log that holds nothing that other tests' pages have written."""
    chromium.get("about:blank")
    chromium.get_log("browser")
    return chromium


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The machine's Chromium without a screen; one for all tests of a process."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no Chromium here (make host-tools installs one)")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    profile = tmp_path_factory.mktemp("profile")
    flags = "headless no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-sync"
    quiet = "disable-background-networking disable-component-update"  # Chromium would search for hosts at every start.
    for flag in (*flags.split(), *quiet.split(), f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = shutil.which("chromium")
    chrome = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    chrome.set_page_load_timeout(300)
    yield chrome
    chrome.quit()

"""Fixtures shared by the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sagetrain.data.prepare import prepare


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with real text as token files: train, valid and tokenizer.model (512 tokens)."""
    folder = tmp_path_factory.mktemp("corpus")
    prepare(
        [str(Path(json.__file__).parent.parent / "email")],
        folder / "train",
        glob="*.py",
        vocab_size=512,
        valid_fraction=0.2,
        say=lambda text: None,
    )
    return folder

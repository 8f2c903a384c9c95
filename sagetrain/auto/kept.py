"""What the run of a checkpoint settled on, which a run that continues it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sagetrain.checkpoint import on_disk


def recorded(folder: Path, section: str) -> dict[str, Any]:
    """Return what the run of a checkpoint had of a section of its configuration."""
    state: dict[str, dict[str, Any]] = on_disk.read_manifest(folder)["state"]
    if section not in state:  # an import decides nothing: as its configuration asks
        state = yaml.safe_load((folder / "config.yaml").read_text())
    return state.get(section, {})

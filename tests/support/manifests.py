"""Change the manifest of a checkpoint, as a SageTrain would have written it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sagetrain.checkpoint.manifest import MANIFEST, write_manifest


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of the checkpoint in `folder`, and its hash with it."""
    tree = json.loads((folder / MANIFEST).read_text())
    change(tree)
    write_manifest(folder, tree)

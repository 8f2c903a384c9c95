"""The diffs of docs/extending.md apply to today's source, and a run trains, saves and exports with them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from runs import ROOT, rows_of, write_config


def test_the_walkthroughs_apply_and_a_run_works_with_them(corpus: Path, tmp_path: Path) -> None:
    """A change of the lines around the diffs needs a change of the page. Their context is code only, without
    docstrings."""
    for folder in ("sagetrain", "kernels/sagekernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    diffs = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/extending.md").read_text(), re.M | re.S)
    assert len(diffs) == 3
    for diff in diffs:
        subprocess.run(["git", "apply", "--unidiff-zero"], input=diff, text=True, cwd=tmp_path, check=True)
    sections = {
        "model": {"activation": "relu2"},
        "optimizer": {"name": "lion"},
        "training": {"total_tokens": 768},
        "lr_schedule": {"warmup_tokens": 256},
    }
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", **sections)
    path = os.pathsep.join((str(tmp_path), str(tmp_path / "kernels")))
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    commands = [["train", str(config)], ["export", str(tmp_path / "run"), str(tmp_path / "hf")]]
    program = f"from sagetrain.__main__ import main; assert not any(map(main, {commands}))"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, check=True)
    rows = rows_of(tmp_path / "run")
    assert any(row.get("train/documents", 0) > 0 for row in rows)
    assert json.loads((tmp_path / "hf/config.json").read_text())["hidden_act"] == "relu2"

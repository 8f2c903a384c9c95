"""A run that random faults of all kinds happen to ends with the bits of a run that was left alone."""

import os
from pathlib import Path

from forked import PATIENCE, Command
from runs import ROOT


def test_faults_of_all_kinds_change_no_bit(tmp_path: Path, corpus: Path) -> None:
    log = tmp_path / "log"
    words = ["python", str(ROOT / "benchmarks/chaos.py"), str(tmp_path), "--text", str(corpus / "train")]
    words += ["--seed", "1", "--faults", "9", "--steps", "24"]
    code = Command(words, os.environ, log, tmp_path).wait(PATIENCE)
    print(log.read_text())
    run = tmp_path / "seed-1.log"
    assert code == 0, log.read_text() + (run.read_text()[-3000:] if run.exists() else "")

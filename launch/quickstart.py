"""`make quickstart`: the whole life of a run on this machine, each step as the command you would type yourself.

The text is one that every machine with Python has: the standard library's own sources and docstrings. It becomes token
files. Two processes share one model (tensor parallel) and train on them with INT8 attention. They are stopped in the
middle with SIGTERM, and continue. Then the model is evaluated and writes a few tokens, and a page shows the run.
Everything runs on the CPU, even if there is a GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
RUN_DIR, DATA_DIR = Path("runs/quickstart"), Path("runs/quickstart-data")
CONFIG = "configs/quickstart.yaml"
PAGE = RUN_DIR / "report.html"
PREPARE = f"sagetrain prepare python-stdlib --output {DATA_DIR}/train --vocab-size 2048 --valid-fraction 0.02"
LAYOUT = "parallel.tensor_parallel_size=2 parallel.sequence_parallel=true"
TRAIN = f"torchrun --standalone --nproc-per-node 2 -m sagetrain train {CONFIG} {LAYOUT}"
NEXT = {
    f'sagetrain generate {RUN_DIR} "import" --max-tokens 60': "what the model makes of other beginnings",
    f"sagetrain plan {CONFIG} --brief": "what a run would be on a GPU: memory, speed, and what does not fit together",
    f"tensorboard --logdir {RUN_DIR}": "the same curves while a run goes on",
    "sagetrain doctor": "what this machine has and lacks for training",
    "sagetrain config 325m > my.yaml": "a model for a GPU; docs/first-run.md goes through a run on text of your own",
}
"""Commands to try next, and their purpose."""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
}

console = Console()


def typed(command: str) -> str:
    """Return a command as it runs in the shell that started this. The folder of its program is added if it is not on
    PATH."""
    program = command.split()[0]
    found = shutil.which(program)
    if found and Path(found).parent == BIN:
        return command
    return f"{BIN.relative_to(ROOT) if BIN.is_relative_to(ROOT) else BIN}/{command}"


def show(text: str, style: str = "") -> None:
    """Print a line without breaking it. A terminal wraps it by itself, and it is copied as a whole."""
    console.print(Text(text, style), soft_wrap=True)


def start(command: str) -> subprocess.Popen:
    """Show a command and start it from the repository's root."""
    show(f"\n$ {typed(command)}", "bold green")
    return subprocess.Popen(shlex.split(command), cwd=ROOT, env={**os.environ, **ENVIRONMENT}, start_new_session=True)


def run(command: str) -> None:
    """Show a command, run it, and end here if it fails."""
    process = start(command)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # The command runs in a session of its own, where Ctrl-C does not reach it.
        os.killpg(process.pid, signal.SIGTERM)
        raise
    if code:
        sys.exit(f"failed with exit code {code}: {command}")


def rows(key: str) -> list[dict]:
    """Return the rows of metrics.jsonl that hold a metric."""
    path = ROOT / RUN_DIR / "metrics.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # This line is being written right now.
            continue
        found += [row] if key in row else []
    return found


def train_and_stop_in_the_middle(total_tokens: int) -> None:
    """Start training and send the job SIGTERM at half of the tokens, as a cluster does when it wants the node."""
    launcher = start(TRAIN)
    while launcher.poll() is None:
        seen = rows("train/loss")
        if seen and seen[-1]["tokens"] >= total_tokens // 2:
            console.print("\n[bold yellow]half way: SIGTERM to all. The ranks save, torchrun ends with a traceback")
            os.killpg(launcher.pid, signal.SIGTERM)
            launcher.wait()
            wait_until_released()
            return
        time.sleep(0.2)
    sys.exit(f"training ended before it could be stopped, with exit code {launcher.returncode}")


def wait_until_released() -> None:
    """Wait until the ranks have saved and left. A run holds a lock on its folder."""
    with (ROOT / RUN_DIR / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def loss_table() -> Table:
    """Build a table of training and validation loss along the run."""
    table = Table(title="Loss in nats per token")
    for column in ("step", "tokens seen", "tokens per step", "learning rate", "training", "validation"):
        table.add_column(column, justify="right")
    valid = {row["step"]: row["valid/loss"] for row in rows("valid/loss")}
    train = rows("train/loss")
    for row in train:
        if row["step"] in valid or row in (train[0], train[-1]):
            shown = f"{valid[row['step']]:.4f}" if row["step"] in valid else ""
            table.add_row(
                str(row["step"]),
                f"{row['tokens']:,}",
                f"{row['train/tokens_per_step']:,}",
                f"{row['train/lr']:.2e}",
                f"{row['train/loss']:.4f}",
                shown,
            )
    return table


def main() -> None:
    """Run all steps of the quickstart."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.path.insert(0, str(ROOT))
    from sagetrain.config.load import load_config

    total = load_config(ROOT / CONFIG).training.total_tokens
    begin = time.perf_counter()
    if rows("train/loss"):
        sys.exit(f"{RUN_DIR} holds an earlier quickstart; remove it to start again: rm -r {RUN_DIR}")
    if not (ROOT / DATA_DIR / "train.idx").exists():
        run(PREPARE)
    train_and_stop_in_the_middle(total)
    run(TRAIN)
    console.print(loss_table())
    run(f"sagetrain eval {RUN_DIR}")
    run(f'sagetrain generate {RUN_DIR} "def read(self," --max-tokens 60')
    run(f"sagetrain report {RUN_DIR} -o {PAGE}")
    show(f"\nAll of it took {time.perf_counter() - begin:.0f} s. Its curves and samples, for your browser:", "bold")
    show(f"  {(ROOT / PAGE).as_uri()}")
    show(f"Next, in {ROOT}:", "bold")
    for command, what in NEXT.items():
        show(f"  {typed(command)}", "green")
        show(f"      {what}")


if __name__ == "__main__":
    main()

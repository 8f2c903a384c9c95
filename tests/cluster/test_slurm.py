"""launch/slurm.sbatch with stand-ins for srun, scontrol and python. Ranks, signals and requeueing are real."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from forked import PATIENCE
from held import file_of, hold, release
from runs import ROOT, free_port, reached, training_rows, wait_for, write_config
from stand_in import stand_in

SRUN = f"""#!{sys.executable}
# Starts the tasks, passes signals on, ends with the worst exit code: what srun promises.
import os, signal, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1"
command = sys.argv[2:]
count = int(os.environ["SLURM_NTASKS"])
tasks = [
    subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
    for i in range(count)
]
def forward(number, frame):
    for task in tasks:
        task.send_signal(number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, forward)
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
case $1 in
  show) echo 127.0.0.1 ;;
  requeue) echo "requeued $2" ;;
esac
"""


def submit(folder: Path, config: Path) -> subprocess.Popen:
    """Run the script as sbatch does, for a job of two tasks on one host."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    # The script takes the port from the job's number.
    port = next(port for port in iter(free_port, None) if 20_000 <= port < 30_000)
    job = {"SLURM_JOB_ID": str(port - 20_000), "SLURM_JOB_NODELIST": "here"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return subprocess.Popen(
        ["bash", str(ROOT / "launch/slurm.sbatch"), str(config)],
        env={**os.environ, **job, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "HELD": str(file_of(config))},
        cwd=ROOT,
        stdout=config.with_suffix(".log").open("a"),
        stderr=subprocess.STDOUT,
    )


def test_a_signal_saves_and_requeues_and_the_job_finishes(tmp_path, corpus) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, data={"valid": []})
    log = config.with_suffix(".log")
    stand_in(tmp_path)
    hold(config)
    job = submit(tmp_path, config)
    wait_for(job, config, reached(config, 13))
    job.send_signal(signal.SIGUSR1)
    assert job.wait(PATIENCE) == 0, log.read_text()[-3000:]
    release(config)
    assert "stopped by SIGUSR1 with a checkpoint: requeueing" in log.read_text()
    assert submit(tmp_path, config).wait(PATIENCE) == 0, log.read_text()[-3000:]
    assert log.read_text().count("\nrequeued ") == 1  # A finished run is not requeued.
    assert [row["step"] for row in training_rows(tmp_path / "run")] == list(range(1, 41))

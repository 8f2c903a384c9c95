"""Random faults in a run of small ranks, whose end must have the bits of a run that was left alone.

    python benchmarks/chaos.py FOLDER --text TOKENS [--seed 0] [--ranks 2] [--hosts 1] [--steps 30] [--faults 6]

TOKENS is what `sagetrain prepare --valid-fraction` has written, without .bin. FOLDER gets both runs. `--seconds 3600`
takes seed after seed for an hour. With `--hosts 2` ranks pretend to be on two hosts, whose memories are folders. The
faults are drawn from the seed, each with its step and its rank. A run that ends early, as it does after SIGTERM, is
started again. The exit code is 0 if all tensors of the last checkpoints are equal.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("kill", "kill all", "error", "stop", "full disk", "bit", "slow", "broken copy", "broken checkpoint")
"""kill: SIGKILL for one rank, or for all at once. error: an exception like CUDA's. stop: SIGTERM. full disk: the next
checkpoint cannot be written at first. bit: one bit of a weight flips. slow: a rank sleeps in three steps. broken copy
and broken checkpoint: a bit of the newest one flips, and all ranks are killed."""
HOST = "host"
"""The kind of fault that several hosts bring: the ranks of one are killed, and its memory is gone."""
_OF_ALL = ("kill all", "broken copy", "broken checkpoint")


def faults_of(seed: int, number: int, steps: int, ranks: int, hosts: int) -> dict[int, tuple[str, int]]:
    """Return faults by the step before which they come: the kind and the rank."""
    draw, of = random.Random(seed), (*KINDS, *[HOST] * (hosts > 1))
    kinds = [*of * (1 + number // len(of))][:number] if number >= len(of) else draw.sample(of, number)
    draw.shuffle(kinds)
    # A death must lie behind the death before, or the run ends because it does not get past that step.
    at = sorted(draw.sample(range(3, steps, 2), number))
    return {step: (kind, draw.randrange(ranks)) for step, kind in zip(at, kinds, strict=True)}


def config(folder: Path, text: str, steps: int, ranks: int) -> dict[str, Any]:
    """Return the configuration of a run of small ranks."""
    tokens = 16 * 32
    return {
        "model": {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
        "attention": {"backend": "sage"},
        "parallel": {"zero_stage": 1},
        "data": {"train": [{"path": text}], "seq_length": 32, "micro_batch_size": max(1, 8 // ranks)},
        "tokens_per_step": {"schedule": "constant", "tokens": tokens},
        "optimizer": {"lr": 3e-3},
        "training": {"run_dir": str(folder), "total_tokens": tokens * steps, "dtype": "fp32"},
        "checkpoint": {"every_tokens": 4 * tokens},
    }


AGAINST_FAULTS = [
    *("training.restarts=1000", "checkpoint.in_memory_every=1", "checkpoint.tolerate_minutes=1"),
    "stability.replay.every_steps=1",
]
"""The settings of a run that faults happen to."""

# -- a rank ------------------------------------------------------------------------------------------------------


def rank_program(faults: dict[int, tuple[str, int]], done: Path) -> None:
    """Train as one rank, to which faults happen. Each happens once, and is written to `done` before."""
    from sagetrain.__main__ import program
    from sagetrain.checkpoint import publishing, slots
    from sagetrain.engines.step import Engine

    rank, plain, write = int(os.environ["RANK"]), Engine.step, publishing.OnDisk.write
    local, sleeps, full = int(os.environ["LOCAL_WORLD_SIZE"]), 0, 0
    slots.ROOT = done.with_name(f"{done.name}-memory-{rank // local}")
    slots.ROOT.mkdir(exist_ok=True)

    def step(engine: Any, *how: Any) -> Any:
        nonlocal sleeps, full
        number = engine.optimizer_steps + 1
        kind, victim = faults.get(number, ("", 0))
        mark = done / f"{number} {kind} {rank}"
        on_host = kind == HOST and rank // local == victim // local
        if kind and (rank == victim or kind in _OF_ALL or on_host) and not mark.exists():
            mark.touch()
            if on_host:
                shutil.rmtree(slots.ROOT, ignore_errors=True)
            if kind.startswith("broken"):
                spoil(kind, rank, victim)
            if kind.startswith(("kill", "broken", HOST)):
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "error":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if kind == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if kind == "bit":
                flip(engine, number)
            full, sleeps = full + (kind == "full disk"), sleeps + 3 * (kind == "slow")
        if sleeps:
            sleeps -= 1
            time.sleep(0.05)
        return plain(engine, *how)

    def written(self: Any, *how: Any) -> Any:
        nonlocal full
        if full:
            full -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *how)

    Engine.step = step  # type: ignore[method-assign]
    publishing.OnDisk.write = written  # type: ignore[method-assign]
    program()


def flip(engine: Any, number: int) -> None:
    """Flip a bit of a weight of the model."""
    import torch

    leaves = list(engine.leaves().values())
    bits = leaves[number % len(leaves)].detach().view(-1).view(torch.int32)
    bits[number % len(bits)] ^= 1 << number % 23


def spoil(kind: str, rank: int, victim: int) -> None:
    """Flip a bit of the newest copy of a rank in memory, or of the newest checkpoint, where copies go first."""
    from sagetrain.checkpoint.slots import ROOT as MEMORY

    run = Path(os.environ["CHAOS_RUN"])
    memories = [*MEMORY.glob(f"sagetrain-*-{(run / '.run').read_text()}")]
    found = sorted((copy for each in memories for copy in each.glob(f"copy-*-of-rank-{rank}")), key=_step_of)
    if kind == "broken checkpoint":
        for memory in memories:
            shutil.rmtree(memory, ignore_errors=True)
        # A run whose only checkpoint is broken ends, as it should.
        found = sorted(run.glob("checkpoints/step-*"))[1:]
    if rank == victim and found:
        path = next(found[-1].glob("shard-*"))
        content = bytearray(path.read_bytes())
        content[-5000] ^= 16
        path.write_bytes(content)


def _step_of(copy: Path) -> int:
    try:
        return int(json.loads((copy / "copy.json").read_text())["step"])
    except (OSError, ValueError):
        return -1


# -- the whole ---------------------------------------------------------------------------------------------------


def launch(ranks: int, hosts: int, words: list[str], log: Path) -> int:
    """Start ranks, wait for all of them, and return the largest exit code."""
    from sagetrain.cluster.launcher import free_port

    local = ranks // hosts
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **world, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("a") as output:
        started = [
            subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "benchmarks/chaos.py"), "rank", *words],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank % local)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        return max(process.wait() for process in started)


def tensors_of(run: Path) -> dict[str, bytes]:
    """Return the bytes of all files of tensors of the newest checkpoint."""
    folder = max(run.glob("checkpoints/step-*"))
    return {f"{folder.name}/{file.name}": file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def trial(
    folder: Path, text: str, seed: int, ranks: int, hosts: int, steps: int, number: int, show: Callable[[str], None]
) -> bool:
    """Make both runs of a seed, and return whether they end with the same bits."""
    import yaml

    faults = faults_of(seed, number, steps, ranks, hosts)
    alone, disturbed, done = folder / "alone", folder / f"seed-{seed}", folder / f"seed-{seed}-faults"
    done.mkdir(parents=True, exist_ok=True)
    for run in (alone, disturbed):
        run.with_suffix(".yaml").write_text(yaml.safe_dump(config(run, text, steps, ranks)))
    os.environ.update(CHAOS="{}", CHAOS_DONE=str(done), CHAOS_RUN=str(disturbed))
    if not alone.exists() and (code := launch(ranks, hosts, ["train", f"{alone}.yaml"], folder / "alone.log")):
        sys.exit(f"the undisturbed run has ended with exit code {code}: {folder / 'alone.log'}")
    os.environ["CHAOS"] = json.dumps(faults)
    log, begin, starts = folder / f"seed-{seed}.log", time.perf_counter(), 0
    while not list(disturbed.glob(f"checkpoints/step-{steps:08d}")):
        starts += 1
        code = launch(ranks, hosts, ["train", f"{disturbed}.yaml", *AGAINST_FAULTS], log)
        if starts > number + 1 or code not in (0, 128 + signal.SIGTERM):
            show(f"seed {seed}: ended with exit code {code} after {starts} starts: {log}")
            return False
    rows = [json.loads(line) for line in (disturbed / "events.jsonl").read_text().splitlines()]
    events, restarts = Counter(row["kind"] for row in rows), [row for row in rows if row["kind"] == "restart"]
    seconds = ", ".join(f"{row['total']:.2f}{' from memory' * row['from_memory']}" for row in restarts)
    same = tensors_of(alone) == tensors_of(disturbed)
    happened = {int(mark.name.split()[0]): mark.name.split()[1:-1] for mark in done.iterdir()}
    named = ", ".join(f"{kind} in step {step}" for step, (kind, _) in faults.items())
    show(
        f"seed {seed}: {'equal' if same else 'OTHER'} bits after {len(happened)} of {number} faults, {starts} starts "
        f"and {time.perf_counter() - begin:.1f} s; faults: {named}; events: {dict(events)}; "
        f"seconds to the next step: {seconds}"
    )
    return same and len(happened) == number


def main() -> None:
    """Run seeds until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", required=True)
    for name, default in (("seed", 0), ("ranks", 2), ("hosts", 1), ("steps", 30), ("faults", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=0.0)
    args = parser.parse_args()
    end, seed, good = time.perf_counter() + args.seconds, args.seed, True
    while good:
        how = args.text, seed, args.ranks, args.hosts, args.steps, args.faults
        good = trial(args.folder, *how, lambda line: print(line, flush=True))
        seed += 1
        if time.perf_counter() >= end:
            break
    sys.exit(not good)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["rank"]:
        del sys.argv[1]
        drawn = {int(step): tuple(fault) for step, fault in json.loads(os.environ["CHAOS"]).items()}
        rank_program(drawn, Path(os.environ["CHAOS_DONE"]))
    else:
        main()

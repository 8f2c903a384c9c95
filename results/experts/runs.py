"""Train mixtures of experts whose first half is common, in 16 bits and in 8, on one GPU.

    PYTHONPATH=.:kernels:tests/support python results/experts/runs.py TEXT OUT --tokens 16384 --seconds 240

TEXT is a folder with train.xz and valid.xz: uint16 tokens of a vocabulary of 8,192, compressed by xz. Each arithmetic
has a process of its own. The first one also trains the common halves (in 16 bits), and hands their weights and moments
over as files. It times its steps, and chooses how many there are, so that all seeds fit into the seconds; seeds beyond
--seeds follow while there is time. At the end of a run held-out text is evaluated four ways with the same weights: in
the run's arithmetic and in 16 bits, each with its own choices of experts and with those of the other. Rows are written
as runs end. --then trains second halves in steps of another size behind the same first ones. No test runs this script,
and the page names its commit.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import tiny
from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.config import RunConfig
from sagetrain.data.batch import Batch
from sagetrain.engines.step import Engine
from sagetrain.model.moe import Router
from sagetrain.model.selection import attention_functions
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training.perturb import perturb

SMALL = bool(os.environ.get("SMALL"))
VOCAB, LENGTH, MICRO = 8192, 1024, 16
SHAPE = {"num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8}
EXPERTS = {"number": 64, "per_token": 8, "ffn_size": 256}
VALID, PARTED = 384, 96  # Held-out sequences: in the run's arithmetic, and four ways.
LEAST, MOST = 60, 600  # Steps of a half.
if SMALL:
    LENGTH, MICRO, VALID, PARTED, LEAST, MOST = 64, 2, 4, 4, 4, 4
    SHAPE = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 2}
    EXPERTS = {"number": 8, "per_token": 2, "ffn_size": 32}
BALANCE = {"bias_rate": 0.001, "aux_weight": 0.01, "z_weight": 0.001}
RATES = {16384: 1e-3, 131072: 2e-3}
"""The peak learning rate by tokens a step."""
BEFORE = 0.5
"""The part of the common half in which the rate rises."""
SCORES = {"backend": "sage", "recipe": "scores"}
ARMS: dict[str, tuple[dict, dict]] = {
    "bf16": ({"backend": "sdpa"}, {"precision": "bf16"}),
    "band": ({"backend": "sdpa"}, {"precision": "bf16"}),
    "int8": (SCORES, {"precision": "int8"}),
    "attention": (SCORES, {"precision": "bf16"}),
    "fp8": (SCORES, {"precision": "fp8"}),
}
"""Attention and linear layers of each arm, experts included."""


def config_of(arithmetic: tuple[dict, dict], tokens: int, model: dict, dtype: str = "", **attention: str) -> RunConfig:
    """Return the configuration of a model with so many tokens a step. The dtype is by default that of the device."""
    of_attention, linear = arithmetic
    return tiny.config(
        1,
        dtype or ("bf16" if torch.cuda.is_available() else "fp32"),
        model={**model, "vocab_size": VOCAB},
        attention={**of_attention, **attention},
        linear=linear,
        data={"seq_length": LENGTH, "micro_batch_size": MICRO},
        tokens_per_step={"tokens": tokens},
        optimizer={"lr": 1e-3},
        parallel={"engine": "fsdp"},
        training={"total_tokens": 10**9, "cuda_graphs": "off"},
    )


def config(arm: str, tokens: int) -> RunConfig:
    return config_of(ARMS[arm], tokens, {**SHAPE, "experts": {**EXPERTS, "balance": BALANCE}})


@torch.no_grad()
def put(engine: Engine, values: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
    """Give an engine weights, and moments; those that are not given become 0."""
    for kept in engine.owned():
        for kind in kept.kinds:
            own = values[kept.name].get(kind)
            whole = torch.zeros_like(kept.weight) if own is None else own.to(kept.weight.device)
            kept.write(kind, whole.float().flatten()[kept.start : kept.stop])
    engine.state_changed(steps)


def begin(engine: Engine, cfg: RunConfig, seed: int) -> None:
    groups = ParallelGroups.single()
    fresh = tiny.transformer(cfg.model, cfg.attention, vocab_size=VOCAB, seed=seed, groups=groups)
    put(engine, {name: {"weight": weight.detach()} for name, weight in fresh.named_parameters()}, 0)


class Text:
    """Sequences of a text that lie one behind the other, in the order of a seed."""

    def __init__(self, path: Path) -> None:
        tokens = np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint16)
        self.tokens = torch.from_numpy(tokens.astype(np.int32))
        self.number = (len(tokens) - 1) // LENGTH

    def batch(self, rows: list[int]) -> Batch:
        every = torch.stack([self.tokens[row * LENGTH : (row + 1) * LENGTH + 1] for row in rows]).long()
        return Batch(every[:, :-1].contiguous(), every[:, 1:].contiguous(), None, None, None, [])

    def batches(self, order: list[int]) -> list[Batch]:
        return [self.batch(order[i : i + MICRO]) for i in range(0, len(order), MICRO)]


def train(
    engine: Engine, text: Text, seed: int, tokens: int, steps: int, rate, begin: int = 0
) -> tuple[list[float], list[dict]]:
    """Take steps from sequence `begin` of the seed's order on. Return their losses, and the loads of some."""
    order = torch.randperm(text.number, generator=torch.Generator().manual_seed(seed)).tolist()
    several, losses, loads = tokens // (LENGTH * MICRO), list[float](), list[dict]()
    for step in range(steps):
        first = begin + step * several * MICRO
        rows = [order[place % len(order)] for place in range(first, first + several * MICRO)]
        result = engine.step(text.batches(rows), several, rate(step))
        if not result.applied:
            raise RuntimeError(f"step {step} was refused: {result.event}")
        losses.append(result.loss)
        if (step + 1) % max(1, steps // 8) == 0:
            loads.append({name: round(x, 4) for name, x in result.metrics.items() if name.startswith("moe/")})
    return losses, loads


CHOSEN = Router.chosen


@contextmanager
def choices(given: list | None) -> Iterator[list]:
    """Record the choices of all routers, or let them choose what is given."""
    found, left = [], list(given or [])

    def chosen(router: Router, scores: torch.Tensor) -> torch.Tensor:
        found.append(CHOSEN(router, scores) if given is None else left.pop(0))
        return found[-1]

    Router.chosen = chosen
    try:
        yield found
    finally:
        Router.chosen = CHOSEN


def in_16_bits(engine: Engine, cfg: RunConfig) -> AbstractContextManager[None]:
    """Let the model compute in 16 bits."""
    dtype = torch.bfloat16 if engine.device.type == "cuda" else torch.float32
    sdpa = cfg.attention.model_copy(update={"backend": "sdpa"})
    (reference, *_) = attention_functions(sdpa, cfg.model, device=engine.device, dtype=dtype)
    return engine.model.exact(reference)


@torch.no_grad()
def evaluated_in(engine: Engine, valid: Text, ways: Mapping[str, AbstractContextManager[None]]) -> dict:
    """Evaluate a finished run compiled, and in some ways that are not compiled."""
    batches = valid.batches(list(range(VALID)))
    found = {"valid": engine.evaluate(batches)["valid/loss"]}
    for name, how in ways.items():
        with torch.compiler.set_stance("force_eager"), how:
            found[name] = engine.evaluate(batches)["valid/loss"]
    return found


def evaluated_dense(engine: Engine, cfg: RunConfig, valid: Text, exact: bool) -> dict:
    """Evaluate a finished run of a dense model in its own arithmetic, and one in INT8 in 16 bits as well."""
    return evaluated_in(engine, valid, {"own": nullcontext(), "sixteen": in_16_bits(engine, cfg)} if exact else {})


@torch.no_grad()
def evaluated(engine: Engine, cfg: RunConfig, valid: Text, exact: bool) -> dict:
    """Evaluate a finished run. The loss in its arithmetic is of the compiled model, all others are not compiled."""
    found = evaluated_in(engine, valid, {})
    if not exact:
        return found
    parts = valid.batches(list(range(PARTED)))

    def loss(sixteen: bool, given: list | None = None) -> tuple[float, list]:
        how = in_16_bits(engine, cfg) if sixteen else nullcontext()
        with torch.compiler.set_stance("force_eager"), choices(given) as made, how:
            return engine.evaluate(parts)["valid/loss"], made

    (own, of_own), (wide, of_wide) = loss(False), loss(True)
    found |= {"own": own, "sixteen": wide, "own_with_choices_of_sixteen": loss(False, of_wide)[0]}
    found["sixteen_with_choices_of_own"] = loss(True, of_own)[0]
    layers = engine.model.config.num_layers
    pairs = [(a.sort(-1).values, b.sort(-1).values) for a, b in zip(of_own, of_wide, strict=True)]
    differs = [(a != b).any(-1).float().mean() for a, b in pairs]
    found["flips"] = [round(float(sum(differs[n::layers]) / len(differs[n::layers])), 5) for n in range(layers)]
    return found


class Study(NamedTuple):
    """The runs of a page. Pages about dense models have others."""

    arms: dict[str, tuple[dict, dict]]
    """The arithmetic of each arm. `bf16` trains the common halves."""
    config: Callable[[str, int], RunConfig]
    """The configuration of an arm, with so many tokens a step."""
    evaluated: Callable[[Engine, RunConfig, Text, bool], dict]
    """Evaluate a finished run, with the last argument also in 16 bits."""
    table: Callable[[list[dict]], None]
    """Print what the rows of all runs say."""


def worker(arm: str, asked: argparse.Namespace, study: Study) -> None:
    device = init_distributed(timeout_minutes=10)
    torch.set_num_threads(2)
    text, valid = Text(asked.text / "train.xz"), Text(asked.text / "valid.xz")
    cfg, out, tokens = study.config(arm, asked.tokens), asked.out, asked.tokens
    engine, started = tiny.alone(cfg, device, VOCAB), time.time()
    peak = RATES.get(tokens, 1e-3)
    # Everything is compiled before a half is awaited: the passes of a step and of an evaluation.
    one = LENGTH * MICRO
    train(engine, text, 0, one, 2, lambda step: 0.0)
    study.evaluated(engine, cfg, valid, arm not in ("bf16", "band"))
    each = list[float]()
    for _ in range(3 if asked.steps else 7):
        begun = time.time()
        train(engine, text, 0, one, 1, lambda step: 0.0)
        each.append(time.time() - begun)
    took = statistics.median(each) * tokens / one
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    print(f"{arm}: ready after {begun - started:.1f} s, {took:.4f} s a step, {memory:.1f} GiB", flush=True)
    first, path = arm == "bf16", lambda seed: asked.scratch / f"half-{seed}.pt"
    number = asked.steps
    if first and not number:
        left = 0.9 * (asked.until - time.time()) - asked.seeds * len(asked.arms)
        number = int(left / (took * asked.seeds * (1 + len(asked.arms))))
        number = max(LEAST, min(MOST, number))
    halves = list[float]()

    def half(seed: int) -> None:
        """Train a common half and hand it over."""
        begun = time.time()
        begin(engine, cfg, seed)
        rate = lambda step: peak * min(1.0, (step + 0.5) / (BEFORE * number))  # noqa: E731
        losses, loads = train(engine, text, seed, tokens, number, rate)
        values = {kept.name: {kind: kept.read(kind).cpu() for kind in kept.kinds} for kept in engine.owned()}
        torch.save({"values": values, "steps": number}, path(seed).with_suffix(".part"))
        path(seed).with_suffix(".part").rename(path(seed))
        halves.append(time.time() - begun)
        write(out, {"arm": "half", "seed": seed, "tokens": tokens, "steps": number, "losses": losses, "loads": loads})

    def behind(seed: int, size: int, steps: int) -> None:
        """Train the second half of a run, in steps of so many tokens."""
        begun, given = time.time(), torch.load(path(seed), mmap=True)
        put(engine, given["values"], given["steps"])
        if arm == "band":
            perturb(engine, 1)
        peak, after = RATES.get(size, 1e-3), given["steps"] * tokens // LENGTH
        losses, loads = train(engine, text, seed, size, steps, lambda step: peak * (1 - (step + 0.5) / steps), after)
        row = {"arm": arm, "seed": seed, "tokens": size, "steps": steps, "losses": losses, "loads": loads}
        found = study.evaluated(engine, cfg, valid, arm not in ("bf16", "band"))
        write(out, row | found | {"took": time.time() - begun})
        print(f"{arm}, {size} tokens a step, seed {seed}: {losses[-1]:.4f} in {time.time() - begun:.1f} s", flush=True)

    for seed in range(asked.first, asked.first + asked.most):
        if first:
            if seed == asked.first:
                for each in range(seed, seed + asked.seeds):
                    half(each)
            elif seed >= asked.first + asked.seeds:
                # One half and all arms behind it, at the rate at which steps went alone.
                if asked.then or time.time() + 1.2 * (len(asked.arms) + 1) * number * took > asked.until:
                    (asked.scratch / "end").touch()
                    break
                half(seed)
        while not path(seed).exists():
            if (asked.scratch / "end").exists() or time.time() > asked.until:
                break
            time.sleep(0.2)
        else:
            behind(seed, tokens, torch.load(path(seed), mmap=True)["steps"])
            continue
        break
    for seed in range(asked.first, asked.first + asked.seeds):
        if asked.then:
            behind(seed, *map(int, asked.then.split(":")))
    end_distributed()


def write(out: Path, row: dict) -> None:
    row["losses"] = [round(x, 5) for x in row["losses"]]
    with (out / f"rows-{row['tokens']}-{row['arm']}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return " ".join(f"{x:+.4f}" for x in values)
    half = T.get(len(values), 2.0) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):+.4f} ± {half:.4f} ({len(values)})"


def table(rows: list[dict]) -> None:
    """Print the differences to 16 bits of the same seed."""
    for tokens in sorted({row["tokens"] for row in rows}):
        found = {(row["arm"], row["seed"]): row for row in rows if row["tokens"] == tokens}
        last = lambda row: statistics.fmean(row["losses"][-max(1, row["steps"] // 10) :])  # noqa: E731
        steps = {row["steps"] for row in found.values()}
        print(f"\n{tokens} tokens a step, {steps} steps of a half\n")
        print("| arm | training | held out | own less 16 bits | by choices | flips | largest load | entropy |")
        print("|---|---|---|---|---|---|---|---|")
        for arm in ARMS:
            seeds = [seed for name, seed in found if name == arm and ("bf16", seed) in found]
            pairs = [(found[arm, seed], found["bf16", seed]) for seed in seeds]
            if not pairs:
                continue
            cells = [interval([f(a) - f(b) for a, b in pairs]) for f in (last, lambda row: row["valid"])]
            if arm == "bf16":
                cells = [f"{statistics.fmean(f(a) for a, _ in pairs):.4f}" for f in (last, lambda row: row["valid"])]
            if "own" in pairs[0][0]:
                cells.append(interval([a["own"] - a["sixteen"] for a, _ in pairs]))
                cells.append(interval([a["own"] - a["own_with_choices_of_sixteen"] for a, _ in pairs]))
                cells.append(f"{statistics.fmean(x for a, _ in pairs for x in a['flips']):.3f}")
            else:
                cells += ["", "", ""]
            loads = [a["loads"][-1] for a, _ in pairs if a["loads"]]
            entropy = [x for load in loads for name, x in load.items() if name.endswith("entropy")]
            cells.append(f"{statistics.fmean(load['moe/max_load'] for load in loads):.2f}" if loads else "")
            cells.append(f"{statistics.fmean(entropy):.3f}" if entropy else "")
            print(f"| {arm} | " + " | ".join(cells) + " |", flush=True)


def compared(rows: list[dict], arms: Iterable[str], title: str, what: str) -> None:
    """Print the differences to 16 bits of the same seed, for arms that differ in one operation.

    Args:
        title: goes before the number of steps.
        what: the operation, which heads the column of arms.
    """
    found = {(row["arm"], row["seed"]): row for row in rows}
    last = lambda row: sum(row["losses"][-(row["steps"] // 10 or 1) :]) / (row["steps"] // 10 or 1)  # noqa: E731
    print(f"\n{title}{sorted({row['steps'] for row in rows})} steps of a half\n")
    print(f"| {what} | training | held out | rounding the finished model |\n|---|---|---|---|")
    for arm in arms:
        pairs = [
            (found[arm, seed], found["bf16", seed]) for name, seed in found if name == arm and ("bf16", seed) in found
        ]
        if arm == "bf16" and pairs:
            cells = [f"{sum(f(a) for a, _ in pairs) / len(pairs):.4f}" for f in (last, lambda row: row["valid"])]
        else:
            cells = [interval([f(a) - f(b) for a, b in pairs]) for f in (last, lambda row: row["valid"])]
        cells.append(interval([a["own"] - a["sixteen"] for a, _ in pairs if "own" in a]))
        print(f"| {arm} | {' | '.join(cells)} |", flush=True)


STUDY = Study(ARMS, config, evaluated, table)
"""The study of mixtures, for which this script was written."""


def main(study: Study = STUDY) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--until", type=float)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=8, help="the most seeds, if there is time")
    parser.add_argument("--steps", type=int, default=0, help="of a half; 0: as many as fit")
    parser.add_argument("--arms", nargs="*", default=list(study.arms))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--then", help="TOKENS:STEPS, other second halves of the same first ones")
    parser.add_argument("--only")
    parser.add_argument("--scratch", type=Path)
    asked = parser.parse_args()
    if asked.only:
        worker(asked.only, asked, study)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    until, running = time.time() + asked.seconds, []
    env = {**os.environ, "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    with tempfile.TemporaryDirectory() as scratch:
        for arm in asked.arms:
            words = [sys.executable, *sys.argv, "--only", arm, "--until", str(until), "--scratch", scratch]
            running.append(subprocess.Popen(words, env=env))
        while any(process.poll() is None for process in running):
            # Without the first one there are no common halves.
            if time.time() > until + 3 or running[0].poll():
                for process in running:
                    process.kill()
            time.sleep(0.5)
    files = sorted(asked.out.glob("rows-*.jsonl"))
    study.table([json.loads(line) for path in files for line in path.read_text().splitlines()])


if __name__ == "__main__":
    main()

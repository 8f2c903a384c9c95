"""Time the tiles of the portable kernels on this GPU, and keep the fastest: `python -m sagekernels.tune`.

A choice changes no bit of any result: tiles that would are not taken. The choice is kept in
~/.cache/sagekernels/tiles.json (or under $SAGEKERNELS_CACHE) with the table that says why, for this GPU, torch, Triton
and these kernels. Later processes find it there. Delete the file to go back to the tiles that come with the package.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .admission import median_seconds
from .backward import triton_backward
from .call import BackwardCall, Call
from .forward import triton_forward
from .launch import Tiles, launch_tiles, tried, tuned_file, tuned_key
from .pieces import block_d
from .testing import Shape, call_of, random_inputs

GAIN = 1.02
"""Tiles replace the present ones only if they are so many times as fast. A smaller gain is noise."""
ROUNDS = 3
# The values are, by kernel and head dimension: the rows that a program owns (queries; keys in dkdv), warps, stages. The
# side that is looped over is 64 tokens in each, so that sums keep their order. A multiprocessor has registers for 8
# warps of these kernels.
OWNED = {
    "forward": {
        64: [(64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3)],
        128: [(128, 8, 2), (128, 8, 3), (128, 8, 4)],
    },
    "dkdv": {
        64: [(64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 1)],
        128: [(128, 8, 1), (128, 8, 2), (128, 8, 3), (64, 4, 2), (64, 4, 3)],
    },
    "dq": {
        64: [(64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 4, 2)],
        128: [(128, 8, 1), (128, 8, 2), (128, 8, 3), (64, 4, 2), (64, 4, 3)],
    },
}


class Trial(NamedTuple):
    """Both passes of one attention call on random inputs."""

    forward: Call
    backward: BackwardCall


def candidates(kernel: str, head_dim: int) -> list[Tiles]:
    """List the tiles to be timed."""
    return [tiles_of(kernel, *owned) for owned in OWNED[kernel][head_dim]]


def tiles_of(kernel: str, rows: int, warps: int, stages: int) -> Tiles:
    """Return the tiles of a program that owns so many rows."""
    return Tiles(64, rows, warps, stages) if kernel == "dkdv" else Tiles(rows, 64, warps, stages)


def trial_of(shape: Shape, recipe: str, device: torch.device) -> Trial:
    """Run the portable forward on random inputs, to get the inputs of its backward pass."""
    q, k, v, do = random_inputs(shape, dtype=torch.bfloat16, device=device)
    call = call_of(shape, q, k, v, recipe)
    return Trial(call, call.backward(do, *triton_forward(call)))


def checks(head_dim: int, device: torch.device) -> list[Trial]:
    """Run small calls of other kinds, whose bits may not change either: recipes, documents with a window, grouped
    heads, odd lengths."""
    kinds = (
        ("fine", Shape(1, 700, 700, 2, 1, head_dim, documents=(5, 0, 300, 1, 394), window=200)),
        ("scores", Shape(1, 517, 700, 4, 2, head_dim)),
        ("gradients", Shape(2, 300, 300, 2, 2, head_dim, causal=False)),
    )
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda kind: trial_of(kind[1], kind[0], device), kinds))


@contextlib.contextmanager
def using(kernel: str, head_dim: int, tiles: Tiles) -> Iterator[None]:
    """Launch a kernel with these tiles inside the block, in this thread alone."""
    before = tried.set({(kernel, block_d(head_dim)): tiles})
    try:
        yield
    finally:
        tried.reset(before)


def results(kernel: str, trial: Trial) -> tuple[Tensor, ...]:
    """Compute everything that depends on the tiles of a kernel: output and log-sum-exp, or the gradients."""
    if kernel == "forward":
        o, saved = triton_forward(trial.forward)
        return o, saved.lse
    return triton_backward(trial.backward)


def all_results(kernel: str, tiles: Tiles, trials: Iterable[Trial]) -> list[tuple[Tensor, ...]]:
    """Compute the results of several calls with these tiles. Each call has a thread, because Triton compiles a kernel
    of its own for each of them, and that takes seconds and needs the interpreter's lock for a small part of the time.
    """

    def one(trial: Trial) -> tuple[Tensor, ...]:
        with using(kernel, trial.forward.q.shape[3], tiles):
            return results(kernel, trial)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(one, trials))


def unlike(kernel: str, tiles: Tiles, trials: Sequence[Trial], expected: Sequence[tuple[Tensor, ...]]) -> str:
    """Say why tiles may not replace those that gave `expected`, or return ""."""
    try:
        found = all_results(kernel, tiles, trials)
    except triton.runtime.errors.OutOfResources as error:
        return str(error).splitlines()[0]
    pairs = (pair for ours, theirs in zip(found, expected, strict=True) for pair in zip(ours, theirs, strict=True))
    return "" if all(torch.equal(a, b) for a, b in pairs) else "changes bits of results"


def compare(
    kernel: str,
    tiles: Sequence[Tiles],
    timed: Trial,
    checked: Sequence[Trial],
    seconds: Callable[[Callable[[], object]], float],
) -> tuple[Tiles, dict[Tiles, float], dict[Tiles, str]]:
    """Return the fastest of `tiles`, the seconds of those that run, in alternation, and why others are not taken.

    The first tiles are the present ones. They stay if no others are faster by GAIN and give the same bits.
    """
    head_dim = timed.forward.q.shape[3]
    expected = all_results(kernel, tiles[0], (timed, *checked))
    with ThreadPoolExecutor() as threads:  # All are compiled at once.
        reasons = list(threads.map(lambda one: unlike(kernel, one, [timed], expected[:1]), tiles))
    refused = {one: reason for one, reason in zip(tiles, reasons, strict=True) if reason}
    times: dict[Tiles, list[float]] = {one: [] for one in tiles if one not in refused}
    for _ in range(ROUNDS):
        for one, so_far in times.items():
            with using(kernel, head_dim, one):
                so_far.append(seconds(lambda: results(kernel, timed)))
    medians = {one: statistics.median(so_far) for one, so_far in times.items()}
    for one in sorted(medians, key=medians.__getitem__):
        if medians[one] * GAIN > medians[tiles[0]]:
            break
        reason = unlike(kernel, one, checked, expected[1:])
        if not reason:
            return one, medians, refused
        refused[one] = reason
    return tiles[0], medians, refused


def tune(
    head_dims: Iterable[int],
    shape: Callable[[int], Shape],
    device: torch.device,
    say: Callable[[str], None],
) -> dict[tuple[str, int], Tiles]:
    """Return the choice for each kernel and head dimension. Each table is said as soon as it is known."""
    chosen = {}
    for head_dim in head_dims:
        timed, checked = trial_of(shape(head_dim), "fine", device), checks(head_dim, device)
        for kernel in OWNED:
            ours = launch_tiles(kernel, device, block_d(head_dim))
            tiles = [ours, *(one for one in candidates(kernel, head_dim) if one != ours)]
            best, times, refused = compare(kernel, tiles, timed, checked, lambda action: median_seconds(action, device))
            chosen[kernel, head_dim] = best
            say(f"{kernel}, head_dim {head_dim}: {_name(best)}")
            for one in tiles:
                figures = f"{1e3 * times[one]:9.3f} ms {times[ours] / times[one]:6.3f}  " if one in times else ""
                say(f"  {_name(one):<14} {figures}{refused.get(one, '')}".rstrip())
    return chosen


def _name(tiles: Tiles) -> str:
    return " ".join(str(x) for x in tiles if x is not None)


def keep(chosen: dict[tuple[str, int], Tiles], lines: list[str], device: torch.device) -> None:
    """Write the choice and its table into tuned_file(), beside those for other GPUs and versions."""
    path = tuned_file()
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[tuned_key(device)] = {
        "tiles": {f"{kernel} {block_d(head_dim)}": tiles for (kernel, head_dim), tiles in chosen.items()},
        "table": lines,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(kept, indent=1))
    temporary.replace(path)


def main() -> None:
    """Time the tiles, say the tables, and keep the choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], choices=[64, 128])
    parser.add_argument("--tokens", type=int, default=16384, help="of one call, in sequences of 4096 or less")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "tuning needs an NVIDIA GPU\n")
    device = torch.device("cuda", torch.cuda.current_device())
    length = min(4096, arguments.tokens)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    def shape(head_dim: int) -> Shape:
        heads = 2048 // head_dim
        return Shape(max(1, arguments.tokens // length), length, length, heads, heads, head_dim)

    start = time.time()
    say(f"{tuned_key(device)}; {arguments.tokens} tokens, causal, bf16")
    say("block_m, block_n, warps, stages; time of the whole forward or backward; times as fast as before")
    keep(tune(arguments.head_dims, shape, device, say), lines, device)
    print(f"kept in {tuned_file()} ({time.time() - start:.0f} s)")


if __name__ == "__main__":
    main()

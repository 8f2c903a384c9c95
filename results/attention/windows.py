"""Time windowed INT8 attention on a Hopper GPU beside FlashAttention-4 with the same window, with and without sinks.

Each way is compared with float64 on a small problem before it is timed (sagekernels.admission). A way that is wrong
is named and not timed. The ways take turns, and a figure is the median over rounds. Everything from the 16-bit inputs
on is timed: quantization, smoothing and the bounds of the window too. Where FlashAttention-4 cannot be imported,
torch's flex_attention takes its place.

    python results/attention/windows.py --json FILE [--lengths 8192 ...] [--windows 128 ...] [--head-dims 64 128]

This script is frozen. It runs with the library as it was at commit 3f9416c4.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sagekernels import bench, sage_attention
from sagekernels.admission import LIMITS, Attend, admit
from sagekernels.testing import Shape, random_inputs, random_sinks

TOKENS = 32768
"""The tokens of a batch of short sequences. The hidden size is 2048, with four query heads to a key head."""
ROUNDS, RUNS = 3, 4
AHEAD = 30_000_000
"""The cycles that the GPU sleeps before the runs of a round, so that the host gets ahead of it."""


def flash() -> Attend | None:
    """Return FlashAttention-4, or None if it is not installed."""
    try:
        function = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError as problem:
        print(f"FlashAttention-4 is not here: {problem}")
        return None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: None, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        sees = {} if window is None else {"window_size": (window - 1, 0)}
        return function(q, k, v, causal=True, learnable_sink=sinks, **sees)[0]

    return attend


@functools.cache
def flex_mask(tokens: int, window: int | None) -> Any:
    """Return the block mask of a causal window."""
    from torch.nn.attention.flex_attention import create_block_mask

    width = window or tokens

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < width)

    return torch.compile(create_block_mask)(seen, None, None, tokens, tokens)


def flex() -> Attend:
    """Return torch's flex_attention, which has no sinks here."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: None, window: int | None = None) -> Tensor:
        mask = flex_mask(q.shape[1], window)
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


def ours(recipe: str) -> Attend:
    """Return INT8 attention by the best backend for this GPU."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: None, **sees: Any) -> Tensor:
        return sage_attention(q, k, v, recipe=recipe, **sees)

    return attend


def ways() -> dict[str, tuple[Attend, str]]:
    """Return every attention function by name, with the recipe whose error limits it is held to."""
    found = {recipe: (ours(recipe), recipe) for recipe in ("scores", "fine", "paper")}
    peer = flash()
    return found | ({"flex_attention": (flex(), "scores")} if peer is None else {"FA4": (peer, "scores")})


def shapes(lengths: list[int], windows: list[int | None], head_dims: list[int]) -> list[Shape]:
    """List causal problems with grouped heads, for each length and window that is shorter. The shortest come first."""
    found = []
    for n in sorted(lengths):
        for head_dim in head_dims:
            heads = 2048 // head_dim
            one = Shape(max(1, TOKENS // n), n, n, heads, heads // 4, head_dim)
            found += [one._replace(window=window) for window in windows if window is None or window < n]
    return [shape for shape in found if shape.window is not None or shape.n_q <= TOKENS]


def samples(action: Callable[[], object], device: torch.device) -> list[float]:
    """Return the milliseconds of some runs of an action."""
    if device.type != "cuda":
        start = time.perf_counter()
        action()
        return [1e3 * (time.perf_counter() - start)]
    action()  # The allocator has its blocks from here on.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    marks[0].record()
    for mark in marks[1:]:
        action()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def actions_of(attend: Attend, shape: Shape, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the forward pass, and both passes, of a way at a shape."""
    q, k, v, do = random_inputs(shape, k_mean=2.0 * shape.sinks, device=device)
    sinks = random_sinks(shape, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    sees: dict[str, Any] = {} if shape.window is None else {"window": shape.window}

    def forward() -> Tensor:
        own = {} if sinks is None else {"sinks": leaves[3]}
        return attend(*leaves[:3], None, **sees, **own)

    return {"forward": forward, "both": lambda: torch.autograd.grad(forward(), leaves, do)}


def measure(shape: Shape, found: dict[str, tuple[Attend, str]], verdicts: dict, device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of all ways at a shape, and why a way was not timed."""
    tried = [(name, name, shape) for name in found]
    tried += [(f"{name}, sinks", name, shape._replace(sinks=True)) for name in ("scores", "FA4") if name in found]
    actions, refused = {}, {}
    for label, name, kind in tried:
        attend, recipe = found[name]
        key = label, kind.head_dim, kind.window
        try:
            if key not in verdicts:
                verdicts[key] = admit(attend, kind, dtype=torch.bfloat16, device=device, limits=LIMITS[recipe])
            if not verdicts[key].passed:
                refused[label] = verdicts[key].reason[:200]
                continue
            made = actions_of(attend, kind, device)
            for action in made.values():
                action()
            actions[label] = made
        except Exception as problem:  # noqa: BLE001 one row that fails does not end the others
            refused[label] = f"{type(problem).__name__}: {problem}"[:200]
    times: dict[str, dict[str, list[float]]] = {label: {"forward": [], "both": []} for label in actions}
    for _ in range(ROUNDS):
        for label, made in actions.items():
            for what, action in made.items():
                times[label][what] += samples(action, device)
    medians = {label: {what: statistics.median(spent) for what, spent in both.items()} for label, both in times.items()}
    return {"shape": shape._asdict(), "flops": bench.flops(shape), "ms": medians, "refused": refused}


def lines(row: dict[str, Any], shape: Shape) -> list[str]:
    """Return the lines of a shape: milliseconds, and speed over that of the peer."""
    peer = row["ms"].get("FA4") or row["ms"].get("flex_attention")
    found = [str(shape)]
    for label, ms in row["ms"].items():
        rate = 3.5 * row["flops"] / ms["both"] / 1e9
        line = f"  {label:<16}{ms['forward']:9.3f}{ms['both']:9.3f} ms {rate:6.0f} TFLOP/s both"
        found.append(
            line
            if peer is None
            else line + f"   x{peer['forward'] / ms['forward']:.2f} forward  x{peer['both'] / ms['both']:.2f} both"
        )
    return found + [f"  {label:<16} not timed: {why}" for label, why in row["refused"].items()]


def main() -> None:
    """Measure the shapes, print the table and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--windows", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--seconds", type=float, default=130, help="begin no shape later (default: %(default)s)")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    start, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU: these times mean nothing"
    print(f"{name}, torch {torch.__version__}; milliseconds forward, and forward and backward; speed over the peer's")
    found, verdicts, rows = ways(), {}, []
    for shape in shapes(arguments.lengths, [*arguments.windows, None], arguments.head_dims):
        if time.monotonic() - start > arguments.seconds:
            print(f"{shape}: not begun, the time is over")
            continue
        rows.append(measure(shape, found, verdicts, device))
        print("\n".join(lines(rows[-1], shape)), flush=True)
        arguments.json.write_text(json.dumps({"gpu": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

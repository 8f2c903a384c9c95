"""Print one page about INT8 on this GPU, to be sent in an issue: `python -m sagekernels.report`.

The page says what the GPU is, which rates its products reach, and how INT8 attention compares with 16-bit attention,
errors first: a wrong kernel is not timed.
"""

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import triton

from .admission import LIMITS, admit, median_seconds
from .bench import candidates, measure, shapes, time_attention
from .int8_matmul import int8_product
from .launch import half_sums

SIDE = 4096
"""The side of the square matrices whose products are timed."""


def product_rates(device: torch.device) -> list[str]:
    """Time products of SIDE x SIDE matrices in bf16 and in INT8."""
    x, y = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    codes = [torch.randint(-127, 128, (SIDE, SIDE), device=device, dtype=torch.int8) for _ in range(2)]
    scale = torch.ones(SIDE, 1, device=device)
    calls = {
        "bf16": lambda: torch.mm(x, y),
        "INT8": lambda: int8_product(codes[0], scale, codes[1], scale, torch.bfloat16),
    }
    lines = []
    for name, call in calls.items():
        try:
            lines.append(f"  {name} product: {2 * SIDE**3 / median_seconds(call, device) / 1e12:.0f} T/s")
        except NotImplementedError as error:
            lines.append(f"  {name} product: {error}")
    return lines


def page(device: torch.device, card: Any, lengths: Iterable[int]) -> Iterator[str]:
    """Yield the lines of the page as they are known. `card` has the properties that torch.cuda gives for a GPU."""
    yield f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB"
    yield f"torch {torch.__version__}, Triton {triton.__version__}, sums in float16: {half_sums(device)}"
    yield from product_rates(device)
    yield "attention: forward, backward, both: milliseconds, then TFLOP/s; ratio to the fastest 16-bit one"
    for shape in shapes(lengths, [64, 128]):
        if not shape.causal or shape.documents or shape.kv_heads != shape.heads:
            continue
        functions = candidates(shape.causal)
        verdict = admit(functions["sage fine"][0], shape, dtype=torch.bfloat16, device=device, limits=LIMITS["fine"])
        figures = (f"{name} {e:.4f}" for name, e in verdict.errors.items())
        yield " ".join(filter(None, ("errors of fine:", *figures, verdict.reason)))
        timer = partial(time_attention, shape=shape, dtype=torch.bfloat16, repeats=10)
        yield from measure(shape, functions, timer, dtype=torch.bfloat16, device=device)


def main() -> None:
    """Measure the GPU and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "the report needs an NVIDIA GPU\n")
    device = torch.device("cuda", torch.cuda.current_device())
    for line in page(device, torch.cuda.get_device_properties(device), arguments.lengths):
        print(line, flush=True)


if __name__ == "__main__":
    main()

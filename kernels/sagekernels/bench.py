"""Time INT8 attention beside the fastest 16-bit attention on this GPU: `python -m sagekernels.bench` prints one table.

Everything is timed from the 16-bit inputs, so smoothing and quantization are inside the timed region. A kernel is
admitted first: its output and gradients are compared with float64 (admission.py). A kernel that fails is named and not
timed. TFLOP/s count 4 B H N^2 D forward and 2.5 times that backward, half of both when causal, and the documents' own
squares when packed.
"""

import argparse
import importlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import sage_attention
from .admission import LIMITS, Attend, admit
from .testing import Shape, random_inputs

TOKENS = 32768
LONGEST_MS = 500  # Timing one function at one shape takes no longer than this, unless three runs do.


class Times(NamedTuple):
    """The median milliseconds of one function at one shape."""

    forward: float
    both: float


def shapes(lengths: Iterable[int], head_dims: Iterable[int], windows: Iterable[int] = ()) -> list[Shape]:
    """List problems of hidden size 2048 and about 32K tokens: causal and full, grouped heads (4:1), windows that are
    shorter than the sequence, and packed documents."""
    found = []
    for head_dim in head_dims:
        heads = 2048 // head_dim
        for n in lengths:
            whole = Shape(max(1, TOKENS // n), n, n, heads, heads, head_dim)
            found += [whole, whole._replace(causal=False), whole._replace(kv_heads=heads // 4)]
            found += [whole._replace(window=window) for window in windows if window < n]
        documents = (1000, 5000, 100, 12000, 667, 14001)
        found.append(Shape(1, sum(documents), sum(documents), heads, heads, head_dim, documents=documents))
    return found


def flops(shape: Shape) -> float:
    """Count the operations of the forward pass."""
    pairs = sum(n * n for n in shape.documents) or shape.batch * shape.n_q * shape.n_k
    if shape.window is not None and shape.causal:
        lengths = shape.documents or (shape.n_q,) * shape.batch
        pairs = sum(w * (2 * n - w) for n in lengths for w in [min(n, shape.window)])
    return 4 * shape.heads * shape.head_dim * pairs * (0.5 if shape.causal else 1.0)


def _sdpa(
    backend: SDPBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    if cu_seqlens is not None or window is not None:
        raise NotImplementedError("takes no packed documents and no window")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(
            1, 2
        )


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    function: Callable,
    window: int | None = None,
) -> Tensor:
    sees = {} if window is None else {"window_size": (window - 1, 0)}
    if cu_seqlens is None:
        return function.flash_attn_func(q, k, v, causal=causal, **sees)[0]
    longest = int(cu_seqlens.diff().max())
    flat = (x.flatten(0, 1) for x in (q, k, v))
    o = function.flash_attn_varlen_func(
        *flat,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=causal,
        **sees,
    )
    return o[0].view(q.shape)


def candidates(causal: bool) -> dict[str, tuple[Attend, Mapping[str, float], bool]]:
    """Return each function by name, with its error limits and whether it is one of ours."""

    def sage(
        recipe: str, backend: str | None, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, window: int | None = None
    ) -> Tensor:
        how = {"causal": causal, "cu_seqlens": cu, "window": window}
        return sage_attention(q, k, v, recipe=recipe, backend=backend, **how)

    found = {
        " ".join(filter(None, ("sage", recipe, backend))): (partial(sage, recipe, backend), LIMITS[recipe], True)
        # None chooses the best backend for this GPU.
        for recipe, backend in (("fine", "triton"), ("fine", None), ("scores", None))
    }
    for name, backend in (("FA2 (torch)", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        found[name] = (partial(_sdpa, backend, causal=causal), LIMITS["scores"], False)
    try:
        # FlashAttention is a peer to compare with and not a dependency.
        cute = importlib.import_module("flash_attn.cute")
    except ImportError:
        return found
    return found | {"FA4": (partial(_varlen, causal=causal, function=cute), LIMITS["scores"], False)}


def time_attention(attend: Attend, shape: Shape, dtype: torch.dtype, repeats: int) -> Times:
    """Time the forward alone, and forward and backward, by CUDA events after a warm-up. Launches run ahead, as in
    training. Each function runs `repeats` times at most, and fewer times where it is slow."""
    device = torch.device("cuda")
    q, k, v, do = random_inputs(shape, dtype=dtype, device=device)
    cu_seqlens, how = shape.cu_seqlens(device), {} if shape.window is None else {"window": shape.window}
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        return attend(*leaves, cu_seqlens, **how)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, do)

    def times(run: Callable[[], object], count: int) -> list[float]:
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        ends[0].record()
        for end in ends[1:]:
            run()
            end.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]

    medians = []
    for run in (forward, both):
        warm = times(run, 3)[-1]
        count = max(3, min(repeats, int(LONGEST_MS / warm)))
        medians.append(statistics.median(times(run, count)))
    return Times(*medians)


def measure(
    shape: Shape,
    functions: Mapping[str, tuple[Attend, Mapping[str, float], bool]],
    timer: Callable[[Attend], Times],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[str]:
    """Return the table rows for one shape. A function is timed only if it is admitted; ours carry the ratio to the best
    peer."""
    times, refused = {}, []
    for name, (attend, limits, _) in functions.items():
        verdict = admit(attend, shape, dtype=dtype, device=device, limits=limits)
        if verdict.passed:
            times[name] = timer(attend)
        else:
            refused.append(f"  {name:<20} not timed: {verdict.reason.splitlines()[0][:90]}")
    peers = [times[name] for name, (_, _, ours) in functions.items() if not ours and name in times]
    rows = [str(shape)]
    for name, t in times.items():
        backward = t.both - t.forward
        rates = [flops(shape) * factor / ms / 1e9 for factor, ms in ((1, t.forward), (2.5, backward), (3.5, t.both))]
        row = f"  {name:<20}{t.forward:9.3f} {backward:9.3f} {t.both:9.3f} ms  " + "".join(f"{r:7.0f}" for r in rates)
        if functions[name][2] and peers:
            best = Times(min(p.forward for p in peers), min(p.both for p in peers))
            row += f"   x{best.forward / t.forward:.2f} forward  x{best.both / t.both:.2f} both"
        rows.append(row)
    return rows + refused


def main() -> None:
    """Measure the shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--windows", type=int, nargs="*", default=[], help="of tokens, such as 128 1024 4096")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "the benchmark needs an NVIDIA GPU; `python -m sagekernels.report` runs without one\n")
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, medians of up to {arguments.repeats}")
    print("forward, backward, both: milliseconds, then TFLOP/s; ratio to the fastest peer that was admitted")
    for shape in shapes(arguments.lengths, arguments.head_dims, arguments.windows):
        timer = partial(time_attention, shape=shape, dtype=torch.bfloat16, repeats=arguments.repeats)
        for row in measure(shape, candidates(shape.causal), timer, dtype=torch.bfloat16, device=device):
            print(row, flush=True)


if __name__ == "__main__":
    main()

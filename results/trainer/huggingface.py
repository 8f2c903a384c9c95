"""Time transformers' Trainer with INT8 attention and 8-bit linear layers beside its own attention, in one run.

    python results/trainer/huggingface.py
    python results/trainer/huggingface.py --cases sdpa,sage,sage+int8 --layers 24 --hidden 1024 --seconds 300

A Llama with random weights in bfloat16 learns random tokens. First sage is compared with sdpa, in logits and gradients,
with padding and with packed documents: if they differ by more than INT8's error, nothing is timed. A case is an
attn_implementation, with the precision of convert() behind a plus sign. Decoder layers are compiled one by one. A
figure is the mean over the steps after the first four. Cases that would begin too late for --seconds are not run.

This script is frozen. It runs with the library as it was at commit 6c48af22.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from sagekernels import Linear8bit, convert
from sagekernels.huggingface import register

CASES = "sdpa,sage,sage+int8,sdpa+int8,sage+fp8,sdpa+fp8"
WARM = 4
LIMITS = 0.03, 0.06
"""The largest relative errors of logits and gradients of sage against sdpa."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--cases", default=CASES, help=f"comma-separated (default {CASES})")
    for name, default in (("layers", 16), ("hidden", 2048), ("heads", 16), ("inner", 8192), ("vocab", 32000)):
        found.add_argument(f"--{name}", type=int, default=default, help=f"of the model (default {default})")
    found.add_argument("--tokens", type=int, default=4096, help="of a sequence (default 4096)")
    found.add_argument("--batch", type=int, default=4, help="sequences of a step (default 4)")
    found.add_argument("--steps", type=int, default=12, help="steps of a case (default 12)")
    found.add_argument("--seconds", type=float, default=118, help="no case begins that would end later (default 118)")
    return found


def llama(asked: argparse.Namespace, implementation: str, layers: int, spread: float = 0.02) -> LlamaForCausalLM:
    """Return a model with random weights, the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=asked.vocab,
        hidden_size=asked.hidden,
        intermediate_size=asked.inner,
        num_hidden_layers=layers,
        num_attention_heads=asked.heads,
        num_key_value_heads=max(1, asked.heads // 4),
        max_position_embeddings=max(2048, asked.tokens),
        initializer_range=spread,
        attn_implementation=implementation,
    )
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        return LlamaForCausalLM(config).to(torch.bfloat16 if on_gpu else torch.float32)


def check(asked: argparse.Namespace) -> list[str]:
    """Compare sage with sdpa on two layers, and return a line for each kind of batch.

    Raises:
        SystemExit: they differ by more than LIMITS.
    """
    # Scores have a standard deviation of 1.5 at any width. Sharper attention shows more of INT8's error.
    model, length = llama(asked, "sdpa", 2, spread=(1.5 / asked.hidden) ** 0.5), min(asked.tokens, 700)
    ids = torch.randint(1, asked.vocab, (3, length), device=model.device)
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    right[0, length // 2 :] = right[2, length // 9 :] = 0
    left[1, : length // 3] = 0
    positions = torch.arange(length, device=model.device).expand(3, -1) % (length // 3 + 1)
    lines = []
    for name, given in {
        "whole": {},
        "padded right": {"attention_mask": right},
        "padded left": {"attention_mask": left},
        "packed": {"position_ids": positions, "use_cache": False},
    }.items():
        keep = given.get("attention_mask", torch.ones_like(ids)).bool()
        (logits, grads), (expected, wanted) = (_passes(model, how, ids, keep, given) for how in ("sage", "sdpa"))
        errors = [((a - b).norm() / b.norm()).item() for a, b in ((logits, expected), (grads, wanted))]
        lines.append(f"{name}: logits {errors[0]:.4f}, gradients {errors[1]:.4f}")
        if not all(error < limit for error, limit in zip(errors, LIMITS, strict=True)):
            raise SystemExit(f"sage differs from sdpa, nothing is timed: {lines[-1]}")
    return lines


def _passes(
    model: LlamaForCausalLM, how: str, ids: Tensor, keep: Tensor, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    model.set_attn_implementation(how)
    model.zero_grad()
    logits = model(input_ids=ids, **given).logits[keep].float()
    F.cross_entropy(logits, ids[keep]).backward()
    return logits.detach(), torch.cat([each.grad.flatten().float() for each in model.parameters()])


class Clock(TrainerCallback):
    """The ends of steps, when the GPU is done."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def timed(asked: argparse.Namespace, case: str) -> tuple[float, float, float]:
    """Train a case, and return tokens/s, the peak of memory in GiB, and the mean loss."""
    implementation, _, precision = case.partition("+")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = llama(asked, implementation, asked.layers)
    if precision:
        convert(model, precision=precision)
        assert sum(isinstance(layer, Linear8bit) for layer in model.modules()) == 7 * asked.layers
    for layer in model.model.layers if on_gpu else ():
        layer.compile()
    tokens = torch.randint(asked.vocab, (asked.batch * asked.steps, asked.tokens))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=asked.steps, per_device_train_batch_size=asked.batch, learning_rate=1e-4, report_to=[],
            logging_steps=asked.steps, save_strategy="no", disable_tqdm=True, use_cpu=not on_gpu,
            optim="adamw_torch_fused",
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        done = Trainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()
    rate = asked.batch * asked.tokens * (asked.steps - WARM - 1) / (clock.ends[-1] - clock.ends[WARM])
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return rate, peak, done.training_loss


def table(asked: argparse.Namespace, begun: float) -> list[str]:
    """Time the cases and return the rows of the table. A case that fails is a row that says why."""
    rows, first, longest = [], None, 0.0
    for case in asked.cases.split(","):
        if (start := time.perf_counter()) - begun + longest > asked.seconds and longest:
            rows.append(f"| {case} | not run: out of time | | | |")
            continue
        try:
            rate, peak, loss = timed(asked, case)
        except Exception as error:  # noqa: BLE001
            rows.append(f"| {case} | {type(error).__name__}: {str(error)[:200]} | | | |")
        else:
            first = first or rate
            rows.append(f"| {case} | {rate:,.0f} | {rate / first:.3f} | {peak:.1f} GiB | {loss:.3f} |")
        longest = max(longest, time.perf_counter() - start)
        print(rows[-1], flush=True)
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    begun, asked = time.perf_counter(), parser().parse_args(words)
    if asked.steps < WARM + 2:
        raise SystemExit(f"--steps {asked.steps}: the first {WARM} steps are not timed; give {WARM + 2} or more")
    transformers.logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    register()
    print("sage beside sdpa, relative errors", *check(asked), sep="\n", flush=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, not compiled"
    rows = table(asked, begun)
    print(
        f"\n{name}, torch {torch.__version__}, transformers {transformers.__version__}, {asked.batch} x {asked.tokens}",
        f"\n| attention + linear layers | tokens/s | times the first | memory | mean loss |\n|{'---|' * 5}",
        *rows,
        sep="\n",
    )


if __name__ == "__main__":
    main()

"""Time forward and backward of two Llama blocks as wide as 8B's on one sequence of 256K tokens, beside transformers.

    PYTHONPATH=.:kernels python results/step/longest.py OUT [--tokens N] [--layers N] [--gib 80] [--tiny]

Sides: SageTrain in INT8 and in 16 bits, which keep what attention returned in the host's memory and recompute the rest
of a block; transformers' Llama with Liger's kernels and chunked loss, whose gradient checkpointing recomputes whole
blocks and keeps their inputs in the host's memory, with FlashAttention-4; the same with cuDNN's attention, whose output
torch's selective checkpointing keeps on the GPU. There is no optimizer. Weights are drawn by name, so all sides have
the same.

Each side is a process of its own with the GPU alone, limited to --gib. A step of 8,192 tokens, not compiled, is
compared with the sides before it, and nothing is timed that differs. Of two long steps the second one is timed. The
run of the log also prepared all sides at once, to save time, and timed them in the order of SIDES. --tiny tries
everything on the CPU, without Liger and FlashAttention-4. No test runs this script, and the log names its commit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SIDES = ("int8", "transformers", "bf16", "transformers-kept")
parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--side", choices=SIDES, help="time this side alone (default: each in a process, then a table)")
parser.add_argument("--tokens", type=int, default=2**18)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--gib", type=float, default=80.0, help="the most GPU memory of a side (default: %(default)s)")
parser.add_argument("--tiny", action="store_true")
asked = parser.parse_args()
HIDDEN, INNER, HEADS, KEYS, VOCAB, SHORT = 4096, 14336, 32, 8, 32768, 8192
if asked.tiny:
    HIDDEN, INNER, HEADS, KEYS, VOCAB, SHORT = 256, 512, 4, 2, 512, 1024
DEVICE, DTYPE = torch.device("cpu" if asked.tiny else "cuda"), torch.bfloat16
# How far a side's short step may be from transformers': the loss (absolute) and gradients (relative). Another order of
# sums in bf16 gives 0.01 to 0.03 of a gradient, INT8 0.05 to 0.12, and a wrong rotation or shift about 1.
TOLERANCE = {"bf16": (0.003, 0.06), "int8": (0.01, 0.20)}
COMPARED = ("model.layers.0.self_attn.v_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight")


@torch.no_grad()
def draw(named: dict[str, Tensor]) -> None:
    """Draw each weight by its name in transformers."""
    for name, weight in named.items():
        if weight.ndim == 1:
            weight.fill_(1)
        else:
            generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
            values = torch.empty(weight.shape, device=DEVICE, dtype=torch.float32)
            weight.copy_(values.normal_(0, 1.28 * HIDDEN**-0.5, generator=generator))


def text(tokens: int) -> Tensor:
    """Return random tokens."""
    return torch.randint(0, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0)).to(DEVICE)


class Ours:
    """SageTrain's Transformer."""

    def __init__(self) -> None:
        from sagetrain.config.schema import AttentionConfig, LinearConfig, ModelConfig
        from sagetrain.interop.families import _TENSORS
        from sagetrain.model.activation_offload import ActivationOffload
        from sagetrain.model.selection import attention_functions, matmuls_of
        from sagetrain.model.transformer import Transformer
        from sagetrain.parallel.topology import ParallelGroups

        attention, linear, self.what = {
            "int8": ({"backend": "sage", "recipe": "scores"}, "int8", "SageTrain, INT8, `scores`"),
            "bf16": ({"backend": "sdpa"}, "bf16", "SageTrain, bf16, cuDNN's attention"),
        }[asked.side]
        attention = AttentionConfig(qk_norm="none", **attention)
        shape = ModelConfig(
            num_layers=asked.layers, hidden_size=HIDDEN, ffn_hidden_size=INNER, num_attention_heads=HEADS,
            num_key_value_heads=KEYS, vocab_size=VOCAB, rope_theta=5e5, norm_eps=1e-5,
        )  # fmt: skip
        place = {"device": DEVICE, "dtype": DTYPE}
        matmuls, _ = matmuls_of(LinearConfig(precision=linear), shape, tensor_parallel_size=1, **place)
        self.model = Transformer(
            shape, attention, vocab_size=VOCAB, groups=ParallelGroups.single(), matmuls=matmuls,
            functions=attention_functions(attention, shape, **place), activation_checkpointing="attention", seed=None,
            **place,
        )  # fmt: skip
        self.model.to_empty(device=DEVICE)
        self.model.offload = ActivationOffload.on(DEVICE)
        self.named = {}
        for name, weight in self.model.named_parameters():
            _, number, inner = name.split(".", 2) if name.startswith("blocks.") else ("", "", name)
            self.named[(f"model.layers.{number}." if number else "") + _TENSORS[inner]] = weight

    def compile(self) -> None:
        from sagetrain.model.compile import compile_blocks

        compile_blocks(self.model, "aot_eager_decomp_partition" if asked.tiny else "inductor")

    def loss(self, ids: Tensor) -> Tensor:
        self.model.keep_weights()  # Codes of the weights are made in each step, as in training.
        return self.model(ids, F.pad(ids[:, 1:], (0, 1), value=-100), divisor=float(ids.shape[1] - 1))


def flash_attention_4(module, query, key, value, attention_mask=None, scaling=None, **others):
    """Take FlashAttention-4 as transformers calls an attention."""
    from flash_attn.cute import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn_func(q, k, v, softmax_scale=scaling, causal=True)[0], None


def save_attention(context, op, *args, **kwargs):
    """Keep what torch's attention returned, and recompute the rest."""
    kept = "scaled_dot_product" in op.name()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Theirs:
    """transformers' LlamaForCausalLM."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, __version__
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=asked.layers, num_attention_heads=HEADS,
            num_key_value_heads=KEYS, vocab_size=VOCAB, rms_norm_eps=1e-5, max_position_embeddings=2**18,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5}, tie_word_embeddings=False, use_cache=False,
            attn_implementation="sdpa", dtype=DTYPE,
        )  # fmt: skip
        with torch.device(DEVICE):
            self.model = LlamaForCausalLM._from_config(config).train()
        kept: dict = {"use_reentrant": False}
        self.what = f"transformers {__version__}, bf16, FlashAttention-4"
        if asked.side == "transformers-kept":
            kept["context_fn"] = functools.partial(create_selective_checkpoint_contexts, save_attention)
            self.what = f"transformers {__version__}, bf16, cuDNN's attention kept"
        elif not asked.tiny:
            ALL_ATTENTION_FUNCTIONS.register("flash_4", flash_attention_4)
            self.model.config._attn_implementation = "flash_4"
        if not asked.tiny:
            # Where FlashAttention-4 is installed, Liger would take CuTe for these.
            os.environ |= {f"LIGER_KERNEL_IMPL_{of}": "triton" for of in ("ROPE", "CROSS_ENTROPY_LOSS_AND_GRAD")}
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=self.model)
            self.fused = LigerFusedLinearCrossEntropyLoss()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kept, offload=not asked.tiny)
        self.named = dict(self.model.named_parameters())

    def compile(self) -> None:
        """Compile nothing: Liger's kernels take the place of what torch.compile would fuse."""

    def loss(self, ids: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids).last_hidden_state[0]
        labels = F.pad(ids[0, 1:], (0, 1), value=-100)
        if asked.tiny:
            return F.cross_entropy(self.model.lm_head(hidden).float(), labels)
        return self.fused(self.model.lm_head.weight, hidden, labels)


def short_step(side: Ours | Theirs) -> None:
    """Leave the loss and some gradients of a short step for the sides behind, and compare them with those before."""
    loss = side.loss(text(SHORT))
    loss.backward()
    found = {"loss": loss.item(), **{name: side.named[name].grad[:1024].float().cpu() for name in COMPARED}}
    torch.save(found, asked.out / f"{asked.side}.pt")
    for other in SIDES[: SIDES.index(asked.side)]:
        if (asked.side in TOLERANCE) == (other in TOLERANCE):
            continue
        values = torch.load(asked.out / f"{other}.pt")
        apart = abs(found["loss"] - values["loss"])
        errors = [((found[name] - values[name]).norm() / values[name].norm()).item() for name in COMPARED]
        limits = TOLERANCE[asked.side if asked.side in TOLERANCE else other]
        told = " ".join(f"{error:.4f}" for error in errors)
        print(f"{asked.side} beside {other}: losses {apart:.5f} apart, gradients {told}; limits {limits}", flush=True)
        assert apart <= limits[0] and max(errors) <= limits[1], "nothing is timed"


def long_step(side: Ours | Theirs) -> dict[str, float]:
    """Return the loss and the seconds of a step: of both passes, and of the forward pass."""
    for parameter in side.named.values():
        parameter.grad = None
    ids, wait = text(asked.tokens), torch.cpu.synchronize if asked.tiny else torch.cuda.synchronize
    wait()
    began = time.perf_counter()
    loss = side.loss(ids)
    wait()
    forward = time.perf_counter() - began
    loss.backward()
    wait()
    return {"loss": loss.item(), "seconds": time.perf_counter() - began, "forward": forward}


def run() -> None:
    """Take all steps of a side, and write its row."""
    if not asked.tiny:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, asked.gib * 2**30 / total))
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        side = Theirs() if asked.side.startswith("transformers") else Ours()
        draw(side.named)
        short_step(side)
        side.compile()
        if not asked.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        first = long_step(side)["seconds"]
        row = {"what": side.what, "first": first, **long_step(side)}
    assert all(bool(parameter.grad.isfinite().all()) for parameter in side.named.values())
    memory = {"gpu_allocated": 0, "gpu_reserved": 0, "host_pinned": 0}
    if not asked.tiny:
        memory["gpu_allocated"] = torch.cuda.max_memory_allocated()
        memory["gpu_reserved"] = torch.cuda.max_memory_reserved()
        memory["host_pinned"] = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    row["gib"] = {of: size / 2**30 for of, size in memory.items()}
    (asked.out / f"{asked.side}.json").write_text(json.dumps(row, indent=1))


def table() -> None:
    """Print a row of each side that has one, and how fast ours are beside transformers."""
    files = {side: asked.out / f"{side}.json" for side in SIDES}
    rows = {side: json.loads(path.read_text()) for side, path in files.items() if path.is_file()}
    print("| side | s | forward | tokens/s | first step | GPU, GiB | reserved | host | loss |\n" + "|---" * 9 + "|")
    for row in rows.values():
        gib = " | ".join(f"{size:.1f}" for size in row["gib"].values())
        print(
            f"| {row['what']} | {row['seconds']:.3f} | {row['forward']:.3f} | "
            f"{asked.tokens / row['seconds']:,.0f} | {row['first']:.1f} | {gib} | {row['loss']:.5f} |"
        )
    for ours, peer in itertools.product(TOLERANCE, SIDES[1::2]):
        if ours in rows and peer in rows:
            assert abs(rows[ours]["loss"] - rows[peer]["loss"]) <= TOLERANCE[ours][0], f"{ours} beside {peer}"
            print(f"{ours} is {rows[peer]['seconds'] / rows[ours]['seconds']:.3f} times as fast as {peer}")


asked.out.mkdir(parents=True, exist_ok=True)
if asked.side is None:
    for each in SIDES:
        (asked.out / f"{each}.json").unlink(missing_ok=True)
        subprocess.run([sys.executable, *sys.argv, "--side", each], check=False)
    table()
else:
    run()

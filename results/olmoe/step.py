"""Time whole training steps of OLMoE 1B-7B on one GPU, beside the same model composed of torch's operators.

    PYTHONPATH=.:kernels:tests/support:benchmarks python results/olmoe/step.py TEXT OUT [--layers N] [--micro N]

TEXT is a folder with train.xz as results/experts/runs.py takes it: real text of 8,192 words, in a vocabulary of 50,304.
Ours is the engine of a run with int8 moments, in 16 bits with torch's attention and in INT8. The peer's mixture is a
stable sort, indexing, torch._grouped_mm, silu and index_add (results/experts/kernels.py), its blocks and its loss are
compiled, and its AdamW keeps bf16 weights and bf16 moments, which is less work than ours. torchtitan 0.2.2 keeps the
same, and has its Qwen3 with OLMoE's norm of all heads, and its own torch.compile of the parts of a block. All begin
with the same weights, a rate of 0 keeps them, and a bias that our first run finds balances the choices of the others.
Before that the losses of all sides on two layers must agree, with fp32 weights and without clipping. Each side has a
process of its own. No test runs this script, and the page names its commit.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import lzma
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sagetrain.model.transformer as transformer
import tiny
from peer import PeerNorm
from sagetrain.cluster.join import init_distributed
from sagetrain.config import RunConfig
from sagetrain.config.load import load_config
from sagetrain.data.batch import Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.model.compile import compile_blocks
from sagetrain.model.tensors import TensorSpec
from sagetrain.parallel.layers import materialize
from sagetrain.parallel.topology import ParallelGroups, Topology

SMALL = bool(os.environ.get("SMALL"))
GPU = torch.cuda.is_available()
VOCAB, LENGTH = (50304, 4096) if not SMALL else (8192, 64)
SIDES = {
    "SageTrain int8": ("sage", "int8"),
    "SageTrain bf16": ("sdpa", "bf16"),
    "torch operators": ("sdpa", "peer"),
    "torchtitan": ("sdpa", "peer"),
}
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
DTYPE = torch.bfloat16 if GPU else torch.float32


@torch.no_grad()
def drawn(parameters, model, groups, seed, device, partition) -> None:
    """Give the initial weights, drawn on the device: as initialize, but in a second and not in minutes."""
    for spec, parameter in parameters:
        draw = torch.Generator(device).manual_seed(zlib.crc32(spec.name.encode()) + seed)
        whole = torch.empty(spec.shape, dtype=parameter.dtype, device=device)
        std = model.init_std / ((2 * model.num_layers) ** 0.5 if spec.into_stream else 1)
        whole.fill_(spec.begins) if spec.begins is not None else whole.normal_(0, std, generator=draw)
        first = groups.ep_rank * parameter.numel() if spec.cut == "experts" else 0
        materialize(parameter, whole.flatten()[first : first + parameter.numel()].view_as(parameter).clone())
        if partition is not None:
            partition(spec, parameter)


transformer.initialize = drawn


def config(precision: str, layers: int, micro: int, rate: float) -> RunConfig:
    attention, linear = SIDES[precision]
    small = ["model.hidden_size=64", "model.num_attention_heads=2", "model.num_key_value_heads=2",
             "model.head_dim=32", "model.experts.number=8",
             "model.experts.per_token=2", "model.experts.ffn_size=32", "model.vocab_size=8192"]  # fmt: skip
    return load_config(
        "configs/olmoe-1b-7b.yaml",
        [
            f"model.num_layers={layers}", f"data.micro_batch_size={micro}", f"data.seq_length={LENGTH}",
            f"attention.backend={attention}", "attention.recipe=scores",
            f"linear.precision={'int8' if linear == 'int8' else 'bf16'}", "optimizer.moments=int8",
            f"model.experts.balance.bias_rate={rate}", f"training.dtype={'bf16' if GPU else 'fp32'}",
            "training.cuda_graphs=off", "optimizer.clip_grad=0", f"tokens_per_step.tokens={4 * micro * LENGTH}",
            *(small if SMALL else []),
        ],
    )  # fmt: skip


class Batches:
    """Micro-batches of a text."""

    def __init__(self, path: Path, micro: int) -> None:
        text = np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint16)
        self.tokens, self.micro = torch.from_numpy(text.astype(np.int64)), micro

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        size = self.micro * LENGTH
        first = number * size % (len(self.tokens) - size - 1)
        part = self.tokens[first : first + size + 1]
        return part[:-1].view(self.micro, LENGTH), part[1:].view(self.micro, LENGTH)


class Ours:
    """The engine of a run."""

    def __init__(self, cfg: RunConfig, device: torch.device) -> None:
        self.groups = ParallelGroups.create(Topology(1, 1))
        model = tiny.model(cfg, self.groups, device=device, vocab_size=VOCAB)
        if GPU:
            compile_blocks(model, hooks=True)
        self.engine = build_engine(cfg, model, self.groups, 1)
        self.metrics: dict[str, float] = {}

    def step(self, pairs: list[tuple[Tensor, Tensor]], lr: float) -> float:
        batches = [Batch(tokens, labels, None, None, None, []) for tokens, labels in pairs]
        result = self.engine.step(batches, len(batches), lr)
        assert result.applied
        self.metrics = result.metrics
        return result.loss

    def biases(self) -> dict[str, Tensor]:
        """Return what routers add to scores for the choice."""
        return {kept.name: kept.read("weight").clone() for kept in self.engine.owned(is_bias)}


def is_bias(spec: TensorSpec) -> bool:
    return spec.name.endswith("router.bias")


class PeerBlock(nn.Module):
    """A block of OLMoE as it is written by hand."""

    def __init__(self, cfg: RunConfig, weights: dict[str, Tensor], number: int, device: torch.device) -> None:
        super().__init__()
        m, e = cfg.model, cfg.model.experts
        self.heads, self.head_dim, self.top, self.experts = m.num_attention_heads, m.head_dim, e.per_token, e.number
        own = {name.removeprefix(f"blocks.{number}."): x for name, x in weights.items()}
        get = lambda name, *shape: nn.Parameter(own[name].view(*shape).to(device))  # noqa: E731
        hidden, ffn = m.hidden_size, e.ffn_size
        self.norm1, self.norm2 = (PeerNorm(hidden, m.norm_eps) for _ in range(2))
        self.q_norm, self.k_norm = (PeerNorm(hidden, m.norm_eps) for _ in range(2))
        self.to(device, DTYPE)
        qkv = torch.cat([own[f"attention.qkv.{x}"].view(-1, hidden) for x in "qkv"])
        self.qkv = nn.Parameter(qkv.to(device))
        self.out = get("attention.out.weight", hidden, -1)
        self.router = get("mlp.router.weight", self.experts, hidden)
        self.bias = own["mlp.router.bias"].to(device)
        self.gate_up = get("mlp.experts.gate_up", self.experts, 2 * ffn, hidden)
        self.down = get("mlp.experts.down", self.experts, hidden, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = F.linear(self.norm1(x), self.qkv).chunk(3, -1)
        q, k = (rotated(norm(t).unflatten(-1, (self.heads, -1)), cos, sin)
                for norm, t in ((self.q_norm, q), (self.k_norm, k)))  # fmt: skip
        q, k, v = (t.transpose(1, 2) for t in (q, k, v.unflatten(-1, (self.heads, -1))))
        with sdpa_kernel(BACKENDS, set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), self.out)
        return x + self.mixture(self.norm2(x).flatten(0, 1)).view_as(x)

    def mixture(self, x: Tensor) -> Tensor:
        scores = F.linear(x.float(), self.router).softmax(-1)
        choices = (scores.detach() + self.bias).topk(self.top, -1).indices
        weights = scores.gather(-1, choices)
        order = choices.flatten().argsort(stable=True)
        experts = torch.arange(self.experts, device=x.device)
        ends = torch.searchsorted(choices.flatten()[order], experts, right=True).int()
        token = order // self.top
        gate, up = grouped(x[token], self.gate_up, ends).chunk(2, -1)
        out = grouped(F.silu(gate) * up, self.down, ends)
        out = out.float() * weights.flatten()[order, None]
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, out).to(x.dtype)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if GPU:
        return torch._grouped_mm(x, weight.mT, offs=ends)
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ w.T for a, b, w in zip(starts, starts[1:], weight, strict=False)])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def loss_of(x: Tensor, gain: Tensor, head: Tensor, labels: Tensor, eps: float) -> Tensor:
    return F.cross_entropy(
        F.linear(F.rms_norm(x, x.shape[-1:], gain, eps), head).flatten(0, 1).float(), labels.flatten()
    )


class Peer:
    """The model by torch's operators, with torch's fused AdamW."""

    def __init__(self, cfg: RunConfig, biases: dict[str, Tensor], device: torch.device, master: bool) -> None:
        m, self.device, self.loss = cfg.model, device, loss_of
        groups, how = ParallelGroups.single(), {"dtype": DTYPE, "device": device}
        fresh = tiny.transformer(m, cfg.attention, vocab_size=VOCAB, seed=3, groups=groups, **how)
        weights = {name: weight.detach() for name, weight in fresh.named_parameters()} | biases
        self.eps, self.metrics = m.norm_eps, dict[str, float]()
        if GPU:
            torch._dynamo.config.recompile_limit = 1000
            self.loss = torch.compile(loss_of)
        every = self.build(cfg, weights)
        # Where losses are compared the weights are those of ours, in fp32; timed steps are spared that.
        self.masters = [(p, p.detach().float().requires_grad_()) for p in every] if master else []
        every = [copy for _, copy in self.masters] or every
        self.optimizer = torch.optim.AdamW(every, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=GPU)

    def build(self, cfg: RunConfig, weights: dict[str, Tensor]) -> list[nn.Parameter]:
        """Make the model of these weights. Return its parameters."""
        m, device = cfg.model, self.device
        angles = torch.arange(LENGTH)[:, None] * m.rope_theta ** -(torch.arange(0, m.head_dim, 2) / m.head_dim)
        self.tables = [table[None, :, None].to(device) for table in (angles.cos(), angles.sin())]
        self.embedding, self.head = (
            nn.Parameter(weights[name].view(VOCAB, -1).to(device)) for name in ("embedding.weight", "head.weight")
        )
        self.gain = nn.Parameter(weights["final_norm.gain"].to(device))
        self.blocks = [PeerBlock(cfg, weights, number, device) for number in range(m.num_layers)]
        if GPU:
            for block in self.blocks:
                block.compile(fullgraph=True, dynamic=False)
        return [self.embedding, self.head, self.gain, *(p for block in self.blocks for p in block.parameters())]

    def loss_at(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch."""
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, *self.tables)
        return self.loss(x, self.gain, self.head, labels, self.eps)

    def step(self, pairs: list[tuple[Tensor, Tensor]], lr: float) -> float:
        total = 0.0
        for tokens, labels in pairs:
            loss = self.loss_at(tokens.to(self.device), labels.to(self.device)) / len(pairs)
            loss.backward()
            total = total + loss.detach()
        self.optimizer.param_groups[0]["lr"] = lr
        with torch.no_grad():
            for parameter, copy in self.masters:
                copy.grad, parameter.grad = parameter.grad.float(), None
            self.optimizer.step()
            for parameter, copy in self.masters:
                parameter.copy_(copy)
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)


class AllHeads(nn.RMSNorm):
    """OLMoE's QK-norm, which torchtitan lacks: over all heads together."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


class Titan(Peer):
    """torchtitan's Qwen3 with its mixture, compiled as torchtitan does, with weights and moments in bf16
    (training.dtype), as FSDP2 calls it: without autocast."""

    def build(self, cfg: RunConfig, weights: dict[str, Tensor]) -> list[nn.Parameter]:
        # torchtitan imports it for data that is not read here.
        if "datasets" not in sys.modules and importlib.util.find_spec("datasets") is None:
            for name in ("datasets", "datasets.distributed"):
                sys.modules[name] = SimpleNamespace(Dataset=None, load_dataset=None, split_dataset_by_node=None)
        from torchtitan.components.loss import cross_entropy_loss
        from torchtitan.config.job_config import Compile
        from torchtitan.models.llama4.infra.parallelize import apply_compile
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model

        if not GPU:  # torch.histc has no integers there.
            torch.histc = lambda x, bins, **_: torch.bincount(x, minlength=bins)
        m, e = cfg.model, cfg.model.experts
        experts = MoEArgs(num_experts=e.number, num_shared_experts=0, top_k=e.per_token, score_func="softmax",
                          route_norm=e.renormalize, score_before_experts=False, use_grouped_mm=GPU)  # fmt: skip
        args = Qwen3ModelArgs(dim=m.hidden_size, n_layers=m.num_layers, n_heads=m.num_attention_heads,
                              n_kv_heads=m.num_key_value_heads, vocab_size=VOCAB, head_dim=m.head_dim,
                              norm_eps=m.norm_eps, rope_theta=m.rope_theta, max_seq_len=LENGTH, moe_enabled=True,
                              moe_inter_dim=e.ffn_size, moe_args=experts)  # fmt: skip
        torch.set_default_dtype(DTYPE)
        with torch.device(self.device):
            self.model = Qwen3Model(args)
            for layer in self.model.layers.values():
                for name in ("q_norm", "k_norm"):
                    setattr(layer.attention, name, AllHeads(m.num_attention_heads * m.head_dim, m.norm_eps))
        torch.set_default_dtype(torch.float32)
        self.fill(weights)
        self.sum_of = torch.compile(cross_entropy_loss) if GPU else cross_entropy_loss
        if GPU:
            apply_compile(self.model, Compile(enable=True), ep_enabled=False)
        return list(self.model.parameters())

    @torch.no_grad()
    def fill(self, weights: dict[str, Tensor]) -> None:
        """Copy our initial weights. Gains are 1."""
        pairs = [(self.model.tok_embeddings.weight, "embedding.weight"), (self.model.output.weight, "head.weight")]
        for number, layer in self.model.layers.items():
            own, attention, moe = f"blocks.{number}.", layer.attention, layer.moe
            pairs += [(getattr(attention, f"w{x}").weight, f"{own}attention.qkv.{x}") for x in "qkv"]
            pairs += [(attention.wo.weight, f"{own}attention.out.weight")]
            pairs += [(moe.router.gate.weight, f"{own}mlp.router.weight"), (moe.experts.w2, f"{own}mlp.experts.down")]
            pairs += [(moe.expert_bias, f"{own}mlp.router.bias")]
            both = weights[f"{own}mlp.experts.gate_up"].view(len(moe.experts.w1), -1, moe.experts.w1.shape[-1])
            for target, part in zip((moe.experts.w1, moe.experts.w3), both.chunk(2, 1), strict=True):
                target.copy_(part)
        for target, name in pairs:
            target.copy_(weights[name].view_as(target))

    def loss_at(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.sum_of(self.model(tokens), labels) / labels.numel()


def release() -> None:
    """Free the memory of all large tensors on the GPU, whoever still names them."""
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.is_cuda:
            with suppress(RuntimeError):  # What torch.compile has traced has no memory.
                if thing.untyped_storage().nbytes() > 2**20:
                    thing.untyped_storage().resize_(0)
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def time_of(side: Ours | Peer, batches: Batches, several: int, repeats: int) -> list[float]:
    """Return the seconds of steps, each of which ends with its loss on the host."""
    times = []
    for number in range(repeats + 1):
        pairs = [batches(100 + number * several + i) for i in range(several)]
        begun = time.perf_counter()
        side.step(pairs, 0.0)
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times[1:]


def worker(name: str, asked: argparse.Namespace) -> None:
    """Check one side on two layers, wait for its turn, and time it at full depth."""
    device, begun = init_distributed(timeout_minutes=10), asked.begun
    batches, out = Batches(asked.text / "train.xz", asked.micro), asked.out
    say = lambda text: print(f"[{time.time() - begun:5.1f} s] {name}: {text}", flush=True)  # noqa: E731

    def build(layers: int, biases: dict[str, Tensor], rate: float = 0.001, master: bool = False) -> Ours | Peer:
        cfg = config(name, layers, asked.micro, rate)
        if SIDES[name][1] == "peer":
            return (Titan if name == "torchtitan" else Peer)(cfg, biases, device, master)
        return Ours(cfg, device)

    # The graphs of blocks and loss are those of the timed steps, so they are compiled here, on all sides at once.
    side = build(2, {}, 0.0, master=True)
    losses = [side.step([batches(n % 2)], 1e-4) for n in range(4)]
    (out / f"{name}.losses").write_text(json.dumps(losses))
    say(f"checked, {' '.join(f'{x:.4f}' for x in losses)}")
    del side
    release()
    while not (out / f"{name}.turn").exists():
        time.sleep(0.05)
    biases = torch.load(out / "biases.pt", map_location=device) if (out / "biases.pt").exists() else {}
    side = build(asked.layers, biases, 0.003)
    say("built")
    ones = list[float]()
    for number in range(2 if biases or isinstance(side, Peer) else asked.balancing):
        started = time.perf_counter()
        side.step([batches(number)], 0.0)
        ones.append(time.perf_counter() - started)
    if isinstance(side, Ours):
        if not biases:
            torch.save(side.biases(), out / "biases.pt")
        for kept in side.engine.owned(is_bias) if biases else ():
            kept.write("weight", biases[kept.name])
        side.engine.state_changed()
    say(f"steps of one micro-batch took {' '.join(f'{x:.3f}' for x in ones[-3:])} s")
    times = time_of(side, batches, asked.several, asked.repeats)
    tokens = asked.several * asked.micro * LENGTH
    row = {"side": name, "layers": asked.layers, "tokens": tokens, "seconds": times, "ones": ones}
    row["tokens_per_second"] = tokens / statistics.median(times)
    # One more micro-batch takes so long; the rest is the update.
    row["micro_batch"] = (statistics.median(times) - min(ones)) / (asked.several - 1)
    row["loads"] = {k: round(v, 3) for k, v in side.metrics.items() if k.startswith("moe/")}
    if GPU:
        row["gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    say(json.dumps(row))
    (out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
    os._exit(0)  # At once, so that the next side has the memory.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--micro", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--several", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--balancing", type=int, default=6, help="micro-batches that move the bias first")
    parser.add_argument("--sides", nargs="*", default=list(SIDES))
    parser.add_argument("--only")
    parser.add_argument("--begun", type=float, default=time.time())
    asked = parser.parse_args()
    if asked.only:
        worker(asked.only, asked)
        return
    shutil.rmtree(asked.out, ignore_errors=True)
    asked.out.mkdir(parents=True)
    words = [sys.executable, *sys.argv, "--begun", str(asked.begun), "--only"]
    running = {name: subprocess.Popen([*words, name]) for name in asked.sides}
    losses: dict[str, list[float]] = {}
    # A side that has failed writes no losses, and the others go on.
    while any(process.poll() is None and name not in losses for name, process in running.items()):
        for path in asked.out.glob("*.losses"):
            losses[path.stem] = json.loads(path.read_text() or "null") or losses.get(path.stem, [])
        time.sleep(0.1)
    first = losses.get("SageTrain bf16") or next(iter(losses.values()))
    for name, process in running.items():
        found = losses.get(name)
        apart = max((abs(a - b) for a, b in zip(found or [], first, strict=False)), default=float("inf"))
        fell = first[0] - first[-1]
        print(f"{name}: at most {apart:.4f} from ours in 16 bits, which fell {fell:.4f}", flush=True)
        if not apart <= (0.16 if "int8" in name else 0.08) * abs(fell):
            print(f"{name} IS WRONG and is not timed", flush=True)
            process.kill()
    for name, process in running.items():
        (asked.out / f"{name}.turn").touch()
        process.wait()
    rows = [json.loads(path.read_text()) for path in asked.out.glob("*.json")]
    found = {row["side"]: row["tokens_per_second"] for row in rows}
    for name, rate in found.items():
        beside = f" {rate / found['torch operators']:.3f} |" if "torch operators" in found else ""
        print(f"| {name} | {rate:,.0f} |{beside}", flush=True)


if __name__ == "__main__":
    main()

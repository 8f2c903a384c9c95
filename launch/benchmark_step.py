"""Time one training step of SageTrain's model beside the same model in plain PyTorch, in one process on one GPU.

    python3 launch/benchmark_step.py --shape 24x1024 --seq-length 2048

A step is forward, backward and AdamW (torch's fused one) with fp32 master weights for the bf16 parameters, on one
micro-batch of random tokens. Both sides take it alike. The peer is what a careful user writes by hand: torch.compile
over the whole model, fused AdamW, attention by SDPA through cuDNN or by FlashAttention-4. Before anything is timed,
losses of both must agree.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.accounting import flops_per_token
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

SHAPES = {
    "24x1024": ModelConfig(num_layers=24, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=16),
    "325m": ModelConfig(
        num_layers=20, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16, tie_embeddings=True
    ),
    "tiny": ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4),
}
VOCAB = 32000
PEAK_FLOPS = 989e12  # dense bf16, H100 and H200


class PeerNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain, self.eps)


def peer_attention(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention on [batch, tokens, heads, head_dim]."""
    if name == "flash":
        from flash_attn.cute import flash_attn_func

        # Its kernels cannot be traced: torch.compile has to go around them.
        return torch.compiler.disable(lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0])

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return sdpa


class PeerBlock(nn.Module):
    def __init__(self, m: ModelConfig, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.heads, self.head_dim = m.num_attention_heads, m.head_dim
        self.norm1, self.norm2 = PeerNorm(m.hidden_size, m.norm_eps), PeerNorm(m.hidden_size, m.norm_eps)
        self.q_norm, self.k_norm = PeerNorm(m.head_dim, m.norm_eps), PeerNorm(m.head_dim, m.norm_eps)
        self.qkv = nn.Linear(m.hidden_size, 3 * m.hidden_size, bias=False)
        self.out = nn.Linear(m.hidden_size, m.hidden_size, bias=False)
        self.gate_up = nn.Linear(m.hidden_size, 2 * m.ffn_hidden_size, bias=False)
        self.down = nn.Linear(m.ffn_hidden_size, m.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        q, k = (self._rotate(norm(t), cos, sin) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        x = x + self.out(self.attend(q, k, v).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Peer(nn.Module):
    """The same Llama, the way it is written without parallelism in mind: fused q, k, v and gate, up."""

    def __init__(self, m: ModelConfig, attention: str, seq_length: int) -> None:
        super().__init__()
        angles = torch.arange(seq_length)[:, None] * m.rope_theta ** -(torch.arange(0, m.head_dim, 2) / m.head_dim)
        self.cos, self.sin = (
            nn.Buffer(table[None, :, None], persistent=False) for table in (angles.cos(), angles.sin())
        )
        attend = peer_attention(attention)
        self.embedding = nn.Embedding(VOCAB, m.hidden_size)
        self.blocks = nn.ModuleList(PeerBlock(m, attend) for _ in range(m.num_layers))
        self.norm = PeerNorm(m.hidden_size, m.norm_eps)
        self.head = nn.Linear(m.hidden_size, VOCAB, bias=False)
        if m.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())

    @torch.no_grad()
    def take_weights(self, model: Transformer) -> None:
        self.embedding.weight.copy_(model.embedding.weight)
        self.head.weight.copy_(model.head.weight)
        for mine, theirs in zip(self.blocks, model.blocks, strict=True):
            attention, mlp = theirs.attention, theirs.mlp
            mine.qkv.weight.copy_(torch.cat([attention.qkv.q, attention.qkv.k, attention.qkv.v]))
            mine.out.weight.copy_(attention.out.weight)
            mine.gate_up.weight.copy_(torch.cat([mlp.gate_up.gate, mlp.gate_up.up]))
            mine.down.weight.copy_(mlp.down.weight)


class MasterAdamW:
    """Fused AdamW on fp32 copies of 16-bit parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.masters = [p.detach().float() for p in parameters]
        self.gradients = [torch.empty_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        fused = parameters[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self.gradients, [p.grad for p in self.parameters])
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None


def make_step(model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    optimizer = MasterAdamW(list(model.parameters()))

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    return step


def milliseconds(step: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """Median time of a step."""
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        step()
        _synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def print_profile(name: str, step: Callable[[], Tensor], rows: int) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    print(f"\nkernels of one step, {name}:")
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    print(f"  {sum(e.self_device_time_total for e in events) / 1e3:8.2f} ms in {sum(e.count for e in events)} kernels")
    for event in events[:rows]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d} x  {event.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="24x1024")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the micro-batch")
    parser.add_argument("--backends", default="sdpa", help="attention backends of SageTrain, separated by commas")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile", type=int, default=0, help="list this many kernels of each")
    parser.add_argument("--peer", choices=["sdpa", "flash", "none"], default="sdpa", help="attention of the peer")
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, sequences = SHAPES[arguments.shape], arguments.tokens // arguments.seq_length
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (sequences, arguments.seq_length + 1), generator=generator).to(device)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    flops = flops_per_token(shape, VOCAB, arguments.seq_length)

    def report(name: str, model: nn.Module, loss_of: Callable[[], Tensor], seconds: float, first: float) -> float:
        step = make_step(model, loss_of)
        for _ in range(3):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms = milliseconds(step, device, arguments.repeats)
        rate = sequences * arguments.seq_length / ms * 1e3
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
        print(
            f"{name:18s} {ms:8.2f} ms  {rate:9.0f} tokens/s  MFU {rate * flops / PEAK_FLOPS:.3f}"
            f"  {memory:6.1f} GiB  loss {first:.5f}  first call {seconds:.0f} s",
            flush=True,
        )
        if arguments.profile:
            print_profile(name, step, arguments.profile)
        return ms

    def first_call(loss_of: Callable[[], Tensor]) -> tuple[float, float]:
        start = time.perf_counter()
        loss = loss_of()
        loss.backward()
        return time.perf_counter() - start, loss.item()

    print(f"{arguments.shape}: {sequences} x {arguments.seq_length} tokens, torch {torch.__version__}", flush=True)
    times, peer, expected = {}, None, None
    for backend in arguments.backends.split(","):
        model = Transformer(
            shape,
            AttentionConfig(backend=backend),
            vocab_size=VOCAB,
            groups=ParallelGroups.single(),
            dtype=torch.bfloat16,
            device=device,
        )
        if peer is None and arguments.peer != "none":
            peer = Peer(shape, arguments.peer, arguments.seq_length).to(device)
            for parameter in peer.parameters():  # not the rotary tables
                parameter.data = parameter.data.bfloat16()
            peer.take_weights(model)
        model.compile_blocks()
        seconds, first = first_call(lambda model=model: model(tokens, labels))
        expected = first if expected is None else expected
        if abs(first - expected) > 2e-3 * expected:
            raise SystemExit(f"{backend}: loss {first}, expected {expected}")
        times[backend] = report(f"sagetrain {backend}", model, lambda m=model: m(tokens, labels), seconds, first)
        del model
    if peer is not None:
        compiled = torch.compile(peer)
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends, set_priority=True):
            seconds, first = first_call(lambda: compiled(tokens, labels))
            if abs(first - expected) > 2e-3 * expected:
                raise SystemExit(f"the peer's loss is {first}, SageTrain's {expected}: they are not the same model")
            times["peer"] = report(f"peer {arguments.peer}", peer, lambda: compiled(tokens, labels), seconds, first)
        for backend in arguments.backends.split(","):
            print(f"sagetrain {backend}: {times['peer'] / times[backend]:.3f} x the speed of plain PyTorch")


if __name__ == "__main__":
    main()

"""A model and an optimizer as the public speed run nanochat has them, in plain PyTorch, for the script beside.

The parts: no gains and no biases, norms behind the embedding and of queries and keys, squared ReLU, heads of 128, an
output projection of its own with capped logits, embeddings added to the values of every second layer, a share of the
first residual in each layer; Muon with a second moment of rows, cautious decay, and AdamW with rates of its own for
embeddings, output projection and scalars. Left out: windows (the context is short), FP8, and what mixes a token with
the one before. The rates are those of its command line in July 2026, scaled to width and tokens per step as it does.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REFERENCE_WIDTH, REFERENCE_TOKENS, REFERENCE_WEIGHTS = 768, 2**19, 110e6
MATRIX, EMBEDDING, HEAD, SCALAR, DECAY = 0.02, 0.3, 0.008, 0.5, 0.28
WARMUP_STEPS, WARMDOWN, END, HEAD_DIM, GATE, CAP = 40, 0.65, 0.05, 128, 32, 15.0
QUINTIC, NEWTON_SCHULZ, SECOND = (3.4445, -4.7750, 2.0315), 5, 0.9


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]).to(x.dtype)


class Speedrun(nn.Module):
    def __init__(self, layers: int, width: int, vocab: int, length: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_DIM)
        size = width // self.heads
        angles = torch.arange(length)[:, None] * 1e5 ** -(torch.arange(0, size, 2) / size)
        self.cos, self.sin = (nn.Buffer(t[None, :, None], persistent=False) for t in (angles.cos(), angles.sin()))
        self.embedding, self.values = nn.Embedding(vocab, width), nn.Embedding(vocab, width * (layers // 2))
        self.head = nn.Parameter(torch.empty(vocab, width))
        self.square = nn.Parameter(torch.empty(4 * layers, width, width))
        """The matrices of queries, keys, values and output of each layer."""
        self.up, self.down = (nn.Parameter(torch.empty(layers, *s)) for s in ((4 * width, width), (width, 4 * width)))
        self.keep, self.first = nn.Parameter(torch.empty(layers)), nn.Parameter(torch.empty(layers))
        self.gates = nn.Parameter(torch.empty(layers // 2, self.heads, GATE))

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        bound = (3 / self.head.shape[1]) ** 0.5
        for weight in (self.square, self.up, self.values.weight):
            weight.uniform_(-bound, bound)
        self.square[3::4] = 0
        self.down.zero_()
        self.gates.zero_()
        self.keep.fill_(1.0)
        self.first.fill_(0.1)
        self.embedding.weight.normal_()
        self.head.normal_(std=0.001)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first = x = norm(self.embedding(tokens).bfloat16())
        values = self.values(tokens).bfloat16().unflatten(-1, (-1, self.heads, x.shape[-1] // self.heads)).unbind(2)
        square, ups, downs = self.square.unbind(), self.up.unbind(), self.down.unbind()
        for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
            x = self.keep[layer] * x + self.first[layer] * first
            h, (*qkv, out) = norm(x), square[4 * layer : 4 * layer + 4]
            q, k, v = (F.linear(h, weight).unflatten(-1, (self.heads, -1)) for weight in qkv)
            if layer % 2:
                gate = 2 * torch.sigmoid(F.linear(h[..., :GATE], self.gates[layer // 2]))
                v = v + gate[..., None] * values[layer // 2]
            q, k = norm(self._rotate(q)), norm(self._rotate(k))
            o = F.scaled_dot_product_attention(*(t.transpose(1, 2).to(v.dtype) for t in (q, k, v)), is_causal=True)
            x = x + F.linear(o.transpose(1, 2).flatten(2), out)
            x = x + F.linear(F.relu(F.linear(norm(x), up)).square(), down)
        logits = CAP * torch.tanh(F.linear(norm(x), self.head).float() / CAP)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _rotate(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * self.cos + b * self.sin, b * self.cos - a * self.sin), -1).to(x.dtype)


def muon(weight: Tensor, gradient: Tensor, momentum: Tensor, second: Tensor, now: Tensor) -> None:
    """Update a stack of matrices in place. `now` has the momentum's decay rate, the learning rate, and the decay."""
    beta, rate, decay = now.unbind()
    momentum.lerp_(gradient, 1 - beta)
    direction = gradient.lerp(momentum, beta)
    tall = weight.shape[1] > weight.shape[2]
    x = (direction.mT if tall else direction).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-6)
    a, b, c = QUINTIC
    for _ in range(NEWTON_SCHULZ):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    update = (x.mT if tall else x).float()
    rows = update.square().mean(2 if weight.shape[1] >= weight.shape[2] else 1, keepdim=True)
    second.lerp_(rows, 1 - SECOND)
    even = update * second.clamp(min=1e-10).rsqrt()
    update = even * (update.norm(dim=(1, 2), keepdim=True) / even.norm(dim=(1, 2), keepdim=True).clamp(min=1e-10))
    rate = rate * max(1.0, weight.shape[1] / weight.shape[2]) ** 0.5
    weight.sub_(rate * update + rate * decay * weight * (update * weight >= 0))


class Optimizers:
    """The optimizers of a Speedrun. Rates follow the steps, and the share of the run that has passed."""

    def __init__(self, model: Speedrun, tokens: int, device: torch.device) -> None:
        self.stacks, width = [model.square, model.up, model.down], model.head.shape[1]
        more, narrow = (tokens / REFERENCE_TOKENS) ** 0.5, (width / REFERENCE_WIDTH) ** -0.5
        counted = sum(weight.numel() for weight in (*self.stacks, model.head))
        self.matrix, self.decay = MATRIX * more, DECAY * more * REFERENCE_WEIGHTS / counted
        peaks = {
            model.embedding.weight: EMBEDDING * more * narrow, model.values.weight: EMBEDDING * more * narrow,
            model.head: HEAD * more * narrow, model.gates: HEAD * more * narrow,
            model.first: SCALAR * more, model.keep: 0.01 * SCALAR * more,
        }  # fmt: skip
        groups = [{"params": [weight], "peak": peak} for weight, peak in peaks.items()]
        self.rest = torch.optim.AdamW(
            groups, lr=0.0, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=device.type == "cuda"
        )
        self.update = torch.compile(muon, dynamic=False) if device.type == "cuda" else muon
        self.momentum = [torch.zeros_like(weight) for weight in self.stacks]
        self.second = [
            torch.zeros_like(weight[:, :, :1] if weight.shape[1] >= weight.shape[2] else weight[:, :1])
            for weight in self.stacks
        ]
        self.steps = 0

    def begin(self) -> None:
        self.rest.state.clear()
        for state in (*self.momentum, *self.second):
            state.zero_()
        self.steps = 0

    @torch.no_grad()
    def step(self, passed: float) -> None:
        falling = max(0.0, (passed - (1 - WARMDOWN)) / WARMDOWN)
        rate = min((self.steps + 1) / WARMUP_STEPS, 1 - falling * (1 - END))
        beta = 0.85 + 0.12 * self.steps / 400 if self.steps < 400 else 0.97 - 0.07 * falling
        decay = self.decay * (1 + math.cos(math.pi * passed)) / 2
        now = torch.tensor([beta, rate * self.matrix, decay], device=self.stacks[0].device)
        for weight, *state in zip(self.stacks, self.momentum, self.second, strict=True):
            self.update(weight, weight.grad, *state, now)
            weight.grad = None
        for group in self.rest.param_groups:
            group["lr"] = group["peak"] * rate
        self.rest.step()
        self.rest.zero_grad(set_to_none=True)
        self.steps += 1

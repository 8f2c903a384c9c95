"""The models and optimizers of arms.py: our recipe's and a public speed run's, by parts.

torch is imported by the processes that train, so arms.py does without.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

SMALL = bool(os.environ.get("SMALL"))
VOCAB, WIDTH, LAYERS, FFN, LENGTH, SEQUENCES, PASSES = 32000, 512, 10, 1536, 1024, 16, 2.29
VALID, POINTS, BYTES_PER_TOKEN = 128, (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), 1860099 / 430537
if SMALL:
    WIDTH, LAYERS, FFN, LENGTH, SEQUENCES, VALID = 64, 2, 192, 64, 4, 8
HEAD_DIM, WIDE, GATE, CAP = (32, 64, 16, 15.0) if SMALL else (64, 128, 32, 15.0)
FULL = frozenset(("square", "values", "mix", "cap", "plain", "wide"))
"""The parts of the speed run's model: squared ReLU; embeddings added to values; shares of the first residual; capped
logits; no gains, a norm behind the embedding, and its initial weights; heads of 128. With "open", which it lacks,
embeddings are added to values without a gate."""
MORE, NARROW = (SEQUENCES * LENGTH / 2**19) ** 0.5, (WIDTH / 768) ** -0.5


class Recipe(NamedTuple):
    parts: frozenset[str] = frozenset()
    lr: float = 4e-3
    spectral: bool = False
    """The factor of a matrix's rate: sqrt(max(1, rows / columns)) in the place of 0.2 sqrt(max(rows, columns))."""
    momentum: tuple[float, ...] = (0.9,)
    """One value; or start, middle, end, and the share of the run over which it rises. It falls with the rate."""
    decay: float = 0.1
    cautious: bool = False
    fading: bool = False
    """The matrices' decay falls by a cosine, as the speed run's."""
    second: bool = False
    embedding: float = 6.4e-2
    tables: float = 0.0
    """The rate of the embeddings that are added to values; 0: that of the embedding."""
    head: float = 4e-3
    gain: float = 4e-3
    scalar: float = 0.5 * MORE
    adam: bool = False
    """AdamW trains the matrices too."""
    rest_decay: float = 0.1
    """The weight decay of embedding and head."""
    even: bool = False
    """Embedding and head decay at the rate of the matrices (optimizer.weight_decay_lr)."""
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    warmup: float = 0.1
    line: float = 0.65
    """The share of the run over which the rate falls in a line; 0: it falls by a cosine behind the warm-up."""
    end: float = 0.0
    batches: tuple[tuple[float, int], ...] = ((0.0, SEQUENCES),)
    """From which share of the tokens on a step has so many sequences."""
    seed: int = 0
    length: float = 1.0
    """The share of the steps."""


def lane_code() -> dict[str, Any]:
    """Return what a lane needs of torch, which main does without."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch.set_float32_matmul_precision("high")
    backend = os.environ.get("BACKEND", "inductor" if cuda else "")
    compiled = (lambda f: torch.compile(f, dynamic=False, backend=backend)) if backend else (lambda f: f)

    def norm(x: Tensor, eps: float | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, eps)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def make_block(parts: frozenset[str], valued: bool) -> Any:
        size, eps, gained = (
            (WIDE if "wide" in parts else HEAD_DIM),
            None if "plain" in parts else 1e-6,
            "plain" not in parts,
        )

        def block(x, first, cos, sin, keep, share, gains, value, gate, q, k, v, out, up, up2, down):
            if keep is not None:
                x = keep.to(x.dtype) * x + share.to(x.dtype) * first
            h = norm(x, eps)
            if gained:
                h = h * gains[0].to(h.dtype)
            q, k, v = (F.linear(h, w.to(h.dtype)).unflatten(-1, (-1, size)) for w in (q, k, v))
            if valued and gate is None:
                v = v + value.unflatten(-1, (-1, size))
            elif valued:
                v = v + (2 * torch.sigmoid(F.linear(h[..., :GATE], gate.to(h.dtype))))[..., None] * value.unflatten(
                    -1, (-1, size)
                )
            q, k = norm(q, eps), norm(k, eps)
            if gained:
                q, k = q * gains[2].to(q.dtype), k * gains[3].to(k.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            x = x + F.linear(o.transpose(1, 2).flatten(2), out.to(x.dtype))
            h = norm(x, eps)
            if gained:
                h = h * gains[1].to(h.dtype)
            h2 = F.linear(h, up.to(h.dtype))
            h2 = F.relu(h2).square() if up2 is None else F.silu(h2) * F.linear(h, up2.to(h.dtype))
            return x + F.linear(h2, down.to(x.dtype))

        return compiled(block)

    def make_loss(parts: frozenset[str]) -> Any:
        capped, eps, gained = "cap" in parts, None if "plain" in parts else 1e-6, "plain" not in parts

        def loss(x, gain, head, labels):
            x = norm(x, eps)
            if gained:
                x = x * gain.to(x.dtype)
            logits = F.linear(x, head.to(x.dtype)).float()
            if capped:
                logits = CAP * torch.tanh(logits / CAP)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return compiled(loss)

    kept: dict[Any, Any] = {}

    def cached(make: Any, *key: Any) -> Any:
        if (make, key) not in kept:
            kept[make, key] = make(*key)
        return kept[make, key]

    class Model(nn.Module):
        def __init__(self, parts: frozenset[str], seed: int) -> None:
            super().__init__()
            self.parts = parts
            layers = LAYERS + (max(1, LAYERS // 10) if "square" in parts and "plain" in parts else 0)
            plain, square, self.layers = "plain" in parts, "square" in parts, layers
            size = WIDE if "wide" in parts else HEAD_DIM
            ffn, ups = (4 * WIDTH, 1) if square else (FFN, 2)
            self.square = nn.Parameter(torch.empty(4 * layers, WIDTH, WIDTH))
            self.up, self.down = (
                nn.Parameter(torch.empty(ups * layers, ffn, WIDTH)),
                nn.Parameter(torch.empty(layers, WIDTH, ffn)),
            )
            self.embedding, self.head = nn.Parameter(torch.empty(VOCAB, WIDTH)), nn.Parameter(torch.empty(VOCAB, WIDTH))
            self.gains, self.heads_gains = (
                nn.Parameter(torch.ones(2 * layers + 1, WIDTH)),
                nn.Parameter(torch.ones(2 * layers, size)),
            )
            self.values = nn.Parameter(torch.empty(VOCAB, WIDTH * (layers // 2))) if "values" in parts else None
            gated = "values" in parts and "open" not in parts
            self.gates = nn.Parameter(torch.zeros(layers // 2, WIDTH // size, GATE)) if gated else None
            self.keep = nn.Parameter(torch.ones(layers)) if "mix" in parts else None
            self.share = nn.Parameter(torch.full((layers,), 0.1)) if "mix" in parts else None
            angles = torch.arange(LENGTH)[:, None] * (1e5 if plain else 1e4) ** -(torch.arange(0, size, 2) / size)
            self.cos, self.sin = (nn.Buffer(t[None, :, None]) for t in (angles.cos(), angles.sin()))
            self.to("cuda" if cuda else "cpu")
            torch.manual_seed(seed)
            with torch.no_grad():
                bound = (3 / WIDTH) ** 0.5
                if self.values is not None:
                    self.values.normal_(std=0.02) if "open" in parts else self.values.uniform_(-bound, bound)
                if plain:
                    self.square.uniform_(-bound, bound)
                    self.up.uniform_(-bound, bound)
                    self.square[3::4] = 0
                    self.down.zero_()
                    self.embedding.normal_()
                    self.head.normal_(std=0.001)
                else:
                    for weight in (self.square, self.up, self.embedding, self.head, self.down):
                        weight.normal_(std=0.02)
                    self.square[3::4] *= (2 * layers) ** -0.5
                    self.down *= (2 * layers) ** -0.5

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            parts, layers = self.parts, self.layers
            x = F.embedding(tokens, self.embedding).to(dtype)
            first = norm(x, None) if "plain" in parts else x
            x = first.clone() if "mix" in parts else first  # Two names of one tensor make another graph.
            valued = self.values is not None
            values = F.embedding(tokens, self.values).to(dtype).split(WIDTH, -1) if valued else ()
            square, ups, downs = self.square.unbind(), self.up.unbind(), self.down.unbind()
            gains, small = self.gains.unbind(), self.heads_gains.unbind()
            gates = (None,) * layers if self.gates is None else self.gates.unbind()
            keep, share = (
                (self.keep.unbind(), self.share.unbind()) if self.keep is not None else ((None,) * layers,) * 2
            )
            several = len(ups) > layers
            for n in range(layers):
                here = valued and n % 2 == 1
                x = cached(make_block, parts, here)(
                    x, first if keep[n] is not None else None, self.cos, self.sin, keep[n], share[n],
                    None if "plain" in parts else (gains[2 * n], gains[2 * n + 1], small[2 * n], small[2 * n + 1]),
                    values[n // 2] if here else None, gates[n // 2] if here else None, *square[4 * n : 4 * n + 4],
                    ups[2 * n if several else n], ups[2 * n + 1] if several else None, downs[n],
                )  # fmt: skip
            return cached(make_loss, parts)(x, gains[-1], self.head, labels)

    def muon(weight: Tensor, gradient: Tensor, momentum: Tensor, second: Tensor, now: Tensor) -> None:
        """Step. `now`: momentum's decay rate, the rate, what a step decays, and whether evenly, and cautiously."""
        beta, rate, decay, with_second, cautious = now.unbind()
        momentum.lerp_(gradient, 1 - beta)
        direction = gradient.lerp(momentum, beta)
        tall = weight.shape[1] > weight.shape[2]
        x = (direction.mT if tall else direction).to(dtype)
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
        update = (x.mT if tall else x).float()
        rows = update.square().mean(2 if weight.shape[1] >= weight.shape[2] else 1, keepdim=True)
        second.lerp_(rows, 0.1)
        even = update * second.clamp(min=1e-10).rsqrt()
        even = even * (update.norm(dim=(1, 2), keepdim=True) / even.norm(dim=(1, 2), keepdim=True).clamp(min=1e-10))
        update = torch.where(with_second > 0, even, update)
        mask = ((update * weight >= 0) | (cautious == 0)).float()
        weight.sub_(rate * update + decay * weight * mask)

    update = compiled(muon)

    class Optimizers:
        def __init__(self, model: Model, r: Recipe) -> None:
            stacks = [model.square, model.up, model.down]
            self.model, self.r, self.stacks = model, r, [] if r.adam else stacks
            groups = [
                (model.embedding, r.embedding, r.rest_decay), (model.head, r.head, r.rest_decay),
                (model.values, r.tables or r.embedding, r.rest_decay), (model.gates, r.gain, 0.0),
                (model.share, r.scalar, 0.0), (model.keep, 0.01 * r.scalar, 0.0),
            ]  # fmt: skip
            if "plain" not in model.parts:
                groups += [(model.gains, r.gain, 0.0), (model.heads_gains, r.gain, 0.0)]
            if r.adam:
                groups += [(w, r.lr, r.decay) for w in stacks]
            given = [
                {"params": [w], "peak": rate, "weight_decay": r.decay * r.lr / rate if decay and r.even else decay}
                for w, rate, decay in groups if w is not None
            ]  # fmt: skip
            self.every = [*self.stacks, *(group["params"][0] for group in given)]
            self.rest = torch.optim.AdamW(given, lr=0.0, betas=r.betas, eps=r.eps, fused=cuda)
            self.momentum = [torch.zeros_like(w) for w in self.stacks]
            self.second = [torch.zeros_like(w[:, :, :1] if w.shape[1] >= w.shape[2] else w[:, :1]) for w in self.stacks]
            counted = sum(w.numel() for w in (*self.stacks, model.head))
            self.decay = 0.28 * MORE * 110e6 / counted if math.isnan(r.decay) else r.decay

        @torch.no_grad()
        def step(self, passed: float, after: float) -> None:
            """Step. `passed` is the share of the run before the step, `after` behind it."""
            r = self.r
            if r.line:
                falling = max(0.0, (passed - (1 - r.line)) / r.line)
            else:
                falling = (1 - math.cos(math.pi * max(0.0, (passed - r.warmup) / (1 - r.warmup)))) / 2
            rate = min(after / r.warmup, 1 - falling * (1 - r.end))
            beta = r.momentum[0]
            if len(r.momentum) > 1:
                low, high, last, rising = r.momentum
                beta = low + (high - low) * passed / rising if passed < rising else high + (last - high) * falling
            decay = self.decay * ((1 + math.cos(math.pi * passed)) / 2 if r.fading else 1.0)
            if r.clip:
                torch.nn.utils.clip_grad_norm_(self.every, r.clip)
            values = []
            for w in self.stacks:
                rows, columns = w.shape[1:]
                factor = max(1.0, rows / columns) ** 0.5 if r.spectral else 0.2 * max(rows, columns) ** 0.5
                taken = rate * r.lr * decay * (factor if r.spectral else 1.0)
                values.append([beta, rate * r.lr * factor, taken, float(r.second), float(r.cautious)])
            now = torch.tensor(values, pin_memory=cuda and bool(values)).to(self.every[0].device, non_blocking=True)
            for n, w in enumerate(self.stacks):
                update(w, w.grad, self.momentum[n], self.second[n], now[n])
            for group in self.rest.param_groups:
                group["lr"] = group["peak"] * rate
            self.rest.step()
            for w in self.every:
                w.grad = None

    return {"torch": torch, "Model": Model, "Optimizers": Optimizers, "cuda": cuda}

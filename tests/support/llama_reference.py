"""A Llama decoder written from the papers' formulas in float64, token by token where that is simplest.

The file shares no code with sagetrain.model. It takes the model's parameters by name and returns the loss, which is
differentiable.
"""

import math

import torch
from torch import Tensor

from sagetrain.config.schema import ModelConfig


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * gain


def _rotate(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """Rotate x [S, K]: pairs (i, i + K/2) as complex numbers, multiplied by exp(1j * position * theta^(-2i/K))."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * frequency
    rotated = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([rotated.real, rotated.imag], dim=-1)


def _attention(
    p: dict,
    prefix: str,
    x: Tensor,
    tokens: Tensor,
    positions: list[int],
    document: list[int],
    m: ModelConfig,
    qk_norm: str,
):
    group = m.num_attention_heads // m.num_key_value_heads
    heads = []
    for head in range(m.num_attention_heads):
        rows = slice(head * m.head_dim, (head + 1) * m.head_dim)
        kv_rows = slice(head // group * m.head_dim, (head // group + 1) * m.head_dim)
        q, k, v = (x @ p[f"{prefix}.qkv.{n}"][r].t() for n, r in (("q", rows), ("k", kv_rows), ("v", kv_rows)))
        if f"{prefix}.values" in p:
            gate = x @ p[f"{prefix}.gates.values"][head // group]
            v = torch.stack(
                [
                    v[i] + 2 / (1 + torch.exp(-gate[i])) * p[f"{prefix}.values"][token, kv_rows]
                    for i, token in enumerate(tokens.tolist())
                ]
            )
        if qk_norm == "before_rope":
            q, k = (_norm(t, p[f"{prefix}.{n}_norm.gain"], m.norm_eps) for t, n in ((q, "q"), (k, "k")))
        q, k = _rotate(q, positions, m.rope_theta), _rotate(k, positions, m.rope_theta)
        if qk_norm == "after_rope":
            q, k = (_norm(t, p[f"{prefix}.{n}_norm.gain"], m.norm_eps) for t, n in ((q, "q"), (k, "k")))
        rows_out = []
        for i in range(x.shape[0]):
            seen = [j for j in range(i + 1) if document[j] == document[i]]
            weights = torch.softmax(q[i] @ k[seen].t() / math.sqrt(m.head_dim), dim=-1)
            rows_out.append(weights @ v[seen])
        heads.append(torch.stack(rows_out))
    return torch.cat(heads, dim=-1) @ p[f"{prefix}.out.weight"].t()


def reference_logits(
    parameters: dict[str, Tensor],
    model: ModelConfig,
    qk_norm: str,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: list[list[int]] | None = None,
) -> Tensor:
    """Return the logits in float64, [sequences, tokens, vocab]. The arguments are those of reference_loss."""
    p = {name: value.double() for name, value in parameters.items()}
    table = p["embedding.weight"]
    logits = []
    for b in range(tokens.shape[0]):
        where = list(range(tokens.shape[1])) if positions is None else positions[b].tolist()
        document = [0] * tokens.shape[1] if documents is None else documents[b]
        x = table[tokens[b]]
        for layer in range(model.num_layers):
            prefix = f"blocks.{layer}"
            h = _norm(x, p[f"{prefix}.attention_norm.gain"], model.norm_eps)
            x = x + _attention(p, f"{prefix}.attention", h, tokens[b], where, document, model, qk_norm)
            h = _norm(x, p[f"{prefix}.mlp_norm.gain"], model.norm_eps)
            gate, up = (h @ p[f"{prefix}.mlp.gate_up.{n}"].t() for n in ("gate", "up"))
            x = x + (gate / (1 + torch.exp(-gate)) * up) @ p[f"{prefix}.mlp.down.weight"].t()
        logits.append(_norm(x, p["final_norm.gain"], model.norm_eps) @ p.get("head.weight", table).t())
    return torch.stack(logits)


def reference_loss(
    parameters: dict[str, Tensor],
    model: ModelConfig,
    qk_norm: str,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    documents: list[list[int]] | None = None,
) -> Tensor:
    """Return the mean loss in float64 over the labels that are not negative. documents: the document number of every
    token, for each sequence (default: all one)."""
    logits = reference_logits(parameters, model, qk_norm, tokens, positions, documents)
    pairs = zip(logits.flatten(0, 1), labels.flatten(), strict=True)
    return torch.stack([torch.logsumexp(row, 0) - row[label] for row, label in pairs if label >= 0]).mean()

"""Parameters, FLOPs and memory of a model as plain integers: no torch, so that planning runs anywhere."""

from __future__ import annotations

from sagetrain.config.schema import AttentionConfig, ModelConfig


def num_parameters(model: ModelConfig, attention: AttentionConfig, vocab_size: int) -> int:
    """Exact number of parameters of Transformer with `vocab_size` (padded) rows in the embedding."""
    embeddings = (1 if model.tie_embeddings else 2) * vocab_size * model.hidden_size
    gains = (2 * model.num_layers + 1) * model.hidden_size
    if attention.qk_norm != "none":
        gains += 2 * model.num_layers * model.head_dim
    return embeddings + model.num_layers * _block_matrices(model) + gains


def flops_per_token(model: ModelConfig, vocab_size: int, seq_length: int) -> int:
    """Floating point operations of forward and backward for one token, by the usual convention for MFU.

    6 per weight of a matmul (the output projection counts, tied or not; the embedding lookup and gains do not), plus
    6 x layers x attention width x seq_length for causal attention: half the square, forward 1 and backward 2 parts.
    Recomputation is not counted, nor are the shorter spans of packed documents.
    """
    matmul_weights = model.num_layers * _block_matrices(model) + vocab_size * model.hidden_size
    return 6 * matmul_weights + 6 * model.num_layers * model.num_attention_heads * model.head_dim * seq_length


def _block_matrices(model: ModelConfig) -> int:
    """Weights of one block's matmuls: q and out, k and v, and the three of the MLP."""
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    return model.hidden_size * (heads * model.head_dim + 3 * model.ffn_hidden_size)

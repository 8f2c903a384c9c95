"""The names that Hugging Face has for the models that are trained here: architectures and config.json. The names of
tensors are in model/tensors.py.

Both sides rotate dim i together with dim i + head_dim / 2, keep weights as [out, in] and normalize in the same way, so
tensors are copied without change.
"""

from __future__ import annotations

from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import AttentionConfig, ModelConfig, RopeScaling

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

SETTINGS = {
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "penalty_alpha", "remove_invalid_values", "renormalize_logits", "repetition_penalty", "sequence_bias",
    "stop_strings", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip
"""The keys of generation_config.json that transformers reads from config.json if a folder does not have that file."""
OF_SCALING = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast", "attention_factor"),
}


def config_json(model: ModelConfig, attention: AttentionConfig, vocab_size: int, seq_length: int) -> dict[str, Any]:
    """Return the config.json of a model, without its dtype and tokens. The class is Qwen3 if q and k are normalized,
    and otherwise Llama, or Mistral if hidden_size is no multiple of the number of heads, which Llama refuses.

    Raises:
        ConfigError: Hugging Face has no class for the model.
    """
    match attention.qk_norm:
        case "none" if model.hidden_size % model.num_attention_heads:
            architecture: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            architecture |= {"sliding_window": None}
        case "none":
            architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
            architecture |= {"mlp_bias": False}
        case "before_rope":
            architecture = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
            architecture |= {"use_sliding_window": False, "sliding_window": None}
        case "after_rope":
            raise ConfigError(
                "attention.qk_norm after_rope: transformers has no class that normalizes q and k after the rotary "
                "embedding, so this model cannot be exported; train with before_rope (Qwen3) or none (Llama) for that"
            )
    return architecture | {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling and _rope_scaling(model.rope_scaling),
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "use_cache": True,
    }


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": scaling.type,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_seq_length,
        **{key: value for key in OF_SCALING[scaling.type] if (value := getattr(scaling, key)) is not None},
    }

"""The files of a Hugging Face folder: their names, and config.json as it is written. What families of models differ in
is in families.py."""

from __future__ import annotations

from typing import Any

from sagetrain.config.layer_specs import layers
from sagetrain.config.schema import AttentionConfig, ModelConfig, RopeScaling
from sagetrain.interop.families import ACTIVATIONS, Family, family_of

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
    "linear": (),
    "yarn": ("beta_slow", "beta_fast", "attention_factor", "truncate"),
}


def config_json(model: ModelConfig, attention: AttentionConfig, vocab_size: int, seq_length: int) -> dict[str, Any]:
    """Return the config.json of a model, without its dtype and tokens. Raises ConfigError if transformers has no class
    for the model."""
    family = family_of(model, attention)
    return {
        "architectures": [family.name],
        "model_type": family.model_type,
        **family.writes,
        # The only such size is query_scale, whose default is head_dim.
        **{theirs: getattr(model, ours) or model.head_dim for ours, theirs in family.sizes.items()},
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "hidden_act": ACTIVATIONS[model.activation],
        "max_position_embeddings": seq_length,
        "rms_norm_eps": model.norm_eps,
        **(_kinds_of_layers(model, family) if "F" in family.pattern else _rotary(model) | _windows(model, family)),
        "tie_word_embeddings": model.tie_embeddings,
        **({} if model.qkv_bias else {"attention_bias": False}),
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "use_cache": True,
        **(family.mixture.written(model.experts) if family.mixture and model.experts else {}),
    }


def _windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys of windows in a class that writes none where no layer has one."""
    if model.windows is None:
        return {}
    kinds = {"use_sliding_window": True, "layer_types": _layer_types(model)} if family.windows_after else {}
    return {"sliding_window": model.windows.tokens, **kinds}


def _layer_types(model: ModelConfig) -> list[str]:
    full = (each.attention.reach.window is None for each in layers(model))
    return [{True: "full_attention", False: "sliding_attention"}[each] for each in full]


def _rotary(model: ModelConfig) -> dict[str, Any]:
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling and _rope_scaling(model.rope_scaling),
    }


def _kinds_of_layers(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys of a class whose layers may have windows. transformers reads rotary embeddings of both kinds of
    layers from rope_parameters alone, unless both have the same one."""
    windows = model.windows
    theta = model.rope_theta if windows is None or windows.rope_theta is None else windows.rope_theta
    full = {"rope_type": "default"} if model.rope_scaling is None else _rope_scaling(model.rope_scaling)
    kinds = {
        "layer_types": _layer_types(model),
        # transformers makes the mask of windows whether a layer has one or not.
        "sliding_window": windows.tokens if windows else family.defaults["sliding_window"],
    }
    if family.one_rope:
        return kinds | {"rope_theta": model.rope_theta, "rope_scaling": full}
    return kinds | {
        "rope_parameters": {
            "full_attention": {**full, "rope_theta": model.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": scaling.type,
        "factor": scaling.factor,
        **({} if scaling.type == "linear" else {"original_max_position_embeddings": scaling.original_seq_length}),
        **{key: value for key in OF_SCALING[scaling.type] if (value := getattr(scaling, key)) is not None},
    }

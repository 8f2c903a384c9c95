"""What Hugging Face calls the parts of the models that are trained here: architectures, config.json, tensors.

Both sides rotate dim i together with dim i + head_dim / 2, keep weights as [out, in] and normalize alike, so tensors
go over as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import AttentionConfig, ModelConfig, RopeScaling

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_QK_NORM = {"LlamaForCausalLM": "none", "MistralForCausalLM": "none", "Qwen3ForCausalLM": "before_rope"}
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
}
# What else they may be told to compute -> the value that leaves it out.
_WITHOUT = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_OF_SCALING = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast", "attention_factor"),
}


@dataclass(frozen=True)
class Weight:
    """One tensor of a model."""

    ours: str
    """Its name in a checkpoint."""
    theirs: str
    shape: tuple[int, ...]
    """Without rows that pad the vocabulary."""
    tp_dim: int | None
    """The dim that tensor parallelism splits."""


def weights(model: ModelConfig, attention: AttentionConfig, vocab_size: int) -> Iterator[Weight]:
    """All tensors of a model, in the order of its layers."""
    hidden, inner = model.hidden_size, model.ffn_hidden_size
    queries, keys = (heads * model.head_dim for heads in (model.num_attention_heads, model.num_key_value_heads))
    yield Weight("embedding.weight", "model.embed_tokens.weight", (vocab_size, hidden), 0)
    for layer in range(model.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield Weight(f"{ours}.attention_norm.gain", f"{theirs}.input_layernorm.weight", (hidden,), None)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            yield Weight(f"{ours}.attention.qkv.{name}", f"{theirs}.self_attn.{name}_proj.weight", (size, hidden), 0)
        if attention.qk_norm != "none":
            for name in ("q_norm", "k_norm"):
                gain = f"{ours}.attention.{name}.gain", f"{theirs}.self_attn.{name}.weight"
                yield Weight(*gain, (model.head_dim,), None)
        yield Weight(f"{ours}.attention.out.weight", f"{theirs}.self_attn.o_proj.weight", (hidden, queries), 1)
        yield Weight(f"{ours}.mlp_norm.gain", f"{theirs}.post_attention_layernorm.weight", (hidden,), None)
        for name in ("gate", "up"):
            yield Weight(f"{ours}.mlp.gate_up.{name}", f"{theirs}.mlp.{name}_proj.weight", (inner, hidden), 0)
        yield Weight(f"{ours}.mlp.down.weight", f"{theirs}.mlp.down_proj.weight", (hidden, inner), 1)
    yield Weight("final_norm.gain", "model.norm.weight", (hidden,), None)
    if not model.tie_embeddings:
        yield Weight("head.weight", "lm_head.weight", (vocab_size, hidden), 0)


def config_json(model: ModelConfig, attention: AttentionConfig, vocab_size: int, seq_length: int) -> dict[str, Any]:
    """config.json of a model, without its dtype and tokens: Llama, or Qwen3 where q and k are normalized.

    Raises ConfigError where Hugging Face has no class for it.
    """
    match attention.qk_norm:
        case "none":
            architecture: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
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
        **{key: value for key in _OF_SCALING[scaling.type] if (value := getattr(scaling, key)) is not None},
    }


# -- in ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Described:
    """A model by its config.json."""

    architecture: str
    model: ModelConfig
    attention: AttentionConfig
    vocab_size: int
    seq_length: int
    """Longest sequence that it is made for, and computed here as it is there."""


def describe(config: dict[str, Any], where: str, report: Callable[[str], None]) -> Described:
    """The model of a config.json, which `where` names. `report` hears what is taken otherwise than it says.

    Raises ConfigError for one that SageTrain does not compute, or that lacks a size.
    """
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in _QK_NORM:
        raise ConfigError(f"{where}: architectures {architecture}: not one of {', '.join(_QK_NORM)}, which can be read")
    for key, value in _WITHOUT.items():
        if config.get(key) not in (value, None):
            raise ConfigError(f"{where}: {key} {config[key]}: SageTrain computes these models with {value} alone")
    if architecture != "MistralForCausalLM" and set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(f"{where}: layer_types {config['layer_types']}: SageTrain computes full_attention alone")
    if missing := [key for key in (*_SIZES.values(), "vocab_size") if key not in config]:
        raise ConfigError(
            f"{where}: has no {' and no '.join(missing)}; copy the folder again from where it was published"
        )
    length, window = config.get("max_position_embeddings", 2048), config.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM" and window is not None and window < length:
        report(
            f"{where}: attention reaches {window} tokens back there and through the whole sequence here: they are the "
            f"same up to a data.seq_length of {window}"
        )
        length = window
    theta, scaling = _rotary(config, where)
    shape = {ours: config[theirs] for ours, theirs in _SIZES.items()}
    heads = shape["num_attention_heads"]
    shape |= {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or shape["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "init_std": config.get("initializer_range", 0.02),
    }
    try:
        model = ModelConfig.model_validate(shape)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{where}: {problem['loc'][-1]} {problem['input']!r}: {problem['msg']}") from error
    attention = AttentionConfig.model_validate({"backend": "sdpa", "qk_norm": _QK_NORM[architecture]})
    return Described(architecture, model, attention, config["vocab_size"], length)


def _rotary(config: dict[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` of newer folders, or `rope_theta` and `rope_scaling` of older ones."""
    said = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = said.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    kinds = {said.pop(key, None) for key in ("rope_type", "type")} - {None, "default"}
    kind = kinds.pop() if kinds else None
    if said.pop("partial_rotary_factor", 1.0) != 1.0 or (kind is not None and kind not in _OF_SCALING):
        raise ConfigError(f"{where}: RoPE {kind or 'of a part of each head'}: not one of default, llama3, yarn")
    if kind is None:
        return theta, None
    scaling = {"type": kind, "factor": said.pop("factor", None)}
    before = said.pop("original_max_position_embeddings", None) or config.get("max_position_embeddings")
    scaling["original_seq_length"] = before
    scaling |= {key: value for key in _OF_SCALING[kind] if (value := said.pop(key, None)) is not None}
    said = {key: value for key, value in said.items() if value is not None and (key, value) != ("truncate", True)}
    if said:
        raise ConfigError(f"{where}: RoPE {kind} with {said}: SageTrain does not compute that")
    return theta, scaling

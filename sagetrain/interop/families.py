"""The families of models that Hugging Face folders are read and written for: a table with one entry for each class of
transformers. Reading config.json (describe.py), writing it (huggingface.py) and the names of tensors go by this table.

Both sides rotate dim i together with dim i + head_dim / 2, keep weights as [out, in] and normalize in the same way, so
tensors are copied without change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.config.sections.model import QKNorm

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TENSORS = {
    "embedding.weight": EMBEDDING,
    "final_norm.gain": "model.norm.weight",
    "head.weight": HEAD,
    "attention_norm.gain": "input_layernorm.weight",
    "attention.qkv.q": "self_attn.q_proj.weight",
    "attention.qkv.k": "self_attn.k_proj.weight",
    "attention.qkv.v": "self_attn.v_proj.weight",
    "attention.qkv.q_bias": "self_attn.q_proj.bias",
    "attention.qkv.k_bias": "self_attn.k_proj.bias",
    "attention.qkv.v_bias": "self_attn.v_proj.bias",
    "attention.q_norm.gain": "self_attn.q_norm.weight",
    "attention.k_norm.gain": "self_attn.k_norm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "attention_post_norm.gain": "post_attention_layernorm.weight",
    "mlp_norm.gain": "post_attention_layernorm.weight",
    "mlp.gate_up.gate": "mlp.gate_proj.weight",
    "mlp.gate_up.up": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "mlp_post_norm.gain": "post_feedforward_layernorm.weight",
}
"""The names that Llama has for our tensors. In a block they stand behind blocks.N. here, and model.layers.N. there."""
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
"""The names in config.json of keys of our section `model`."""
DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}
"""The values that transformers takes for keys that config.json may leave out."""


ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
"""The names in config.json of the values of our key model.activation."""
_STRUCTURE = {"qkv_bias": False, "norms": "pre", "activation": "swiglu", "conventions": "llama"}
"""The keys of our section `model` that families differ in, with the values of a Llama."""


@dataclass(frozen=True)
class Family:
    """A class of models in transformers."""

    name: str
    """The name of the class, as in `architectures`."""
    model_type: str
    qk_norm: QKNorm
    defaults: Mapping[str, Any]
    """The values of keys that config.json may leave out, beside those of DEFAULTS."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The values of our section `model` by which its models differ from a Llama."""
    writes: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of an exported config.json."""
    pattern: str = ""
    """The layers with windows (model.windows.pattern) of a config.json that does not name them. "": the class knows
    none."""
    theta: float = 10000.0
    """The base of the rotary embedding of a config.json that does not name one."""
    window_theta: float | None = None
    """The base in layers with a window. None: it is that of the other layers."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Further names in config.json of keys of our section `model`, beside SIZES. Other classes do not have the keys."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The names of tensors that differ from a Llama's."""
    demands: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that may tell a model to compute more, with the values that leave that out."""
    whole_heads: bool = False
    """Whether the class refuses a hidden_size that is no multiple of num_attention_heads."""

    def computes(self, model: ModelConfig, attention: AttentionConfig) -> bool:
        """Return whether the class computes what our model does."""
        odd = self.whole_heads and model.hidden_size % model.num_attention_heads
        wanted = {**_STRUCTURE, **self.model}
        same = all(getattr(model, key) == value for key, value in wanted.items())
        windows = bool(self.pattern) or model.windows is None
        same = same and ("query_scale" in self.sizes or model.query_scale is None)
        return self.qk_norm == attention.qk_norm and same and windows and not odd

    def tensor(self, name: str) -> str:
        """Return the name of a tensor in a folder, from its name in our model."""
        in_block = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
        names = {**_TENSORS, **self.tensors}
        return f"model.layers.{in_block[1]}.{names[in_block[2]]}" if in_block else names[name]


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "llama",
            "none",
            {"max_position_embeddings": 2048},
            writes={"mlp_bias": False},
            whole_heads=True,
        ),
        Family(
            "MistralForCausalLM",
            "mistral",
            "none",
            {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
            writes={"sliding_window": None},
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            "none",
            {"max_position_embeddings": 32768, "num_key_value_heads": 32},
            model={"qkv_bias": True},
            writes={"use_sliding_window": False, "sliding_window": None},
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            "before_rope",
            {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
            writes={"use_sliding_window": False, "sliding_window": None},
        ),
        Family(
            "Olmo2ForCausalLM",
            "olmo2",
            "all_heads",
            {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
            model={"norms": "post"},
        ),
        Family(
            "Olmo3ForCausalLM",
            "olmo3",
            "all_heads",
            {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
            model={"norms": "post"},
            pattern="WWWF",
            theta=500000.0,
        ),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            "before_rope",
            {
                "max_position_embeddings": 131072,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "tie_word_embeddings": True,
                "sliding_window": 4096,
                "query_pre_attn_scalar": 256,
            },
            model={"norms": "sandwich", "activation": "geglu", "conventions": "gemma"},
            writes={"hidden_activation": "gelu_pytorch_tanh"},
            pattern="WWWWWF",
            theta=1000000.0,
            window_theta=10000.0,
            sizes={"query_scale": "query_pre_attn_scalar"},
            tensors={"mlp_norm.gain": "pre_feedforward_layernorm.weight"},
            demands={
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh",
                "final_logit_softcapping": None,
                "attn_logit_softcapping": None,
                "use_bidirectional_attention": False,
            },
            whole_heads=True,
        ),
    )
}
"""The families by the names of their classes. A model is exported as the first one that computes it."""


def family_of(model: ModelConfig, attention: AttentionConfig) -> Family:
    """Return the family as which a model is exported. Raises ConfigError if transformers has no class for it."""
    for family in FAMILIES.values():
        if family.computes(model, attention):
            return family
    asked = {key: getattr(model, key) for key, value in _STRUCTURE.items() if getattr(model, key) != value}
    asked |= {} if model.query_scale is None else {"query_scale": model.query_scale}
    asked |= {} if model.windows is None else {"windows.pattern": model.windows.pattern}
    known = "; ".join(
        f"{each.name.removesuffix('ForCausalLM')}: {_in_words(each.qk_norm, each.model)}"
        f"{', model.windows' * bool(each.pattern)}"
        for each in FAMILIES.values()
    )
    raise ConfigError(
        f"{_in_words(attention.qk_norm, asked)}: transformers has no class that computes this, so the model cannot be "
        f"exported; train with the values of one class for that ({known})"
    )


def _in_words(qk_norm: QKNorm, model: Mapping[str, Any]) -> str:
    settings = [f"model.{key} {str(value).lower()}" for key, value in model.items()]
    return ", ".join([f"attention.qk_norm {qk_norm}", *settings])

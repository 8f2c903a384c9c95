"""The families of models that Hugging Face folders are read and written for: a table with one entry for each class of
transformers. Reading config.json (describe.py), writing it (huggingface.py) and the names of tensors go by this table.

Both sides rotate dim i together with dim i + head_dim / 2, keep weights as [out, in] and normalize in the same way, so
tensors are copied without change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sagekernels.swiglu import GATES
from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import AttentionConfig, ExpertsConfig, ModelConfig
from sagetrain.config.sections.model import QKNorm
from sagetrain.interop import fused_experts
from sagetrain.model.tensors import TensorSpec

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
    "attention.sinks": "self_attn.sinks",
    "attention.out.weight": "self_attn.o_proj.weight",
    "attention.out.bias": "self_attn.o_proj.bias",
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
_OF_GPT_OSS = GATES["clamped_swiglu"]
_STRUCTURE = {"qkv_bias": False, "sinks": False, "norms": "pre", "activation": "swiglu", "conventions": "llama"}
"""The keys of our section `model` that families differ in, with the values of a Llama."""


@dataclass(frozen=True)
class MixtureKeys:
    """The keys of config.json, and the tensors, of layers with experts."""

    number: str
    ffn_size: str
    router: str = "mlp.gate.weight"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The names of an expert's gate, up and down."""
    experts: str = "mlp.experts"
    chooses: bool = True
    """Whether norm_topk_prob says if weights are renormalized. Without the key they always are."""
    dense_layers: bool = False
    """Whether decoder_sparse_step and mlp_only_layers say which layers have an MLP in the place of experts."""
    fused: bool = False
    """Whether the experts of a layer are one tensor for each product (fused_experts.py). Family.tensors names them, and
    they may be in MXFP4."""

    @property
    def keys(self) -> set[str]:
        """The keys of config.json that are read."""
        own = {self.number, "num_experts", "num_local_experts", "num_experts_per_tok", self.ffn_size}
        own |= {"router_aux_loss_coef", "output_router_logits", *(["norm_topk_prob"] * self.chooses)}
        return own | {*(["decoder_sparse_step", "mlp_only_layers"] * self.dense_layers)}

    def computes(self, experts: ExpertsConfig) -> bool:
        """Return whether the class computes what our experts do, but for the router's bias, which it does not have."""
        same = experts.scores == "softmax" and experts.scale == 1 and not experts.shared
        return same and (self.chooses or experts.renormalize) and (self.dense_layers or not experts.dense_layers)

    def written(self, experts: ExpertsConfig) -> dict[str, Any]:
        """Return the keys of an exported config.json."""
        keys: dict[str, Any] = {
            self.number: experts.number,
            "num_experts_per_tok": experts.per_token,
            self.ffn_size: experts.ffn_size,
        }
        keys |= {"router_aux_loss_coef": experts.balance.aux_weight, "output_router_logits": False}
        keys |= {"norm_topk_prob": experts.renormalize} if self.chooses else {}
        dense = {"decoder_sparse_step": 1, "mlp_only_layers": [*range(experts.dense_layers)]}
        return keys | (dense if self.dense_layers else {})

    def names(self, spec: TensorSpec) -> list[str] | None:
        """Return the names of a router's matrix, or of the matrices of experts, without their layer. None: the tensor
        is neither."""
        (*_, name), (gate, up, down) = spec.name.split("."), self.parts
        if self.fused:
            return None
        if spec.kind == "router":
            return [self.router]
        if spec.cut != "experts":
            return None
        each = (down,) if name == "down" else (gate, up)
        return [f"{self.experts}.{expert}.{part}.weight" for expert in range(spec.shape[0]) for part in each]


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
    windows_after: bool = False
    """Whether use_sliding_window switches windows on, in the layers from max_window_layers on if config.json does not
    name them."""
    theta: float = 10000.0
    """The base of the rotary embedding of a config.json that does not name one."""
    window_theta: float | None = None
    """The base in layers with a window. None: it is that of the other layers."""
    one_rope: bool = False
    """Whether layers with a window have the rotary embedding of the others. Our layers with a window then have the
    scaling as well in model.conventions gpt_oss alone."""
    rope: Mapping[str, Any] | None = None
    """The rope_parameters of a config.json that has neither these nor rope_scaling. None: no scaling."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Further names in config.json of keys of our section `model`, beside SIZES. Other classes do not have the keys."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The names of tensors that differ from a Llama's."""
    demands: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that may tell a model to compute more, with the values that leave that out."""
    whole_heads: bool = False
    """Whether the class refuses a hidden_size that is no multiple of num_attention_heads."""
    heads_fill: bool = False
    """Whether the class computes only models whose heads together are as wide as hidden_size."""
    mixture: MixtureKeys | None = None
    """The keys and tensors of layers with experts. None: the class has no experts."""

    @property
    def all_or_none(self) -> bool:
        """Whether all layers have windows, or none has."""
        return self.pattern == "W" and not self.windows_after

    def computes(self, model: ModelConfig, attention: AttentionConfig) -> bool:
        """Return whether the class computes what our model does."""
        odd = self.whole_heads and model.hidden_size % model.num_attention_heads
        odd = odd or (self.heads_fill and model.hidden_size != model.num_attention_heads * model.head_dim)
        if model.experts is None or self.mixture is None:
            odd = odd or (model.experts is None) != (self.mixture is None)
        else:
            odd = odd or not self.mixture.computes(model.experts)
        wanted = {**_STRUCTURE, **self.model}
        same = all(getattr(model, key) == value for key, value in wanted.items())
        same = same and model.delta_net is None and not model.value_embeddings
        same = same and ("query_scale" in self.sizes or model.query_scale is None)
        return self.qk_norm == attention.qk_norm and same and self._has_windows_of(model) and not odd

    def _has_windows_of(self, model: ModelConfig) -> bool:
        if (windows := model.windows) is None:
            return True
        if self.all_or_none and "F" in windows.pattern[: model.num_layers]:
            return False
        one = windows.rope_theta in (None, model.rope_theta)
        one = one and (model.rope_scaling is None or model.conventions == "gpt_oss")
        return bool(self.pattern) and (one or not self.one_rope)

    def theirs(self, spec: TensorSpec) -> list[str]:
        """Return the names of the tensors in a folder that are a tensor of our model. Several are its matrices, one
        above the other; a state of our model has none."""
        if spec.kind == "state":
            return []
        in_block, names = re.fullmatch(r"blocks\.(\d+)\.(.*)", spec.name), {**_TENSORS, **self.tensors}
        if not in_block:
            return [names[spec.name]]
        of_experts = self.mixture.names(spec) if self.mixture else None
        found = [names[in_block[2]]] if of_experts is None else of_experts
        return [f"model.layers.{in_block[1]}.{name}" for name in found]

    def _fused(self, spec: TensorSpec) -> bool:
        return self.mixture is not None and self.mixture.fused and spec.cut == "experts"

    def stored_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the shape in a folder of each of the tensors that are one of ours."""
        return fused_experts.stored_shape(spec) if self._fused(spec) else spec.matrix

    def from_folder(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """Return the values of a folder's tensor, of any shape, as those of the one of ours that it is, flattened."""
        if self._fused(spec):
            tensor = fused_experts.from_folder(spec, tensor.view(self.stored_shape(spec)))
        return tensor.flatten()

    def for_folder(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """Return one of the tensors of a folder that are one of ours, given its values in our order."""
        return fused_experts.for_folder(spec, tensor).contiguous() if self._fused(spec) else tensor


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
            pattern="W",
            one_rope=True,
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            "none",
            {"max_position_embeddings": 32768, "num_key_value_heads": 32},
            model={"qkv_bias": True},
            writes={"use_sliding_window": False, "sliding_window": None},
            pattern="W",
            windows_after=True,
            one_rope=True,
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            "before_rope",
            {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
            writes={"use_sliding_window": False, "sliding_window": None},
            pattern="W",
            windows_after=True,
            one_rope=True,
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
        Family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            "before_rope",
            {
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "norm_topk_prob": False,
                "router_aux_loss_coef": 0.001,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            writes={"use_sliding_window": False, "sliding_window": None},
            mixture=MixtureKeys("num_experts", "moe_intermediate_size", dense_layers=True),
        ),
        Family(
            "MixtralForCausalLM",
            "mixtral",
            "none",
            {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
            | {"router_aux_loss_coef": 0.001},
            writes={"sliding_window": None},
            pattern="W",
            theta=1000000.0,
            one_rope=True,
            demands={"router_jitter_noise": 0.0},
            mixture=MixtureKeys(
                "num_local_experts",
                "intermediate_size",
                router="block_sparse_moe.gate.weight",
                parts=("w1", "w3", "w2"),
                experts="block_sparse_moe.experts",
                chooses=False,
            ),
        ),
        Family(
            "OlmoeForCausalLM",
            "olmoe",
            "all_heads",
            {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
            | {"norm_topk_prob": False, "router_aux_loss_coef": 0.01},
            writes={"clip_qkv": None},
            demands={"clip_qkv": None},
            heads_fill=True,
            mixture=MixtureKeys("num_experts", "intermediate_size"),
        ),
        Family(
            "GptOssForCausalLM",
            "gpt_oss",
            "none",
            {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5}
            | {"sliding_window": 128, "router_aux_loss_coef": 0.001},
            model={"qkv_bias": True, "sinks": True, "conventions": "gpt_oss"},
            writes={"attention_bias": True, "swiglu_limit": _OF_GPT_OSS.limit},
            pattern="WF",
            theta=150000.0,
            one_rope=True,
            rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
            tensors={
                "mlp.router.weight": "mlp.router.weight",
                "mlp.router.logit_bias": "mlp.router.bias",
                "mlp.experts.gate_up": "mlp.experts.gate_up_proj",
                "mlp.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
                "mlp.experts.down": "mlp.experts.down_proj",
                "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
            },
            demands={"attention_bias": True, "swiglu_limit": _OF_GPT_OSS.limit, "swiglu_alpha": _OF_GPT_OSS.slope},
            mixture=MixtureKeys("num_local_experts", "intermediate_size", chooses=False, fused=True),
        ),
    )
}
"""The families by the names of their classes. A model is exported as the first one that computes it."""


REFUSED = {
    "Qwen2MoeForCausalLM": "its shared expert has a gate of its own",
    "Qwen3NextForCausalLM": "its full attention has a gate and rotates a quarter of each head, and its shared expert "
    "has a gate (model.delta_net has its linear attention alone)",
    "OlmoHybridForCausalLM": "its gated delta nets correct by up to twice the difference, and the places of its norms "
    "depend on the kind of layer",
    "Qwen3_5ForCausalLM": "its full attention has a gate and rotates a quarter of each head (model.delta_net has its "
    "linear attention alone)",
    "DeepseekV2ForCausalLM": "its attention is latent (MLA)",
    "DeepseekV3ForCausalLM": "its attention is latent (MLA), and its router chooses groups of experts first",
    "Glm4MoeForCausalLM": "its router chooses groups of experts first, and it rotates a part of each head",
    "Llama4ForCausalLM": "its router weights the inputs of experts, and some layers have no rotary embedding",
}
"""The classes near to ours that SageTrain does not compute, with the reasons."""


def family_of(model: ModelConfig, attention: AttentionConfig) -> Family:
    """Return the family as which a model is exported. Raises ConfigError if transformers has no class for it."""
    for family in FAMILIES.values():
        if family.computes(model, attention):
            return family
    asked = {key: getattr(model, key) for key, value in _STRUCTURE.items() if getattr(model, key) != value}
    asked |= {} if model.query_scale is None else {"query_scale": model.query_scale}
    asked |= {} if model.windows is None else {"windows.pattern": model.windows.pattern}
    asked |= {} if model.delta_net is None else {"delta_net.pattern": model.delta_net.pattern}
    asked |= {"value_embeddings": True} if model.value_embeddings else {}
    asked |= {} if model.experts is None else {f"experts.{key}": value for key, value in _chosen(model.experts)}
    known = "; ".join(
        f"{each.name.removesuffix('ForCausalLM')}: {_in_words(each.qk_norm, each.model)}"
        f"{', model.windows' * bool(each.pattern)}{', model.experts' * bool(each.mixture)}"
        for each in FAMILIES.values()
    )
    raise ConfigError(
        f"{_in_words(attention.qk_norm, asked)}: transformers has no class that computes this, so the model cannot be "
        f"exported; train with the values of one class for that ({known})"
    )


def _chosen(experts: ExpertsConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys in which classes of transformers differ, with their values."""
    yield from ((key, getattr(experts, key)) for key in ("scores", "renormalize", "scale", "shared", "dense_layers"))


def _in_words(qk_norm: QKNorm, model: Mapping[str, Any]) -> str:
    said = {key: value if isinstance(value, str) else str(value).lower() for key, value in model.items()}
    settings = [f"model.{key} {value}" for key, value in said.items()]
    return ", ".join([f"attention.qk_norm {qk_norm}", *settings])

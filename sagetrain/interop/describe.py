"""Read config.json of a Hugging Face folder as the description of a model, in the way that transformers reads the same
keys.

If two keys say the same thing in different ways, nobody can tell which of them the weights were trained with. That is
an error here that names both, even where transformers takes one of them in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sagetrain.config.errors import ConfigError
from sagetrain.config.layer_specs import exact_backend
from sagetrain.config.rules.model import rope_scaling
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.interop.families import DEFAULTS, FAMILIES, REFUSED, SIZES, Family, MixtureKeys
from sagetrain.interop.huggingface import OF_SCALING, SETTINGS

Report = Callable[[str], None]


_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# These keys may tell a model to compute more. The values leave that out.
_WITHOUT = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "per_layer_config": {},
}


# These keys say nothing about what a model computes, or are read by interop/importing.py.
_HARMLESS = {
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "_name_or_path",
    "add_cross_attention", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "dtype", "eos_token_id", "id2label", "is_decoder",
    "is_encoder_decoder", "label2id", "max_position_embeddings", "max_window_layers", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "quantization_config", "return_dict", "return_dict_in_generate", "torch_dtype", "torchscript",
    "transformers_version", "transformers_weights", "use_bfloat16", "use_cache", "use_return_dict", "layer_types",
    "original_max_position_embeddings", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta",
    "sliding_window", "sliding_window_pattern", "_sliding_window_pattern",
}  # fmt: skip


@dataclass(frozen=True)
class Described:
    """A model as its config.json describes it."""

    family: Family
    model: ModelConfig
    attention: AttentionConfig
    vocab_size: int
    seq_length: int
    """Longest sequence that the model is made for, and that is computed here as it is there."""


def describe(config: Mapping[str, Any], where: str, report: Report) -> Described:
    """Return the model that a config.json describes. `report` gets a message for each key that is read differently than
    it says. Raises ConfigError if SageTrain does not compute the model, a size is missing, or keys contradict each
    other."""
    for key in ("architectures", "layer_types", "configuration_files"):
        if not isinstance(given := config.get(key) or [], list) or {*map(type, given)} - {str}:
            raise ConfigError(f"{where}: {key} {given!r} is no list of names; copy the folder again")
    family = _family(config, where)
    name = family.name
    if config.get("hidden_act") == "swish":  # transformers has two names for one function.
        config = {**config, "hidden_act": "silu"}
    _quantization(config, family, where)
    if others := [name for name in config.get("configuration_files") or [] if name != "config.json"]:
        raise ConfigError(
            f"{where}: configuration_files names {', '.join(map(str, others))}, and transformers takes one of these by "
            "its own version: rename the file that is meant to config.json, and delete configuration_files"
        )
    for key, value in {**_WITHOUT, **family.demands}.items():
        if config.get(key) not in (value, None) and not (family.windows_after and key == "use_sliding_window"):
            raise ConfigError(f"{where}: {key} {config[key]!r}: SageTrain computes these models with {value!r} alone")
    if dropout := config.get("attention_dropout"):
        report(f"{where}: attention_dropout {dropout}: SageTrain drops nothing when this model is trained on")
    known = {*_HARMLESS, *SIZES.values(), *family.sizes.values(), *_WITHOUT, *family.demands, *SETTINGS}
    known |= family.mixture.keys if family.mixture else set()
    if unread := {key: value for key, value in config.items() if value is not None and key not in known}:
        report(
            f"{where}: not read, as {name} of transformers does not: "
            f"{', '.join(f'{key} {value!r}'[:80] for key, value in unread.items())}"
        )
    if code := config.get("auto_map"):
        report(
            f"{where}: auto_map names code of its own ({code}), which is not run: the model is read as {name}, as by "
            "transformers without trust_remote_code"
        )
    if missing := [key for key in _REQUIRED if key not in config]:
        raise ConfigError(
            f"{where}: has no {' and no '.join(missing)}; copy the folder again from where it was published"
        )
    defaults = {**DEFAULTS, **family.defaults}
    if absent := [f"{key} {value}" for key, value in defaults.items() if key not in config]:
        report(f"{where}: taken as transformers takes what is not there: {', '.join(absent)}")
    said = {**defaults, **config}
    if family.rope and not (said.get("rope_scaling") or said.get("rope_parameters")):
        report(f"{where}: has no rope_scaling: {family.rope} is taken, as transformers does")
        said["rope_parameters"] = family.rope
    windows, said = _windows(said, family, where)
    theta, scaling = _rotary(said, family.theta, where, report)
    if windows and scaling and family.one_rope and family.model.get("conventions") != "gpt_oss":
        raise ConfigError(
            f"{where}: RoPE {scaling['type']} with sliding_window {windows['tokens']}: SageTrain does not scale RoPE "
            "in layers with a window"
        )
    experts = _experts(said, family.mixture, where) if family.mixture else None
    heads = said["num_attention_heads"]
    if said.get("num_key_value_heads") is None:
        said["num_key_value_heads"] = heads
    if said.get("head_dim") is None:
        said["head_dim"] = _head_dim(said, where)
    shape = {ours: said[theirs] for ours, theirs in {**SIZES, **family.sizes}.items()}
    try:
        rope = {"rope_theta": theta, "rope_scaling": scaling, "windows": windows}
        model = ModelConfig.model_validate({**shape, **rope, **family.model, "experts": experts})
    except ValidationError as error:
        problem = error.errors()[0]
        names = [SIZES.get(str(each), str(each)) for each in problem["loc"]]
        raise ConfigError(f"{where}: {'.'.join(names)} {problem['input']!r}: {problem['msg']}") from error
    if model.num_attention_heads % model.num_key_value_heads:
        raise ConfigError(
            f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {model.num_key_value_heads}; "
            "copy the folder again"
        )
    for finding in rope_scaling(model):
        if finding.level == "error":
            raise ConfigError(f"{where}: {finding.key.removeprefix('model.')} {finding.value} {finding.message}")
    if model.head_dim % 2:
        raise ConfigError(f"{where}: head_dim {model.head_dim} is odd: RoPE turns pairs of numbers")
    attention = AttentionConfig.model_validate({"backend": exact_backend(model), "qk_norm": family.qk_norm})
    length = _whole(said, "max_position_embeddings", where)
    return Described(family, model, attention, _whole(said, "vocab_size", where), length)


def _family(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of the model. transformers goes by model_type, and other readers by architectures, so the two
    must agree."""
    by_type = {each.model_type: each for each in FAMILIES.values()}
    model_type, names = config.get("model_type"), config.get("architectures") or []
    if not names and model_type in by_type:
        return by_type[str(model_type)]
    name = names[0] if len(names) == 1 else None
    if name not in FAMILIES:
        if why := REFUSED.get(str(name)):
            raise ConfigError(f"{where}: architectures {name}: SageTrain does not compute it: {why}")
        of_type = by_type.get(str(model_type))
        fix = f"; if it is the model of model_type {model_type!r}, set them to [{of_type.name!r}]" if of_type else ""
        if any(str(each).endswith("ForConditionalGeneration") for each in names):
            fix = "; save its language model by itself: the class for text alone, with save_pretrained"
        raise ConfigError(
            f"{where}: architectures {names}: not one of {', '.join(FAMILIES)}, which can be read"
            f"{fix or '; another class needs an entry in sagetrain/interop/families.py'}"
        )
    if model_type not in (None, FAMILIES[name].model_type):
        raise ConfigError(
            f"{where}: architectures {name} contradicts model_type {model_type!r}, by which transformers goes: set "
            "both to what the model is"
        )
    return FAMILIES[name]


def _quantization(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Raise ConfigError for weights that are quantized in a way that is not read."""
    if not (said := config.get("quantization_config")):
        return
    fused = family.mixture is not None and family.mixture.fused
    method = said.get("quant_method") if isinstance(said, dict) else said
    if fused and method == "mxfp4":
        return
    raise ConfigError(
        f"{where}: quantization_config: weights that are quantized are not read{' but in mxfp4' * fused}; take the "
        "folder in which the model is published in 16 bits"
    )


def _head_dim(said: Mapping[str, Any], where: str) -> int:
    hidden, heads = _whole(said, "hidden_size", where), _whole(said, "num_attention_heads", where)
    if hidden % heads:
        raise ConfigError(
            f"{where}: has no head_dim, and hidden_size {hidden} is no multiple of num_attention_heads {heads}: add "
            "the head_dim that the model has"
        )
    return hidden // heads


def _windows(said: Mapping[str, Any], family: Family, where: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return our section `model.windows`, and the keys with those of layers with full attention alone."""
    types, number = said.get("layer_types"), _whole(said, "num_hidden_layers", where)
    # transformers takes another class for a Mistral whose layers have types.
    known = bool(family.pattern) and not (family.all_or_none and types)
    known = known and (bool(said.get("use_sliding_window")) or not family.windows_after)
    letters = {"full_attention": "F"} | ({"sliding_attention": "W"} if known else {})
    if types and set(types) - letters.keys():
        raise ConfigError(f"{where}: layer_types {types}: SageTrain computes {' and '.join(letters)} alone")
    if types and len(types) != number:
        raise ConfigError(
            f"{where}: layer_types names {len(types)} layers, num_hidden_layers says {number}: set "
            "both to the layers that the model has"
        )
    if not known:
        return None, {**said}
    if family.windows_after:
        said = {"sliding_window": 4096, "max_window_layers": 28, **said}
    full, theta = {**said}, said.get("rope_local_base_freq")
    parameters = said.get("rope_parameters") or {}
    if parameters and isinstance(parameters, dict) and not family.one_rope:  # one for each type of layers
        if not any(isinstance(value, dict) for value in parameters.values()):
            raise ConfigError(
                f"{where}: rope_parameters {parameters} names no type of layers, and transformers drops what it says: "
                'write {"full_attention": {...}, "sliding_attention": {...}}, each with rope_type and rope_theta'
            )
        full["rope_parameters"] = parameters.get("full_attention")
        sliding = parameters.get("sliding_attention") or {}
        if not isinstance(sliding, dict):
            raise ConfigError(f"{where}: sliding_attention {sliding!r} holds no keys; copy the folder again")
        within = {key: value for key, value in sliding.items() if value is not None}
        if within.pop("rope_type", "default") != "default" or set(within) - {"rope_theta"}:
            raise ConfigError(
                f"{where}: rope_parameters: sliding_attention {within}: SageTrain does not scale RoPE in layers with "
                "a window; name rope_theta alone"
            )
        theta = within.get("rope_theta", theta)
    named = said.get("sliding_window_pattern") is not None
    pattern = "W" * (_whole(said, "sliding_window_pattern", where) - 1) + "F" if named else family.pattern
    every = [letters[each] for each in types or ()] or [pattern[i % len(pattern)] for i in range(number)]
    if family.windows_after and not types:
        first = said["max_window_layers"] and _whole(said, "max_window_layers", where)
        every = ["F" if i < first else "W" for i in range(number)]
    if "W" not in every or said.get("sliding_window") is None:
        return None, full
    shortest = next(n for n in range(1, number + 1) if all(every[i] == every[i % n] for i in range(number)))
    if theta is None and family.window_theta is None and not family.one_rope:
        # transformers 5 has one base in these layers, whatever the others have, and transformers 4 had the one of all.
        theta, all_layers = family.theta, said.get("rope_theta")
        if not parameters and all_layers not in (None, theta):
            raise ConfigError(
                f"{where}: rope_theta {all_layers}: transformers 4 takes it for all layers, and transformers 5 takes "
                f"{theta} in layers with a window: write rope_parameters instead, with the rope_theta of both, "
                '{"full_attention": {...}, "sliding_attention": {...}}, each with rope_type and rope_theta'
            )
    theta = family.window_theta if theta is None else theta
    tokens = _whole(said, "sliding_window", where)
    return {"tokens": tokens, "pattern": "".join(every[:shortest]), "rope_theta": theta}, full


def _experts(said: Mapping[str, Any], keys: MixtureKeys, where: str) -> dict[str, Any]:
    numbers = [key for key in ("num_experts", "num_local_experts") if said.get(key) is not None]
    counts = {key: _whole(said, key, where) for key in numbers}
    if len({*counts.values()}) != 1:
        both = " contradicts ".join(f"{key} {value!r}" for key, value in counts.items())
        fix = "delete the one that is not the model's" if both else "copy the folder again"
        raise ConfigError(f"{where}: {both or f'has no {keys.number}'}; {fix}")
    if absent := [key for key in ("num_experts_per_tok", keys.ffn_size) if said.get(key) is None]:
        raise ConfigError(f"{where}: has no {' and no '.join(absent)}; copy the folder again")
    (key, number), per_token = next(iter(counts.items())), _whole(said, "num_experts_per_tok", where)
    if per_token > _whole(said, key, where) or number < 2:
        raise ConfigError(
            f"{where}: num_experts_per_tok {per_token} and {key} {number}: a token goes to some of at least 2 experts; "
            "copy the folder again"
        )
    only = said.get("mlp_only_layers") or []
    kinds = {
        "norm_topk_prob": (isinstance(said.get("norm_topk_prob") or False, bool), "true or false"),
        "router_aux_loss_coef": (type(said["router_aux_loss_coef"]) in (int, float), "a number"),
        "mlp_only_layers": (isinstance(only, list) and {*map(type, only)} <= {int}, "a list of numbers of layers"),
    }
    for key, (right, what) in kinds.items():
        if not right:
            raise ConfigError(f"{where}: {key} {said[key]!r} is not {what}; copy the folder again")
    return {
        "number": number,
        "per_token": per_token,
        "ffn_size": _whole(said, keys.ffn_size, where),
        "renormalize": bool(said["norm_topk_prob"]) if keys.chooses else True,
        "dense_layers": _dense_layers(said, where) if keys.dense_layers else 0,
        "balance": {"aux_weight": float(said["router_aux_loss_coef"])},
    }


def _dense_layers(said: Mapping[str, Any], where: str) -> int:
    """Return the number of first layers without experts. Raises ConfigError if others have none either."""
    layers, step, only = _whole(said, "num_hidden_layers", where), said["decoder_sparse_step"], said["mlp_only_layers"]
    _whole(said, "decoder_sparse_step", where)
    dense = [number in (only or []) or bool((number + 1) % step) for number in range(layers)]
    first = dense.index(False) if False in dense else layers
    if first == layers or any(dense[first:]):
        raise ConfigError(
            f"{where}: decoder_sparse_step {step} and mlp_only_layers {only} leave the layers "
            f"{[number for number, each in enumerate(dense) if each]} without experts: SageTrain computes models whose "
            "first layers have none, and all others have them"
        )
    return first


def _whole(said: Mapping[str, Any], key: str, where: str) -> int:
    value = said[key]
    if type(value) is not int or not 1 <= value < 10**18:
        what = "no whole number above 0" if type(value) is not int or value < 1 else "larger than any number of a run"
        raise ConfigError(f"{where}: {key} {value!r} is {what}; copy the folder again")
    return value


# -- rotary position embedding -----------------------------------------------------------------------------------------


def _rotary(said: Mapping[str, Any], default: float, where: str, report: Report) -> tuple[float, dict[str, Any] | None]:
    """Return the base and the scaling of the rotary embedding. transformers 5 writes both as rope_parameters. Older
    folders have rope_theta and rope_scaling; if both forms are there, transformers 5 takes the older one first."""
    found = {key: _rope(said, key, default, where) for key in ("rope_scaling", "rope_parameters") if said.get(key)}
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        both = " and ".join(f"{key} {said[key]} (rope_theta {found[key][0]})" for key in found)
        raise ConfigError(
            f"{where}: {both} contradict each other: transformers takes rope_scaling and drops rope_parameters, other "
            "readers do not; delete the one that is not the model's, and keep its rope_theta in the other"
        )
    if all(place.get("rope_theta") is None for place in (said, *(said[key] for key in found))):
        report(f"{where}: has no rope_theta: {default} is taken, which is the default of transformers")
    theta = said.get("rope_theta")
    return next(iter(found.values()), (default if theta is None else theta, None))


def _rope(said: Mapping[str, Any], key: str, default: float, where: str) -> tuple[float, dict[str, Any] | None]:
    """Return the base and the scaling that one of the two keys gives."""
    if not isinstance(said[key], dict):
        raise ConfigError(f"{where}: {key} {said[key]!r} holds no keys; copy the folder again")
    given = {name: value for name, value in said[key].items() if value is not None}
    where = f"{where}: {key}"

    def agreed(name: str, other: str, *values: Any) -> Any:
        """Return the one value that two places give. Raises ConfigError if they differ."""
        there = [value for value in values if value is not None]
        if any(value != there[0] for value in there):
            raise ConfigError(
                f"{where}: {name} {values[0]!r} contradicts {other} {values[1]!r}; delete the one that is not the "
                "model's"
            )
        return there[0] if there else None

    kind = agreed("rope_type", "type", given.pop("rope_type", None), given.pop("type", None)) or "default"
    theta = agreed("rope_theta", "rope_theta beside it,", given.pop("rope_theta", None), said.get("rope_theta"))
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}: RoPE of a part of each head: SageTrain turns whole heads")
    if not isinstance(kind, str) or (kind != "default" and kind not in OF_SCALING):
        raise ConfigError(f"{where}: RoPE {kind}: not one of default, {', '.join(OF_SCALING)}")
    scaling: dict[str, Any] | None = None
    if kind != "default":
        name = "original_max_position_embeddings"
        before = agreed(name, f"{name} beside it,", given.pop(name, None), said.get(name))
        scaling = {
            "type": kind,
            "factor": given.pop("factor", None),
            "original_seq_length": before or said["max_position_embeddings"],
        }
        if kind == "llama3" and (missing := [name for name in OF_SCALING[kind] if name not in given]):
            raise ConfigError(f"{where}: RoPE llama3 without {' and '.join(missing)}; copy the folder again")
        scaling |= {name: given.pop(name) for name in OF_SCALING[kind] if name in given}
    if given:
        raise ConfigError(
            f"{where}: RoPE {kind} with {given}: SageTrain does not compute that; delete what is not the model's, or "
            "name its rope_type"
        )
    return default if theta is None else theta, scaling

"""Folders of models that say one thing in two places, or keep it where only transformers looks. If the import reads the
folder, the model computes what transformers computes. Otherwise an error names both places."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from sagetrain.config import ConfigError
from sagetrain.config.load import load_config
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.load import load_run, open_run
from sagetrain.interop.exporting import export
from sagetrain.interop.families import DEFAULTS, FAMILIES
from sagetrain.interop.importing import import_folder
from transformers_models import LLAMA3, SIZES, YARN, check_logits, edit, save

EMBEDDING, HEAD, WHOLE, INDEX = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.safetensors",
    "model.safetensors.index.json",
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {
        "llama": save(root / "llama", LlamaConfig(**SIZES)),
        "shards": save(root / "shards", LlamaConfig(**SIZES), shard="40KB"),
        "qwen": save(root / "qwen", Qwen3Config(**SIZES | {"head_dim": 128, "num_key_value_heads": 4})),
        # hidden_size is no multiple of the number of heads, which transformers takes with this class alone.
        "mistral": save(
            root / "mistral", MistralConfig(**SIZES | {"num_attention_heads": 24, "num_key_value_heads": 8})
        ),
    }


class Folder:
    """A copy of a published folder that is spoiled, imported, and compared with the model that transformers makes of
    it."""

    def __init__(self, source: Path, root: Path):
        self.path, self.run, self.said = shutil.copytree(source, root / "in"), root / "run", list[str]()

    def config(self, drop: tuple[str, ...] = (), file: str = "config.json", **keys: Any) -> Folder:
        edit(self.path, drop, file, **keys)
        return self

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], None], file: str = WHOLE) -> Folder:
        tensors = load_file(self.path / file)
        change(tensors)
        save_file({name: each.clone() for name, each in tensors.items()}, self.path / file, metadata={"format": "pt"})
        return self

    def as_transformers(self) -> str:
        """Import the folder, compare the logits with those of transformers, and return the notes on the way."""
        import_folder(self.path, self.run, report=self.said.append)
        check_logits(self.path, self.run, atol=2e-4)
        return "\n".join(self.said)

    def refused(self, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            import_folder(self.path, self.run)
        assert not self.run.exists() and not [*self.run.parent.glob(".writing-*")]


@pytest.fixture
def copy(published: dict[str, Path], tmp_path: Path) -> Callable[..., Folder]:
    return lambda name="llama": Folder(published[name], tmp_path)


# -- embedding and head ------------------------------------------------------------------------------------------------


def test_a_head_of_its_own_is_kept_though_the_folder_says_tied(copy: Callable[..., Folder], tmp_path: Path) -> None:
    folder = copy().config(tie_word_embeddings=True)
    assert "lm_head.weight is stored beside model.embed_tokens.weight with other values" in folder.as_transformers()
    export(folder.run, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert load_file(tmp_path / "out" / WHOLE)[HEAD].equal(load_file(folder.path / WHOLE)[HEAD])


def test_tied_matrices_are_read_under_either_name(copy: Callable[..., Folder], tmp_path: Path) -> None:
    folder = copy().config(tie_word_embeddings=True)
    # The folder has both tensors, and they are equal.
    folder.tensors(lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
    assert "stored" not in folder.as_transformers() and load_run(folder.run, print).cfg.model.tie_embeddings
    shutil.rmtree(folder.run)
    folder.tensors(lambda tensors: tensors.pop(EMBEDDING))
    assert "embed_tokens.weight is stored as lm_head.weight alone, and tied" in folder.as_transformers()
    export(folder.run, tmp_path / "out")
    assert load_file(tmp_path / "out" / WHOLE).keys() & {EMBEDDING, HEAD} == {EMBEDDING}


@pytest.mark.parametrize(("stored", "lacking"), [(EMBEDDING, HEAD), (HEAD, EMBEDDING)])
def test_one_matrix_of_two_is_no_model(copy: Callable[..., Folder], stored: str, lacking: str) -> None:
    message = rf"tie_word_embeddings false, .* {lacking} is missing: set it to true if {stored} is both"
    copy().tensors(lambda tensors: tensors.pop(lacking)).refused(message)


def test_tensors_of_a_bare_model_are_read(copy: Callable[..., Folder]) -> None:
    """Embedding models of Qwen3 are published like this."""

    def bare(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[HEAD]
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    folder = copy("qwen").config(tie_word_embeddings=True).tensors(bare)
    assert "have no model. before their names" in folder.as_transformers()


# -- rows and tokens ---------------------------------------------------------------------------------------------------


def test_rows_that_config_json_does_not_count(copy: Callable[..., Folder], model: Path) -> None:
    folder = copy()
    shutil.copyfile(model, folder.path / "tokenizer.model")
    message = r"embed_tokens.weight has 352 rows, .* says vocab_size 350, the tokenizer has 350 tokens: rows were added"
    folder.config(vocab_size=350).refused(message)
    folder.config(vocab_size=352)

    def longer(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EMBEDDING] = torch.cat([tensors[EMBEDDING], tensors[EMBEDDING][:1]])

    folder.tensors(longer).refused(r"embed_tokens.weight has 353 rows, .* says vocab_size 352")


def test_a_token_that_was_added_to_the_tokenizer_alone(copy: Callable[..., Folder], model: Path) -> None:
    from sagetrain.interop.tokenizer_files import tokenizer_files

    folder = copy()
    for name, content in tokenizer_files(Tokenizer.load(model), 256).items():
        (folder.path / name).write_bytes(content)
    (folder.path / "tokenizer.model").unlink()
    tree = json.loads((folder.path / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for number, text in ((350, "<a>"), (351, "<b>"), (352, "<pad>")):
        tree["added_tokens"].append({"id": number, "content": text, **flags})
    (folder.path / "tokenizer.json").write_text(json.dumps(tree))
    folder.refused(
        r"353 tokens, .* vocab_size 352: the model has no row for 1 of them, among them <pad> \(352\).*or name the tok"
    )


# -- config.json -------------------------------------------------------------------------------------------------------


ROPE_AGREES: list[dict[str, Any]] = [
    {"rope_scaling": LLAMA3, "rope_theta": 500.0, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    {"rope_scaling": {**LLAMA3, "type": "llama3"}, "rope_theta": 500.0, "rope_parameters": None},
    {"rope_scaling": {**YARN, "rope_theta": 500.0}, "rope_parameters": None},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 500.0, "rope_parameters": None},
    {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0},
     "original_max_position_embeddings": 64},
    {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 500.0, "rope_scaling": None},
    {"rope_parameters": None, "rope_theta": 500.0},
    {"rope_parameters": None},
]  # fmt: skip


@pytest.mark.parametrize("keys", ROPE_AGREES, ids=range(len(ROPE_AGREES)))
def test_rope_wherever_it_is_written(copy: Callable[..., Folder], keys: dict) -> None:
    said = copy().config(**keys).as_transformers()
    assert ("has no rope_theta: 10000.0 is taken" in said) == (keys == {"rope_parameters": None})


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForCausalLM, .* save its language model"),
    ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel'\]: not one of LlamaForCausalLM, Mistral"),
    ({"architectures": None, "model_type": "gpt2"}, r"architectures \[\]: not one of"),
    ({"attention_bias": True}, "attention_bias True: SageTrain computes these models with False alone"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu': .* with 'silu' alone"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "RoPE longrope: not one of default, ll"),
    ({"rope_parameters": {**YARN, "mscale": 0.7}}, r"RoPE yarn with \{'mscale': 0.7\}"),
    ({"rope_parameters": {**YARN, "factor": None}}, "factor None: "),
    ({"num_hidden_layers": 0}, "num_hidden_layers 0 is no whole number above 0"),
    ({"head_dim": 8}, r"q_proj\.weight has the shape \(64, 32\), .*json says \(32, 32\) by num_attention_heads, "),
    ({"rope_scaling": {**LLAMA3, "factor": 4.0}, "rope_parameters": LLAMA3}, "rope_scaling .* and rope_parameters "),
    ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "rope_scaling .* and rope_parameters .* contradict each other"),
    # A published model's card says to add this to a file that transformers 5 wrote. transformers then loses the theta.
    ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
     r"rope_scaling .*\(rope_theta 10000.0\) and rope_parameters .*\(rope_theta 1000000.0\)"),
    ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta 10000.0 contradicts rope_theta beside"),
    ({"rope_parameters": {**LLAMA3, "type": "yarn"}}, "rope_type 'llama3' contradicts type 'yarn'"),
    ({"rope_parameters": {**LLAMA3, "type": "default"}}, "rope_type 'llama3' contradicts type 'default'"),
    ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 64}, "embeddings 32 contradicts .*it, 64"),
    ({"rope_parameters": {"factor": 8.0}}, "RoPE default with {'factor': 8.0}: .* or name its rope_type"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "RoPE default with {'full_attention'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3 without low_freq_factor and high_freq"),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": 8.0}}, "low_freq_factor 8.0 is not below high_freq_factor 4.0"),
    ({"rope_parameters": {**YARN, "beta_slow": 64}}, "beta_slow 64.0 is not below beta_fast 32.0"),
    ({"rope_parameters": YARN, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"},
     "rope_parameters .*'yarn'.* names no type of layers, and transformers drops what it says: write "),
    ({"rope_theta": 1e4, "rope_parameters": None, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3",
      "num_hidden_layers": 4}, r"rope_theta 10000.0: transformers 4 takes it for all layers, and .* 5 takes 500000.0"),
    ({"rope_theta": 0, "rope_parameters": None}, "rope_theta 0: Input should be greater than 1"),
    ({"rope_parameters": [1]}, r"rope_parameters \[1\] holds no keys"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, r"RoPE \['yarn'\]: not one of default"),
    ({"architectures": {"0": "LlamaForCausalLM"}}, "architectures .* is no list of names; copy the folder again"),
    ({"layer_types": [["full_attention"]]}, r"layer_types \[\['full_attention'\]\] is no list of names"),
    ({"configuration_files": True}, "configuration_files True is no list of names"),
    ({"sliding_window_pattern": "x", "rope_parameters": None, "architectures": ["Olmo3ForCausalLM"],
      "model_type": "olmo3"},
     "sliding_window_pattern 'x' is no whole number above 0"),
    ({"rope_parameters": {"sliding_attention": [1], "full_attention": {}}, "architectures": ["Olmo3ForCausalLM"],
      "model_type": "olmo3"}, r"sliding_attention \[1\] holds no keys"),
    ({"rope_parameters": YARN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
      "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9},
     "RoPE yarn with sliding_window 9: SageTrain does not scale RoPE in layers with a window"),
    ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": True,
      "max_window_layers": "x"}, "max_window_layers 'x' is no whole number above 0"),
    ({"use_sliding_window": True}, "use_sliding_window True: SageTrain computes these models with False alone"),
    ({"model_type": "qwen3"}, "architectures LlamaForCausalLM contradicts model_type 'qwen3'"),
    ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "architectures .*'Qwen3ForCausalLM'.: not one of"),
    ({"architectures": ["LLaMAForCausalLM"]}, r"is the model of model_type 'llama', set them to \['LlamaForC"),
    ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers says 2"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ({"head_dim": None, "num_attention_heads": 5}, "no head_dim, and hidden_size 32 is no multiple of num_attent.*5"),
    ({"max_position_embeddings": "256"}, "max_position_embeddings '256' is no whole number"),
    ({"max_position_embeddings": 10**30}, "max_position_embeddings 1000.* is larger than any number of a run"),
    ({"rms_norm_eps": None}, "rms_norm_eps None: "),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false': "),
    ({"num_hidden_layers": 3}, r"9 of them, first: model\.layers\.2\..*num_hidden_layers 3, .* hold 2 layers: set"),
    ({"num_hidden_layers": 1}, r"9 tensors .* first: model\.layers\.1\..*num_hidden_layers 1, .* hold 2 layers"),
    ({"intermediate_size": 64}, r"mlp.gate_proj.weight has the shape \(48, 32\), .*\(64, 32\) by intermediate_size"),
    ({"vocab_size": None}, "vocab_size None is no whole number above 0"),
    ({"is_causal": False}, "is_causal False: SageTrain computes these models with True alone"),
    ({"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config .* SageTrain computes these models with {}"),
    ({"configuration_files": ["config.json", "config.4.0.0.json"]}, "configuration_files names config.4.0.0.json, "),
    ({"bos_token_id": [1]}, r"config.json: bos_token_id \[1\] is no token id; copy"),
    ({"eos_token_id": "</s>"}, "config.json: eos_token_id '</s>' is no token id and no list of them"),
    ({"transformers_weights": "../other/model.safetensors"}, "transformers_weights .*no file of this folder"),
    ({"transformers_weights": "other.safetensors"}, "has no other.safetensors, which config.json names"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), CONTRADICTIONS, ids=[", ".join(keys) for keys, _ in CONTRADICTIONS])
def test_a_config_json_that_is_no_model_of_ours(copy: Callable[..., Folder], keys: dict, message: str) -> None:
    """The file names what SageTrain does not compute, or contradicts itself or the weights."""
    copy().config(**keys).refused(message)


def test_layer_types_make_another_class_of_a_mistral(copy: Callable[..., Folder], tmp_path: Path) -> None:
    folder = copy("mistral").config(layer_types=["full_attention", "sliding_attention"], sliding_window=64)
    folder.refused("layer_types .* SageTrain computes full_attention alone")
    folder.config(layer_types=["full_attention"] * 2).as_transformers()
    assert load_config(folder.run / "config.yaml").model.windows is None
    assert export(folder.run, tmp_path / "out").architecture == "MistralForCausalLM"
    Folder(tmp_path / "out", tmp_path / "second").as_transformers()


def test_biases_that_config_json_denies(copy: Callable[..., Folder]) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    copy().tensors(lambda tensors: tensors.update(bias)).refused(
        r"first: model.layers.0.self_attn.q_proj.bias \(.* says attention_bias and mlp_bias false\)"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    ours, theirs = FAMILIES[name], AutoConfig.for_model(FAMILIES[name].model_type)
    known = {**DEFAULTS, **ours.defaults}
    assert {key: getattr(theirs, key) for key in known} == known
    # The keys are those of a model with two heads that are as wide as four.
    for key in ("num_key_value_heads", "head_dim"):
        other = type(theirs)(hidden_size=64, num_attention_heads=2)
        derived = {"num_key_value_heads": 2, "head_dim": 32} | known
        # Some classes derive head_dim when they need it, and have none, or null, until then.
        assert (getattr(other, key, None) or derived[key]) == derived[key]


def test_keys_that_no_reader_of_the_class_knows_are_said(copy: Callable[..., Folder]) -> None:
    """Other classes scale by such keys. A config.json that transformers wrote has none of them."""
    folder = copy()
    assert "not read, as" not in folder.as_transformers()
    shutil.rmtree(folder.run)
    said = folder.config(logits_scaling=8.0, rope_interleaved=True, sep_token_id=None).as_transformers()
    assert "not read, as LlamaForCausalLM of transformers does not: logits_scaling 8.0, rope_interleaved True" in said


@pytest.mark.parametrize(("name", "keys"), [("qwen", ("head_dim",)), ("mistral", ("num_key_value_heads",))])
def test_keys_that_are_not_there_are_the_class_s(copy: Callable[..., Folder], name: str, keys: tuple[str]) -> None:
    folder = copy(name).config(drop=(*keys, "architectures"))
    if name == "mistral":  # Other models keep the window under a key of their own.
        folder.config(head_dim=16, sliding_window=None)
    assert f"taken as transformers takes what is not there: {keys[0]} " in folder.as_transformers()


def test_dtypes_of_config_json_and_files(copy: Callable[..., Folder], tmp_path: Path) -> None:
    folder = copy().config(dtype="bfloat16", torch_dtype="float32", attention_dropout=0.1)
    assert "attention_dropout 0.1: SageTrain drops nothing" in folder.as_transformers()
    shutil.rmtree(folder.run)
    assert "says dtype bfloat16, and tensors are stored in float32 (21 of 21)" in folder.as_transformers()
    export(folder.run, tmp_path / "out")
    assert {each.dtype for each in load_file(tmp_path / "out" / WHOLE).values()} == {torch.float32}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(copy: Callable[..., Folder], value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = copy().tensors(lambda tensors: tensors[name][3, :2].fill_(value))
    folder.refused(rf"model.safetensors: {name}: 2 of 1,536 values are NaN or infinite.*earlier save")


# -- where a text ends -------------------------------------------------------------------------------------------------


def test_ends_of_config_json_and_generation_config_json(
    copy: Callable[..., Folder], model: Path, tmp_path: Path
) -> None:
    folder = copy().config(eos_token_id=7, bos_token_id=1, pad_token_id=9, temperature=0.9)
    settings = {"eos_token_id": [5, 6], "temperature": 0.6, "do_sample": True, "transformers_version": "5"}
    folder.config(file="generation_config.json", drop=("pad_token_id",), **settings)
    shutil.copyfile(model, folder.path / "tokenizer.model")
    said = folder.as_transformers()
    assert "config.json says temperature, which is not read beside generation_config.json" in said
    assert "config.json says eos_token_id 7, generation_config.json says [5, 6]: the latter counts" in said
    assert "the tokenizer's end-of-text token is 2, eos_token_id says [5, 6]: a text ends with each" in said
    done = export(folder.run, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert theirs.eos_token_id == done.eos_token_id == [5, 6, 2]
    assert (theirs.pad_token_id, theirs.temperature, theirs.do_sample) == (9, 0.6, True)
    again = Folder(tmp_path / "out", tmp_path / "second")
    assert "eos_token_id" not in again.as_transformers()
    assert open_run(again.run, print).state.texts.end_tokens == [5, 6, 2]


def test_ends_of_config_json_alone(copy: Callable[..., Folder], tmp_path: Path) -> None:
    keys = {"eos_token_id": [7, 300], "pad_token_id": 352, "temperature": 0.5, "do_sample": True}
    folder = copy().config(**keys, auto_map={"AutoModel": "own.Model"})
    (folder.path / "generation_config.json").unlink()
    import_folder(folder.path, folder.run, report=folder.said.append)
    said = "\n".join(folder.said)
    # transformers does not load a folder with a pad_token_id beyond the rows.
    assert "pad_token_id 352 is no token of the model (vocab_size 352): it never comes and is left out" in said
    assert "auto_map names code of its own" in said and "temperature" not in said
    export(folder.run, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (theirs.eos_token_id, theirs.temperature, theirs.do_sample) == ([7, 300], 0.5, True)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("key", "value"), [("eos_token_id", [7, 400]), ("eos_token_id", -1), ("bos_token_id", 352)])
def test_ends_that_are_no_tokens_are_refused(copy: Callable[..., Folder], file: str, key: str, value: object) -> None:
    folder = copy()
    (folder.path / "generation_config.json").unlink()
    folder.config(file=file, **{key: value})
    number = value[-1] if isinstance(value, list) else value
    folder.refused(rf"/{file}: {key} {number} is no token of the model, whose ids are 0 to 351 .*write the id of the")


# -- files of weights --------------------------------------------------------------------------------------------------


def sharded(folder: Folder) -> tuple[dict[str, str], str, str]:
    """Return the index, the file of the embedding, and the last file."""
    index = json.loads((folder.path / INDEX).read_text())["weight_map"]
    return index, index[EMBEDDING], sorted({*index.values()})[-1]


def test_a_tensor_in_two_files(copy: Callable[..., Folder]) -> None:
    folder = copy("shards")
    _, first, last = sharded(folder)
    embedding = load_file(folder.path / first)[EMBEDDING]
    folder.tensors(lambda tensors: tensors.update({EMBEDDING: embedding}), last)
    assert "embed_tokens" not in folder.as_transformers()  # The values are the same.
    shutil.rmtree(folder.run)
    folder.tensors(lambda tensors: tensors.update({EMBEDDING: embedding + 1}), last)
    folder.refused(rf"{EMBEDDING} is in {first}, where .*index.json says it is, and with other values in {last}")


def test_an_index_that_names_too_little(copy: Callable[..., Folder]) -> None:
    folder = copy("shards")
    index, first, _ = sharded(folder)
    norm = "model.layers.0.input_layernorm.weight"  # The tensor is in a file with others.
    folder.config(file=INDEX, weight_map={name: file for name, file in index.items() if name != norm})
    assert f"1 tensor that {INDEX} does not name, which transformers reads too" in folder.as_transformers()
    shutil.rmtree(folder.run)
    folder.config(file=INDEX, weight_map={name: file for name, file in index.items() if name != EMBEDDING})
    folder.refused(rf"{EMBEDDING} is missing \({first} has it\): set it to true if")


def test_frequencies_of_early_folders_are_passed_over(copy: Callable[..., Folder]) -> None:
    """They are computed from config.json. Some folders have them in the index alone."""
    folder = copy("shards")
    index, first, _ = sharded(folder)
    frequencies = {f"model.layers.0.self_attn.rotary_emb.{name}": torch.ones(8) for name in ("inv_freq", "cos_cached")}
    folder.tensors(lambda tensors: tensors.update(frequencies), first)
    frequencies["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    folder.config(file=INDEX, weight_map=index | dict.fromkeys(frequencies, first))
    assert "not read" not in folder.as_transformers()


def test_an_index_that_contradicts_its_files(copy: Callable[..., Folder]) -> None:
    folder = copy("shards")
    index, first, last = sharded(folder)

    def refused(weight_map: Any, message: str) -> None:
        folder.config(file=INDEX, weight_map=weight_map).refused(message)

    refused(index | {EMBEDDING: last}, rf"says that {last} holds {EMBEDDING}, which it does not \({first} has it\)")
    refused(index | {"model.none": last}, rf"says that {last} holds model.none, which it does not; copy")
    refused({}, "weight_map names no file")
    for name in (f"../{folder.path.name}/{first}", str(folder.path / first), "a/../b.safetensors", 3, None,
                 r"C:\a.safetensors", r"..\a.safetensors"):  # fmt: skip
        refused(index | {EMBEDDING: name}, "weight_map: model.embed_tokens.weight .*: no file of this folder")
    refused(index | {EMBEDDING: "pytorch_model.bin"}, "'pytorch_model.bin': no .safetensors, and no other file is read")
    folder.config(file=INDEX, weight_map=index)
    merged = {name: each for file in {*index.values()} for name, each in load_file(folder.path / file).items()}
    save_file(merged, folder.path / WHOLE, metadata={"format": "pt"})
    folder.refused(rf"has {WHOLE}, which transformers reads, and {INDEX}, which names other files")
    refused(dict.fromkeys(index, WHOLE) | {"model.none": WHOLE}, "holds model.none, which it does not")
    folder.config(file=INDEX, weight_map=dict.fromkeys(index, WHOLE))
    assert f"not read, nor by transformers: {first}, " in folder.as_transformers()


def test_files_below_and_beside(copy: Callable[..., Folder]) -> None:
    folder = copy("shards")
    index, *_ = sharded(folder)
    (folder.path / "part").mkdir()
    for file in {*index.values()}:
        (folder.path / file).rename(folder.path / "part" / file)
    folder.config(file=INDEX, weight_map={name: f"part/{file}" for name, file in index.items()})
    (folder.path / "pytorch_model.bin").touch()
    (folder.path / "consolidated.safetensors").touch()
    assert "not read, nor by transformers: consolidated.safetensors, pytorch_model.bin" in folder.as_transformers()
    (folder.path / "adapter_config.json").write_text("{}")
    shutil.rmtree(folder.run)
    folder.refused("adapter_config.json: transformers takes this folder for an adapter of another model")


def test_a_pointer_in_place_of_a_file(copy: Callable[..., Folder]) -> None:
    folder = copy()
    (folder.path / WHOLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    folder.refused(r"model.safetensors is a pointer of Git LFS, not the file: run `git lfs pull`")
    (folder.path / WHOLE).rename(folder.path / "config.json")
    folder.refused(r"config.json is a pointer of Git LFS, not the file: run `git lfs pull`")


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if old in each]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return rename


def quantized(*parts: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update(
        {f"model.layers.0.mlp.up_proj.{part}": torch.zeros(2, dtype=torch.int32) for part in parts}
    )


WHOLE_MODEL = "save the whole model .*zero_to_fp32.py"
NAMES: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (renamed("", "_orig_mod."), r"lacks 21 of them, .* there as _orig_mod\..* with '_orig_mod\.' in its name"),
    (renamed("", "language_model."), r"with 'language_model\.' in its name, as in a model inside of another"),
    # The head has the name that it should have, so only the embedding is missing of the two.
    (renamed("model.", "model.language_model."), r"lacks 20 of them, .* with 'language_model\.' in its name"),
    (renamed("layers.1.", "layers.1._checkpoint_wrapped_module."), "9 of them, .* with '_checkpoint_wrapped_module"),
    (renamed("q_proj.", "q_proj.base_layer."), "of an adapter beside the model; merge the two"),
    (lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.lora_A.default.weight": torch.ones(2)}),
     "the folder holds 1 tensor that .* does not have, first.* of an adapter beside the model"),
    (quantized("qweight", "qzeros", "scales"), "3 tensors that .* its weights are quantized, which are not read"),
    (quantized("weight_scale_inv"), "1 tensor that .* its weights are quantized"),
    (lambda tensors: (quantized("qweight", "g_idx")(tensors), tensors.pop("model.layers.0.mlp.up_proj.weight")),
     "lacks 1 of them, .* its weights are quantized, .* published in 16 bits"),
    (renamed("q_proj", "qkv_proj"), r"layers\.0\.self_attn\.qkv_proj\.weight holds several matrices in one"),
    (renamed("lm_head", "score"), "score.weight is the head of a classifier or of a reward model"),
    (renamed("model.layers", "blk"), "lacks 18 of them, .* the same number of tensors is there under other names"),
    (lambda tensors: tensors.update({EMBEDDING: torch.empty(0)}), rf"embed_tokens.weight .* \(0,\), .* {WHOLE_MODEL}"),
    (lambda tensors: tensors.update({HEAD: tensors[HEAD].flatten()}), rf"\(11264,\), .* \(352, 32\).* {WHOLE_MODEL}"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), NAMES, ids=range(len(NAMES)))
def test_names_and_shapes_that_show_what_a_folder_is(
    copy: Callable[..., Folder], change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    copy().tensors(change).refused(message)


FOLDERS: list[tuple[dict[str, str | None], str]] = [
    ({"adapter_config.json": "{}"}, r"holds an adapter of another model alone \(adapter_config.json\): merge the two"),
    ({"params.json": "{}", "consolidated.00.pth": ""}, "but params.json: .* as Meta or Mistral publish them"),
    ({"model-Q4_K_M.gguf": "GGUF"}, "but GGUF files, which are not read"),
    ({"checkpoint-9/config.json": "{}", "checkpoint-10/config.json": "{}"}, "; name .*/checkpoint-10, or another"),
    ({"snapshots/0/config.json": "{}", "refs/main": "0"}, "no config.json; name .*/in/snapshots/0$"),
    ({}, "no config.json; name a Hugging Face folder that has it"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "message"), FOLDERS, ids=[", ".join(files) for files, _ in FOLDERS])
def test_folders_and_files_that_are_no_model(copy: Callable[..., Folder], files: dict[str, str], message: str) -> None:
    folder = copy()
    (folder.path / "config.json").unlink()
    for name, text in files.items():
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text(text)
    folder.refused(message)
    # A file is no folder, whatever it holds.
    file = folder.path / next(iter(files), WHOLE)
    folder.path = file
    folder.refused("GGUF files are not read" if file.suffix == ".gguf" else "is a file; name the Hugging Face folder")


def test_weights_whose_index_or_target_is_missing(copy: Callable[..., Folder]) -> None:
    folder = copy("shards")
    (folder.path / INDEX).unlink()
    folder.refused(rf"has neither {WHOLE} nor .*, but 5 other files, first: model-00001-of-.*; copy the index")
    (folder.path / WHOLE).symlink_to("blobs/0")
    folder.refused(r"model\.safetensors is a link to blobs/0, which is not there: copy the folder with the files")


def test_weights_under_a_name_of_their_own(copy: Callable[..., Folder]) -> None:
    folder = copy()
    (folder.path / WHOLE).rename(folder.path / "mine.safetensors")
    folder.refused(r"has neither model.safetensors nor .* \(there is mine.safetensors: rename")
    folder.config(transformers_weights="mine.safetensors").as_transformers()

"""`sagetrain import`: models of transformers compute the same here as there, and go back bit for bit."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import transformers_models
from prepare_inputs import published_tokenizer
from runs import sagetrain
from sagetrain.config import ConfigError
from sagetrain.config.check import check
from sagetrain.config.load import load_config
from sagetrain.config.rules.model import rope_scaling
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.evaluate import evaluate_texts
from sagetrain.inference.generate import Sampling, generate
from sagetrain.inference.load import load_run
from sagetrain.interop.exporting import export
from sagetrain.interop.importing import import_folder
from sagetrain.interop.tokenizer_files import tokenizer_files
from transformers_models import check_gradients, check_logits, edit, save

SIZES = transformers_models.SIZES | {"bos_token_id": 1, "eos_token_id": 2}
LLAMA3, YARN = transformers_models.LLAMA3 | {"rope_theta": 500.0}, transformers_models.YARN | {"rope_theta": 1000.0}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-3": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None, rms_norm_eps=1e-5),
    "mistral-windows": lambda: MistralConfig(**SIZES, sliding_window=20),
    "qwen2.5-windows": lambda: Qwen2Config(
        **SIZES | {"num_hidden_layers": 3},
        use_sliding_window=True,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "qwen-windows": lambda: Qwen3Config(
        **SIZES | {"num_hidden_layers": 3}, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen2.5": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "olmo3": lambda: Olmo3Config(**SIZES | {"num_hidden_layers": 6}, sliding_window=48),
    "olmo3-yarn": lambda: Olmo3Config(
        **SIZES | {"num_hidden_layers": 3},
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        sliding_window=20,
        query_pre_attn_scalar=24,
        layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "qwen": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen-yarn": lambda: Qwen3Config(**SIZES, rope_parameters=YARN),
}

EXPERTS = {"num_experts_per_tok": 2, "pad_token_id": None}
MIXTURES: dict[str, Callable[[], Any]] = {
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES | EXPERTS, num_experts=6, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "mixtral": lambda: MixtralConfig(**SIZES | EXPERTS, num_local_experts=4, sliding_window=20),
    "olmoe": lambda: OlmoeConfig(**SIZES | EXPERTS | {"head_dim": 8}, num_experts=5),
    "gpt-oss": lambda: GptOssConfig(**SIZES | EXPERTS, num_local_experts=4, sliding_window=20),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with several files of weights."""
    return save(tmp_path_factory.mktemp("import") / "llama", LlamaConfig(**SIZES), shard="40KB")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_same(folder: Path, again: Path) -> None:
    before, after = weights(folder), weights(again)
    assert before.keys() == after.keys()
    assert [n for n in before if before[n].dtype != after[n].dtype or not before[n].equal(after[n])] == []


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal_and_tensors_go_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "in", MODELS[name]())
    if name == "olmo3":  # The form that transformers 4 has written, with another name of the activation.
        scaling = {key: value for key, value in YARN.items() if key != "rope_theta"}
        edit(folder, ("rope_parameters",), rope_theta=500000, hidden_act="swish", rope_scaling=scaling)
    if name == "qwen-windows":  # The class takes those from max_window_layers on.
        config = edit(folder, ("layer_types",))
        assert config["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    said: list[str] = []
    done = import_folder(folder, tmp_path / "run", report=said.append)
    assert done.parameters == sum(tensor.numel() for tensor in weights(folder).values())
    assert len(said) == 1 and "has no tokenizer.json" in said[0]
    # A run that takes this file would be told of keys that its user did not write.
    assert [*rope_scaling(load_config(tmp_path / "run/config.yaml").model)] == []
    check_logits(folder, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    check_same(folder, tmp_path / "out")
    check_logits(tmp_path / "out", tmp_path / "run")
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_have_the_same_logits_and_go_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Experts of a layer are two tensors of a checkpoint, and one each in a folder; a file holds a layer at most."""
    folder = save(tmp_path / "in", MIXTURES[name]())
    done = import_folder(folder, tmp_path / "run")
    there = weights(folder)
    assert (done.parameters, done.tensors) == (sum(tensor.numel() for tensor in there.values()), len(there))
    check_logits(folder, tmp_path / "run")
    if name == "gpt-oss":  # The modules of the others have their experts in other tensors than folders.
        check_gradients(folder, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    check_same(folder, tmp_path / "out")
    theirs, ours = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "out"))
    assert {key: ours.get(key) for key in theirs if key.startswith(("num_exp", "norm_topk", "mlp_only", "moe_"))} == {
        key: value for key, value in theirs.items() if key.startswith(("num_exp", "norm_topk", "mlp_only", "moe_"))
    }


def test_experts_in_mxfp4_become_bf16(tmp_path: Path) -> None:
    """The released folders of GPT-OSS. Blocks and scales of a tensor may be in different files. transformers wants the
    size of a window from a model without windows, too."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "layer_types": ["full_attention"] * 2}
    folder = save(tmp_path / "in", GptOssConfig(**SIZES | EXPERTS | sizes, num_local_experts=4), torch.bfloat16)
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    wanted, scales = {}, {}
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
        exponents = torch.randint(115, 125, shape, dtype=torch.uint8, generator=draw)
        wanted[name] = convert_moe_packed_tensors(blocks.clone(), exponents.clone())
        tensors[f"{name}_blocks"], scales[f"{name}_scales"] = blocks, exponents
    parts = {"first.safetensors": tensors, "second.safetensors": scales}
    (folder / "model.safetensors").unlink()
    for file, part in parts.items():
        save_file(part, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit(folder, quantization_config={"quant_method": "mxfp4"})
    said: list[str] = []
    done = import_folder(folder, tmp_path / "run", report=said.append)
    assert len(said) == 1 and "has no tokenizer.json" in said[0]
    export(tmp_path / "run", tmp_path / "out")
    found = weights(tmp_path / "out")
    assert len(wanted) == 4 and done.tensors == len(found)
    for name, value in wanted.items():
        assert found[name].dtype == torch.bfloat16 and found[name].equal(value), name
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    check_logits(tmp_path / "out", tmp_path / "run")
    (cut := tensors | scales)[f"{name}_blocks"], cut[f"{name}_scales"] = (each[0] for each in (blocks, exponents))
    save_file(cut, folder / "cut.safetensors")
    index["weight_map"] = dict.fromkeys(cut, "cut.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"{name}_blocks"):
        import_folder(folder, tmp_path / "again")
    edit(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match="quantization_config: weights that are quantized are not read but in mxfp4"):
        import_folder(folder, tmp_path / "again")


def test_a_tokenizer_that_qwen2_overrules_is_said(tmp_path: Path) -> None:
    """AutoTokenizer cuts texts as Qwen 2's tokenizer does in every folder of this model_type."""
    folder, out, text = save(tmp_path / "in", MODELS["qwen2.5"]()), tmp_path / "out", "Hi  e\u0301\n\n12"
    files = tokenizer_files(tokenizer := published_tokenizer(vocab_size=350), 256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(files[name])
    said: list[str] = []
    import_folder(folder, tmp_path / "run", report=said.append)
    assert "(tokenizer_class Qwen2Tokenizer by model_type qwen2, not PreTrainedTokenizerFast)" in said[0]
    export(tmp_path / "run", out, report=said.append)
    assert "AutoTokenizer will give other ids than the run had" in said[-1] and len(said) == 2
    of_class, as_it_is = (each.from_pretrained(out).encode(text) for each in (AutoTokenizer, PreTrainedTokenizerFast))
    assert of_class != tokenizer.encode(text) == as_it_is


@pytest.mark.parametrize("name", ["qwen", "qwen2.5", "gemma3"])
def test_experts_of_a_dense_model_begin_with_its_logits(name: str, tmp_path: Path) -> None:
    """Each expert is a copy of the MLP, so logits are the dense model's whatever the router says."""
    folder = save(tmp_path / "in", MODELS[name]())
    done = import_folder(folder, tmp_path / "run", experts=4, per_token=2)
    assert done.tensors == len(weights(folder))
    model = load_config(tmp_path / "run/config.yaml").model
    assert model.experts and (model.experts.number, model.experts.per_token) == (4, 2)
    check_logits(folder, tmp_path / "run")
    saved = weights(tmp_path / "run/checkpoints/step-00000000")
    routers = [saved[f"blocks.{layer}.mlp.router.weight|weight"] for layer in range(2)]
    assert not routers[0].equal(routers[1]) and all(0.01 < router.std() < 0.03 for router in routers)


def test_models_that_become_no_mixture(tmp_path: Path) -> None:
    for name, experts, per_token, message in (
        ("qwen", 1, 1, "experts 1: a mixture has 2 experts or more"),
        ("qwen", 4, 5, "per-token 5: a token goes to 1 to 4 of 4 experts"),
        ("qwen", 1024, 2, "model.experts.number = 1024: is more than 1,023"),
    ):
        folder = tmp_path / name
        if not folder.exists():
            save(folder, MODELS[name]())
        with pytest.raises(ConfigError, match=message):
            import_folder(folder, tmp_path / "run", experts=experts, per_token=per_token)
    folder = save(tmp_path / "mixture", MIXTURES["mixtral"]())
    with pytest.raises(ConfigError, match="MixtralForCausalLM has experts already: leave --experts out"):
        import_folder(folder, tmp_path / "run", experts=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_several_files_go_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save(tmp_path / "in", LlamaConfig(**SIZES), dtype, shard="20KB")
    import_folder(folder, tmp_path / "run", shard_bytes=15_000)
    assert len([*tmp_path.glob("run/checkpoints/step-00000000/weights-*.safetensors")]) > 3
    export(tmp_path / "run", tmp_path / "out", shard_bytes=30_000)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    check_same(folder, tmp_path / "out")
    check_logits(folder, tmp_path / "run")


def test_what_was_exported_comes_back_with_its_tokenizer(llama: Path, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "in")
    shutil.copyfile(model, folder / "tokenizer.model")
    first = sagetrain("import", folder, tmp_path / "run")
    assert first.returncode == 0 and first.stderr == ""
    assert "LlamaForCausalLM, 44,192 parameters in 21 tensors, tokenizer tokenizer.model" in first.stdout
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert f"sagetrain config finetune --model {tmp_path / 'run'} --data" in first.stdout
    assert config["attention"]["backend"] == "sdpa" and "attention.backend is sdpa" in first.stdout
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").is_file()
    import_folder(tmp_path / "out", tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again/tokenizer.model").sha256 == Tokenizer.load(model).sha256
    again = load_run(tmp_path / "again", print)
    assert len([*generate(again, ["abc"], Sampling(max_tokens=3))]) > 1
    # A SentencePiece model has no template of its own.
    (tmp_path / "out/chat_template.jinja").write_text("{{ messages }}")
    said: list[str] = []
    assert import_folder(tmp_path / "out", tmp_path / "chats", report=said.append).tokenizer == "tokenizer.json"
    assert "tokenizer.json is taken, which has a chat template, not tokenizer.model" in said[0]
    assert Tokenizer.load(tmp_path / "chats/tokenizer.json").chat_template == "{{ messages }}"
    (tmp_path / "out/chat_template.jinja").unlink()
    tree = json.loads((tmp_path / "out/tokenizer.json").read_text())
    (tmp_path / "out/tokenizer.json").write_text(json.dumps(tree).replace('"<0x00>"', '"<new>"'))
    assert import_folder(tmp_path / "out", tmp_path / "new", report=said.append).tokenizer == "tokenizer.json"
    assert re.search(r"tokenizer.json is taken, which has the token '<new>' \(\d+\), not tokenizer.model", said[-1])
    part = {"Sequence": {"id": "A", "type_id": 0}}
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, part],
        "pair": [part, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (tmp_path / "out/tokenizer.json").write_text(json.dumps(tree))
    import_folder(tmp_path / "out", tmp_path / "begun", report=said.append)
    assert "tokenizer.json is taken, which has a post_processor" in said[-1]
    export(tmp_path / "begun", tmp_path / "begun-hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "begun-hf")("abc").input_ids[0] == 1
    with pytest.raises(ConfigError, match="name some with --data"):
        evaluate_texts(again, [], 32)


def test_a_sentencepiece_model_brings_its_bos_along(llama: Path, tmp_path: Path) -> None:
    """The model is as published with Llama 1 and 2. The bos stands before a prompt here, and in the export."""
    folder, published = shutil.copytree(llama, tmp_path / "in"), published_tokenizer(vocab_size=350)
    (folder / "tokenizer.model").write_bytes(published.model)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    import_folder(folder, tmp_path / "run")
    run = load_run(tmp_path / "run", print)
    assert run.texts.prefix == [1] and run.tokenizer.sha256 == published.sha256
    export(tmp_path / "run", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the").input_ids == [1, *published.encode("the")]
    import_folder(tmp_path / "out", tmp_path / "again")
    assert load_run(tmp_path / "again", print).texts.prefix == [1]


def test_a_window_that_is_not_named_is_that_of_the_class(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", MistralConfig(**SIZES, sliding_window=64))
    edit(folder, ("sliding_window",))
    assert import_folder(folder, tmp_path / "run").seq_length == 256
    windows = load_config(tmp_path / "run/config.yaml").model.windows
    assert windows is not None and (windows.tokens, windows.pattern) == (4096, "W")


BAD_MIXTURES = [
    ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "swiglu_limit": 5.0},
     "swiglu_limit 5.0: SageTrain computes these models with 7.0 alone"),
    ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] leave the layers \[1\] .* computes models whose first"),
    ({"decoder_sparse_step": 3}, r"decoder_sparse_step 3 and mlp_only_layers \[0\] leave the layers \[0, 1\] without"),
    ({"num_local_experts": [6]}, r"num_local_experts \[6\] is no whole number above 0"),
    ({"num_experts": 8}, "num_experts 8 contradicts num_local_experts 6; delete the one"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 and num_local_experts 6: a token goes to some"),
    ({"norm_topk_prob": "no"}, "norm_topk_prob 'no' is not true or false; copy"),
    ({"router_aux_loss_coef": "a"}, "router_aux_loss_coef 'a' is not a number; copy"),
    ({"mlp_only_layers": "0"}, "mlp_only_layers '0' is not a list of numbers of layers; copy"),
    ({"moe_intermediate_size": 32}, r"gate_proj.weight has .*\(16, 32\), .* \(32, 32\) by moe_intermediate_size"),
]  # fmt: skip


def test_mixtures_that_cannot_be_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", MIXTURES["qwen3-moe"]())
    config = json.loads((folder / "config.json").read_text())
    for keys, message in BAD_MIXTURES:
        (folder / "config.json").write_text(json.dumps(config | keys))
        with pytest.raises(ConfigError, match=message):
            import_folder(folder, tmp_path / "run")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    folder = save(tmp_path / "in", LlamaConfig(**SIZES | {"vocab_size": 300}))
    shutil.copyfile(model, folder / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"its tokenizer has 350 tokens, .* says vocab_size 300"):
        import_folder(folder, tmp_path / "run")


def test_the_configuration_of_an_import_lacks_data_alone(llama: Path, tmp_path: Path) -> None:
    """A key that the user has not set is not warned about."""
    import_folder(llama, tmp_path / "run")
    changes = [f"training.init_from={tmp_path}/run", f"training.run_dir={tmp_path}/new"]
    (lacking,) = check(load_config(tmp_path / "run/config.yaml", changes), 1)
    assert str(lacking).startswith(
        'data.train.0.path = "none": stands for no data, as in the configuration of an import'
    )


def test_folders_that_are_not_whole(llama: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return shutil.copytree(llama, tmp_path / name)

    def refused(folder: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            import_folder(folder, tmp_path / "run")

    folder = broken("shard")
    second = sorted(folder.glob("*.safetensors"))[1].name
    (folder / second).unlink()
    refused(folder, rf"files of weights are missing \(1 of \d+\), first: {second}; copy")
    folder = broken("short")
    (folder / second).write_bytes((folder / second).read_bytes()[:-100])
    refused(folder, f"{second} cannot be read")
    folder = broken("index")
    (folder / "model.safetensors.index.json").unlink()
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    refused(folder, "could run code; save it anew")
    refused(tmp_path / "none", r"none: no such folder; .* `hf download NAME")
    (tmp_path / "trained/checkpoints").mkdir(parents=True)
    refused(tmp_path / "trained", r"trained is a run of SageTrain, which training\.init_from takes as it is")
    folder = broken("json")
    (folder / "config.json").write_text("{")
    refused(folder, r"config\.json is not valid JSON")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/proc/self/mem")  # Nobody can read its beginning.
    refused(folder, r"config\.json: Input/output error; let this user read it")
    (folder / "config.json").unlink()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 5}')
    refused(folder, "has no num_hidden_layers and no hidden_size and no intermediate_size and no num_attention_heads")
    folder = save(tmp_path / "eight", LlamaConfig(**SIZES))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)},
              folder / "model.safetensors")  # fmt: skip
    refused(folder, r"model\.norm\.weight is F8_E4M3: weights are read in F32, BF16, F16 alone")
    assert not (tmp_path / "run").exists()


def test_layers_whose_sides_8_bits_do_not_take_are_named(tmp_path: Path) -> None:
    import_folder(save(tmp_path / "in", LlamaConfig(**SIZES | {"intermediate_size": 40})), tmp_path / "run")
    said: list[str] = []
    run = load_run(tmp_path / "run", said.append, linear="int8")
    assert [*run.model.matmuls[0]] == ["qkv", "out"]
    (line,) = said
    assert "in all blocks, but for sides that are no multiples of 16 (gate_up 40, down 40) (" in line


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"])
def test_what_gemma_may_compute_more_is_refused(key: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "in", MODELS["gemma3"]())
    edit(folder, **{key: 30.0})
    with pytest.raises(ConfigError, match=rf"{key} 30\.0: SageTrain computes these models with"):
        import_folder(folder, tmp_path / "run")

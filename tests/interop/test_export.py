"""`sagetrain export` writes a folder in which transformers finds the model and the tokenizer that were trained."""

import errno
import json
import os
import random
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Tokenizer as Pipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import saved_runs
from prepare_inputs import TEXTS, published_tokenizer
from runs import sagetrain
from sagetrain.config import ConfigError
from sagetrain.config.errors import CheckpointError
from sagetrain.config.schema import AttentionConfig, ModelConfig, RopeScaling
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.interop import exporting
from sagetrain.interop.exporting import export
from sagetrain.interop.families import family_of
from sagetrain.interop.huggingface import config_json
from sagetrain.interop.tokenizer_files import tokenizer_files
from sagetrain.model.rotary import rotary_tables
from transformers_models import check_logits

LLAMA3 = {"type": "llama3", "factor": 4.0, "original_seq_length": 32}
YARN = {"type": "yarn", "factor": 3.0, "original_seq_length": 32, "beta_fast": 4.0, "beta_slow": 0.25}
# The values are: QK-norm, tied embeddings, RoPE scaling, tensor-parallel size.
RUNS: dict[str, tuple[str, bool, dict | None, int]] = {
    "qwen": ("before_rope", False, None, 1),
    "qwen-tp": ("before_rope", True, None, 2),
    "qwen-yarn": ("before_rope", False, YARN, 1),
    "llama": ("none", True, None, 1),
    "llama-tp": ("none", False, None, 2),
    "llama-llama3": ("none", False, LLAMA3, 2),
    "llama-yarn": ("none", False, YARN | {"attention_factor": 1.25}, 2),
    "after": ("after_rope", False, None, 1),
}


GEMMA = {"norms": "sandwich", "activation": "geglu", "conventions": "gemma"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of the RUNS. Their vocabulary of 350 tokens is padded to 384."""
    root = tmp_path_factory.mktemp("export")
    configured = [
        (root / name, saved_runs.config(root / name, qk_norm, tie_embeddings=tied, rope_scaling=scaling), tp_size)
        for name, (qk_norm, tied, scaling, tp_size) in RUNS.items()
    ]
    configured.append((root / "gemma", saved_runs.config(root / "gemma", tie_embeddings=True, **GEMMA), 1))
    saved_runs.make(configured, model)
    return root


@pytest.mark.parametrize("name", [name for name in RUNS if name != "after"])
def test_logits_are_those_of_transformers(runs: Path, name: str, tmp_path: Path) -> None:
    said: list[str] = []
    done = export(runs / name, tmp_path / "out", report=said.append)
    assert (said, done.step, done.shards) == ([], 3, 1)
    assert done.architecture == ("Qwen3ForCausalLM" if name.startswith("qwen") else "LlamaForCausalLM")
    check_logits(tmp_path / "out", runs / name)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["vocab_size"], config["head_dim"], config["max_position_embeddings"]) == (350, 16, 16)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (350, 32)
    assert ("lm_head.weight" in tensors) != config["tie_word_embeddings"]
    assert (
        GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
        == Tokenizer.load(runs / name / "tokenizer.model").eos_id
    )
    assert not [*tmp_path.glob(".writing-*")]


def test_a_gemma_without_query_scale_has_the_width_of_its_heads(runs: Path, tmp_path: Path) -> None:
    assert export(runs / "gemma", tmp_path / "out").architecture == "Gemma3ForCausalLM"
    check_logits(tmp_path / "out", runs / "gemma")


@pytest.mark.parametrize("own", [LLAMA3, YARN, YARN | {"attention_factor": 1.5, "truncate": False}])
@pytest.mark.parametrize(("theta", "length"), [(500_000.0, 8192), (1e6, 32768), (100.0, 32)])
def test_frequencies_are_those_of_transformers(own: dict, theta: float, length: int) -> None:
    scaling = RopeScaling(**(own | {"original_seq_length": length}))
    model = saved_runs.config(Path("none"), rope_theta=theta, head_dim=64).model.model_copy(
        update={"rope_scaling": scaling}
    )
    there = LlamaConfig(**config_json(model, AttentionConfig(qk_norm="none"), 128, 4 * length))
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.type](there, "cpu")
    cos, sin = (table[0, 0] for table in rotary_tables(torch.tensor([1]), 64, theta, scaling))
    torch.testing.assert_close(torch.atan2(sin, cos), expected, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(torch.hypot(sin, cos), torch.full([32], factor), rtol=1e-6, atol=0)


def test_shards_hold_each_tensor_once(runs: Path, tmp_path: Path) -> None:
    whole, cut = (export(runs / "qwen", tmp_path / str(size), shard_bytes=size) for size in (10**9, 40_000))
    index = json.loads((tmp_path / "40000/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "40000").glob("*.safetensors"))
    assert len(files) == cut.shards > 2 and files[0].name == f"model-00001-of-{cut.shards:05d}.safetensors"
    joined = {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert {name: file for name, (file, _) in joined.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == whole.bytes == sum(t.nbytes for _, t in joined.values())
    assert max(file.stat().st_size for file in files) < 350 * 32 * 4 + 2000  # One tensor is larger than a shard.
    for name, tensor in load_file(tmp_path / f"{10**9}/model.safetensors").items():
        assert tensor.equal(joined[name][1])
    check_logits(tmp_path / "40000", runs / "qwen")


def test_weights_are_of_the_dtype_asked_for(runs: Path, tmp_path: Path) -> None:
    export(runs / "llama", tmp_path / "out", dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_qk_norm_after_rope_has_no_class_there(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qk_norm after_rope: .* no class .* Qwen3: attention.qk_norm before_rope"):
        export(runs / "after", tmp_path / "out")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("qk_norm", "windows", "shape", "name"), [
    ("before_rope", {"pattern": "WWF"}, {}, "Qwen3ForCausalLM"),
    ("none", {"pattern": "WF"}, {"qkv_bias": True}, "Qwen2ForCausalLM"),
    ("none", {"pattern": "WWF"}, {"num_layers": 2}, "MistralForCausalLM"),
    ("none", {"pattern": "WF"}, {}, None),
    ("before_rope", {"pattern": "WF", "rope_theta": 500.0}, {}, None),
    ("before_rope", {"pattern": "WF"}, {"rope_scaling": YARN}, None),
])  # fmt: skip
def test_windows_have_a_class_where_one_rope_is_enough(qk_norm, windows, shape, name) -> None:
    shape = {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 2} | shape
    model, attention = ModelConfig(**shape, windows={"tokens": 9, **windows}), AttentionConfig(qk_norm=qk_norm)
    if name:
        assert family_of(model, attention).name == name
    else:
        with pytest.raises(ConfigError, match="transformers has no class"):
            family_of(model, attention)


@pytest.mark.parametrize(("key", "given", "said"), [
    ("delta_net", {"key_heads": 2, "pattern": "DF"}, "model.delta_net.pattern DF"),
    ("value_embeddings", True, "model.value_embeddings true"),
])  # fmt: skip
def test_a_layer_that_no_class_has_is_named_as_it_was_given(key: str, given: object, said: str) -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=2, tie_embeddings=True, **{key: given}
    )
    with pytest.raises(ConfigError, match=f"{said}: transformers has no class"):
        family_of(model, AttentionConfig())


def test_nothing_half_written_is_left(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def bad_disk(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "out/.writing-out/model.safetensors")

    def of_safetensors(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    for save, message in (
        (full_disk, "No space left on device; free some space there or choose another folder$"),
        (of_safetensors, "No space left on device .*; free some space there or choose another folder$"),
        (bad_disk, "Input/output error; choose another folder$"),
    ):
        monkeypatch.setattr(exporting, "save_file", save)
        with pytest.raises(CheckpointError, match=rf"cannot write .*out: .*{message}"):
            export(runs / "qwen", tmp_path / "out")
        assert not [*tmp_path.iterdir()]


def test_a_folder_that_may_not_be_written_is_named_first(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # A read-only file system answers so, also for root.
    with pytest.raises(ConfigError, match=rf"cannot write .*out/hf: {tmp_path} is no folder that can be written to"):
        export(runs / "qwen", tmp_path / "out/hf")


def test_a_folder_with_something_in_it_is_left_alone(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("notes")
    with pytest.raises(ConfigError, match="exists and is not empty: choose another"):
        export(tmp_path / "no run", tmp_path)  # It is looked at before the run, which may take minutes to read.
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_the_command(runs: Path, tmp_path: Path) -> None:
    result = sagetrain("export", runs / "llama-tp", tmp_path / "out", "--dtype", "float16", "--checkpoint", 3)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{tmp_path}/out: LlamaForCausalLM of step 3, 21 tensors, ")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float16
    again = sagetrain("export", runs / "llama-tp", tmp_path / "out")
    assert again.returncode == 2 and "choose another folder" in again.stderr
    by_url = sagetrain("export", runs / "llama-tp", f"file://{tmp_path}/by-url")
    assert by_url.stdout.startswith(f"file://{tmp_path}/by-url: LlamaForCausalLM of step 3, "), by_url


def test_the_tokenizer_gives_the_same_ids(runs: Path, model: Path, tmp_path: Path) -> None:
    export(runs / "llama", tmp_path / "out")
    ours, theirs = Tokenizer.load(model), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(theirs) == ours.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    draw = random.Random(0)
    letters = string.ascii_letters + string.digits + string.punctuation + " " * 40 + "\n\n\t\0é日🎉\u2581\u00a0\u3000"
    texts = ["", " ", "  two  spaces ", "\u2581\u2581 the mark ", "a\r\n\tb", "日本語 🎉👩‍👩‍👧", "1234 3.14"]
    texts += ["".join(draw.choices(letters, k=draw.randrange(80))) for _ in range(500)]
    texts += [path.read_text()[:3000] for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    for text in texts:
        assert theirs(text).input_ids == ours.encode(text), repr(text)
        assert theirs.decode(theirs(text).input_ids) == text
    special = "</s> and <s> <unk><0x0A>"
    assert theirs(special).input_ids == ours.encode(special)
    assert ours.encode(special)[0] == ours.eos_id


NO_SPACE = {"add_dummy_prefix": False}
PUBLISHED: dict[str, dict[str, object]] = {
    "a space before a text": {},
    "no bytes": {"byte_fallback": False},
    "symbols": {"user_defined_symbols": ["<|x|>", "##", "\n"], **NO_SPACE},
    "symbols of spaces, which are never found": {"user_defined_symbols": ["  ", "    ", "a b"], **NO_SPACE},
    "symbols of the mark, which are": {"user_defined_symbols": ["\u2581\u2581", "\u2581the", "x\u2581"], **NO_SPACE},
    "symbols of both": {"user_defined_symbols": ["\u2581\u2581", "  "], **NO_SPACE},
    "symbols of the mark, no bytes": {"user_defined_symbols": ["\u2581the"], "byte_fallback": False, **NO_SPACE},
    "no space behind a text": {"treat_whitespace_as_suffix": True, **NO_SPACE},
    "pieces over spaces": {"split_by_whitespace": False, "allow_whitespace_only_pieces": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_give_the_same_ids(name: str) -> None:
    """Texts contain the space mark, and texts of templates contain control tokens."""
    ours = published_tokenizer(**PUBLISHED[name])
    theirs = Pipeline.from_str(tokenizer_files(ours, 128)["tokenizer.json"].decode())
    draw = random.Random(0)
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text), repr(text)
    parts = [*"abcdeo  \n\té日🎉,1", "  ", "the", "\u2581", " ##a<|x|>b", "x ", "\u2581\u2581", "</s>"]
    for _ in range(600):
        text = "".join(draw.choices(parts, k=draw.randrange(30)))
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text), repr(text)
        if "no bytes" not in name and "</s>" not in text:
            assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("name", ["ours", "space before a text", "no bytes"])
def test_the_same_tokens_count_in_both_forms(model: Path, tmp_path: Path, name: str) -> None:
    """If a character is spelled in bytes, all its bytes count, even at the start of a text. A space that the tokenizer
    puts before the text counts with the character after it."""
    if name == "ours":
        ours = Tokenizer.load(model)
    else:
        ours = published_tokenizer(**({"byte_fallback": False} if name == "no bytes" else {}))
    for file, content in tokenizer_files(ours, 128).items():
        (tmp_path / file).write_bytes(content)
    theirs = Tokenizer.load(tmp_path / "tokenizer.json")
    if name == "ours":
        ids, counts, _ = ours.encode_parts([("say it", False), ("🎉!", True), ("end", False)])
        assert "🎉" in ours.decode([token for token, each in zip(ids, counts, strict=True) if each])
    draw = random.Random(0)
    for _ in range(300):
        texts = ["".join(draw.choices("abc e🎉猫é\n", k=draw.randrange(1, 6))) for _ in range(4)]
        parts = [(text, number % 2 == 1) for number, text in enumerate(texts)]
        assert ours.encode_parts(parts) == theirs.encode_parts(parts), texts


def with_piece(piece: str, score: float, kind: int) -> Tokenizer:
    """Return a published tokenizer to which somebody added a piece."""
    model = ModelProto.FromString(published_tokenizer().model)
    model.pieces.add(piece=piece, score=score, type=kind)
    return Tokenizer(model.SerializeToString())


REFUSED: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "unigram": (lambda: published_tokenizer(model_type="unigram", vocab_size=300), "is not a byte-pair encoding"),
    "normalized": (lambda: published_tokenizer(normalization_rule_name="nmt_nfkc"), r"normalizes text \(nmt_nfkc\)"),
    "spaces taken away": (lambda: published_tokenizer(remove_extra_whitespaces=True), "remove_extra_whitespaces"),
    "suffix": (lambda: published_tokenizer(treat_whitespace_as_suffix=True), "treat_whitespace_as_suffix"),
    "symbols": (lambda: published_tokenizer(user_defined_symbols=["<|x|>"]), "user-defined symbols, and puts a space"),
    "a space": (lambda: published_tokenizer(user_defined_symbols=[" "], **NO_SPACE), "a symbol that is a single space"),
    "a control token": (lambda: published_tokenizer(control_symbols=["<a b>"]), "gives '<a b>' other ids than tokeni"),
    "equal scores": (lambda: with_piece("ofand", 0.0, 1), "gives 'ofand' and '.*' the same score"),
    "switched off": (lambda: with_piece("ofand", 0.0, 5), "pieces that are switched off, such as 'ofand'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_ids_is_refused_by_its_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        tokenizer_files(make(), 128)


def test_a_piece_that_somebody_added_is_found_alike() -> None:
    ours = with_piece("ofand", 5.0, 1)
    theirs = Pipeline.from_str(tokenizer_files(ours, 128)["tokenizer.json"].decode())
    assert theirs.encode(" ofand", add_special_tokens=False).ids == ours.encode(" ofand")
    assert ours.vocab_size - 1 in ours.encode(" ofand")


def test_tokenizers_that_stay_sentencepiece_alone(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = REFUSED["suffix"][0]()
    opened = replace(exporting.open_run(runs / "llama", print, None), tokenizer=tokenizer)
    monkeypatch.setattr(exporting, "open_run", lambda *_: opened)
    said: list[str] = []
    export(runs / "llama", tmp_path / "out", report=said.append)
    assert len(said) == 1 and "AutoTokenizer will not load the folder, use its tokenizer.model" in said[0]
    assert (tmp_path / "out/tokenizer.model").read_bytes() == tokenizer.model
    assert not (tmp_path / "out/tokenizer.json").exists()

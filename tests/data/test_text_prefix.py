"""The prefix of an imported model's tokenizer stands before each text that is scored or continued, as in transformers.
Our own models have no prefix. A chat template writes the prefix itself."""

import json
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import tiny
from prepare_inputs import SAMPLE, prepare, published_pipeline
from runs import finish, rows_of, sagetrain, write_config
from sagetrain.checkpoint.state import InitFromRecord
from sagetrain.config import ConfigError
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference import windows
from sagetrain.inference.cache import CachedModel
from sagetrain.inference.evaluate import evaluate_texts
from sagetrain.inference.generate import Completion, Sampling, generate
from sagetrain.inference.load import TrainedRun, at_context, load_run, open_run
from sagetrain.interop import exporting
from sagetrain.interop.exporting import export
from sagetrain.interop.importing import import_folder
from sagetrain.interop.lm_eval import HarnessTasks, harness_of

BOS, EOS = 0, 1
DOCUMENTS = ["import re\n", "def add(self, name):\n    return name\n", "x"]

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.content == "none" %}{{ raise_exception("says nothing") }}{% endif %}
[{{ message.role }}]{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def following(run: TrainedRun, prefix: list[int]) -> TrainedRun:
    """Return a model that expects these tokens before a text."""
    return replace(run, texts=replace(run.texts, prefix=prefix))


class Theirs(NamedTuple):
    """The model and the tokenizer of transformers."""

    model: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, and a tokenizer that puts a bos before every text, as Llama 3's does."""
    folder = tmp_path_factory.mktemp("published") / "llama"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes, vocab_size=600, max_position_embeddings=256, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    pipeline = published_pipeline()
    begin = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", BOS)])
    pipeline.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    pipeline.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def imported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the imported model."""
    run_dir = tmp_path_factory.mktemp("imported") / "run"
    import_folder(folder, run_dir)
    return run_dir


@pytest.fixture(scope="module")
def loaded(imported: Path) -> TrainedRun:
    return load_run(imported, print, attention="reference")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Theirs(model, AutoTokenizer.from_pretrained(folder))


def completions(run: TrainedRun, prompts: Sequence[str], max_tokens: int) -> list[Completion]:
    return [done for done, _ in generate(run, prompts, Sampling(max_tokens, temperature=0)) if done.finish]


def log_likelihood(theirs: Theirs, tokens: Sequence[int], scored: int) -> float:
    """Return the log-likelihood of the last `scored` tokens."""
    text = torch.tensor(tokens)
    with torch.no_grad():
        likely = theirs.model(text[None, :-1]).logits[0].double().log_softmax(-1)[-scored:]
    return likely.gather(-1, text[-scored:, None]).sum().item()


def test_every_end_token_of_transformers_ends_a_text(folder: Path, tmp_path: Path) -> None:
    """generation_config.json may list several end tokens. A run that began with the model knows them, too."""
    other = shutil.copytree(folder, tmp_path / "other")
    ids = AutoTokenizer.from_pretrained(other)("def add(", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    made = model.generate(ids, attention_mask=ids >= 0, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    ends = made[5]
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, ends]}))
    import_folder(other, tmp_path / "run")
    run = load_run(tmp_path / "run", print, attention="reference")
    (done,) = completions(run, ["def add("], 12)
    assert (done.tokens, done.finish) == (made[: made.index(ends)], "eos")
    begun = tiny.run_state(init_from=InitFromRecord(generation={"eos_token_id": ends}))
    known = begun.texts.end_tokens, tiny.run_state().texts.end_tokens, run.texts.end_tokens
    assert known == ([ends], [], [EOS, ends])


@pytest.mark.parametrize("prompt", ["def add(", ""])
def test_what_is_continued_is_what_transformers_continues(loaded: TrainedRun, theirs: Theirs, prompt: str) -> None:
    ids = theirs.tokenizer(prompt, return_tensors="pt").input_ids
    made = theirs.model.generate(ids, attention_mask=ids >= 0, do_sample=False, max_new_tokens=12)
    (done,) = completions(loaded, [prompt], 12)
    assert done.tokens == [token for token in made[0, ids.shape[1] :].tolist() if token != EOS]
    assert (ids[0, 0].item(), done.prompt_tokens) == (BOS, ids.shape[1])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The token ids that models read from now on, without the tokens that they generate."""
    seen, read = [], CachedModel.read
    monkeypatch.setattr(CachedModel, "read", lambda self, row, ids: (seen.append([*ids]), read(self, row, ids))[1])
    return seen


def test_a_text_beyond_the_context_begins_with_the_prefix_again(loaded: TrainedRun, seen: list[list[int]]) -> None:
    (done,) = completions(at_context(loaded, 16), ["import re"], 30)
    assert len(done.tokens) == 30 and len(seen) > 2
    assert [ids[0] for ids in seen] == [BOS] * len(seen) and {len(ids) for ids in seen[1:]} == {8}
    assert seen[1][1:] == [*loaded.tokenizer.encode("import re"), *done.tokens][8:15]


def prepare_as_before(sources: list[str], output: Path, tokenizer: Path, **how: Any) -> None:
    """Write token files of an older version, which put nothing before documents."""
    with pytest.MonkeyPatch.context() as patch:
        load = Tokenizer.load
        patch.setattr(Tokenizer, "load", lambda path: vars(found := load(path)).update(prefix=[]) or found)
        prepare(sources, output, tokenizer=tokenizer, **{"say": lambda said: None, **how})


def asked(*args: object) -> Instance:
    return Instance(request_type="loglikelihood", doc={}, arguments=args, idx=0)


def test_log_likelihoods_are_those_of_transformers(loaded: TrainedRun, theirs: Theirs) -> None:
    pairs = [("def add(", "self, name):"), ("import", " re"), ("import ", "re"), ("", "class Message:"), ("\n", "im")]
    requests = [asked(*pair) for pair in pairs]
    found = harness_of(loaded).loglikelihood(requests)
    for (context, continuation), (total, _) in zip(pairs, found, strict=True):
        before, whole = (theirs.tokenizer(text).input_ids for text in (context.rstrip(), context + continuation))
        assert total == pytest.approx(log_likelihood(theirs, whole, len(whole) - len(before)), rel=1e-4)
    without = harness_of(following(loaded, [])).loglikelihood(requests)
    assert all(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(found, without, strict=True))


def test_whole_texts_are_scored_after_the_prefix(loaded: TrainedRun, theirs: Theirs) -> None:
    tokens = theirs.tokenizer(DOCUMENTS[1]).input_ids
    (found,) = harness_of(loaded).loglikelihood_rolling([asked(DOCUMENTS[1])])
    assert tokens[0] == BOS
    assert found == pytest.approx(log_likelihood(theirs, tokens, len(tokens) - 1), rel=1e-4)
    # A text without context has all tokens before it of a prefix of two.
    harness = harness_of(following(loaded, [EOS, BOS]))
    expected = log_likelihood(theirs, [EOS, *tokens], len(tokens) - 1)
    (rolling,), ((total, _),) = (
        harness.loglikelihood_rolling([asked(DOCUMENTS[1])]),
        harness.loglikelihood([asked("", DOCUMENTS[1])]),
    )
    assert (rolling, total) == pytest.approx((expected, expected), rel=1e-4)


def test_a_prompt_that_is_cut_leaves_room_for_the_prefix(loaded: TrainedRun, seen: list[list[int]]) -> None:
    how = {"max_gen_toks": 4, "until": []}
    harness_of(at_context(loaded, 16)).generate_until([asked(SAMPLE[:400], how)])
    assert seen[0][0] == BOS and len(seen[0]) == 12
    assert loaded.tokenizer.decode(seen[0]) == SAMPLE[:400][-len(loaded.tokenizer.decode(seen[0])) :]


def test_every_document_of_raw_text_follows_the_prefix(
    folder: Path, loaded: TrainedRun, theirs: Theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix is not scored. A prepared text has the same tokens. Token files of older versions are read as they
    are: an eos stands before each of their documents."""
    encoded = [theirs.tokenizer(text).input_ids for text in DOCUMENTS]
    expected = sum(log_likelihood(theirs, [*tokens, EOS], len(tokens)) for tokens in encoded)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in DOCUMENTS))
    (found,) = evaluate_texts(loaded, [str(text)])
    assert (found.tokens, found.bytes) == (sum(map(len, encoded)), sum(map(len, DOCUMENTS)))
    assert -found.nats == pytest.approx(expected, rel=1e-4)
    prepare([str(text)], tmp_path / "train", tokenizer=folder / "tokenizer.json", say=lambda said: None)
    for block in (windows._BLOCK, 1, 4):
        monkeypatch.setattr(windows, "_BLOCK", block)
        (begun,) = evaluate_texts(loaded, [str(tmp_path / "train")])
        assert (begun.tokens, begun.bytes) == (found.tokens, found.bytes)
        assert begun.nats == pytest.approx(found.nats, rel=1e-6)
    prepare_as_before([str(text)], tmp_path / "old", folder / "tokenizer.json")
    before, own = evaluate_texts(loaded, [str(tmp_path / "old")]), following(loaded, [])
    assert before[0].nats == pytest.approx(evaluate_texts(own, [str(text)])[0].nats, rel=1e-6)
    assert before[0].tokens == found.tokens and abs(before[0].nats - found.nats) > 1e-2


def test_windows_of_raw_text_score_no_prefix(loaded: TrainedRun, tmp_path: Path) -> None:
    """Windows may begin anywhere, and a document may go on in any piece."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in DOCUMENTS * 20))
    tokens = 20 * sum(len(loaded.tokenizer.encode(each)) + 1 for each in DOCUMENTS)
    for stride in (1, 5, 16):
        (found,) = evaluate_texts(at_context(loaded, 16), [str(text)], stride)
        assert found.tokens == tokens


def test_a_run_has_the_prefix_that_its_model_learned(folder: Path, imported: Path, tmp_path: Path) -> None:
    """The model learned the prefix before the run began, or from the run's data. Tasks and samples during training use
    the prefix too. A run that learned none has none, even with the same tokenizer. Prompts may be as long as the
    sequences that the model was trained with before this run of sequences of 32 tokens."""
    source = [str(path) for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / "json").glob("*.py"))]
    how = {"valid_fraction": 0.3, "say": lambda text: None}
    prepare(source, tmp_path / "new/train", tokenizer=folder / "tokenizer.json", **how)
    prepare_as_before(source, tmp_path / "data/train", folder / "tokenizer.json", **how)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in DOCUMENTS))
    task = {
        "task": "read",
        "test_split": "test",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "read.yaml").write_text(json.dumps(task))
    tasks = HarnessTasks([str(tmp_path / "read.yaml")])
    long = "def add(self, name):\n    return name\n" * 3
    model = yaml.safe_load((imported / "config.yaml").read_text())["model"]
    kinds = ("begun", "data", str(imported)), ("own", "data", None), ("learned", "new", None)
    for name, data, init_from in (*kinds, ("goes on", "data", str(tmp_path / "learned"))):
        prefix = [] if name == "own" else [BOS]
        config = write_config(
            tmp_path / f"{name}.yaml",
            tmp_path / data,
            tmp_path / name,
            model=model,
            attention={"backend": "sdpa", "qk_norm": "none"},
            training={"total_tokens": 512, "init_from": init_from},
            lr_schedule={"warmup_tokens": 256},
            evaluation={
                "num_sequences": 8,
                "tasks": [str(tmp_path / "read.yaml")],
                "samples_every_tokens": 512,
                "samples_prompts": [long if name == "begun" else "x"],
                "samples_tokens": 8,
            },
        )
        finish("sagetrain", config)
        warned = f"of {init_from} do" if init_from else "do not begin"
        assert (warned in (tmp_path / name / "log.txt").read_text()) == bool(init_from)
        run = load_run(tmp_path / name, print)
        assert run.texts.prefix == prefix
        sample = rows_of(tmp_path / name, "samples")[-1]
        (done,) = (found for found, _ in generate(run, [sample["prompt"]], Sampling(8)) if found.finish)
        assert sample["text"] == done.text
        rows = rows_of(tmp_path / name)
        said = next(row["eval/read/bits_per_byte"] for row in reversed(rows) if "eval/read/bits_per_byte" in row)
        bits = [tasks.measure(harness_of(following(run, each)))["read"]["bits_per_byte"] for each in ([], [BOS])]
        assert said == pytest.approx(bits[bool(prefix)], rel=1e-6) and abs(bits[0] - bits[1]) > 1e-4
        export(tmp_path / name, tmp_path / f"{name}-hf")
        tokens = json.loads((tmp_path / f"{name}-hf/generation_config.json").read_text())
        assert (tokens["bos_token_id"], tokens["eos_token_id"]) == (BOS if prefix else EOS, EOS)
    learned = open_run(tmp_path / "learned", print)
    assert learned.tokenizer is not None
    nameless = replace(learned, tokenizer=Tokenizer(learned.tokenizer.model, {"eos_token": "<|end|>"}))
    assert exporting._generation(nameless)["bos_token_id"] == BOS  # The tokenizer puts it there without a name for it.


# -- chats -----------------------------------------------------------------------------------------------------------


def test_a_message_is_what_transformers_makes_of_it(loaded: TrainedRun, theirs: Theirs, seen: list[list[int]]) -> None:
    """The template writes the bos, so there is exactly one."""
    prompts = ["What is 2 + 2?", "", "two\nlines <|end|>"]
    template = loaded.tokenizer.chat_template
    done = [text for text, _ in generate(loaded, prompts, Sampling(3, 0), template=template) if text.finish]
    for text, ids in zip(done, seen, strict=True):
        message = [{"role": "user", "content": text.prompt}]
        expected = theirs.tokenizer.apply_chat_template(message, add_generation_prompt=True).input_ids
        assert ids == expected and ids[:2] != [BOS, BOS] and text.prompt_tokens == len(ids)
    with pytest.raises(ConfigError, match=r"--chat: the chat template refuses .*: says nothing"):
        next(generate(loaded, ["none"], Sampling(3), template=template))


def test_answers_are_printed_alone(imported: Path, loaded: TrainedRun) -> None:
    how = "--chat", "--temperature", 0, "--max-tokens", 6
    (done,) = (
        text
        for text, _ in generate(loaded, ["sum"], Sampling(6, 0), template=loaded.tokenizer.chat_template)
        if text.finish
    )
    one = sagetrain("generate", imported, "sum", *how)
    assert (one.returncode, one.stdout) == (0, f"{done.text}\n")
    two = sagetrain("generate", imported, "--prompt", "sum", "--prompt", "sum", *how)
    assert two.stdout == f"{done.text}\n\n{done.text}\n"
    record = json.loads(sagetrain("generate", imported, "sum", "--json", *how).stdout)
    assert (record["prompt"], record["text"], record["prompt_tokens"]) == ("sum", done.text, done.prompt_tokens)


def test_a_model_without_a_template_needs_one(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    import_folder(bare, tmp_path / "run")
    words = "generate", tmp_path / "run", "sum", "--max-tokens", 3
    refused = sagetrain(*words, "--chat")
    assert refused.returncode == 2 and "error: the tokenizer has no chat template" in refused.stderr
    assert "name a Jinja file with --chat-template" in refused.stderr
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    assert sagetrain(*words, "--chat", "--chat-template", tmp_path / "chat.jinja").returncode == 0
    for options, message in (
        (["--chat-template", tmp_path / "chat.jinja"], "chat.jinja is for chats: add --chat"),
        (["--chat", "--chat-template", tmp_path / "none"], "none cannot be read"),
    ):
        refused = sagetrain(*words, *options)
        assert refused.returncode == 2 and message in refused.stderr

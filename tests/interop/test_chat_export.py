"""A model that was fine-tuned on chats and exported: transformers asks it with the data's template, and stops where
`sagetrain generate --chat` stops. Its context is still that of the base model."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import tiny
from prepare_inputs import byte_pipeline, prepare, published_tokenizer
from runs import finish, log_of, sagetrain, write_config
from sagetrain.checkpoint.state import Identity, InitFromRecord, RunState
from sagetrain.config.errors import CheckpointError
from sagetrain.corpus.records import Chats
from sagetrain.data.chat_template import chat_prompt
from sagetrain.inference.generate import Sampling, generate
from sagetrain.inference.load import load_run
from sagetrain.interop.exporting import export
from sagetrain.interop.importing import import_folder
from sagetrain.interop.tokenizer_files import tokenizer_files

END, EOT = 256, 258
PUBLISHED = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
MINE = (
    "{% for m in messages %}({{ m.role }}) {{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}(assistant) {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 256 positions whose tokenizer has a chat template of its own."""
    folder = tmp_path_factory.mktemp("chats") / "llama"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=260, max_position_embeddings=256, bos_token_id=None, eos_token_id=END)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_pipeline("<|end|>", "<|turn|>", "<|eot|>").save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": PUBLISHED, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_fine_tuned_model_is_asked_as_it_was_trained(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "base")
    assert export(tmp_path / "base", tmp_path / "base-hf").eos_token_id == END
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes." * (n % 3 + 1)}]}
        for n in range(120)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "mine.jinja").write_text(MINE)
    records = Chats("messages", 64, MINE)
    how = {"tokenizer": folder / "tokenizer.json", "say": lambda text: None}
    prepare([str(tmp_path / "chats.jsonl")], tmp_path / "data/train", records=records, **how)
    config = write_config(
        tmp_path / "tuned.yaml",
        tmp_path / "data",
        tmp_path / "tuned",
        model=yaml.safe_load((tmp_path / "base/config.yaml").read_text())["model"],
        attention={"backend": "sdpa", "qk_norm": "none"},
        data={"valid": [], "seq_length": 64},
        training={"total_tokens": 512, "init_from": str(tmp_path / "base")},
        lr_schedule={"warmup_tokens": 256},
    )
    finish("sagetrain", config)
    assert "chat template" not in log_of(config)

    done = sagetrain("export", tmp_path / "tuned", tmp_path / "out")
    assert "max_position_embeddings 256, eos_token_id [256, 258]" in done.stdout
    assert "max_position_embeddings 256: the positions of the model that this run began with" in done.stderr
    long = sagetrain("generate", tmp_path / "tuned", "7" * 200, "--temperature", 0, "--max-tokens", 4, "--json")
    assert json.loads(long.stdout)["prompt_tokens"] == 200, "of 256 positions, not of the 64 of its own sequences"
    run, theirs = load_run(tmp_path / "tuned", print), AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert run.chat_template == MINE and theirs.config.max_position_embeddings == tokenizer.model_max_length == 256
    assert (theirs.generation_config.eos_token_id, theirs.config.eos_token_id) == ([END, EOT], [END, EOT])
    message = [{"role": "user", "content": "7?"}]
    asked = tokenizer.apply_chat_template(message, add_generation_prompt=True).input_ids
    assert asked == chat_prompt(MINE, run.tokenizer, "7?")
    words = "generate", tmp_path / "tuned", "7?", "--chat", "--temperature", 0, "--max-tokens", 12
    assert sagetrain(*words).stdout == sagetrain(*words, "--chat-template", tmp_path / "mine.jinja").stdout

    def end_of_turn(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(logits.shape[-1]) == EOT, 1.0, 0.0)[None]

    made = theirs.generate(torch.tensor([asked]), do_sample=False, max_new_tokens=5, logits_processor=[end_of_turn])
    assert made[0, len(asked) :].tolist() == [EOT]

    import_folder(tmp_path / "out", tmp_path / "again")
    again = load_run(tmp_path / "again", print)
    assert (again.texts.end_tokens, again.chat_template, again.cfg.data.seq_length) == ([END, EOT], MINE, 256)
    assert export(tmp_path / "again", tmp_path / "again-hf").eos_token_id == [END, EOT]
    assert (tmp_path / "again-hf/config.json").read_bytes() == (tmp_path / "out/config.json").read_bytes()
    answers = [[*generate(each, ["7?"], Sampling(8, 0), template=MINE)][-1][0].tokens for each in (run, again)]
    assert answers[0] == answers[1]


def test_a_template_goes_with_every_tokenizer() -> None:
    """SentencePiece's tokenizer has no template of its own, and the template replaces others that have names."""
    files = tokenizer_files(published_tokenizer(), 128, {"default": MINE})
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == MINE


def test_later_runs_know_what_a_run_began_with() -> None:
    """Later runs know the chat template and the positions: the longest of all runs that rotated q and k alike."""
    rope = {"rope_theta": 500.0, "rope_scaling": None}

    def run(length: int, began: InitFromRecord | None = None, **model: object) -> RunState:
        identity = Identity(model={**rope, **model}, qk_norm="none", vocab_size=1, seq_length=length)
        return tiny.run_state(identity=identity, init_from=began)

    def origin(state: RunState) -> InitFromRecord:
        return InitFromRecord(positions=state.positions)

    def positions(state: RunState) -> int:
        return state.positions.length

    def learned(own: str | None, before: str | None) -> str | None:
        return tiny.run_state(chat_template=own, init_from=InitFromRecord(chat_template=before)).texts.chat_template

    base = run(256)
    tuned = run(64, origin(base))
    again = run(128, origin(tuned))
    assert [positions(each) for each in (base, tuned, again)] == [256, 256, 256]
    assert positions(run(512, origin(tuned))) == 512
    # A run with another theta knows these positions only.
    assert positions(run(64, origin(base), rope_theta=1e6)) == 64
    assert positions(run(64, InitFromRecord(checkpoint="of an earlier version"))) == 64
    assert (learned(None, MINE), learned(PUBLISHED, MINE), learned(None, None)) == (MINE, PUBLISHED, None)


def test_a_file_beside_a_tokenizer_was_changed(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "run")
    (tmp_path / "run/chat_template.jinja").write_text(MINE)
    with pytest.raises(
        CheckpointError, match=r"beside it as the run wrote it \(tokenizer_config\.json, chat_template\.j"
    ):
        load_run(tmp_path / "run", print)

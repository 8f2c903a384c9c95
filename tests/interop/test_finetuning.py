"""`sagetrain config finetune`: a model and prepared records become a configuration that trains as it is."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from prepare_inputs import published_tokenizer, quiet
from runs import sagetrain
from sagetrain.config import ConfigError
from sagetrain.corpus.records import Pairs
from sagetrain.interop.finetuning import finetuning


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama of 64 positions in a Hugging Face folder, beside which commands run."""
    monkeypatch.chdir(tmp_path)
    folder = Path("llama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=400, max_position_embeddings=64)).save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(published_tokenizer().model)
    return folder


def records(tokenizer: object, output: str, number: int = 40) -> None:
    lines = (json.dumps({"prompt": f"repeat {n}:", "completion": f" {n}"}) for n in range(number))
    Path("pairs.jsonl").write_text("\n".join(lines))
    pairs = Pairs("prompt", "completion", seq_length=32)
    quiet(["pairs.jsonl"], output, tokenizer=tokenizer, valid_fraction=0.2, records=pairs)


def test_a_folder_and_records_become_a_run(model: Path) -> None:
    """The model is imported once, and a length that an override gives needs no other key."""
    records(model / "tokenizer.model", "data/pairs/train")
    done = sagetrain("config", "finetune", "--model", model, "--data", "data/pairs")
    assert done.returncode == 0 and "was imported to runs/llama" in done.stderr
    Path("ft.yaml").write_text(done.stdout)
    said: list[str] = []
    assert finetuning(model, Path("data/pairs/train"), said.append).splitlines()[1:] == done.stdout.splitlines()[1:]
    assert said == ["runs/llama is there already: it is taken as the import of llama"]
    run = sagetrain("train", "ft.yaml", "training.total_tokens=320")
    assert run.returncode == 0 and "warning" not in run.stderr and "finished at step" in run.stderr, run.stderr


@pytest.mark.parametrize(("start", "data", "message"), [
    ("nowhere", "data/pairs", "--model there is no folder nowhere; name .*or a Hugging Face folder"),
    ("llama", "nowhere", "--data nowhere: does not exist: name token files.*sagetrain prepare chats.jsonl"),
    ("llama", "pairs.jsonl", "pairs.jsonl: is not prepared: .*sagetrain prepare pairs.jsonl -o data/pairs/train "
     "--tokenizer llama/tokenizer.model"),
    ("caf\udce9", "data/pairs", r"--model caf\\udce9 is not UTF-8, as a configuration is: rename it"),
    ("llama", "data/other", "was prepared with another tokenizer .*--tokenizer runs/llama/tokenizer"),
])  # fmt: skip
def test_what_cannot_be_trained_is_named_with_the_way_to_it(model: Path, start: str, data: str, message: str) -> None:
    records(model / "tokenizer.model", "data/pairs/train")
    Path("other.model").write_bytes(published_tokenizer(vocab_size=390).model)
    records("other.model", "data/other/train")
    with pytest.raises(ConfigError, match=message):
        finetuning(Path(start), Path(data), lambda text: None)

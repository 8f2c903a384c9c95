"""Write the configuration of a fine-tuning run, from the model that it begins with and the data that were prepared."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sagetrain.checkpoint.on_disk import read_state
from sagetrain.config.errors import ConfigError, is_utf8, no_run
from sagetrain.config.load import load_config
from sagetrain.config.schema import AttentionConfig, ModelConfig, tokenizer_in
from sagetrain.config.yaml_nodes import dump
from sagetrain.data.token_file import TokenFile, read_provenance, token_path
from sagetrain.interop.importing import import_folder
from sagetrain.training.init_from import named

_PASSES, _STEPS = 2, 100
"""Passes over the data, and the least number of steps that they are divided into where the data suffice."""
_MICRO_BATCH, _MOST_SEQUENCES = 8192, 64
"""Tokens of a micro-batch, and the largest number of sequences of a step."""
_LONGEST = 4096
"""The longest sequence that is proposed for data without records."""
_TEMPLATE = """\
# Fine-tuning of {model} on {data}. Every other key has its default (sagetrain plan --keys lists them).
#
#   sagetrain plan FILE
#   sagetrain train FILE

{sections}
linear:
  precision: bf16 # of linear layers; 8 bits are not measured in fine-tuning

data:
  train: # token files of `sagetrain prepare`, without .bin/.idx
{train}
  valid:{valid}
  seq_length: {seq_length}
  micro_batch_size: {micro} # sequences that a rank computes at once

tokens_per_step: # tokens per optimizer step of all ranks
  schedule: constant
  tokens: {tokens}

optimizer:
  lr: 2e-5 # peak learning rate

lr_schedule:
  shape: cosine
  warmup: 0.03 # a share of the run

training:
  run_dir: {run_dir}
  init_from: {init_from}
  total_tokens: {total} # {passes} passes over the data, {steps} steps
  dtype: {dtype}
  activation_checkpointing: auto # the least that fits into the GPU

evaluation:
  num_sequences: {held_out} # held-out sequences, ten times in the run
"""


def finetuning(model: Path, data: Path, report: Callable[[str], None]) -> str:
    """Return the complete YAML of a fine-tuning run. Raises ConfigError if there is no such model or data, or the data
    have another tokenizer.

    Args:
        model: a run, one of its checkpoints, or a Hugging Face folder, which is imported to runs/NAME.
        data: a token file without its suffix, or a folder of token files. Files named valid* are held out.
    """
    for option, path in (("model", model), ("data", data)):
        if not is_utf8(str(path)):
            raise ConfigError(
                f"--{option} {ascii(str(path))[1:-1]} is not UTF-8, as a configuration is: rename it (mv, convmv)"
            )
    train, valid = _token_files(data, model)
    start = _start(model, report)
    folder = named(start)
    assert folder is not None, "_start has found or made it"
    of_model = load_config(folder / "config.yaml")
    state, record = read_state(folder), read_provenance(train[0])
    theirs = record.get("tokenizer_sha256")
    if theirs and state.identity.tokenizer_sha256 not in (None, theirs):
        raise ConfigError(
            f"--data {train[0]}: was prepared with another tokenizer than that of --model {model}: prepare it with "
            f"--tokenizer {_tokenizer(start)}"
        )
    seq_length = record.get("seq_length") or min(state.identity.seq_length, _LONGEST)
    tokens = sum(TokenFile(path).num_tokens for path in train)
    sequences = 1
    while sequences < _MOST_SEQUENCES and 2 * sequences * _STEPS * seq_length <= _PASSES * tokens:
        sequences *= 2
    micro = sequences
    while micro > 1 and micro * seq_length > _MICRO_BATCH:
        micro //= 2
    steps = max(1, round(_PASSES * tokens / (sequences * seq_length)))
    held_out = min(_MOST_SEQUENCES, sum(TokenFile(path).num_tokens // seq_length for path in valid))
    text = _TEMPLATE.format(
        model=model,
        data=data,
        sections=_sections(of_model.model, of_model.attention),
        train="\n".join(_items(train)),
        valid="\n".join(["", *_items(valid)]) if valid else " []",
        seq_length=seq_length,
        micro=micro,
        tokens=sequences * seq_length,
        run_dir=_quoted(f"runs/{folder.parent.parent.name}-{(data if data.is_dir() else data.parent).name or 'data'}"),
        init_from=_quoted(str(start)),
        total=steps * sequences * seq_length,
        passes=_PASSES,
        steps=f"{steps:,}",
        dtype=of_model.training.dtype,
        held_out=max(1, held_out),
    )
    return _aligned(text if valid else text[: text.index("\nevaluation:")])


def _start(model: Path, report: Callable[[str], None]) -> Path:
    """Return the run or checkpoint to start from. A Hugging Face folder is imported, unless it was before."""
    if named(model):
        return model
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {no_run(model)}, or a Hugging Face folder")
    run_dir = Path("runs") / model.resolve().name
    if named(run_dir):
        report(f"{run_dir} is there already: it is taken as the import of {model}")
    else:
        import_folder(model, run_dir, report=report)
        report(f"{model} was imported to {run_dir}")
    return run_dir


def _tokenizer(folder: Path) -> Path:
    """Return the file of the tokenizer of a model: of a run, of a checkpoint, or of a Hugging Face folder."""
    return next((path for path in (tokenizer_in(folder), tokenizer_in(folder.parent.parent)) if path.is_file()),
                tokenizer_in(folder))  # fmt: skip


def _token_files(data: Path, model: Path) -> tuple[list[Path], list[Path]]:
    if token_path(data, ".idx").is_file():
        beside = data.with_name(data.name.replace("train", "valid"))
        return [data], [beside] if beside != data and token_path(beside, ".idx").is_file() else []
    found = [path.with_suffix("") for path in sorted(data.glob("*.idx"))] if data.is_dir() else []
    valid = [path for path in found if path.name.startswith("valid")]
    if train := [path for path in found if path not in valid]:
        return train, valid
    what = "is not prepared" if data.exists() else "does not exist"
    raise ConfigError(
        f"--data {data}: {what}: name token files, without .bin and .idx, or their folder. From chats (prompts: "
        f"--prompt-field and --completion-field): sagetrain prepare {data if data.is_file() else 'chats.jsonl'} "
        f"-o data/{data.stem}/train --tokenizer {_tokenizer(model)} --chat-field messages --seq-length {_LONGEST} "
        "--valid-fraction 0.02. For plain text leave --chat-field and --seq-length out"
    )


def _sections(model: ModelConfig, attention: AttentionConfig) -> str:
    """Return the sections that the weights decide: the model's shape, and its attention."""
    backend = f"  backend: {attention.backend}"
    given = {"backend": attention.backend, **attention.model_dump(mode="json", exclude_defaults=True)}
    text = "\n".join(
        dump({name: keys}) for name, keys in (("model", model.model_dump(mode="json")), ("attention", given))
    )
    return text.replace(f"{backend}\n", f"{backend} # 16 bits; sage: INT8\n")


def _aligned(text: str) -> str:
    """Begin the comments behind keys in one column."""
    return re.sub(r"(?m)^(.*\S) # ", lambda key: f"{key[1]:<40}# ", text)


def _items(paths: list[Path]) -> list[str]:
    return [f"    - path: {_quoted(str(path))}" for path in paths]


def _quoted(path: str) -> str:
    """Return a path as YAML on one line."""
    return dump([path]).removeprefix("- ").rstrip("\n")

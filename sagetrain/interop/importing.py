"""`sagetrain import`: a Hugging Face folder as a run folder to start from, in the memory of one file of weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import dump_config
from sagetrain.config.rules.data import TEXT_PREFIX
from sagetrain.config.schema import NO_DATA, TOKENIZER_JSON, TOKENIZER_NAME, RunConfig
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.interop.exporting import cut, published
from sagetrain.interop.huggingface import INDEX, WEIGHTS, Described, Weight, describe, weights
from sagetrain.train.checkpoint import FORMAT, folder_name, sha256

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Imported:
    """What was read."""

    architecture: str
    tensors: int
    parameters: int
    seq_length: int
    tokenizer: str | None


def import_folder(
    folder: Path,
    run_dir: Path,
    *,
    shard_bytes: int = 4 * 10**9,
    report: Callable[[str], None] = lambda text: None,
) -> Imported:
    """Make of a Llama, Mistral or Qwen3 folder a run folder with one checkpoint, which training.init_from, eval,
    generate and export take. Its weights stay as they are, in their dtype; rows that pad the vocabulary are zeros.

    Args:
        run_dir: does not exist yet, or is empty. It appears when everything in it is written.
        shard_bytes: largest size of a file of weights, unless a single tensor is larger.
        report: hears what is taken otherwise than the folder says.

    Raises:
        ConfigError: the folder is not one of those, is not whole, or its sizes do not match.
        CheckpointError: the run folder cannot be written.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; a model of the Hugging Face hub comes into one by "
            "`hf download NAME --local-dir DIR`"
        )
    if (folder / "checkpoints").is_dir():
        raise ConfigError(f"{folder} is a run of SageTrain, which training.init_from takes as it is")
    config = _read_json(folder / "config.json")
    described = describe(config, str(folder / "config.json"), report)
    tensors, vocab_size = _Tensors(folder), described.vocab_size
    dtypes = _checked(tensors, described)
    tokenizer = _tokenizer(folder, vocab_size, report)
    text = dump_config(_run_config(described, run_dir, next(iter(dtypes.values()))))
    index: dict[str, dict[str, Any]] = {}
    with published(run_dir) as temporary:
        checkpoint = temporary / "checkpoints" / folder_name(0)
        checkpoint.mkdir(parents=True)
        for path in (temporary, checkpoint):
            (path / "config.yaml").write_text(text)
        if tokenizer:
            (temporary / tokenizer.file_name).write_bytes(tokenizer.model)
        for number, part in enumerate(cut(dtypes, shard_bytes), 1):
            file = f"weights-{number:05d}.safetensors"
            values = {}
            for weight in part:
                padded = _padded(weight)
                values[f"{weight.ours}|weight"] = tensors.read(weight.theirs, padded)
                piece = {"file": file, "tp_rank": 0, "start": 0, "stop": prod(padded)}
                kept = str(dtypes[weight]).removeprefix("torch.")
                index[weight.ours] = {
                    "shape": list(padded), "tp_dim": weight.tp_dim, "dtype": kept, "pieces": [piece]
                }  # fmt: skip
            save_file(values, checkpoint / file)
            (checkpoint / file).chmod((checkpoint / "config.yaml").stat().st_mode & 0o777)
            del values
        state = {
            "step": 0,
            "tokens": 0,
            "sequences": 0,
            "identity": {
                "model": described.model.model_dump(),
                "attention.qk_norm": described.attention.qk_norm,
                "vocab_size": vocab_size,
                "tokenizer (SHA-256)": tokenizer.sha256 if tokenizer else None,
            },
            "imported": {"architecture": described.architecture, "tokens": _tokens(folder, config)},
            **({TEXT_PREFIX: tokenizer.prefix} if tokenizer else {}),
        }
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(checkpoint.iterdir())
        }
        layout = {"tensor_parallel_size": 1, "context_parallel_size": 1, "data_parallel_size": 1}
        manifest = {"format": FORMAT, "state": state, "layout": layout, "tensors": index, "files": files}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest, indent=1))
        (checkpoint.parent / "latest").write_text(checkpoint.name + "\n")
    return Imported(
        described.architecture,
        len(dtypes),
        sum(prod(weight.shape) for weight in dtypes),
        described.seq_length,
        tokenizer.file_name if tokenizer else None,
    )


class _Tensors:
    """The tensors of a folder by name, wherever they lie."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, str] = {}
        self._headers: dict[str, tuple[tuple[int, ...], str]] = {}
        if (folder / INDEX).is_file():
            listed: dict[str, str] = _read_json(folder / INDEX).get("weight_map", {})
        elif (folder / WEIGHTS).is_file():
            listed = {"": WEIGHTS}
        else:
            pickled = " (pytorch_model.bin could run code; save it anew with transformers' save_pretrained)"
            hint = pickled if [*folder.glob("*.bin")] else ""
            raise ConfigError(f"{folder}: has neither {WEIGHTS} nor {INDEX}{hint}")
        files = sorted(set(listed.values()))
        if missing := [file for file in files if not (folder / file).is_file()]:
            raise ConfigError(
                f"{folder}: {len(missing)} of {len(files)} files of weights are missing, first: {missing[0]}; "
                "copy the folder again from where it was published"
            )
        for file in files:
            with self._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    stored = opened.get_slice(name)
                    self._files[name] = file
                    self._headers[name] = tuple(stored.get_shape()), stored.get_dtype()

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self._folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._folder / file} cannot be read ({error}); copy it again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[name][0]

    def dtype(self, name: str) -> torch.dtype:
        kind = self._headers[name][1]
        if kind not in _DTYPES:
            raise ConfigError(f"{self._folder}: {name} is {kind}: weights are read in {', '.join(_DTYPES)} alone")
        return _DTYPES[kind]

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Its values, flattened, with rows of zeros up to `shape`."""
        with self._open(self._files[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        if tuple(tensor.shape) == shape:
            return tensor.flatten()
        out = tensor.new_zeros(shape)
        out[: len(tensor)] = tensor
        return out.flatten()


def _checked(tensors: _Tensors, described: Described) -> dict[Weight, torch.dtype]:
    """The weights of the model and their dtypes. ConfigError unless the folder holds these, in their shapes, and no
    others."""
    there, model = set(tensors), described.model
    wanted = {weight.theirs: weight for weight in weights(model, described.attention, described.vocab_size)}
    if missing := [name for name in wanted if name not in there]:
        raise ConfigError(
            f"{described.architecture} has {len(wanted)} tensors; {len(missing)} of them are missing in the folder, "
            f"first: {missing[0]}; copy it again from where it was published"
        )
    ignored = {name for name in there if name.endswith("rotary_emb.inv_freq")}
    ignored |= {"lm_head.weight"} if model.tie_embeddings else set()
    if others := sorted(there - set(wanted) - ignored):
        raise ConfigError(
            f"{len(others)} tensors in the folder are none of {described.architecture}'s, first: {others[0]}; what "
            "they do would be lost, so this model cannot be read"
        )
    for name, weight in wanted.items():
        if tensors.shape(name) != weight.shape:
            raise ConfigError(
                f"{name} has the shape {tensors.shape(name)}, config.json says {weight.shape}: they belong to "
                "different models; copy the folder again"
            )
    return {weight: tensors.dtype(name) for name, weight in wanted.items()}


def _padded(weight: Weight) -> tuple[int, ...]:
    """Its shape in a checkpoint."""
    rows, *rest = weight.shape
    return (padded_vocab_size(rows) if weight.ours in ("embedding.weight", "head.weight") else rows, *rest)


def _tokenizer(folder: Path, vocab_size: int, report: Callable[[str], None]) -> Tokenizer | None:
    """The folder's SentencePiece model where it knows as many tokens as its tokenizer.json, else that, which alone
    keeps a chat template, and what is put before a text."""
    there = [folder / name for name in (TOKENIZER_JSON, TOKENIZER_NAME) if (folder / name).is_file()]
    if not there:
        report(f"{folder}: has no {TOKENIZER_JSON} and no {TOKENIZER_NAME}: text cannot be tokenized for this model")
        return None
    tokenizer = Tokenizer.load(there[0])
    if len(there) == 2:
        try:
            other = Tokenizer.load(there[1])
            if other.vocab_size == tokenizer.vocab_size:
                more = ["a chat template"] if tokenizer.chat_template else []
                more += ["a post_processor"] if json.loads(tokenizer.model).get("post_processor") else []
                if more:
                    report(f"{folder}: {TOKENIZER_JSON} is taken, which has {' and '.join(more)}, not {TOKENIZER_NAME}")
                else:
                    tokenizer = other
        except ConfigError:  # some call another kind of file so
            pass
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, config.json says vocab_size {vocab_size}: "
            "they belong to different models; copy the folder again"
        )
    return tokenizer


def _tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of its special tokens, for when it is exported as it is."""
    file = folder / "generation_config.json"
    said = {**config, **(_read_json(file) if file.is_file() else {})}
    return {key: said.get(key) for key in ("bos_token_id", "eos_token_id")}


def _run_config(described: Described, run_dir: Path, dtype: torch.dtype) -> RunConfig:
    """What there is to say of a run that was not: its model, beside the least that a configuration must hold."""
    length = described.seq_length
    tree = {
        "model": described.model.model_dump(),
        "attention": described.attention.model_dump(),
        "data": {"train": [{"path": NO_DATA}], "seq_length": length, "micro_batch_size": 1},
        "tokens_per_step": {"schedule": "constant", "tokens": length},
        "optimizer": {"lr": 1e-5},
        "training": {
            "run_dir": str(run_dir),
            "total_tokens": length,
            "dtype": "fp32" if dtype == torch.float32 else "bf16",
        },
    }
    return RunConfig.model_validate(tree)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a Hugging Face folder that has it") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); copy it again") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no keys; copy it again")
    return tree

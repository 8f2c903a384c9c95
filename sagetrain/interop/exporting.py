"""The command `sagetrain export`: write a run's checkpoint as a Hugging Face folder, with the memory of one shard and
one tensor."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sagetrain.checkpoint.reading import Reader
from sagetrain.config.errors import CheckpointError, ConfigError, url_of, way_to_room
from sagetrain.config.schema import TOKENIZER_JSON, ModelConfig
from sagetrain.config.sections.base import store_url
from sagetrain.data.token_file import check_writable
from sagetrain.data.tokenizer_config import OVERRULED
from sagetrain.data.tokenizer_copy import BY_CALL, cut_otherwise
from sagetrain.inference.generate import ending_tokens
from sagetrain.inference.load import OpenRun, open_run
from sagetrain.interop.families import Family, family_of
from sagetrain.interop.huggingface import INDEX, WEIGHTS, config_json
from sagetrain.interop.tokenizer_files import tokenizer_files
from sagetrain.model.tensors import TensorSpec, tensors
from sagetrain.storage.local import sync
from sagetrain.storage.range_reader import send_folder
from sagetrain.storage.url_path import UrlPath

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The keys that config.json and generation_config.json share."""
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Exported:
    """The result of `export`."""

    architecture: str
    """The class of transformers that loads the folder."""
    step: int
    """The step of the checkpoint."""
    tensors: int
    """Number of tensors."""
    bytes: int
    """Bytes of all tensors."""
    shards: int
    """Number of files that hold the tensors."""
    positions: int
    """The value of max_position_embeddings."""
    eos_token_id: int | list[int] | None
    """The tokens at which a text ends."""


def export(
    run_dir: Path,
    folder: Path,
    *,
    step: int | None = None,
    dtype: Dtype | None = None,
    shard_bytes: int = 4 * 10**9,
    report: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write a checkpoint as a folder that transformers.AutoModelForCausalLM.from_pretrained loads. Raises ConfigError
    if transformers has no class for the model, or there is something in the folder, and CheckpointError if there is no
    checkpoint, or the folder cannot be written.

    Args:
        folder: folder to write, which does not exist yet or is empty. It appears when everything in it is written. A
            path that was a URL means a folder in a store, in which config.json is written last.
        step: step of the checkpoint. Default: the newest complete one.
        dtype: dtype of the weights. Default: the dtype that the run computed in; imported weights keep their dtype.
        shard_bytes: largest size of a file of weights, unless a single tensor is larger.
        report: gets messages about what could not be exported.
    """
    if url := url_of(folder):
        target = UrlPath(store_url(url))
        try:
            if target.exists():
                raise ConfigError(f"{target} exists and is not empty: choose another folder, or delete it")
            with TemporaryDirectory(prefix="sagetrain-") as scratch:
                written = Path(scratch, "export")
                done = export(run_dir, written, step=step, dtype=dtype, shard_bytes=shard_bytes, report=report)
                send_folder(written, target, last="config.json")
                return done
        except OSError as error:
            raise CheckpointError(f"cannot write {target}: {error}") from error
    check_free(folder)
    run = open_run(run_dir, report, step)
    reader, cfg, vocab_size = run.reader, run.cfg, run.state.identity.vocab_size
    own = cfg.data.seq_length
    length = run.state.positions.length or own
    if length != own:
        report(
            f"max_position_embeddings {length}: the positions of the model that this run began with; its own sequences "
            f"have {own} tokens (data.seq_length)"
        )
    family = family_of(cfg.model, cfg.attention)
    config = config_json(cfg.model, cfg.attention, vocab_size, length)
    dtypes = {
        spec: _dtype(reader, spec, dtype, cfg.training.dtype)
        for spec in tensors(cfg.model, cfg.attention, vocab_size)
        if spec.kind != "state"
    }
    _check_biases(reader, cfg.model, family)
    generation = _generation(run)
    special = {key: generation[key] for key in SPECIAL_IDS if key in generation}
    computed_in = str(next(iter(dtypes.values()))).removeprefix("torch.")
    files = {
        "config.json": _json(config | special | {"torch_dtype": computed_in}),
        "generation_config.json": _json(generation),
    }
    if run.tokenizer is None:
        report("no tokenizer: the run was trained without one; put its files into the folder yourself")
    else:
        try:
            files |= tokenizer_files(run.tokenizer, length, run.chat_templates)
            _report_class(config["model_type"], files[TOKENIZER_JSON], report)
        except ConfigError as error:
            report(f"no tokenizer.json: {error}; AutoTokenizer will not load the folder, use its tokenizer.model")
            files |= run.tokenizer.files
            if template := run.chat_templates.get("default"):
                files["chat_template.jinja"] = template.encode()
    shards = _shards(dtypes, file_bytes(dtypes, shard_bytes))
    total = sum(spec.size * kept.itemsize for spec, kept in dtypes.items())
    if len(shards) > 1:
        where = {name: file for file, part in shards.items() for spec in part for name in family.theirs(spec)}
        files[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    with published(folder) as temporary, closing(reader):
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        for file, part in shards.items():
            values = {name: value for spec in part for name, value in _values(reader, spec, dtypes[spec], family)}
            save_file(values, temporary / file, metadata={"format": "pt"})
            # safetensors makes the file readable for its user alone. The umask should decide who else may read it.
            (temporary / file).chmod((temporary / "config.json").stat().st_mode & 0o777)
            del values
    ends = generation["eos_token_id"]
    count = sum(len(family.theirs(spec)) for spec in dtypes)
    return Exported(config["architectures"][0], run.state.step, count, total, len(shards), length, ends)


def _report_class(model_type: str, tokenizer_json: bytes, report: Callable[[str], None]) -> None:
    """Say that AutoTokenizer would give other ids, because it takes a class by the model that cuts a text otherwise."""
    of_class = OVERRULED.get(model_type, "")
    if differs := cut_otherwise(json.loads(tokenizer_json), of_class):
        report(
            f"AutoTokenizer will give other ids than the run had: for model_type {model_type} it takes {of_class}, "
            f"whatever tokenizer_config.json says. With this class {differs}; {BY_CALL}"
        )


def _generation(run: OpenRun) -> dict[str, Any]:
    """Return the content of generation_config.json: the settings that were imported with the weights, and every token
    at which `sagetrain generate` ends a text or an answer."""
    tokenizer, settings, texts = run.tokenizer, dict(run.state.generation), run.state.texts
    if tokenizer is None:
        return settings or {"bos_token_id": None, "eos_token_id": None}
    ends = ending_tokens(tokenizer, texts.end_tokens, run.chat_templates.get("default"))
    # If the model was not trained on a bos token, it is an eos token that stands before every document.
    bos, *_ = *texts.prefix, tokenizer.eos_id
    return {"bos_token_id": bos, **settings, "eos_token_id": ends if len(ends) > 1 else ends[0]}


def _dtype(reader: Reader, spec: TensorSpec, asked: Dtype | None, computed_in: str) -> torch.dtype:
    """Return the dtype of a tensor in the folder: the one asked for, or else the imported one, or else the one that the
    run computed in."""
    kept = reader.tensors.get(spec.name, {}).get("dtype")
    found: torch.dtype = getattr(torch, asked or kept or {"bf16": "bfloat16", "fp32": "float32"}[computed_in])
    return found


def _values(reader: Reader, spec: TensorSpec, dtype: torch.dtype, family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the folder that are one of ours, by their names."""
    start = 0
    names = family.theirs(spec)
    for name in names:
        out = torch.empty(spec.matrix if len(names) > 1 else spec.shape, dtype=dtype)
        # The rows that pad the vocabulary are left out. The other rows are the first values of the flattened tensor.
        reader.fill(out.view(-1), spec.name, "weight", 0, 1, start)
        start += out.numel()
        yield name, family.for_folder(spec, out)


def _check_biases(reader: Reader, model: ModelConfig, family: Family) -> None:
    """Check that no router has a bias, which no class of transformers with these routers has. Raises ConfigError if one
    has."""
    if model.experts is None:
        return
    for number in range(model.experts.dense_layers, model.num_layers):
        bias = torch.empty(model.experts.number)
        reader.fill(bias, f"blocks.{number}.mlp.router.bias", "weight", 0, 1)
        if bias.any():
            raise ConfigError(
                f"the router of layer {number} chooses experts with a bias (up to {bias.abs().max():.3g}, "
                f"model.experts.balance.bias_rate), and {family.name} of transformers has none: it would choose "
                "others; balance by aux_weight alone in a run that is to be exported"
            )


def file_bytes(dtypes: Mapping[TensorSpec, torch.dtype], most: int) -> int:
    """Return the largest size of a file of weights: `most`, or with experts no more than a layer, because a file is
    in memory as a whole."""
    if not any(spec.matrices > 1 for spec in dtypes):
        return most
    layers = Counter[object]()
    for spec, dtype in dtypes.items():
        layers[spec.layer] += spec.size * dtype.itemsize
    return min(most, max(layers.values()))


def _shards(dtypes: Mapping[TensorSpec, torch.dtype], most: int) -> dict[str, list[TensorSpec]]:
    parts = [*cut(dtypes, most)]
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def cut(dtypes: Mapping[TensorSpec, torch.dtype], most: int) -> Iterator[list[TensorSpec]]:
    """Yield the tensors in their order, in parts of up to `most` bytes. A larger tensor is a part of its own."""
    part: list[TensorSpec] = []
    used = 0
    for spec, dtype in dtypes.items():
        size = spec.size * dtype.itemsize
        if part and used + size > most:
            yield part
            part, used = [], 0
        part.append(spec)
        used += size
    yield part


def check_free(folder: Path) -> None:
    """Check that `folder` can be made. Raises ConfigError if something is there, or nothing may be written there."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: choose another folder, or delete it")
    check_writable(folder)


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder` to write in. At the end it is synced and renamed to `folder`, or removed if
    that fails. Raises CheckpointError if the folder cannot be written."""
    temporary = folder.absolute().with_name(f".writing-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or str(error)
        way = way_to_room(said)
        fix = f"{way} there or choose another folder" if way else "choose another folder"
        raise CheckpointError(f"cannot write {folder}: {said}; {fix}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _json(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()

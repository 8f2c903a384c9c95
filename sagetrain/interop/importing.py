"""The command `sagetrain import`: turn a Hugging Face folder into a run folder to start from, with the memory of one
file of weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from sagetrain.checkpoint.manifest import FORMAT, write_manifest
from sagetrain.checkpoint.on_disk import folder_name, sha256
from sagetrain.checkpoint.state import Identity, ImportRecord, RunState
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import ConfigError, is_there, is_utf8, many, url_of
from sagetrain.config.load import dump_config
from sagetrain.config.schema import NO_DATA, TOKENIZER_JSON, TOKENIZER_NAME, ModelConfig, RunConfig
from sagetrain.config.sections.base import store_url
from sagetrain.data.tokenizer import OTHER_FILES, Tokenizer
from sagetrain.data.tokenizer_config import keys_in
from sagetrain.data.tokenizer_copy import CONVERT
from sagetrain.interop import upcycling
from sagetrain.interop.causes import GATHER, no_folder, no_model, other_names
from sagetrain.interop.describe import Described, Report, describe
from sagetrain.interop.exporting import SPECIAL_IDS, check_free, cut, file_bytes, published
from sagetrain.interop.families import EMBEDDING, HEAD
from sagetrain.interop.huggingface import SETTINGS
from sagetrain.interop.weight_files import WeightFiles
from sagetrain.model.tensors import TensorSpec, tensors
from sagetrain.storage.range_reader import fetch
from sagetrain.storage.url_path import UrlPath

# These keys of a generation_config.json only say who wrote it.
_NO_SETTINGS = ("transformers_version", "_from_model_config")
# Parts of tensor names, and the keys of config.json that determine the tensor's shape.
_SHAPED_BY = {
    "embed_tokens": "vocab_size and hidden_size",
    "lm_head": "vocab_size and hidden_size",
    "q_proj": "num_attention_heads, head_dim and hidden_size",
    "o_proj": "num_attention_heads, head_dim and hidden_size",
    "k_proj": "num_key_value_heads, head_dim and hidden_size",
    "v_proj": "num_key_value_heads, head_dim and hidden_size",
    "sinks": "num_attention_heads",
    "experts": "moe_intermediate_size (or else intermediate_size) and hidden_size",
    "mlp.gate.": "num_experts and hidden_size",
    "moe.gate.": "num_local_experts and hidden_size",
    "mlp.router.": "num_local_experts and hidden_size",
    "mlp": "intermediate_size and hidden_size",
    "q_norm": "head_dim",
    "k_norm": "head_dim",
    "norm": "hidden_size",
}


@dataclass(frozen=True)
class Imported:
    """The result of `import_folder`."""

    architecture: str
    """The class of transformers that the folder names."""
    tensors: int
    """Number of tensors."""
    parameters: int
    """Number of parameters, without padding of the vocabulary."""
    seq_length: int
    """The longest sequence that the model was made for."""
    tokenizer: str | None
    """The name of the tokenizer's file in the run folder; None: the folder has none."""


def import_folder(
    folder: Path,
    run_dir: Path,
    *,
    experts: int | None = None,
    per_token: int = 2,
    shard_bytes: int = 4 * 10**9,
    report: Report = lambda text: None,
) -> Imported:
    """Turn a Hugging Face folder into a run folder with one checkpoint, for training.init_from, eval, generate and
    export. The weights stay as they are, in their dtype. Rows that pad the vocabulary are zeros. Raises ConfigError if
    the folder holds another kind of model, is incomplete, or its sizes do not match, and CheckpointError if the run
    folder cannot be written.

    Args:
        run_dir: folder to write, which does not exist yet or is empty. It appears when everything in it is written.
        experts: make the MLP of each layer so many experts, copies of it, of a dense model. None: leave it as it is.
        per_token: the experts of a token.
        shard_bytes: largest size of a file of weights, unless a single tensor is larger.
        report: gets a message for everything that is read differently than the folder says.
    """
    if url := url_of(folder):
        source = UrlPath(store_url(url))
        with TemporaryDirectory(prefix="sagetrain-") as scratch:
            try:
                fetch(source, Path(scratch, source.name))
            except OSError as error:
                raise ConfigError(f"{source} cannot be read: {error}") from error
            how: dict[str, Any] = {"experts": experts, "per_token": per_token, "shard_bytes": shard_bytes}
            return import_folder(Path(scratch, source.name), run_dir, **how, report=report)
    for each, rule in ((folder, "as safetensors wants"), (run_dir, "as its config.yaml, which names it (run_dir), is")):
        if not is_utf8(str(each)):
            raise ConfigError(f"the folder's name {str(each)!a} is not UTF-8, {rule}: choose another name")
    if not folder.is_dir():
        raise ConfigError(no_folder(folder))
    if (folder / "checkpoints").is_dir():
        raise ConfigError(f"{folder} is a run of SageTrain, which training.init_from takes as it is")
    if not is_there(folder / "config.json"):
        raise ConfigError(no_model(folder))
    check_free(run_dir)
    where = str(folder / "config.json")
    config = keys_in(Path(where))
    described = describe(config, where, report)
    if experts is not None:
        described = upcycling.upcycled(described, experts, per_token, where)
    files, vocab_size = WeightFiles(folder, config.get("transformers_weights"), report), described.vocab_size
    tokenizer = _tokenizer(folder, report)
    model, dtypes = _matched(files, described, where, tokenizer, report)
    if tokenizer:
        _check_vocabulary(folder, tokenizer, vocab_size)
    _say_dtype(config, dtypes, where, report)
    generation = _generation(folder, config, tokenizer, vocab_size, report)
    cfg = _run_config(described, model, run_dir, next(iter(dtypes.values())))
    if experts is not None:
        upcycling.check(cfg, where)
    text = dump_config(cfg)
    index: dict[str, dict[str, Any]] = {}
    with published(run_dir) as temporary:
        checkpoint = temporary / "checkpoints" / folder_name(0)
        checkpoint.mkdir(parents=True)
        for path in (temporary, checkpoint):
            (path / "config.yaml").write_text(text)
        if tokenizer:
            tokenizer.write(temporary)
        for number, part in enumerate(cut(dtypes, file_bytes(dtypes, shard_bytes)), 1):
            file = f"weights-{number:05d}.safetensors"
            values = {}
            for spec in part:
                family = described.family
                padded, theirs = _padded(spec), family.theirs(spec)
                if len(theirs) == 1:
                    shape = padded if spec.kind == "embedding" else family.stored_shape(spec)
                    values[f"{spec.name}|weight"] = family.from_folder(spec, files.read(theirs[0], shape))
                else:
                    begun = upcycling.router(spec, model) if spec.kind == "router" else torch.zeros(spec.size)
                    values[f"{spec.name}|weight"] = files.joined(theirs, dtypes[spec]) if theirs else begun
                piece = {"file": file, "tp_rank": 0, "start": 0, "stop": prod(padded)}
                kept = str(dtypes[spec]).removeprefix("torch.")
                index[spec.name] = {
                    "shape": list(padded), "tp_dim": spec.tensor_dim, "dtype": kept, "pieces": [piece]
                }  # fmt: skip
            save_file(values, checkpoint / file)
            (checkpoint / file).chmod((checkpoint / "config.yaml").stat().st_mode & 0o777)
            del values
        state = RunState(
            step=0,
            tokens=0,
            sequences=0,
            text_prefix=tokenizer.prefix if tokenizer else None,
            identity=Identity(
                model=model.model_dump(),
                qk_norm=described.attention.qk_norm,
                vocab_size=vocab_size,
                seq_length=described.seq_length,
                tokenizer_sha256=tokenizer.sha256 if tokenizer else None,
            ),
            imported=ImportRecord(described.family.name, generation),
        )
        sums = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(checkpoint.iterdir())
        }
        layout = {"tensor_parallel_size": 1, "context_parallel_size": 1, "data_parallel_size": 1}
        manifest = {"format": FORMAT, "state": state.to_json(), "layout": layout, "tensors": index, "files": sums}
        write_manifest(checkpoint, manifest)
        (checkpoint.parent / "latest").write_text(checkpoint.name + "\n")
    return Imported(
        described.family.name,
        len({name for spec in dtypes for name in described.family.theirs(spec)}),
        sum(spec.size for spec in dtypes if spec.kind != "state"),
        described.seq_length,
        tokenizer.file_name if tokenizer else None,
    )


def _matched(
    files: WeightFiles, described: Described, where: str, tokenizer: Tokenizer | None, report: Report
) -> tuple[ModelConfig, dict[TensorSpec, torch.dtype]]:
    """Return the model that the folder holds, with its weights and their dtypes. It is the model that config.json
    describes, except that it may have a head of its own that config.json denies. Raises ConfigError if the folder does
    not hold exactly these weights in their shapes."""
    model = _with_its_head(files, described.model, where, report)
    family = described.family
    specs = [*tensors(model, described.attention, described.vocab_size)]
    wanted = {name: each for each in specs for name in family.theirs(each)}
    there = {*files} - ({HEAD} if model.tie_embeddings else set())
    layers = {int(match[1]) + 1 for name in there if (match := re.match(r"model\.layers\.(\d+)\.", name))}
    says = (
        f"{where} says num_hidden_layers {model.num_layers}, the files of weights hold {max(layers, default=0)} layers"
    )
    cause = f"{says}: set it to what the model has, or " if max(layers, default=0) != model.num_layers else ""
    others, missing = sorted(there - set(wanted)), [name for name in wanted if name not in there]
    if missing in ([EMBEDDING], [HEAD]) and not others:
        raise ConfigError(
            f"{where} says tie_word_embeddings false, and of the two matrices that the model then has {missing[0]} is "
            f"missing{files.elsewhere(missing[0])}: set it to true if "
            f"{HEAD if missing == [EMBEDDING] else EMBEDDING} is both, or copy the folder again"
        )
    why = other_names(missing, others)
    if missing:
        lacks = f"{family.name} has {len(wanted)} tensors, and the folder lacks {len(missing)} of them"
        instead = f"; {len(others)} that it does not have are there, first: {others[0]}" if others else ""
        raise ConfigError(
            f"{lacks}, first: {missing[0]}{files.elsewhere(missing[0])}{instead}; "
            f"{why or f'{cause}copy the folder again'}"
        )
    if others:
        biased = f" ({where} says attention_bias and mlp_bias false)" if others[0].endswith(".bias") else ""
        raise ConfigError(
            f"the folder holds {many(len(others), 'tensor')} that {family.name} does not have, first: "
            f"{others[0]}{biased}; "
            f"{why or 'what they do would be lost, so this model cannot be read'}{f' ({says})' if cause else ''}"
        )
    for name, spec in wanted.items():
        if files.shape(name) != (shape := family.stored_shape(spec)):
            raise ConfigError(_other_shape(name, files.shape(name), shape, where, tokenizer))
    return model, {spec: _dtype(files, family.theirs(spec)) for spec in specs}


def _dtype(files: WeightFiles, names: Sequence[str]) -> torch.dtype:
    """Return the dtype of the tensors of a folder that are one of ours. A state, which no folder has, is fp32."""
    dtypes = {files.dtype(name): name for name in names} or {torch.float32: ""}
    if len(dtypes) > 1:
        (one, name), (other, second), *_ = dtypes.items()
        raise ConfigError(
            f"{name} is stored in {one} and {second} in {other}: experts of a layer are one tensor here, of one dtype; "
            "save the model in one dtype"
        )
    return next(iter(dtypes))


def _with_its_head(files: WeightFiles, model: ModelConfig, where: str, report: Report) -> ModelConfig:
    """Give the tensors of a bare model and of a tied model the names that the whole model has for them. If both an
    embedding and a head are stored, they are tied if transformers ties them."""
    bare = [name for name in files if not name.startswith(("model.", "lm_head.")) and f"model.{name}" not in files]
    if bare and "embed_tokens.weight" in bare:
        report(f"{where}: its tensors have no model. before their names ({bare[0]}): read as transformers does")
        for name in bare:
            files.rename(f"model.{name}", name)
    if HEAD in files and EMBEDDING in files:
        if model.tie_embeddings and not files.equal(HEAD, EMBEDDING):
            report(
                f"{where} says tie_word_embeddings true, but {HEAD} is stored beside {EMBEDDING} with other values: "
                "the model is read with this head of its own, tie_embeddings: false, as transformers does"
            )
            return model.model_copy(update={"tie_embeddings": False})
    elif HEAD in files and model.tie_embeddings:
        report(f"{where}: {EMBEDDING} is stored as {HEAD} alone, and tied: read as transformers does")
        files.rename(EMBEDDING, HEAD)
    return model


def _other_shape(
    name: str, found: tuple[int, ...], said: tuple[int, ...], where: str, tokenizer: Tokenizer | None
) -> str:
    """Return the message for a tensor that has another shape than config.json gives it."""
    if 0 in found or len(found) != len(said):
        return f"{name} has the shape {found}, {where} says {said}: it is empty or not whole, {GATHER}"
    if name in (HEAD, EMBEDDING) and found[1:] == said[1:]:
        tokens = f", the tokenizer has {tokenizer.vocab_size} tokens" if tokenizer else ""
        return (
            f"{name} has {found[0]} rows, {where} says vocab_size {said[0]}{tokens}: rows were added (for tokens or as "
            "padding) or lost, and transformers refuses the folder, too; set vocab_size to the rows that embedding and "
            "head have, or copy the folder again"
        )
    keys = next(keys for part, keys in _SHAPED_BY.items() if part in name)
    return f"{name} has the shape {found}, {where} says {said} by {keys}; set these to those of the model"


def _check_vocabulary(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that the model has a row for every token. Raises ConfigError if not."""
    if tokenizer.vocab_size <= vocab_size:
        return
    added = json.loads(tokenizer.model).get("added_tokens", []) if tokenizer.file_name == TOKENIZER_JSON else []
    beyond = [f"{each['content']} ({each['id']})" for each in added if each["id"] >= vocab_size]
    what = f", among them {', '.join(beyond[:3])}, added to the tokenizer alone" if beyond else ""
    raise ConfigError(
        f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, config.json says vocab_size {vocab_size}: the "
        f"model has no row for {tokenizer.vocab_size - vocab_size} of them{what}; give it these rows (in transformers "
        "model.resize_token_embeddings(len(tokenizer)), then save_pretrained), take the tokens out of the tokenizer's "
        "files, or name the tokenizer_class PreTrainedTokenizerFast if another class brings them along"
    )


def _say_dtype(config: Mapping[str, Any], dtypes: Mapping[TensorSpec, torch.dtype], where: str, report: Report) -> None:
    """Report weights that are stored in another dtype than config.json names. transformers would compute in the
    latter."""
    said = config.get("dtype") or config.get("torch_dtype")
    stored = [dtype for spec, dtype in dtypes.items() if spec.kind != "state"]
    others = [dtype for dtype in stored if f"{dtype}" not in (f"torch.{said}", f"{said}")]
    if said not in (None, "auto") and others:
        kinds = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in others}))
        report(
            f"{where} says dtype {said}, and tensors are stored in {kinds} ({len(others)} of {len(stored)}): they are "
            "kept as stored; transformers would round them"
        )


def _padded(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a tensor in a checkpoint, where the vocabulary is padded."""
    rows, *rest = spec.shape
    return (padded_vocab_size(rows) if spec.kind == "embedding" else rows, *rest)


def _tokenizer(folder: Path, report: Report) -> Tokenizer | None:
    """Return the folder's tokenizer. The SentencePiece model is taken if it has the tokens of tokenizer.json, unless
    tokenizer.json has what only it can hold: a chat template, or tokens that are put before a text."""
    there = [folder / name for name in (TOKENIZER_JSON, TOKENIZER_NAME) if is_there(folder / name)]
    if not there:
        found = next((f" ({CONVERT} writes one from {name})" for name in OTHER_FILES if (folder / name).is_file()), "")
        report(
            f"{folder}: has no {TOKENIZER_JSON}{found} and no {TOKENIZER_NAME}: text cannot be tokenized for this model"
        )
        return None
    tokenizer = Tokenizer.load(there[0])
    if len(there) == 2:
        try:
            other = Tokenizer.load(there[1])
            if other.vocab_size == tokenizer.vocab_size:
                more = ["a chat template"] if tokenizer.chat_template else []
                more += ["a post_processor"] if json.loads(tokenizer.model).get("post_processor") else []
                each = range(tokenizer.vocab_size)
                if other_token := next((at for at in each if tokenizer.spelling(at) != other.spelling(at)), None):
                    more += [f"the token {tokenizer.spelling(other_token)!r} ({other_token})"]
                if more:
                    report(f"{folder}: {TOKENIZER_JSON} is taken, which has {' and '.join(more)}, not {TOKENIZER_NAME}")
                else:
                    tokenizer = other
        except ConfigError:  # Some folders call another kind of file by this name.
            pass
    for note in tokenizer.notes:
        report(note)
    return tokenizer


def _generation(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int, report: Report
) -> dict[str, Any]:
    """Read generation_config.json, with the special token ids of config.json where it has none. Without the file, all
    settings are those of config.json, as in transformers. The ids say where a text ends, and all settings are exported
    again."""
    file = folder / "generation_config.json"
    said = keys_in(file)
    settings = {key: value for key, value in said.items() if key not in _NO_SETTINGS}
    in_config = {key: value for key, value in config.items() if key in SETTINGS and value is not None}
    if not file.is_file():
        settings = in_config
    elif others := [key for key, value in in_config.items() if said.get(key) != value]:
        report(f"{folder}: config.json says {', '.join(others)}, which is not read beside {file.name}")
    for key in SPECIAL_IDS:
        theirs, own = (_ids(tree.get(key), f"{folder / name}: {key}") for tree, name in
                       ((config, "config.json"), (said, file.name)))  # fmt: skip
        settings[key] = config.get(key) if said.get(key) is None else said[key]
        if own and not set(theirs) <= set(own):
            report(
                f"{folder}: config.json says {key} {config[key]}, {file.name} says {said[key]}: the latter counts, as "
                "in transformers"
            )
        for beyond in (each for each in own or theirs if not 0 <= each < vocab_size):
            what = f"{folder / (file.name if own else 'config.json')}: {key} {beyond} is no token of the model"
            if key != "pad_token_id":
                raise ConfigError(
                    f"{what}, whose ids are 0 to {vocab_size - 1} (vocab_size {vocab_size} of config.json): write the "
                    f"id of the token that {'ends' if key == 'eos_token_id' else 'begins'} a text, or null if none does"
                )
            # transformers would not load an export with such an id.
            settings[key] = None
            report(f"{what} (vocab_size {vocab_size}): it never comes and is left out")
    if settings["pad_token_id"] is None:
        del settings["pad_token_id"]
    ends = _ids(settings["eos_token_id"], "eos_token_id")
    if ends and tokenizer and tokenizer.eos_id not in ends:
        report(
            f"{folder}: the tokenizer's end-of-text token is {tokenizer.eos_id}, eos_token_id says "
            f"{settings['eos_token_id']}: a text ends with each of them, here and where this model is exported to"
        )
    return settings


def _ids(value: Any, where: str) -> list[int]:
    several = where.endswith("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) and several else [value]
    if any(type(each) is not int for each in ids):
        raise ConfigError(f"{where} {value!r} is no token id{' and no list of them' if several else ''}; copy it again")
    return ids


def _run_config(described: Described, model: ModelConfig, run_dir: Path, dtype: torch.dtype) -> RunConfig:
    """Build the configuration of a run that did not take place: its model, and the least that a configuration must
    hold."""
    length = described.seq_length
    tree = {
        "model": model.model_dump(),
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

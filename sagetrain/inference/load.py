"""Load a run's checkpoint as a model, in one process or over the ranks of a launcher, on GPUs or without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sagetrain.auto.kept import Kept, kept_attention, kept_linear
from sagetrain.checkpoint import on_disk, reading
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.state import RunState, Texts
from sagetrain.config.arguments import LoadedAttention, LoadedPrecision, from_python, spelled
from sagetrain.config.arithmetic import low_bit_linear, padded_vocab_size
from sagetrain.config.errors import CheckpointError, ConfigError, no_run
from sagetrain.config.layer_specs import exact_backend
from sagetrain.config.load import load_config, saved_config
from sagetrain.config.rules.prepared import CHAT_TEMPLATE
from sagetrain.config.schema import DataSource, RunConfig, tokenizer_in
from sagetrain.data.loader import SampleStream
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.data.tokenizer_config import BESIDE
from sagetrain.data.tokenizer_copy import kept_templates
from sagetrain.engines.step import Engine
from sagetrain.inference.located import located
from sagetrain.inference.ranks import Ranks
from sagetrain.model.moe import MoE
from sagetrain.model.selection import attention_functions, matmuls_of, resolve_backend
from sagetrain.model.tensors import EMBEDDING
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.metrics import Metrics
from sagetrain.storage.url_path import checkpoints_of


@dataclass
class TrainedRun:
    """A model with the weights of a checkpoint, and the settings that it was trained with."""

    cfg: RunConfig
    model: Transformer
    tokenizer: Tokenizer | None
    """None: the run was trained on token files from elsewhere, with only the size of their vocabulary known."""
    vocab_size: int
    step: int
    tokens: int
    device: torch.device
    texts: Texts
    """The conventions of texts that the weights have learned."""
    chat_template: str | None = None
    """The template of the chats in the data, or else the tokenizer's own."""
    data_hashes: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the data by name, as the checkpoint records them."""
    call: Callable[..., torch.Tensor] | None = None
    """Calls `model` where it is spread over the stages of a pipeline, or its experts over ranks. None: `model` is
    called itself."""

    @property
    def context(self) -> int:
        """The number of tokens that a text may have at once. Fine-tuning on short sequences does not reduce it."""
        return max(self.texts.context, self.cfg.data.seq_length)

    def stream(self, sources: list[DataSource]) -> SampleStream:
        """Open some of the data. Raises ConfigError if it cannot be read, or comes from another tokenizer."""
        sha256 = self.tokenizer.sha256 if self.tokenizer else None
        return SampleStream(self.cfg.data, sources, self.cfg.training.seed, self.vocab_size, sha256)


@dataclass(frozen=True)
class OpenRun:
    """A checkpoint of a run, and the settings that it was trained with. No tensor has been read."""

    cfg: RunConfig
    reader: Reader
    tokenizer: Tokenizer | None
    """None: the run was trained on token files from elsewhere, with only the size of their vocabulary known."""

    @property
    def state(self) -> RunState:
        """The state of the run in the checkpoint."""
        return self.reader.state

    @property
    def chat_templates(self) -> dict[str, str]:
        """The templates by name of the chats in the data, or else those of the tokenizer."""
        recorded = kept_templates({CHAT_TEMPLATE: self.state.texts.chat_template})
        return recorded or (self.tokenizer.chat_templates if self.tokenizer else {})


def open_run(run_dir: Path, report: Callable[[str], None], step: int | None = None) -> OpenRun:
    """Open the checkpoint of a step of a run, or its newest complete one. `report` gets messages about what was
    skipped. Raises CheckpointError if there is none, or the run's tokenizer is not the one it was trained with."""
    config, folder = run_dir / "config.yaml", None
    training = saved_config(config).get("training", {}) if config.is_file() else {}
    root = checkpoints_of(run_dir, training.get("run_url"))
    if step is None:
        folder, _ = on_disk.newest_whole(root, report, moments=False)
    elif on_disk.published(root):
        folder = on_disk.whole_at(root, step, moments=False)
    if folder is None:
        raise CheckpointError(_no_run(run_dir))
    reader = Reader(folder)
    cfg = load_config(folder / "config.yaml", passed_over=report)
    trained_with = reader.state.identity.tokenizer_sha256
    file = tokenizer_in(run_dir)  # Training has kept the tokenizer there.
    if trained_with and not file.is_file():
        file = Path(cfg.data.tokenizer_path)
        if not file.is_file():
            raise CheckpointError(
                f"{run_dir} has lost its tokenizer, which is not at {file} either: put the tokenizer.model, or the "
                "tokenizer.json with its tokenizer_config.json, back into the folder of the run"
            )
    tokenizer = Tokenizer.load(file) if trained_with or file.is_file() else None
    if trained_with and tokenizer and tokenizer.sha256 != trained_with:
        # Beside a SentencePiece model nothing counts.
        beside = [name for name in BESIDE if file.suffix == ".json" and (file.parent / name).exists()]
        more = f", and what is part of it beside it as the run wrote it ({', '.join(beside)})" if beside else ""
        raise CheckpointError(
            f"{folder} was trained with another tokenizer (SHA-256 {trained_with[:12]}) than {file} "
            f"({tokenizer.sha256[:12]}); put that file back{more}"
        )
    return OpenRun(cfg, reader, tokenizer)


def _no_run(path: Path) -> str:
    """Return a message that says what a path without a run and checkpoint is, and what to name instead."""
    if path.parent.name == "checkpoints" and path in on_disk.published(path.parent):
        # Step 0 is an imported model, which has no other checkpoint.
        step = on_disk.step_of(path)
        option = f" with {'step=' if from_python() else '--checkpoint '}{step}" * (step > 0)
        return f"{path} is a checkpoint: name {path.parent.parent}{option}"
    if (path / "manifest.json").is_file():
        return (
            f"{path} is a checkpoint without its run: put it into RUN/checkpoints under the name that it had there "
            "(step-...), the run's tokenizer into RUN, and name RUN"
        )
    if (path / "config.json").is_file():
        return f"{path} is a Hugging Face folder: read it first, `sagetrain import {path} RUN`, and name RUN"
    return no_run(path)


def in_training(cfg: RunConfig, engine: Engine, tokenizer: Tokenizer, texts: Texts) -> TrainedRun:
    """Return a model in training as one that generates, with what its weights had learned of texts. It has the same
    weights, which are not copied, and is complete on each group of Topology.text_ranks, or on those of all stages of a
    pipeline. This is impossible at ZeRO 3, where no rank has whole weights."""
    model, weights = engine.model, {name: weight.detach() for name, weight in engine.gathered().items()}
    of_texts = replace(model.groups.topology, context_parallel_size=1, context_gather=1)
    groups = replace(model.groups, topology=of_texts, cp_group=None, metrics=Metrics())
    weight = next(iter(weights.values()))
    if model.chunks[-1].last and cfg.model.tie_embeddings:
        weights["head.weight"] = weights[EMBEDDING]
    own = Transformer(
        cfg.model,
        cfg.attention,
        functions=[model.functions[0] if other is None else other.function for other in model.every_attention],
        vocab_size=model.every_spec[EMBEDDING].shape[0],
        known=model.known,
        groups=groups,
        overlap=False,
        seed=None,
        dtype=weight.dtype,
        chunks=model.chunks,
    )
    own.load_state_dict(weights, assign=True)
    for module in own.modules():
        if isinstance(module, MoE):
            module.same_tokens = True
    call = engine.as_whole(own)
    # Otherwise tensor-parallel ranks gather their logits.
    if groups.ep_group is not None and groups.ep_size > groups.tp_size:
        call = partial(_of_first, call, groups.ep_group)
    return TrainedRun(cfg, own.eval(), tokenizer, tokenizer.vocab_size, 0, 0, weight.device, texts, call=call)


def _of_first(
    call: Callable[..., torch.Tensor], together: dist.ProcessGroup, *tokens: torch.Tensor, **how: Any
) -> torch.Tensor:
    """Return the logits of the first of the ranks that write a text together. With other bits a rank would draw another
    token, and wait for the others."""
    logits = call(*tokens, **how)
    dist.broadcast(logits, group=together, group_src=0)
    return logits


def with_data(run: TrainedRun, run_dir: Path, root: Path | None, report: Callable[[str], None]) -> TrainedRun:
    """Return the run with the present paths of its data, for commands that read the data. `root` is a folder that holds
    the data, if one is named. `report` gets a message if the data is elsewhere than it was. Raises ConfigError if it is
    not in `root`."""
    data = located(run.cfg.data, run.cfg.training.run_dir, run_dir, run.data_hashes, root, report)
    return replace(run, cfg=run.cfg.model_copy(update={"data": data}))


def at_context(run: TrainedRun, context: int) -> TrainedRun:
    """Return the run with sequences of `context` tokens in place of data.seq_length, and about as many tokens at once.
    The model is the same. Positions past those that it was trained with are new to it."""
    data = run.cfg.data
    rows = max(1, data.micro_batch_size * data.seq_length // context)
    update = {"seq_length": context, "micro_batch_size": rows}
    cfg = run.cfg.model_copy(update={"data": data.model_copy(update=update)})
    return replace(run, cfg=cfg, texts=replace(run.texts, context=context))


def load_run(
    run_dir: Path,
    report: Callable[[str], None],
    step: int | None = None,
    *,
    attention: LoadedAttention | None = None,
    linear: LoadedPrecision | None = None,
    ranks: Ranks | None = None,
) -> TrainedRun:
    """Load the checkpoint of `open_run` as a model. Raises CheckpointError if open_run refuses the run, and ConfigError
    if `attention` or `linear` cannot run here, or the model cannot be spread over so many ranks.

    Args:
        report: gets messages about what was skipped, and about what runs differently here.
        step: step of the checkpoint; None: the newest complete one.
        attention: a backend (model/backends.py) for all layers, in place of what the run was trained with.
        linear: a precision (linear.precision) for the linear layers of the blocks. Default: 16 bits; `report` says so
            if the run has others.
        ranks: the ranks that share the model, tensor parallel; all of them call this. Default: this process has all of
            it.
    """
    run = open_run(run_dir, report, step)
    ranks = ranks or Ranks.alone()
    cfg, state, device, groups = run.cfg, run.state, ranks.device, ranks.groups
    vocab_size = state.identity.vocab_size
    before = Kept.by(run.reader.folder)
    trained = kept_attention(cfg.attention, before.attention)
    cfg = cfg.model_copy(update={"linear": kept_linear(cfg.linear, before.linear)})
    dtype = torch.bfloat16 if device.type == "cuda" and cfg.training.dtype == "bf16" else torch.float32
    wide: LoadedAttention = exact_backend(cfg.model)
    try:
        asked = trained if attention is None else trained.model_copy(update={"backend": attention})
        backend, _ = resolve_backend(asked, cfg.model, device=device, dtype=dtype)
    except ValueError as error:
        if attention is not None:
            raise ConfigError(f"{spelled('attention')} {attention}: {error}") from error
        backend = wide
        report(f"{error}; {wide} is used here")  # The run was trained on other hardware.
    if backend == "auto":  # The version that trained the run did not record the choice.
        backend = wide
    try:
        # In 8 bits they are the same layers as in training.
        multiply = cfg.linear.model_copy(update={"precision": linear or "bf16"})
        matmuls, how = matmuls_of(
            multiply,
            cfg.model,
            tensor_parallel_size=cfg.parallel.tensor_parallel_size,
            here=groups.tp_size,
            device=device,
            dtype=dtype,
        )
        if multiply.low_bit:
            report(f"linear layers {how}")
    except ValueError as error:
        raise ConfigError(f"{spelled('linear')} {linear}: {error}") from error
    try:
        attending = trained.model_copy(update={"backend": backend})
        model = Transformer(
            cfg.model,
            attending,
            functions=attention_functions(attending, cfg.model, device=device, dtype=dtype),
            matmuls=matmuls,
            vocab_size=padded_vocab_size(vocab_size),
            known=vocab_size,
            groups=groups,
            # Overlap would split a batch.
            overlap=False,
            seed=None,
            dtype=dtype,
            device=device,
        )
    except ValueError as error:
        raise ConfigError(f"{error}: start the command on fewer ranks") from error
    reading.load_weights(run.reader, model, groups, device)
    model.keep_weights()
    model.eval()
    if low_bit_linear(cfg.linear, state.tokens, cfg.training.total_tokens) and linear is None:
        report(f"linear layers, {cfg.linear.precision} in training, are not in 8 bits here")
    return TrainedRun(
        cfg,
        model,
        run.tokenizer,
        vocab_size,
        state.step,
        state.tokens,
        device,
        state.texts,
        chat_template=run.chat_templates.get("default"),
        data_hashes=state.files,
    )

"""The state of a run in a checkpoint: "state" in manifest.json. It says where the run stood and what kind of run it
was.

The manifest keeps the names that checkpoints have always had, so that this version reads older checkpoints and older
versions read newer ones. `sagetrain import` writes a state as well, for a model that no run has trained yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from sagetrain.checkpoint.ledger import Ledger
from sagetrain.config.errors import CheckpointError
from sagetrain.config.linear_sizes import LowBit
from sagetrain.config.rules.data import ORDER
from sagetrain.config.schema import ModelConfig
from sagetrain.storage.url_path import Location

T = TypeVar("T")
_NAMED = 8  # An error names this many wrong keys.
VERSION = 1
"""The version of the state that this code writes. Checkpoints without a version are read as version 1."""
_OF_RUNS = (
    *("ledger", "controllers", "optimizer_steps", "init_from", "chat_template", "attention", "linear", "overlap"),
    *("engine", "files", "guidance_overrides", "versions"),
)
"""The keys that an imported model does not have, because no run has trained it."""


@dataclass(frozen=True)
class Identity:
    """The settings that a checkpoint must share with the run that continues it."""

    model: dict[str, Any]
    """The section `model` of the configuration."""
    qk_norm: Annotated[str, Field(alias="attention.qk_norm")]
    vocab_size: int
    """The size of the vocabulary; 0: it is not known yet, in a plan without a tokenizer."""
    init_from: Annotated[str | None, Field(alias="training.init_from")] = None
    seed: Annotated[int | None, Field(alias="training.seed")] = None
    """The seed of the run; None: the model was imported and no run has trained it."""
    seq_length: Annotated[int, Field(alias="data.seq_length")] = 0
    tokenizer_sha256: Annotated[str | None, Field(alias="tokenizer (SHA-256)")] = None
    order: Annotated[str | None, Field(alias=ORDER)] = None
    """The fingerprint of the order of samples; None: it is not known."""
    loss: str | None = None
    """The name of the user's loss (sagetrain.train(..., loss=...)); None: the cross-entropy."""

    @property
    def complete(self) -> Identity:
        """The settings as this version has them. Keys of `model` that a checkpoint lacks have their defaults."""
        defaults = {name: key.default for name, key in ModelConfig.model_fields.items()}
        later = {key: value for key, value in defaults.items() if value is not PydanticUndefined}
        return replace(self, model={**later, **self.model})

    @property
    def rope(self) -> dict[str, Any]:
        """The settings of RoPE, by name."""
        return {key: self.model.get(key) for key in ("rope_theta", "rope_scaling")}

    def to_json(self) -> dict[str, Any]:
        """Return the settings by their names in the manifest, without unknown ones."""
        tree: dict[str, Any] = _IDENTITY.dump_python(self, by_alias=True)
        unknown = [key for key, value in (("vocab_size", self.vocab_size), (ORDER, self.order)) if not value]
        unknown += ["training.init_from", "training.seed"] if self.seed is None else []
        unknown += ["loss"] if self.loss is None else []
        return {key: value for key, value in tree.items() if key not in unknown}


@dataclass(frozen=True)
class Positions:
    """The sequence length that a model was made for, and the RoPE that it had then."""

    length: int
    rope: dict[str, Any]

    @classmethod
    def reached(cls, identity: Identity, before: Positions | None) -> Positions:
        """Return the positions of a run. A run on shorter sequences than the run that it began with, which reached
        `before`, does not reduce the length, as long as it keeps the RoPE."""
        length, rope = identity.seq_length, identity.rope
        return cls(max(length, before.length) if before and before.rope == rope else length, rope)


@dataclass(frozen=True)
class InitFromRecord:
    """The checkpoint that a run began with (training.init_from), and what its weights had learned of texts."""

    checkpoint: str = ""
    """The path of the checkpoint when the run began."""
    manifest_sha256: Annotated[str, Field(alias="manifest (SHA-256)")] = ""
    step: int = 0
    tokens: int = 0
    optimizer_steps: int = 0
    """The updates that the Adam moments have seen; 0 without training.init_moments."""
    generation: Annotated[dict[str, Any], Field(alias="imported tokens")] = field(default_factory=dict)
    """The generation settings, special token ids among them, of the folder that the weights were imported from."""
    text_prefix: list[int] | None = None
    chat_template: Any = None
    positions: Positions | None = None

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], where: Path) -> InitFromRecord:
        """Read a record of the file `where`. Raises CheckpointError if values are missing or of the wrong type."""
        return validated(_RECORD, tree, f"{where}: ")

    def to_json(self) -> dict[str, Any]:
        """Return the record by its names in init_from.json."""
        tree: dict[str, Any] = _RECORD.dump_python(self, by_alias=True)
        return tree


@dataclass(frozen=True)
class Texts:
    """The conventions of texts that the weights have learned."""

    prefix: list[int]
    """The tokens before a text that is scored or continued."""
    end_tokens: list[int]
    """The tokens that end a text, in addition to the tokenizer's own."""
    context: int
    """The number of tokens that a text may have at once."""
    chat_template: Any = None
    """The template of the chats that were learned last, or templates by name; None if there were no chats."""


@dataclass(frozen=True)
class ImportRecord:
    """The Hugging Face folder that weights were imported from."""

    architecture: str = ""
    generation: Annotated[dict[str, Any], Field(alias="tokens")] = field(default_factory=dict)
    """The generation settings, special token ids among them."""


@dataclass(frozen=True)
class SettledAttention:
    """The attention of a run, with `auto` replaced by the choice that was made."""

    backend: str
    recipe: str


@dataclass(frozen=True)
class SettledLinear:
    """The precision of a run's linear layers, with `auto` replaced by the choice that was made."""

    precision: Literal["bf16", LowBit, "auto"]
    keep_layers_below: int = 0


@dataclass(frozen=True)
class SettledOverlap:
    """The choice of a run to split micro-batches in two halves or not, and the layout for which it was made."""

    choice: Literal["auto", "on", "off"]
    layout: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run in a checkpoint, in the order in which the manifest has it."""

    version: int = VERSION
    step: int
    tokens: int
    sequences: int
    ledger: Ledger | None = None
    """The ledger of the samples consumed; None for an imported model."""
    controllers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The memory of each stability controller, keyed by the controller's name."""
    optimizer_steps: int = 0
    """The number of updates that the Adam moments have seen, those of an earlier run included."""
    init_from: InitFromRecord | None = None
    text_prefix: list[int] | None = None
    """The tokens that every text of the training data began with."""
    chat_template: Any = None
    """The template of the chats in the training data, or templates by name as in tokenizer_config.json."""
    identity: Identity
    imported: ImportRecord | None = None
    engine: Literal["deepspeed", "fsdp"] | None = None
    """The engine that wrote the checkpoint; None: it was written before `auto` was fsdp, or no run has written it."""
    attention: SettledAttention | None = None
    linear: SettledLinear | None = None
    overlap: SettledOverlap | None = None
    files: dict[str, str] = field(default_factory=dict)
    """The first digits of the hashes of the data's files, by name."""
    guidance_overrides: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], folder: Location) -> RunState:
        """Read the state of the checkpoint in `folder`. Raises CheckpointError if a newer SageTrain wrote the state,
        values are missing or of the wrong type, or contradict one another."""
        if newer := newer_state(tree, folder):
            raise CheckpointError(newer)
        known = {key: value for key, value in tree.items() if value is not None}
        state = validated(_STATE, known, f"{folder}: manifest.json: state.")
        if state.imported is None and "optimizer_steps" not in known:
            raise CheckpointError(f"{folder}: manifest.json: state.optimizer_steps: missing; restore that checkpoint")
        if wrong := state._contradiction():
            raise CheckpointError(
                f"{folder}: manifest.json: state.{wrong}; restore that checkpoint, or use another one"
            )
        return state

    def _contradiction(self) -> str:
        """Return how the numbers of steps, samples and tokens contradict one another; an empty text if they agree."""
        length = self.identity.seq_length
        if length and self.tokens != self.sequences * length:
            return f"tokens: {self.tokens:,} are not {self.sequences:,} sequences of {length:,} tokens"
        if self.ledger is None:
            return ""
        steps, samples = self.ledger.steps, self.ledger.samples
        if (steps, samples) != (self.step, self.sequences):
            return (
                f"ledger: has {steps:,} steps over {samples:,} samples, the training state says {self.step:,} steps "
                f"over {self.sequences:,}"
            )
        before = self.init_from.optimizer_steps if self.init_from else 0
        if self.identity.init_from and not self.init_from:  # The earliest checkpoints do not say what a run began with.
            before = self.optimizer_steps
        updates = before + steps - len(self.ledger.dropped)
        if not 0 <= self.optimizer_steps <= updates:
            return f"optimizer_steps: {self.optimizer_steps:,}, where the ledger has {updates:,} updates at most"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the state in the manifest's form. Its containers are new, so training does not change them."""
        tree: dict[str, Any] = {**_STATE.dump_python(self, by_alias=True), "identity": self.identity.to_json()}
        if self.ledger and not self.ledger.ended:
            del tree["ledger"]["ended"]
        if self.imported is None:
            del tree["imported"]
            return tree
        return {key: value for key, value in tree.items() if key not in _OF_RUNS and value is not None}

    @property
    def generation(self) -> dict[str, Any]:
        """The generation_config.json of the folder that the weights were imported from; empty for others."""
        before = self.init_from.generation if self.init_from else {}
        return (self.imported.generation if self.imported else {}) or before

    @property
    def texts(self) -> Texts:
        """The conventions of texts that the weights have learned in this run and in earlier ones. Those of the run's
        own data come first."""
        before, ends = self.init_from or InitFromRecord(), self.generation.get("eos_token_id")
        return Texts(
            (before.text_prefix if self.text_prefix is None else self.text_prefix) or [],
            [] if ends is None else [ends] if isinstance(ends, int) else [*ends],
            self.positions.length,
            self.chat_template or before.chat_template,
        )

    @property
    def positions(self) -> Positions:
        """The longest sequence that the model is made for, and its RoPE."""
        return Positions.reached(self.identity, self.init_from.positions if self.init_from else None)


def newer_state(tree: Mapping[str, Any], folder: Location) -> str:
    """Return the message for a state that came after this version; an empty text for every other state."""
    version = tree.get("version", VERSION)
    if isinstance(version, int) and version <= VERSION:
        return ""
    return (
        f"{folder}: the training state in manifest.json has version {version}, this SageTrain reads versions up to "
        f"{VERSION}: continue with the SageTrain that wrote it"
    )


def validated(adapter: TypeAdapter[T], tree: Mapping[str, Any], where: str) -> T:
    """Read JSON as a dataclass. Raises CheckpointError that names the keys that are wrong, the first eight of them."""
    try:
        return adapter.validate_python(tree)
    except ValidationError as error:
        every = error.errors()
        wrong = [
            f"{'.'.join(map(str, each['loc']))}: {'missing' if each['type'] == 'missing' else each['msg']}"
            for each in every[:_NAMED]
        ]
        if more := len(every) - len(wrong):
            wrong.append(f"and {more} more")
        raise CheckpointError(f"{where}{'; '.join(wrong)}; restore that checkpoint, or use another one") from error


_IDENTITY, _RECORD, _STATE = TypeAdapter(Identity), TypeAdapter(InitFromRecord), TypeAdapter(RunState)

"""The public functions of SageTrain as a library. `import sagetrain` offers the names of this module, and loads the
module when one of them is used.

The functions do what the commands of the same names do, and return values where a command prints text. Nothing here
ends the process, prints, or catches signals. Messages for people go to `say`, if it is given. A mistake of the caller
raises ConfigError with the text of the command, which names arguments in the place of options. A checkpoint that cannot
be used raises CheckpointError.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sagetrain.config.arguments import LoadedAttention, LoadedPrecision, check_least, checked
from sagetrain.config.errors import CheckpointError, ConfigError, TrainingError
from sagetrain.config.load import load_config as _load_config
from sagetrain.config.overrides import ConfigChanges, assignments
from sagetrain.config.schema import RunConfig
from sagetrain.corpus.prepare import Prepared
from sagetrain.corpus.prepare import prepare as _prepare
from sagetrain.corpus.records import Chats, Pairs
from sagetrain.corpus.request import Request
from sagetrain.costs.hardware import cluster_of
from sagetrain.costs.which_gpu import planned_gpu
from sagetrain.planning.plan import make_plan
from sagetrain.planning.result import Plan

# These modules import torch.
if TYPE_CHECKING:
    from sagetrain.comparing.analysis import Comparison
    from sagetrain.data.batch import Sample
    from sagetrain.data.function import SampleFunction
    from sagetrain.engines.protocol import StepResult
    from sagetrain.inference.evaluate import Evaluation
    from sagetrain.inference.generate import Completion
    from sagetrain.inference.load import TrainedRun
    from sagetrain.interop.exporting import Exported
    from sagetrain.interop.importing import Imported
    from sagetrain.parallel.cross_entropy import OwnLoss, by_sequence
    from sagetrain.training.callbacks import Callback, Position, RunStart

__all__ = [
    "Callback",
    "Chats",
    "CheckpointError",
    "ConfigError",
    "Model",
    "Pairs",
    "Plan",
    "Position",
    "Prepared",
    "Request",
    "RunConfig",
    "RunStart",
    "Sample",
    "StepResult",
    "TrainingError",
    "TrainingResult",
    "by_sequence",
    "compare",
    "import_folder",
    "load_config",
    "load_run",
    "plan",
    "prepare",
    "train",
]

_LAZY = {"Callback": "training.callbacks", "Position": "training.callbacks", "RunStart": "training.callbacks",
         "Sample": "data.batch", "StepResult": "engines.protocol",
         "by_sequence": "parallel.cross_entropy"}  # fmt: skip
"""The public names whose modules import torch. Such a module is imported when its name is used."""


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"sagetrain.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'sagetrain.api' has no attribute {name!r}")


def _silent(text: str) -> None:
    """Ignore a message. This is the default of `say`."""


def _changes(config: object, overrides: ConfigChanges) -> list[str]:
    """Return overrides as `assignments` does. Raises ConfigError if there are some for a RunConfig."""
    texts = assignments(overrides)
    if isinstance(config, RunConfig) and texts:
        raise ConfigError(f"overrides {texts}: a RunConfig has its values; give overrides to load_config")
    return texts


@checked
def load_config(path: str | Path, overrides: ConfigChanges = ()) -> RunConfig:
    """Read the configuration of a run from a YAML file, or a shipped one by its name, such as "325m".

    Args:
        path: a YAML file, or the name of a shipped configuration.
        overrides: values that replace those of the file.

    Raises:
        ConfigError: every problem of the configuration, with place, key, value, rule and fix.
    """
    return _load_config(path, assignments(overrides))


@checked
def prepare(request: Request, say: Callable[[str], None] = _silent) -> Prepared:
    """Turn text into token files, and train a tokenizer if the request asks for one.

    An interrupted call continues where it was when it is repeated with the same request.

    Args:
        request: the text, the path of the token file, and the tokenizer.
        say: gets messages for people.

    Raises:
        ConfigError: the request contradicts itself, or a source cannot be read.
    """
    return _prepare(request, say)


@checked
def plan(
    config: RunConfig | str | Path,
    overrides: ConfigChanges = (),
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    gpus_per_host: int = 8,
    network_gbps: float = 400.0,
    host_memory_gib: float | None = None,
) -> Plan:
    """Predict a run: memory, speed, schedule, better layouts, and every finding. This needs no GPU.

    Args:
        config: the result of load_config, a YAML file, or the name of a shipped configuration.
        overrides: values that replace those of the file. They are not allowed together with a RunConfig.
        world_size: the number of ranks. Default: parallel.world_size, or 1.
        gpu: a key of sagetrain.costs.hardware.HARDWARE, or a part of one ("4090"). Default: this host's GPU, or h200.
        gpus_per_host: the number of GPUs of a host.
        network_gbps: the bandwidth of the network for each GPU, in Gbit/s.
        host_memory_gib: the memory of a host in GiB, for parallel.offload. Default: an assumption for the GPU.

    Raises:
        ConfigError: the configuration cannot be read, the GPU is not known, or a number is below 1 or not finite.
    """
    check_least("plan", 1, {"world_size": world_size, "gpus_per_host": gpus_per_host})
    check_least("plan", 1, {"network_gbps": network_gbps, "host_memory_gib": host_memory_gib})
    kind, _ = planned_gpu(gpu)
    hardware = cluster_of(kind, gpus_per_host, network_gbps, host_memory_gib, named=gpu is not None)
    return make_plan(config, _changes(config, overrides), world_size, hardware)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a call of `train`."""

    run_dir: Path
    """The run folder."""
    step: int
    """The number of optimizer steps that the run has taken."""
    tokens: int
    """The number of tokens that the run has seen."""
    finished: bool
    """Whether the run has reached training.total_tokens. The next call continues a run that was stopped."""
    metrics: Mapping[str, float]
    """The newest value of each number that this call has measured, by its name in metrics.jsonl: train/loss,
    valid/loss, ... They are the same on every rank. Empty if the run had reached its end before."""


@checked
def train(
    config: RunConfig | str | Path,
    overrides: ConfigChanges = (),
    *,
    callbacks: Sequence[Callback] = (),
    loss: OwnLoss | None = None,
    tokens: SampleFunction | None = None,
    say: Callable[[str], None] = _silent,
    own_process: bool = False,
) -> TrainingResult:
    """Train the run of a configuration, or continue it. Under a launcher every rank calls this.

    Args:
        config: the result of load_config, a YAML file, or the name of a shipped configuration.
        overrides: values that replace those of the file. They are not allowed together with a RunConfig.
        callbacks: objects that are told of steps, rows, evaluations, events and checkpoints (sagetrain.Callback).
        loss: a function (logits fp32 [tokens, vocab], labels int64 [tokens]) -> the loss of each token, [tokens], in
            the place of the cross-entropy. It is called several times for a micro-batch, with some of its tokens, or
            once with whole sequences (sagetrain.by_sequence). A label of -100 does not count. Held-out losses stay
            cross-entropies. Checkpoints keep its name, and only a call with a loss of that name continues them.
        tokens: a function of the index of a training sequence, from 0, that returns its data.seq_length + 1 tokens, or
            a sagetrain.Sample with the places where documents begin. It replaces the token files of data.train, which
            has to be [{path: none}]. The same index has to give the same tokens on every rank and at every start. It
            is called in threads (data.num_workers).
        say: gets the lines that `sagetrain train` prints, on rank 0.
        own_process: let signals stop the run with a checkpoint, end the process if the run hangs, and tell the other
            hosts if this one cannot take part, as `sagetrain train` does. Without it SIGTERM, as Slurm sends it, ends
            the script at once, and the next call continues from the newest checkpoint.

    Raises:
        ConfigError: the configuration, the files or the hosts do not allow the run.
        CheckpointError: a checkpoint cannot be read or written.
        TrainingError: training cannot continue, or a callback, the loss or `tokens` has failed on some rank, which
            every rank's error names. The newest checkpoint is undamaged.
    """
    from sagetrain.interop.looks import looks_of
    from sagetrain.training.program import train_here

    texts = _changes(config, overrides)
    run_dir, position, finished, metrics = train_here(
        config, texts, looks_of, callbacks, loss=loss, tokens=tokens, say=say, own_process=own_process
    )
    return TrainingResult(run_dir, position.step, position.tokens, finished, metrics)


@dataclass(frozen=True)
class Model:
    """A model with the weights of a checkpoint, in this process. `load_run` returns one."""

    run: TrainedRun
    """The loaded run. It has the torch module (`run.model`), the tokenizer, the configuration, and the step."""
    run_dir: Path

    def __repr__(self) -> str:
        return f"Model({self.run_dir}, step {self.run.step}, {self.run.tokens:,} tokens)"

    @checked
    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        chat: bool = False,
        batch_size: int = 8,
    ) -> list[Completion]:
        """Continue prompts, or with `chat` answer them as messages of a user. Return one completion for each prompt, in
        order.

        Args:
            prompts: one text, or several.
            max_tokens: the largest number of new tokens for each prompt.
            temperature: the sampling temperature; 0 takes the likeliest token each time.
            top_k: the number of likeliest tokens to choose from; 0: all tokens.
            top_p: choose only from the fewest likeliest tokens whose probabilities together reach this value.
            stop: a completion ends before the first of these texts.
            seed: the seed of the sampling.
            chat: treat each prompt as a message of a user, and use the chat template.
            batch_size: the number of prompts that are continued at the same time.

        Raises:
            ConfigError: an option is out of range, or a prompt is longer than the model's context.
        """
        from sagetrain.inference.generate import Sampling
        from sagetrain.inference.requests import GenerateRequest

        check_least("generate", 1, {"max_tokens": max_tokens, "batch_size": batch_size})
        check_least("generate", 0, {"top_k": top_k})
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = Sampling(max_tokens, temperature, top_k, top_p, tuple(stop), seed)
        request = GenerateRequest(given, sampling, batch_size, chat)
        for said in request.remarks(self.run):
            warnings.warn(said, stacklevel=3)
        return request.finished(self.run)

    @checked
    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the natural logarithm of p(continuation | context) for each pair of a context and its continuation.

        Raises:
            ConfigError: the run has no tokenizer, or a continuation is longer than the model's context.
        """
        from sagetrain.inference.score import encoded_pair, scorer_of

        run = self.run
        if run.tokenizer is None:
            raise ConfigError(f"{self.run_dir} has no tokenizer: put the one that made its data into the folder")
        begin, encoded = [*run.texts.prefix], [encoded_pair(run.tokenizer, *pair) for pair in pairs]
        tokens = [([*begin, *context] or [run.tokenizer.eos_id], text) for context, text in encoded]
        return [found for found, _ in scorer_of(run, run.tokenizer)(tokens)]

    @checked
    def evaluate(
        self,
        texts: str | Path | Sequence[str | Path] = (),
        *,
        num_sequences: int | None = None,
        stride: int | None = None,
        text_key: str = "text",
        say: Callable[[str], None] = _silent,
    ) -> list[Evaluation]:
        """Measure loss (nats per token), perplexity and bits per byte for each source.

        Args:
            texts: a token file without suffix, a text file that `prepare` can read, or several. Default: the run's
                data.valid.
            num_sequences: the number of sequences of data.valid. Default: evaluation.num_sequences of the run.
            stride: score all of the data in windows whose begins are this many tokens apart. Default with texts: half a
                window.
            text_key: the field or column that holds the text.
            say: gets messages for people.

        Raises:
            ConfigError: the options contradict each other, or the data cannot be read.
        """
        from sagetrain.inference.load import with_data
        from sagetrain.inference.requests import EvaluateRequest

        check_least("evaluate", 1, {"num_sequences": num_sequences, "stride": stride})
        each = [texts] if isinstance(texts, str | os.PathLike) else texts
        request = EvaluateRequest([str(text) for text in each], num_sequences, stride, text_key)
        return request.measure(with_data(self.run, self.run_dir, None, say), say)

    @checked
    def export(
        self,
        folder: str | Path,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        say: Callable[[str], None] = _silent,
    ) -> Exported:
        """Write the checkpoint as a Hugging Face folder, which transformers and vLLM can load.

        Args:
            folder: a folder that does not exist yet or is empty, on a disk or in a bucket (s3://BUCKET/FOLDER, gs://).
            dtype: the dtype of the weights. Default: the dtype in which the run computed.
            say: gets messages for people.

        Raises:
            ConfigError: the folder is not empty, or transformers has no class for the model.
            CheckpointError: the folder cannot be written.
        """
        from sagetrain.interop.exporting import export

        return export(self.run_dir, Path(folder), step=self.run.step or None, dtype=dtype, report=say)


@checked
def load_run(
    run_dir: str | Path,
    step: int | None = None,
    *,
    attention: LoadedAttention | None = None,
    linear: LoadedPrecision | None = None,
    say: Callable[[str], None] = _silent,
) -> Model:
    """Load the newest undamaged checkpoint of a run, or the checkpoint of a step, as a model on this process's GPU or
    on the CPU.

    Args:
        run_dir: the run's training.run_dir, or its training.run_url.
        step: the step of the checkpoint. Default: the newest undamaged one.
        attention: the attention backend of all layers: sdpa, sage, flash or reference. Default: the backend that the
            run was trained with.
        linear: the precision of the linear layers in the blocks: bf16, fp8 or int8. Default: 16 bits.
        say: gets messages for people.

    Raises:
        CheckpointError: there is no undamaged checkpoint, or the tokenizer file is not the run's.
        ConfigError: there is no such `attention` or `linear`, or it cannot run here.
    """
    from sagetrain.cluster.run_copy import here
    from sagetrain.inference.load import load_run as load

    path = here(Path(run_dir))
    return Model(load(path, say, step, attention=attention, linear=linear), path)


@checked
def import_folder(folder: str | Path, run_dir: str | Path, *, say: Callable[[str], None] = _silent) -> Imported:
    """Turn a Hugging Face folder into a run folder, to start from with training.init_from, and to load
    with load_run. docs/new-phase.md has the families of models that are read.

    Args:
        folder: the Hugging Face folder, on a disk or in a bucket.
        run_dir: the folder to write, which does not exist yet or is empty. Its config.yaml has the model.
        say: gets a message for everything that is read differently than the folder says.

    Raises:
        ConfigError: the folder holds another kind of model, is incomplete, or its sizes do not match.
        CheckpointError: the run folder cannot be written.
    """
    from sagetrain.interop.importing import import_folder as read

    return read(Path(folder), Path(run_dir), report=say)


@checked
def compare(
    configs: Sequence[str | Path],
    *,
    variants: Mapping[str, ConfigChanges] | None = None,
    rows: Mapping[str, ConfigChanges] | None = None,
    overrides: ConfigChanges = (),
    seeds: int = 3,
    band: int = 0,
    margin: float = 0.01,
    output: str | Path | None = None,
    runs_per_gpu: int = 1,
    say: Callable[[str], None] = _silent,
) -> list[Comparison]:
    """Train configurations side by side from the same initialization and samples. Return their losses and verdicts.

    Each run is a process of its own on the GPUs of this host. A repeated call adds what is missing.

    Args:
        configs: files or names of configurations. The first one is the baseline.
        variants: overrides of the baseline by name. Each makes a further configuration to compare with the baseline.
        rows: overrides by name. All configurations are compared once more with each, for example with other tokens per
            step.
        overrides: overrides of all runs.
        seeds: the number of runs of each configuration. Runs with the same seed form a pair.
        band: for this many seeds the baseline runs again with another rounding, which gives the rounding band.
        margin: a difference in nats per token that does not matter.
        output: the folder of the page, the plot, the tables and the runs. Default: training.run_dir-compare.
        runs_per_gpu: the number of runs that share a GPU at the same time.
        say: gets messages for people.

    Raises:
        ConfigError: there is nothing to compare, or the folder holds another comparison.
    """
    from sagetrain.comparing import command
    from sagetrain.comparing.compare_request import CompareRequest

    check_least("compare", 1, {"seeds": seeds, "runs_per_gpu": runs_per_gpu})
    check_least("compare", 0, {"band": band, "margin": margin})
    named, settings = ([f"{name}: {shlex.join(assignments(changes))}" for name, changes in (each or {}).items()]
                       for each in (variants, rows))  # fmt: skip
    request = CompareRequest(
        [str(path) for path in configs], named, settings, assignments(overrides), seeds=seeds, band=band,
        output=Path(output) if output else None, per_gpu=runs_per_gpu,
    )  # fmt: skip
    question = request.question()
    where = request.places(question)
    found = command.compare(question, where, say, command="sagetrain.compare(...)")
    return command.report(found, where.output, margin, "", say)

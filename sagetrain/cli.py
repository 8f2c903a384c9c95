"""The `sagetrain` command: with cli_evaluate.py, cli_generate.py and cli_studies.py what reads the command line.

Heavy imports sit inside the commands, so that `--help` and `plan` answer at once and without torch.
"""

from __future__ import annotations

import enum
import gc
import os
import re
import shutil
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from sagetrain import __version__
from sagetrain.cli_evaluate import evaluation, while_training
from sagetrain.cli_generate import generation
from sagetrain.cli_options import Checkpoint, Config, Overrides, RunDir
from sagetrain.cli_studies import studies
from sagetrain.config.errors import ConfigError, Finding
from sagetrain.exits import Errors as _Errors
from sagetrain.exits import forbidden as _forbidden
from sagetrain.exits import leave as _exit
from sagetrain.exits import leave_together as _leave_together
from sagetrain.exits import warn as _warn
from sagetrain.hardware import HARDWARE, planned_gpu

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut option names where a terminal is narrow
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(evaluation)
app.add_typer(generation)
app.add_typer(studies)

Gpu = enum.Enum("Gpu", {name: name for name in HARDWARE})  # type: ignore[misc]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="The same: --config CONFIG.")]


def _version(given: bool) -> None:
    if given:
        typer.echo(f"sagetrain {__version__}")
        raise typer.Exit


@app.callback()
def sagetrain(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    local_rank: Annotated[
        int, typer.Option("--local_rank", "--local-rank", hidden=True, help="Given by `deepspeed --module sagetrain`.")
    ] = 0,
) -> None:
    """Pretrain Llama-like models with trainable INT8 attention (SageBwd).

    Typical order: prepare text into token files, take a configuration (config), plan the run on a laptop, train it (on
    a cluster: deepspeed --module sagetrain train CONFIG), then eval and generate.
    """


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files (.jsonl, .json, .csv, .tsv, .parquet, text; .gz, .bz2, .xz and .zst too), folders, archives "
            "(.tar, .zip), Hugging Face datasets, or python-stdlib: the standard library's own sources."
        ),
    ],
    output: Annotated[  # no Path, which would drop the slash of a folder
        str, typer.Option("--output", "-o", metavar="PATH", help="Token file to write, without suffix: data/train.")
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="SentencePiece model or Hugging Face tokenizer.json. Default: the one beside the output."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Train a new tokenizer of this many tokens first.")] = None,
    tokenizer_sample: Annotated[
        int, typer.Option(min=1, help="Characters of the corpus that a new tokenizer is trained on.")
    ] = 100_000_000,
    text_key: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    prompt_field: Annotated[
        str | None,
        typer.Option(help="Fine-tuning: field of a prompt, which does not count in the loss.", show_default=False),
    ] = None,
    completion_field: Annotated[
        str | None, typer.Option(help="Fine-tuning: field of its completion, which does.", show_default=False)
    ] = None,
    chat_field: Annotated[
        str | None,
        typer.Option(
            help="Fine-tuning: field of a chat, a list of messages with role and content.", show_default=False
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file that renders chats. Default: the tokenizer's own.")
    ] = None,
    tools_field: Annotated[
        str | None,
        typer.Option(
            help="Field of the tools of a chat, which its template writes. Default: tools.", show_default=False
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(help="Fine-tuning: data.seq_length, into which records are put whole.", show_default=False),
    ] = None,
    glob: Annotated[str | None, typer.Option(help='Which files of a folder or archive: "**/*.md".')] = None,
    split_on: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What stands between documents in plain text: '<|endoftext|>', '\\n\\n'. Default: one a file.",
        ),
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a Hugging Face dataset.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")] = "train",
    valid_fraction: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the documents that goes to `valid` beside the output.")
    ] = 0.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that turn text into tokens.")] = os.cpu_count() or 1,
    overwrite: Annotated[
        bool, typer.Option(help="Replace files made from something else, and the tokenizer, which checkpoints need.")
    ] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out and count lines without text instead of stopping.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Do the K-th of N parts, each on a host, and train on PATH-*."),
    ] = None,
) -> None:
    """Turn text into token files (.bin and .idx, which Megatron-LM reads too), and train a tokenizer when asked.

    Interrupted, it goes on where it was when it is called again with the same arguments.

    \b
    sagetrain prepare corpus/*.jsonl.zst -o data/train --vocab-size 32000 --valid-fraction 0.005

    sagetrain prepare chats.jsonl -o chat/train --tokenizer tokenizer.json --chat-field messages --seq-length 4096
    """
    with _Errors(output=Path(output)):
        from sagetrain.data.prepare import prepare as run
        from sagetrain.data.records import records_of

        run(
            sources,
            output,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            tokenizer_sample=tokenizer_sample,
            text_key=text_key,
            records=records_of(prompt_field, completion_field, chat_field, chat_template, tools_field, seq_length),
            glob=glob,
            dataset_config=dataset_config,
            dataset_split=dataset_split,
            valid_fraction=valid_fraction,
            num_workers=workers,
            overwrite=overwrite,
            skip_bad_lines=skip_bad_lines,
            shard=shard,
            split_on=split_on,
        )


@app.command()
def plan(
    config: Config = None,
    overrides: Overrides = None,
    config_option: ConfigOption = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Ranks (GPUs) the run will have. Default: parallel.world_size, or 1."
        ),
    ] = None,
    gpu: Annotated[
        Gpu | None,
        typer.Option(
            case_sensitive=False,
            show_default=False,
            help="What memory and step time are predicted for. Default: this host's GPU, or h200. Rates of h200 and "
            "h100 are measured; the others are scaled by data sheets.",
        ),
    ] = None,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs that share NVLink; beyond is the network.")] = 8,
    network_gbps: Annotated[float, typer.Option(min=1, help="Network bandwidth of one GPU, in Gbit/s.")] = 400,
    measured_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=1,
            show_default=False,
            help="What this configuration reached on one GPU (tensor or context parallel: on one group of GPUs). "
            "Scales the predicted speed of the GPU to it.",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            show_default=False,
            help="Folder of an earlier run: the findings take what it measured about INT8 attention.",
        ),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Only the findings and the few numbers one needs.")] = False,
    show_keys: Annotated[
        bool, typer.Option("--keys", help="List the keys of the YAML instead; --keys optimizer: those of a section.")
    ] = False,
) -> None:
    """Show what a run will be, on any laptop: parameters, memory, schedules, step time, better layouts, every finding.

    \b
    sagetrain plan configs/7b.yaml --world-size 64 parallel.tensor_parallel_size=8
    """
    from dataclasses import replace

    from sagetrain.planning.show import show_key_reference, show_plan
    from sagetrain.planning.tables import console, print_text

    if show_keys:
        show_key_reference(console(), config or "")
        return
    path, changes = _named("plan", config, config_option, overrides)
    kind, assumed = planned_gpu(gpu.value if gpu else None)
    hardware = replace(HARDWARE[kind], gpus_per_host=gpus_per_host, network_bandwidth=network_gbps * 1e9 / 8)
    if assumed:
        print_text(console(), assumed)
    if show_plan(path, changes, world_size, console(), hardware, measured_tokens_per_second, brief, measured):
        _exit(2)


@app.command()
def train(
    config: Config = None,
    overrides: Overrides = None,
    config_option: ConfigOption = None,
    local_rank: Annotated[
        int, typer.Option("--local_rank", "--local-rank", hidden=True, help="Given by the deepspeed launcher.")
    ] = 0,
) -> None:
    """Train, or continue, the run that a YAML file describes.

    \b
    sagetrain train configs/quickstart.yaml training.run_dir=runs/mine optimizer.lr=3e-4

    \b
    torchrun --nproc-per-node 8 -m sagetrain train configs/7b.yaml parallel.world_size=8

    \b
    deepspeed --hostfile hostfile --module sagetrain train configs/7b.yaml parallel.world_size=16

    If training.run_dir holds a checkpoint, the run continues from it.
    SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint and exit; the same command continues.

    A shipped configuration (sagetrain config lists them) goes by its name (325m) in any folder; give its paths as
    KEY=VALUE: data.train.0.path, data.valid.0.path (or data.valid=[]) and training.run_dir.
    """
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its store says for pages that a rank has gone; we say who
    from sagetrain.cluster.launcher import launched, unknown_launcher
    from sagetrain.parallel.host import use_cores

    with _Errors() as errors:
        rank, world_size = launched()
        errors.rank = rank
        if (said := unknown_launcher()) and os.environ["LOCAL_RANK"] == "0":
            _warn(f"warning: {said}")
        try:
            path, changes = _named("train", config, config_option, overrides)
            cfg, findings = _checked(path, changes, world_size, show=rank == 0)
            errors.run_dir = Path(cfg.training.run_dir)
            if (said := use_cores()) and rank == 0:
                _warn(said)
            gc.disable()  # what is imported stays: to look for garbage in it takes a fifth of the start
            from sagetrain.train.trainer import Trainer

            gc.freeze()
            gc.enable()
            trainer = Trainer(cfg, findings, *while_training(cfg))
        except (ConfigError, PermissionError) as error:
            if world_size > 1:
                from sagetrain.cluster import preflight

                preflight.stay_out(_forbidden(error) if isinstance(error, PermissionError) else error)
            raise
        trainer.run()
    _leave_together()


@app.command("config")
def print_shipped(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", show_default=False, help="One of those that are listed without a NAME."),
    ] = None,
) -> None:
    """Print a configuration that comes with SageTrain, to change and train, or a template for a launcher.

    \b
    sagetrain config 1b > my.yaml

    \b
    sagetrain config slurm > slurm.sbatch
    """
    with _Errors():
        from sagetrain.config.load import shipped

        files = shipped()
        if name is None:
            from sagetrain.planning.tables import console, facts, print_table

            print_table(console(), facts("sagetrain config NAME", [(x, _subject(y)) for x, y in files.items()]))
        elif name in files:
            typer.echo(files[name].read_text(), nl=False)
        else:
            raise ConfigError(f"config {name}: nothing of that name is shipped; there are {', '.join(files)}")


def _subject(path: Path) -> str:
    """The first sentence of the comment with which a file begins."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    comment = " ".join(line[2:] for line in takewhile(lambda line: line.startswith("# "), lines))
    return (
        re.split(r"[.:](?: |$)", comment)[0]
        or "variables that the deepspeed launcher hands to all hosts (hostfile says how)"
    )


class Dtype(enum.Enum):
    """Of exported weights."""

    float32, bfloat16, float16 = "float32", "bfloat16", "float16"


@app.command()
def export(
    run_dir: RunDir,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must not exist yet.")],
    dtype: Annotated[
        Dtype | None, typer.Option(show_default=False, help="Of the weights. Default: what the run computed in.")
    ] = None,
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Largest size of a file of weights, in GB.")] = 4.0,
    checkpoint: Checkpoint = None,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder, which transformers loads as Llama or Qwen3.

    \b
    sagetrain export runs/325m 325m-hf --dtype bfloat16
    """
    with _Errors(run_dir=run_dir):
        from sagetrain.interop.exporting import export as write

        name: Any = dtype.value if dtype else None
        done = write(run_dir, folder, step=checkpoint, dtype=name, shard_bytes=int(shard_gb * 1e9), report=_warn)
    typer.echo(
        f"{folder}: {done.architecture} of step {done.step}, {done.tensors} tensors, {done.bytes:,} bytes in "
        f"{done.shards} file{'s' * (done.shards > 1)}, max_position_embeddings {done.positions}, eos_token_id "
        f"{done.eos_token_id}"
    )


@app.command("import")
def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face folder of Llama, Mistral or Qwen3.")],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to write; it must not exist yet.")],
) -> None:
    """Make of a Hugging Face folder a run folder to start from, with training.init_from.

    \b
    sagetrain import Qwen3-0.6B runs/qwen3
    """
    with _Errors(run_dir=run_dir):
        from sagetrain.interop.importing import import_folder as read

        done = read(folder, run_dir, report=_warn)
    typer.echo(
        f"{run_dir}: {done.architecture}, {done.parameters:,} parameters in {done.tensors} tensors, tokenizer "
        f"{done.tokenizer or 'none'}, sequences of up to {done.seq_length:,} tokens\nstart from it with "
        f"training.init_from={run_dir} and the model and attention sections of its config.yaml, or that file with "
        "training.run_dir, data.train, data.micro_batch_size, training.total_tokens, tokens_per_step.tokens and "
        "optimizer.lr of your own: the file's are one step of one sequence (attention.backend: sdpa; sage is INT8)"
    )


def _named(command: str, first: str | None, option: Path | None, others: list[str] | None) -> tuple[Path, list[str]]:
    """Configuration and overrides: of `CONFIG [KEY=VALUE]...`, or of `--config CONFIG [KEY=VALUE]...`."""
    words = [*([first] if first is not None else []), *(others or [])]
    if option is not None:
        return option, words
    from sagetrain.config.load import is_assignment

    if not words or is_assignment(words[0]):
        raise ConfigError(f"name a configuration: sagetrain {command} configs/quickstart.yaml")
    return Path(words[0]), words[1:]


def _checked(config: Path, overrides: list[str], world_size: int, show: bool) -> tuple[Any, list[Finding]]:
    """Load and check a configuration. Errors end the run here, before any process group starts."""
    from sagetrain.config.check import check
    from sagetrain.config.load import load_config
    from sagetrain.data.tokenizer import known_vocab_size

    cfg = load_config(config, overrides)
    findings = check(cfg, world_size, vocab_size=known_vocab_size(cfg.data), path=config, overrides=overrides)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise ConfigError("\n".join(str(finding) for finding in errors))
    if show:
        for finding in findings:
            _warn(f"{finding.level}: {finding}")
    return cfg, findings


def run(words: Sequence[str]) -> int:
    """Run a command, given as the words after `sagetrain`, and return its exit code.

    Help is as wide as the terminal; a pipe has no end.

    Raises:
        KeyboardInterrupt: Ctrl-C, in a command that does not save and stop on it.
    """
    for option, after in zip(words, [*words[1:], ""], strict=False):  # as other programs take them
        if words[0] in ("train", "plan", "doctor", "compare") and re.match(r"--[a-z_]+(\.\w+)+(=|$)", option):
            key, _, value = option[2:].partition("=")
            _warn(f"error: {option}: keys of the YAML go without dashes: {key}={value or after or 'VALUE'}")
            return 2
    command = typer.main.get_group(app)
    for each in command.commands.values():
        each.short_help = (each.help or "").partition("\n\n")[0]  # whole: by itself the list of commands is cut
    width, code = shutil.get_terminal_size((10_000, 24)).columns, 0
    try:
        with _Errors():  # commands that know a rank or a folder have their own inside; it is for --help on a full disk
            command(list(words), prog_name="sagetrain", obj=tuple(words), terminal_width=width)
    except SystemExit as ended:
        code = int(ended.code or 0)
    if code == 130:  # the parser's word for it
        raise KeyboardInterrupt
    return code

"""Build a run in five acts: check files, meet, settle `auto`, build the engine, resume.

Each act takes what it needs and returns what it found. Files and settings are checked first, before ranks wait for each
other. Slow work comes last, when nothing can be refused any more.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from sagetrain.auto.kept import Kept
from sagetrain.auto.settled import Settled, settle
from sagetrain.auto.timed_choice import StartOfRun
from sagetrain.checkpoint import on_disk, slots
from sagetrain.checkpoint.in_memory import CopiesInMemory
from sagetrain.checkpoint.ledger import Ledger, TrainState
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.saving import Saver
from sagetrain.cluster import preflight
from sagetrain.cluster.failures import Failures
from sagetrain.cluster.guard import StopSignal, Watchdog
from sagetrain.cluster.interfaces import use_interface
from sagetrain.cluster.join import init_distributed
from sagetrain.cluster.rendezvous import ended_by_signals
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import ConfigError, to_stderr
from sagetrain.config.layout import Layout
from sagetrain.config.load import dump_config
from sagetrain.config.rules.prepared import TEXT_PREFIX, chat_templates, prepared, text_prefixes
from sagetrain.config.run_parts import parts
from sagetrain.config.schema import Recomputation, RunConfig
from sagetrain.costs.accounting import overlaps
from sagetrain.costs.host_memory import host_memory_finding
from sagetrain.costs.stages import chunks_of_stage
from sagetrain.data import verify
from sagetrain.data.function import FunctionStream, SampleFunction
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.data.tokenizer import tokenizer_of
from sagetrain.engines.build_engine import build_engine, partitioner
from sagetrain.engines.step import Engine
from sagetrain.model import initialization
from sagetrain.model.activation_offload import ActivationOffload
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions, matmuls_of, resolve_backend
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.cross_entropy import OwnLoss
from sagetrain.parallel.host import memory_of_host, ranks_of_host
from sagetrain.parallel.objects import of_rank_0
from sagetrain.parallel.rng import seed_everything
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.storage.url_path import Location
from sagetrain.training import init_from, inputs
from sagetrain.training.controllers import Controllers
from sagetrain.training.loss import GuardedLoss, name_of
from sagetrain.training.out_of_memory import memory_explained, record_allocations
from sagetrain.training.perturb import perturb
from sagetrain.training.reporter import Reporter
from sagetrain.training.resume import announce, check_part, restore
from sagetrain.training.run import CheckedFiles, Meeting, Resumed, Run
from sagetrain.training.start_line import start_lines
from sagetrain.training.start_times import StartTimes, born
from sagetrain.training.weights_and_biases import check_login


def build(
    cfg: RunConfig,
    *,
    own_process: bool = True,
    hears: Callable[[str], None] | None = None,
    tokens: SampleFunction | None = None,
    loss: OwnLoss | None = None,
    stop: StopSignal | None = None,
) -> Run:
    """Build a run, or the part of a run that is next (config/run_parts.py), on this rank; collective. Raises
    ConfigError if files, settings or hosts do not allow the run, CheckpointError if the checkpoints or the folder of
    the run cannot be used, and TrainingError if a GPU is out of memory.

    Args:
        own_process: let signals stop the run, and end the process if the run hangs. False in a program that continues
            after the run.
        hears: gets the lines for people on rank 0. None: the lines go to stderr.
        tokens: the user's source of training tokens. None: the token files of data.train.
        loss: the user's loss. None: the cross-entropy.
        stop: the signals that the part before has listened to.
    """
    # In a program that continues, the run begins here, and so does a later part of it.
    times = StartTimes(born() if own_process and stop is None else time.time())
    times.ended("imports and settings")
    files = check_parts(cfg, tokens, loss)
    times.ended("files checked")
    try:
        met = meet(cfg, files, own_process, hears, stop)
        cfg, files = parts(cfg)[met.part], files.part(met.part)
        times.ended("ranks met")
        if cfg.profile is not None:
            record_allocations(met.device)
        compiled = {"auto": met.device.type == "cuda", "on": True, "off": False}[cfg.training.compile]
        with memory_explained(cfg, files.vocab_size):
            vocab_size, say = padded_vocab_size(files.vocab_size), met.reporter.say
            start = StartOfRun(cfg, met.groups, vocab_size, met.device, files.dtype, compiled, files.folder, say)
            before = Kept.by(met.checkpoint) if met.checkpoint and not met.begins_part else None
            settled = settle(start, before, files.train)
        times.ended("auto settled")
        with memory_explained(settled.cfg, files.vocab_size):
            engine = make_engine(settled, files, met)
            times.ended("engine built")
            resumed = resume(files, met, settled, engine)
        run = assemble(files, met, settled, engine, resumed, times)
        times.ended("state ready")
        times.from_memory = met.from_memory
        said = f"started in {sum(times.seconds.values()):.1f} s, log in {files.folder.log}"
        met.reporter.say(said + "; the first step compiles" * compiled)
        return run
    except BaseException:
        files.folder.release()
        raise
    finally:
        initialization.forget()


# -- 1. check files ----------------------------------------------------------------------------------------------------


def check_parts(cfg: RunConfig, tokens: SampleFunction | None = None, loss: OwnLoss | None = None) -> CheckedFiles:
    """Do what check_files does for each part of a run. They share the run's folder."""
    every = parts(cfg)
    if every[1:] and (tokens or loss):
        raise ConfigError(
            f"tokens_per_step.stages with a seq_length were not tried with {'tokens' if tokens else 'a loss'} of your "
            "own: train a run for each length (training.init_from)"
        )
    first, *later = (check_files(part, tokens, loss) for part in every)
    return replace(first, later=tuple(replace(files, folder=first.folder) for files in later)) if later else first


def check_files(cfg: RunConfig, tokens: SampleFunction | None = None, loss: OwnLoss | None = None) -> CheckedFiles:
    """Open the files that the run reads, and check that this device can run it. Nothing waits for another rank here.
    Raises ConfigError if a file or a setting does not allow the run."""
    if (every := cfg.stability.replay.every_steps) and (loss or tokens):
        raise ConfigError(
            f"stability.replay.every_steps: {every} compares bits of replicas, which was not tried with "
            f"{'a loss' if loss else 'tokens'} of your own; set it to null"
        )
    folder = RunFolder(Path(cfg.training.run_dir), cfg.training.run_url)
    tokenizer = tokenizer_of(cfg.data, cfg.model.vocab_size)
    vocab_size = cfg.model.vocab_size or (tokenizer.vocab_size if tokenizer else 0)
    sha256 = tokenizer.sha256 if tokenizer else None
    records = prepared(cfg.data)
    known = cfg.training.seed, vocab_size, sha256
    if tokens is None:
        train = SampleStream(cfg.data, cfg.data.train, *known)
    else:
        train = FunctionStream(tokens, cfg.data, cfg.training.seed, vocab_size)
    valid = SampleStream(cfg.data, cfg.data.valid, *known) if cfg.data.valid else None
    identity = inputs.identity(cfg, vocab_size, sha256, train.fingerprint, loss and name_of(loss))
    init_from.check(cfg, identity)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.training.dtype]
    kind = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolve_backend(cfg.attention, cfg.model, device=kind, dtype=dtype)
        size = cfg.parallel.tensor_parallel_size
        matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=size, device=kind, dtype=dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_host_memory(cfg, padded_vocab_size(vocab_size))
    inputs.check_disk(cfg, padded_vocab_size(vocab_size))
    if cfg.logging.wandb and os.environ.get("RANK", "0") == "0":
        check_login(cfg.logging.wandb, folder.path)
    failures = Failures()
    return CheckedFiles(
        folder=folder,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        train=train,
        valid=valid,
        text_prefix=next(filter(None, text_prefixes(records).values()), []),
        chat_template=next(filter(None, chat_templates(records).values()), None),
        identity=identity,
        dtype=dtype,
        loss=loss and GuardedLoss(loss, failures),
        failures=failures,
    )


def check_host_memory(cfg: RunConfig, vocab_size: int) -> None:
    """Check that this host has the memory that its ranks take with parallel.offload and training.activation_offload,
    and for copies of the state. Raises ConfigError if it lacks some."""
    if (memory := memory_of_host()) is None:
        return
    # Copies of an earlier process of this run take memory already.
    memory += slots.bytes_left()
    world_size, host = int(os.environ.get("WORLD_SIZE", "1")), socket.gethostname()
    found = host_memory_finding(cfg, world_size, vocab_size, ranks_of_host() or world_size, memory, f"host {host}")
    if found is not None:
        raise ConfigError(str(found))


# -- 2. meet -----------------------------------------------------------------------------------------------------------


def meet(
    cfg: RunConfig,
    files: CheckedFiles,
    own_process: bool = True,
    hears: Callable[[str], None] | None = None,
    stop: StopSignal | None = None,
) -> Meeting:
    """Join the other ranks, check that all hosts have the same inputs, and find the checkpoint to continue from;
    collective. Raises ConfigError if hosts differ or do not come, or the checkpoint is of another run, and
    CheckpointError if another run uses the folder, or all of its checkpoints are damaged."""
    use_interface(cfg.training.network_interface)
    if cfg.stability.replay.every_steps:
        # torch refuses deterministic products without it, and cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    stopped, folder, parallel = stop is None, files.folder, cfg.parallel
    stop = stop or StopSignal(own_process)
    patience, rank = cfg.training.timeout_minutes, int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    watchdog = Watchdog(folder.stacks, rank, 60 * patience, ranks, own_process)
    with ended_by_signals() if own_process else nullcontext():
        # The timeout of collectives is twice that of the watchdog, which then ends a hanging run first and can say
        # more.
        device = init_distributed(2 * patience)
        topology = Topology(
            dist.get_world_size(),
            parallel.tensor_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.expert_parallel_size,
            Layout.of(cfg).gather,
        )
        # Reading files may take a while. The ranks have met by now, so each host can report its progress.
        reporter = Reporter(rank == 0, hears)
        tells = reporter.say if rank == 0 else hears or to_stderr
        hashes = preflight.check_in(cfg, topology, device, partial(_hashes, files), tells, reporter.keep)
        preflight.share(folder, tells)
        reporter.log_to(folder.log)
    groups = ParallelGroups.create(topology, timedelta(minutes=2 * patience))
    if groups.rank == 0:
        watchdog.forget()
    seed_everything(cfg.training.seed, f"rank {groups.rank}")
    checkpoint, damaged = on_disk.newest_whole(folder.checkpoints, reporter.say)
    # The checkpoint is checked before `auto` is measured and the model is built.
    step = on_disk.step_of(checkpoint) if checkpoint else 0
    copies, copied = _copies(cfg, folder, groups, step, damaged)
    checkpoint = copied or checkpoint
    part = check_part(checkpoint, cfg, files, hashes, stopped) if checkpoint else (0, False)
    found = device, groups, hashes, checkpoint, damaged, stop, watchdog, reporter, step, copies, copied is not None
    return Meeting(*found, *part)


def _copies(
    cfg: RunConfig,
    folder: RunFolder,
    groups: ParallelGroups,
    step: int,
    damaged: Sequence[Location],
) -> tuple[CopiesInMemory | None, Path | None]:
    """Return what keeps copies of the state in memory, and the folder of those to continue from; collective.

    Args:
        step: the step of the newest whole checkpoint; 0: there is none.
        damaged: newer checkpoints, which are damaged.
    """
    if (every := cfg.checkpoint.in_memory_every) is None:
        return None, None
    run = of_rank_0(folder.identity() if groups.rank == 0 else "")
    kept = cfg.parallel.model_dump(mode="json", exclude={"world_size"}) | {"optimizer": cfg.optimizer.name}
    copies = CopiesInMemory(run, groups, kept, every, to_stderr)
    return copies, copies.newest(step, max([step, *map(on_disk.step_of, damaged)]))


def _hashes(files: CheckedFiles, say: Callable[[str], None]) -> dict[str, str]:
    """Check this host's data and return its hashes by name. One rank of a run reads all tokens, before its first
    save."""
    streams = {"data.train": files.train} | ({"data.valid": files.valid} if files.valid else {})
    hashes = verify.verify(streams, deep=dist.get_rank() == 0 and not files.folder.checkpoints.exists(), say=say)
    orders = {name: stream.fingerprint for name, stream in streams.items()}
    prefix = {TEXT_PREFIX: f"{files.text_prefix}"} if files.text_prefix else {}
    return {"tokenizer": files.identity.tokenizer_sha256 or "none", **prefix, **orders, **hashes}


# -- 3. settle `auto`: auto/settled.py ---------------------------------------------------------------------------------
# -- 4. build the engine -----------------------------------------------------------------------------------------------


def make_engine(settled: Settled, files: CheckedFiles, met: Meeting) -> Engine:
    """Make the model and its engine, and print what runs; collective."""
    cfg, start = settled.cfg, settled.start
    layout = Layout.of(cfg, met.groups.topology.world_size)
    model = Transformer(
        cfg.model,
        cfg.attention,
        vocab_size=start.vocab_size,
        known=files.vocab_size,
        groups=met.groups,
        functions=attention_functions(cfg.attention, cfg.model, device=met.device, dtype=files.dtype),
        sequence_parallel=cfg.parallel.sequence_parallel,
        overlap=overlaps(cfg),
        activation_checkpointing=cast(Recomputation, cfg.training.activation_checkpointing),
        seed=cfg.training.seed,
        dtype=files.dtype,
        device=met.device,
        partition=partitioner(cfg, met.groups),
        matmuls=settled.matmuls,
        loss=files.loss,
        chunks=chunks_of_stage(cfg, start.vocab_size, met.groups.pp_rank),
    )
    model.offload = ActivationOffload.on(met.device) if cfg.training.activation_offload else None
    if start.compiled:
        compile_blocks(model, hooks=layout.engine == "fsdp", inner_hooks=layout.calls_experts)
    engine = build_engine(cfg, model)
    said = start_lines(settled, engine)
    met.reporter.say("\n".join(said[:3]))
    for line in said[3:]:
        met.reporter.keep(line)
    return engine


# -- 5. resume ---------------------------------------------------------------------------------------------------------


def resume(files: CheckedFiles, met: Meeting, settled: Settled, engine: Engine) -> Resumed:
    """Load the checkpoint that the run continues from, or the weights that it begins with; collective. Raises
    CheckpointError if the files do not fit the model or the order of samples."""
    cfg = settled.cfg
    if met.checkpoint is None:
        record = init_from.start_from(cfg.training, engine, files.folder.path, met.reporter.say)
        perturb(engine, cfg.training.perturb)
        return Resumed(TrainState(ledger=Ledger(files.train.fingerprint)), record, [])
    reader, changed = Reader(met.checkpoint), list[str]()
    state = restore(reader, engine, files.train.fingerprint, cfg)
    if met.main:
        for folder in met.damaged:
            on_disk.set_aside(folder)
        changed = announce(settled.asked, cfg.linear, reader, met.reporter.say)
    return Resumed(state, reader.state.init_from, changed)


# -- the run -----------------------------------------------------------------------------------------------------------


def assemble(
    files: CheckedFiles,
    met: Meeting,
    settled: Settled,
    engine: Engine,
    resumed: Resumed,
    times: StartTimes,
) -> Run:
    """Make the run from the results of the acts, and add its saver, its controllers and its loader; collective."""
    cfg, folder, groups = settled.cfg, files.folder, met.groups
    # The tokenizer is copied, because `sagetrain generate` needs nothing but the run folder.
    if met.main and files.tokenizer:
        files.tokenizer.write(folder.path)
    patience, alive = timedelta(minutes=2 * cfg.training.timeout_minutes), partial(met.watchdog.begin, "saving")
    saver = Saver(folder, groups, cfg.checkpoint, patience, alive)
    saver.reserve(engine.owned())
    saver.published_step = met.saved_step
    if met.copies:
        met.copies.prepare(engine.owned(), dump_config(settled.asked))
    controllers = Controllers(cfg, engine, folder, met.reporter, resumed.state, met.begins_part)
    loader_of = partial(
        Loader,
        dp_rank=groups.dp_rank,
        dp_size=groups.dp_size,
        micro_batch_size=cfg.data.micro_batch_size,
        num_workers=cfg.data.num_workers,
    )
    loader, valid = loader_of(files.train), loader_of(files.valid) if files.valid else None
    return Run(files, met, settled, engine, resumed, saver, controllers, loader, valid, times)

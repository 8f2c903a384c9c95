"""Check the files that a run starts from: token files, tokenizer, and the checkpoint that it continues from or begins
with.

`plan` checks the files that exist and `train` checks all files, with the same functions. So `train` refuses nothing
that `plan` could have found.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import CheckpointError, ConfigError, Finding
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About
from sagetrain.config.run_parts import begin_of, part_at, run_of
from sagetrain.config.schema import DataConfig, DataSource, RunConfig, TrainingConfig, is_url
from sagetrain.costs.accounting import checkpoint_bytes
from sagetrain.data.tokenizer import INSIDE, LEAVE_OUT, Tokenizer
from sagetrain.model.tensors import tensors
from sagetrain.storage.url_path import Location, UrlPath, checkpoints_of, location

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from sagetrain.checkpoint.state import Identity, Positions
    from sagetrain.data.loader import SampleStream

_READ_TOKENS = 1 << 24
"""The largest number of tokens with which a source is read completely, which takes a tenth of a second. In larger
sources only the two ends of each file are read."""


def identity(
    cfg: RunConfig, vocab_size: int | None, tokenizer_sha256: str | None, order: str | None, loss: str | None = None
) -> Identity:
    """Return the settings that a checkpoint must share with the run that continues it. Arguments that are not known yet
    are None; without the name of a user's loss it is the cross-entropy."""
    # This import loads numpy.
    from sagetrain.checkpoint.state import Identity

    return Identity(
        model=cfg.model.model_dump(),
        qk_norm=cfg.attention.qk_norm,
        vocab_size=vocab_size or 0,
        init_from=cfg.training.init_from,
        seed=cfg.training.seed,
        seq_length=cfg.data.seq_length,
        tokenizer_sha256=tokenizer_sha256,
        order=order,
        loss=loss,
    )


def findings(cfg: RunConfig, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield what `train` would refuse in the files that exist, and say what it would continue from. Missing files are
    findings of config.rules.data; there is no tokenizer if its file is missing."""
    vocab_size = cfg.model.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    sha256 = tokenizer.sha256 if tokenizer else None
    there = {name: [each for each in getattr(cfg.data, name) if is_there(each)] for name in ("train", "valid")}
    damaged = False
    for name, sources in there.items():
        if sources:
            paths = [each.path for each in sources]
            found = list(_refused(f"data.{name}", paths, _open, cfg.data, sources, vocab_size, sha256))
            damaged |= bool(found)
            yield from found
    both = [*there["train"], *there["valid"]]
    if both and not (damaged or tokenizer):
        yield from _refused("data.valid", [each.path for each in there["valid"]], _same_tokenizer, both)
    whole = len(there["train"]) == len(cfg.data.train) and not damaged
    if tokenizer and cfg.evaluation.samples_every_tokens:
        prompts, room = cfg.evaluation.samples_prompts, context_of(cfg)
        yield from _refused("evaluation.samples_prompts", prompts, check_prompts, prompts, tokenizer, room)
        for number, prompt in enumerate(prompts):
            if tokenizer.ends_inside(prompt):
                yield About("prompt", f"evaluation.samples_prompts.{number}", prompt).warning(INSIDE, LEAVE_OUT)
    if tasks := cfg.evaluation.tasks:
        with suppress(ImportError):  # A plan may be made without the harness.
            sharded = not Layout.of(cfg).whole_between_passes
            yield from _refused("evaluation.tasks", tasks, _tasks, tasks, sharded)
    if url := cfg.training.run_url:
        found = list(_refused("training.run_url", url, _check_rights, url))
        yield from found
        if found:
            return
    # Without the folder, the plan is for another machine.
    elif vocab_size and Path(cfg.training.run_dir).is_dir():
        padded = padded_vocab_size(vocab_size)
        yield from _refused("training.run_dir", cfg.training.run_dir, check_disk, cfg, padded)
    yield from _checkpoint(cfg, vocab_size, sha256, whole)


def task_manager(names: Sequence[str]) -> TaskManager:
    """Return what loads tasks of the lm-evaluation-harness. Raises ConfigError if the harness has no task of a name,
    and there is no such file, and ImportError if the harness is not installed."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    named = [name for name in names if not Path(name).is_file()]
    # Listing the tasks of the harness takes seconds, and reading their files for words takes half of one.
    files = Path(lm_eval.__file__).parent.glob("tasks/**/*") if named else ()
    # Files that others include have no suffix.
    texts = (path.read_text("utf-8") for path in files if path.suffix in (".yaml", "") and path.is_file())
    text = "\n".join(texts)
    words, called = re.split(r"[\s\"',:\[\]{}]+", text), re.findall(r"\b(?:task|group|tag): *([\w.-]+)", text)
    _refuse_unknown(named, {*words}, {*called})
    manager = TaskManager(include_defaults=bool(named))
    _refuse_unknown(named, manager.task_index, manager.all_tasks)
    return manager


def _refuse_unknown(names: Sequence[str], known: Container[str], near: Collection[str]) -> None:
    for name in names:
        if name not in known:
            found = get_close_matches(name, near, 3)
            hint = f"did you mean {', '.join(found)}? " if found else ""
            raise ConfigError(
                f"task {name}: lm_eval has none of this name, and there is no such file; {hint}`lm-eval ls tasks` "
                "lists them"
            )


def _tasks(names: Sequence[str], sharded: bool) -> None:
    """Check what is known of tasks without their data: names, files, and whether sharded weights can answer them."""
    from lm_eval.api.task import ALL_OUTPUT_TYPES
    from lm_eval.tasks._yaml_loader import load_yaml

    index = task_manager(names).task_index

    def kinds(task: str | Mapping[str, Any], kind: str | None = None) -> Iterator[tuple[str, str]]:
        """Yield the name of each task of a task, a group or a tag, and what the task wants of the model. `kind` is what
        the group says of its tasks."""
        own: Mapping[str, Any] = {"task": task} if isinstance(task, str) else task
        name, kind = str(own.get("group", own["task"])), own.get("output_type", kind)
        if entry := index.get(name):
            own = entry.cfg or {"task": sorted(entry.tags)}
        elif isinstance(task, str):
            own = load_yaml(task, resolve_func=False)
        kind = kind or own.get("output_type")
        if isinstance(own["task"], list):
            for part in own["task"]:
                yield from kinds(part, kind)
        else:
            # A task that is a Python class says what it wants only once its data is loaded.
            yield own["task"], kind or ("" if "class" in own else "generate_until")

    try:
        found = [each for task in names for each in kinds(task)]
    except Exception as error:  # A file may hold anything.
        raise ConfigError(f"tasks {', '.join(names)} cannot be loaded: {error}") from error
    for name, kind in found:
        if kind and kind not in ALL_OUTPUT_TYPES:
            raise ConfigError(f"task {name}: output_type is {kind}; it must be one of {', '.join(ALL_OUTPUT_TYPES)}")
    if sharded:
        refuse_generating([name for name, kind in found if kind == "generate_until"])


def refuse_generating(tasks: Sequence[str]) -> None:
    """Refuse tasks that want generated text where weights are sharded. Raises ConfigError if there are any."""
    if tasks:
        raise ConfigError(
            f"evaluation.tasks: {', '.join(tasks)}: generated text takes a pass over all weights for every token, and "
            "parallel.zero_stage 3 would gather them each time: leave such tasks to `sagetrain eval RUN --tasks`, or "
            "set parallel.zero_stage: 2"
        )


def as_continued(cfg: RunConfig) -> tuple[RunConfig, Finding | None]:
    """Return the configuration with the engine of the run that it continues, and a finding where `auto` would be
    another one in a new run."""
    root = checkpoints_of(cfg.training.run_dir, cfg.training.run_url)
    if cfg.parallel.engine != "auto" or not _has_checkpoints(root):
        return cfg, None
    # These imports need torch.
    from sagetrain.auto.kept import Kept, kept_engine
    from sagetrain.checkpoint import on_disk

    # That no checkpoint is whole or can be read, or the newest one is of the future, is an error elsewhere.
    with suppress(CheckpointError, OSError):
        folder, _ = on_disk.newest_whole(root, lambda said: None, contents=False)
        if folder:
            return kept_engine(cfg, Kept.by(folder))
    return cfg, None


def context_of(cfg: RunConfig) -> int:
    """Return the number of tokens that a text of the run may have at once: data.seq_length, or more if it began with
    weights that were trained on longer sequences."""
    root, start = checkpoints_of(cfg.training.run_dir, cfg.training.run_url), cfg.training.init_from
    if start is None:
        return cfg.data.seq_length
    # These imports need torch.
    from sagetrain.checkpoint import on_disk
    from sagetrain.checkpoint.state import Positions
    from sagetrain.training import init_from

    before = None
    # A checkpoint that is damaged, of the future, or in a store that does not answer, is an error elsewhere.
    with suppress(CheckpointError, OSError):
        if folder := on_disk.newest(root) or init_from.named(location(start)):
            before = on_disk.read_state(folder).positions
    return Positions.reached(identity(cfg, None, None, None), before).length


def check_prompts(prompts: Sequence[str], tokenizer: Tokenizer, context: int) -> None:
    """Check that each prompt of samples leaves at least half of the context for its continuation. Raises ConfigError if
    a prompt is too long."""
    for number, prompt in enumerate(prompts):
        if (size := len(tokenizer.encode(prompt))) > context // 2:
            raise ConfigError(
                f"evaluation.samples_prompts.{number} has {size:,} tokens, more than half of the {context:,} that the "
                "model is trained with (its longest data.seq_length): there would be little room for a text behind it; "
                "shorten it"
            )


def check_disk(cfg: RunConfig, vocab_size: int) -> None:
    """Check that the disk of the run folder has room for a checkpoint. An older one makes room only once the next one
    is there. Raises ConfigError if the disk has not."""
    if cfg.training.run_url:
        return
    folder, size = Path(cfg.training.run_dir).absolute(), checkpoint_bytes(cfg, vocab_size)
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    # Some network file systems do not say how large they are.
    if disk.total and disk.free < size:
        raise ConfigError(
            f"training.run_dir {cfg.training.run_dir}: a checkpoint takes {size / 1e6:,.1f} MB, and the disk there "
            f"has {disk.free / 1e6:,.1f} MB free; make room, or choose a folder on another disk"
        )


def _has_checkpoints(root: Location) -> bool:
    """Whether a run has checkpoints. False as well if its store cannot be read, which is an error elsewhere."""
    if isinstance(root, Path):
        return any(root.glob("step-*"))
    # This import loads numpy.
    from sagetrain.checkpoint import in_store

    with suppress(CheckpointError):
        return bool(in_store.published(root))
    return False


def _check_rights(url: str) -> None:
    """Check that the store of the run can be written to. Raises ConfigError if it cannot."""
    from sagetrain.storage.lease import check_rights

    try:
        check_rights(UrlPath(url))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _of_run(cfg: TrainingConfig) -> tuple[str, str]:
    """Return the key that names the folder of the run's checkpoints, and its value."""
    return ("training.run_url", cfg.run_url) if cfg.run_url else ("training.run_dir", cfg.run_dir)


def is_there(source: DataSource) -> bool:
    """Whether a source has token files, and all of them can be opened."""
    files = source.files
    return bool(files) and all(Path(f"{path}{end}").is_file() for path in files for end in (".idx", ".bin"))


def _refused(key: str, value: object, check: Callable[..., None], *arguments: object) -> Iterator[Finding]:
    """Yield what a check of these arguments refuses, as a finding about a key."""
    try:
        check(*arguments)
    except ConfigError as said:
        yield About("refused_by_train", key, value).error(str(said), "")
    except PermissionError as denied:
        message = f"{denied.filename}: {denied.strerror}"
        yield About("refused_by_train", key, value).error(
            message, "let this user read it (chmod), or name another path"
        )


def _open(cfg: DataConfig, sources: Sequence[DataSource], vocab_size: int | None, sha256: str | None) -> None:
    """Open the files of sources as training does, and check their tokens."""
    # This import loads numpy.
    from sagetrain.data.token_files import check_vocabulary, open_sources

    opened = open_sources(sources, cfg.seq_length, cfg.document_attention, sha256)
    files = [file for source in opened for file in source.files]
    if sum(file.num_tokens for file in files) <= _READ_TOKENS:
        for file in files:
            file.validate(deep=True, vocab_size=vocab_size)
    elif vocab_size:
        for file in files:
            size = min(1 << 12, file.num_tokens)
            for start in (0, file.num_tokens - size):
                check_vocabulary(file, file.tokens(start, start + size), vocab_size)


def _same_tokenizer(sources: Sequence[DataSource]) -> None:
    from sagetrain.data.token_file import TokenFile
    from sagetrain.data.token_files import check_tokenizers

    check_tokenizers([TokenFile(path) for source in sources for path in source.files], None)


def _checkpoint(cfg: RunConfig, vocab_size: int | None, sha256: str | None, whole: bool) -> Iterator[Finding]:
    """Yield findings about the checkpoint that a run would continue from or begin with. `whole` says that data.train
    exists."""
    root, start = checkpoints_of(cfg.training.run_dir, cfg.training.run_url), cfg.training.init_from
    goes_on = _has_checkpoints(root)
    on_disks = ("manifest.json", "checkpoints/step-*/*")
    begins = start is not None and (is_url(start) or any(any(Path(start).glob(name)) for name in on_disks))
    if not (goes_on or begins):
        return
    # These imports need torch, which a plan of a run without a checkpoint does not load.
    from sagetrain.checkpoint import on_disk, reading
    from sagetrain.data.loader import SampleStream
    from sagetrain.training import init_from

    key, value = _of_run(cfg.training) if goes_on else ("training.init_from", start)
    try:
        ours = identity(cfg, vocab_size, sha256, None)
        init_from.check(cfg, ours)
        if goes_on:
            stream = None
            if whole and vocab_size:
                stream = SampleStream(cfg.data, cfg.data.train, cfg.training.seed, vocab_size, sha256)
            yield from _resume(cfg, root, vocab_size, sha256, stream)
        else:
            moments = cfg.training.init_moments
            folder = on_disk.whole(location(str(start)), lambda said: None, contents=False, moments=moments)
            reader = reading.Reader(folder)
            reading.check_shapes(reader, _shapes(cfg, reader.state.identity.vocab_size))
            yield from _new_positions(cfg.data.seq_length, reader.state.positions, ours)
    # A ValueError comes from a model section that is impossible, an OSError from a store.
    except (CheckpointError, ValueError, OSError) as said:
        yield About("refused_by_train", key, value).error(str(said), "")


def _new_positions(seq_length: int, before: Positions, ours: Identity) -> Iterator[Finding]:
    """Yield a warning if sequences are longer than those that the weights were trained on, with a RoPE that is not
    slower."""
    theta, scaling = (before.rope.get(key) for key in ("rope_theta", "rope_scaling"))
    slower = ours.rope["rope_theta"] > (theta or 0) or ours.rope["rope_scaling"] not in (scaling, None)
    if 0 < before.length < seq_length and not slower:
        yield About("new_positions", "data.seq_length", seq_length).warning(
            f"the model of training.init_from was made for sequences of {before.length:,} tokens, and RoPE rotates "
            "later positions by angles that its weights have never met: its loss begins higher there",
            f"use data.seq_length {before.length}, or give a longer phase a RoPE that is slower (a larger "
            "model.rope_theta, or model.rope_scaling) and many tokens",
        )


def _resume(
    cfg: RunConfig, root: Location, vocab_size: int | None, sha256: str | None, stream: SampleStream | None
) -> Iterator[Finding]:
    from sagetrain.checkpoint import on_disk, reading
    from sagetrain.checkpoint.ledger import Ledger
    from sagetrain.cluster import preflight
    from sagetrain.data import verify
    from sagetrain.training import resume

    said: list[str] = []
    folder, _ = on_disk.newest_whole(root, said.append, contents=False)
    key, value = _of_run(cfg.training)
    yield from (About("damaged_checkpoint", key, value).warning(each, "") for each in said)
    if folder is None:
        return
    run = run_of(cfg)
    wrote, _ = resume.parts_of(on_disk.read_state(folder), run)
    if wrote != part_at(run, begin_of(cfg)):
        return  # Another part of the run has to fit to this checkpoint.
    small = stream is not None and stream.num_tokens <= _READ_TOKENS
    files = verify.verify({"data.train": stream}, deep=False, say=said.append) if stream and small else {}
    files = {name: digest[: preflight.SHOWN] for name, digest in files.items()}

    ours = identity(cfg, vocab_size, sha256, stream.fingerprint if stream else None)
    reader = resume.check(folder, cfg, ours, files)
    state = reader.state
    reading.check_shapes(reader, _shapes(cfg, state.identity.vocab_size))
    if stream:
        length = state.identity.seq_length
        Ledger.verified(state.ledger, stream.fingerprint, folder, length)
    changed = resume.changed(cfg, folder)
    tokens, total = state.tokens, cfg.training.total_tokens
    more = f"; changed since: {'; '.join(changed)}" if changed else ""
    where = "is finished there" if tokens >= total else f"goes on there, at {tokens:,} of {total:,} tokens"
    why = f"holds {folder.name}: the run {where}{more}"
    yield About("goes_on", key, value).info(why, "choose another folder to begin anew")
    if jump := resume.learning_rate_jump(cfg, folder, tokens, resume.last_step(state, cfg.data.seq_length)):
        yield About("learning_rate_jump", "training.total_tokens", total).warning(*jump)


def _shapes(cfg: RunConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every tensor of the configured model, by name, for a vocabulary of `vocab_size`
    tokens."""
    return {spec.name: spec.shape for spec in tensors(cfg.model, cfg.attention, padded_vocab_size(vocab_size))}

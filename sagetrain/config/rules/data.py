"""Rules for the files that a run reads (token files, tokenizer, the run to start from), for its folder, and for
documents that share a sequence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from sagetrain.config.errors import ConfigError, Finding, Level, is_there, many
from sagetrain.config.rules import prepared
from sagetrain.config.rules.findings import About, no_effect, samples_off
from sagetrain.config.run_parts import run_of
from sagetrain.config.schema import NO_DATA, TOKENIZER_JSON, TOKENIZER_NAME, EvaluationConfig, RunConfig, is_url
from sagetrain.config.sections.base import PACKAGES

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
"""The names of the files that `sagetrain prepare --shard` writes."""
WRITTEN = (
    *("config.yaml", "deepspeed.json", "fsdp.json", "findings.json", "metrics.jsonl", "events.jsonl", "stability.json"),
    *("attention.json", "linear.json", "overlap.json", "samples.jsonl", "init_from.json", "wandb.json", "stacks"),
    *(TOKENIZER_NAME, TOKENIZER_JSON, "tokenizer_config.json"),
)
"""The files that a run writes beside its folders (docs/run-folder.md), and a folder that it empties."""
_CACHES = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""The environment variables that name folders in which torch.compile and Triton keep what they have compiled."""
_TOKENIZERS = (TOKENIZER_JSON, TOKENIZER_NAME)
_PREPARE = "write it with `sagetrain prepare`; the path goes without .bin and .idx"
_FEW_STEPS = 100
"""Runs of fewer optimizer steps hardly learn: the shortest that a rate was tuned for have 100 (docs/recipes.md)."""
ORDER = "order of samples (hash of token files, weights, seq_length and seed)"
"""The name that the order of samples has in a run's identity."""


def findings(cfg: RunConfig, required: bool, tokens_given: bool = False) -> Iterator[Finding]:
    """Find files that do not exist (errors if they are `required`, else warnings), data that is read more than once or
    that is both held out and trained on, and document positions that contradict the attention. With `tokens_given` a
    function takes the place of the training files."""
    yield from _unexpanded(cfg)
    yield from _files(cfg, required, ("valid",) if tokens_given else ("train", "valid"))
    yield from _start(cfg, required)
    yield from _run_dir(cfg, required)
    yield from _run_url(cfg, required)
    yield from _caches(required)
    yield from _weights(cfg)
    yield from prepared.findings(cfg)
    yield from repeats(cfg)
    if cfg.data.document_positions and not cfg.data.document_attention:
        yield About("positions_across_documents", "data.document_positions", True).error(
            "positions restart at every document, while attention crosses documents (data.document_attention false): "
            "tokens of different documents would stand at the same positions",
            "set data.document_positions: false, or data.document_attention: true",
        )
    if cfg.evaluation.every_tokens is not None and not cfg.data.valid:
        yield no_effect("evaluation.every_tokens", cfg.evaluation.every_tokens, "no data.valid to evaluate on")
    yield from _only_at_the_end(cfg)
    for key in ("tasks_every_tokens", "tasks_limit"):
        value = getattr(cfg.evaluation, key)
        if value is not None and not cfg.evaluation.tasks:
            yield no_effect(f"evaluation.{key}", value, "no evaluation.tasks")
    yield from _samples(cfg)
    yield from _twice(cfg)
    held_out = {path for source in cfg.data.valid for path in source.files}
    shared = sorted(held_out.intersection(path for source in cfg.data.train for path in source.files))
    if shared:
        yield About("held_out_data", "data.valid", shared[0]).warning(
            "is also a training source: its loss will look better than on unseen text",
            "evaluate on data that is not trained on",
        )


def _only_at_the_end(cfg: RunConfig) -> Iterator[Finding]:
    """Find a run that is evaluated or saved at its end alone, as a shorter one by a long run's configuration is."""
    total = cfg.training.total_tokens
    evaluated = cfg.evaluation.every_tokens if cfg.data.valid else None
    for key, every, what in (
        ("evaluation.every_tokens", evaluated, "the run is evaluated"),
        ("checkpoint.every_tokens", cfg.checkpoint.every_tokens, "the run is saved"),
    ):
        if every is not None and every >= total:
            yield About("only_at_the_end", key, every).info(
                f"is not below training.total_tokens = {total}: {what} at its end alone",
                f"set {key}: null, for a tenth of the run",
            )


def _unexpanded(cfg: RunConfig) -> Iterator[Finding]:
    """Find paths with variables, which a shell would have replaced and a YAML file does not."""
    paths = {
        "training.run_dir": cfg.training.run_dir,
        "training.init_from": cfg.training.init_from,
        "data.tokenizer": cfg.data.tokenizer,
    }
    for name in ("train", "valid"):
        paths |= {f"data.{name}.{i}.path": source.path for i, source in enumerate(getattr(cfg.data, name))}
    for key, path in paths.items():
        if path and re.search(r"\$[\w{]|{{", path):
            yield About("path_not_expanded", key, path).error(
                "is taken as it is written: variables are not replaced",
                f'write the path in full, or begin it with ~ for the home folder; the shell replaces "{key}=$HOME/..."',
            )


def _twice(cfg: RunConfig) -> Iterator[Finding]:
    """Find token files that several sources of data.train name, in full or by a pattern."""
    first: dict[str, int] = {}
    for i, source in enumerate(cfg.data.train):
        for path in map(os.path.normpath, source.files):
            if (other := first.setdefault(path, i)) != i:
                yield About("source_twice", f"data.train.{i}.path", source.path).warning(
                    f"holds {path}, as data.train.{other} does: its texts are seen once for each of them",
                    "name the files once, and give them a weight if they are to be seen more often",
                )
                break


def _samples(cfg: RunConfig) -> Iterator[Finding]:
    """Find samples of text that cannot be written, or whose settings have no effect."""
    asked, default = cfg.evaluation, EvaluationConfig()
    if asked.samples_every_tokens is None:
        for key in ("samples_prompts", "samples_tokens"):
            if (value := getattr(asked, key)) != getattr(default, key):
                yield no_effect(f"evaluation.{key}", value, "no evaluation.samples_every_tokens")
        return
    if cfg.data.tokenizer is None and cfg.model.vocab_size is not None and not Path(cfg.data.tokenizer_path).is_file():
        yield About("samples_without_tokenizer", "evaluation.samples_every_tokens", asked.samples_every_tokens).error(
            f"there is no tokenizer that makes text of tokens: no {cfg.data.tokenizer_path}",
            f"name it in data.tokenizer, or set {samples_off(asked)}",
        )


def _files(cfg: RunConfig, required: bool, names: Iterable[str]) -> Iterator[Finding]:
    """Find token files and tokenizers that do not exist. They are errors if they are required, else warnings."""
    names, sources = tuple(names), []
    imported = cfg.data.missing and "train" in names
    for name in names:
        if imported and name == "train":
            fix = "name token files that `sagetrain prepare` wrote with the tokenizer of the model"
            message = "stands for no data, as in the configuration of an imported model"
            yield _missing(required, "data.train.0.path", NO_DATA, message, fix)
            continue
        for i, source in enumerate(getattr(cfg.data, name)):
            key, files = f"data.{name}.{i}.path", source.files
            sources += [(key, prefix) for prefix in files]
            if not files:
                fix = "see that `sagetrain prepare` has written them; the pattern goes without .bin and .idx"
                yield _missing(required, key, source.path, "no token file of this pattern", fix)
            yield from _parts(key, source.path, files)
    if imported and cfg.data.tokenizer is None:  # The tokenizer is looked for beside the data.
        return
    has_tokenizer = Path(cfg.data.tokenizer_path).is_file()
    # Of the tokenizer of token files from elsewhere, training needs to know the vocabulary size alone.
    elsewhere = not has_tokenizer and cfg.data.tokenizer is None and cfg.model.vocab_size is not None
    elsewhere = elsewhere and not any(Path(f"{prefix}.json").is_file() for _, prefix in sources)
    if sources and not (has_tokenizer or elsewhere or cfg.data.tokenizer) and all(map(_is_unprepared, sources)):
        (key, prefix), *others = sources
        also = others[0][1] if len(others) == 1 else many(len(others), "other source")
        more = f", nor of {also}" if others else ""
        message = f"nothing is prepared: no .bin and .idx of {prefix}{more}, and no {cfg.data.tokenizer_path}"
        fix = f"`sagetrain prepare YOUR_TEXT -o {prefix} --vocab-size 32000 --valid-fraction 0.005`, with your numbers"
        yield _missing(required, key, prefix, message, fix)
        return
    for key, prefix in sources:
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
        if missing:
            yield _missing(required, key, prefix, f"no {' and no '.join(missing)}", _meant(Path(prefix)))
        elif not elsewhere and not Path(f"{prefix}.json").is_file():
            yield About("unknown_tokenizer", key, prefix).warning(
                f"no {prefix}.json: nothing says which tokenizer the tokens come from, and there is no checksum: the "
                "tokens are only compared with the size of the vocabulary",
                "copy the .json that `sagetrain prepare` wrote beside the .bin; for files from elsewhere, see that "
                f"they were made with {cfg.data.tokenizer_path}",
            )
    if elsewhere and cfg.evaluation.tasks:
        yield About("tasks_without_tokenizer", "evaluation.tasks", cfg.evaluation.tasks).error(
            f"are texts, and there is no tokenizer to read them with: no {cfg.data.tokenizer_path}",
            "name the tokenizer that made the token files (data.tokenizer), or leave the tasks out",
        )
    if elsewhere:
        yield About("no_tokenizer", "data.tokenizer", None).info(
            f"there is none: the token files are taken to hold tokens of a vocabulary of {cfg.model.vocab_size} "
            "(model.vocab_size) that is not known here, and `sagetrain generate` will lack it",
            "put the tokenizer.model or tokenizer.json that made them beside the first one, if you have it",
        )
    elif not has_tokenizer:
        fix = (
            "name the tokenizer.model or tokenizer.json that `sagetrain prepare` wrote; for token files from elsewhere "
            "give model.vocab_size instead"
        )
        message = "no such file" if cfg.data.tokenizer else f"no {cfg.data.tokenizer_path}"
        if cfg.data.tokenizer and Path(cfg.data.tokenizer).is_dir():
            found = [str(file) for name in _TOKENIZERS if (file := Path(cfg.data.tokenizer, name)).is_file()]
            message, fix = "is a folder, not a file", f"name {found[0]}" if found else fix
        fix = _gone(Path(cfg.data.tokenizer_path)) or fix
        yield _missing(required, "data.tokenizer", cfg.data.tokenizer, message, fix)


def _meant(path: Path) -> str:
    """Return the fix for a path that is not the path of a token file."""
    if gone := _gone(Path(f"{path}.bin")) or _gone(Path(f"{path}.idx")):
        return gone
    if path.suffix in (".bin", ".idx") and path.is_file():
        return f"leave {path.suffix} out: {path.with_suffix('')}"
    if path.is_dir() and (there := sorted(str(index.with_suffix("")) for index in path.glob("*.idx"))):
        return f"it is a folder: name one of {', '.join(there)}"
    if path.is_file():
        return "it is text: make a token file of it with `sagetrain prepare`"
    return _PREPARE


def _gone(file: Path) -> str:
    """Return the message about a link to a file that is gone, or "" for everything else."""
    try:
        is_there(file)
    except ConfigError as error:
        return str(error)
    return ""


def _is_unprepared(source: tuple[str, str]) -> bool:
    """Whether nothing is there under the name of a token file, which is a key and a path."""
    path = Path(source[1])
    return _meant(path) == _PREPARE and not any(Path(f"{path}{end}").exists() for end in (".bin", ".idx"))


def _run_dir(cfg: RunConfig, required: bool) -> Iterator[Finding]:
    """Find a run folder that cannot be made or written to, and one that holds files of something else that the run
    would replace."""
    run_dir, fix = cfg.training.run_dir, "let this user write there (chmod)"
    folder, logging = Path(run_dir), cfg.logging
    folders: dict[str, object] = {"checkpoints": True, "stacks": True}
    folders |= {"profile": cfg.profile, "tensorboard": logging.tensorboard, "wandb": logging.wandb}
    inside = [folder / name for name, used in folders.items() if used and os.path.lexists(folder / name)]
    inside += [path for path in folder.glob("checkpoints/step-*") if not path.is_dir()]
    for path in (folder, *inside):
        yield from _unwritable("run_dir", "training.run_dir", run_dir, path, required, fix)
    for path in (folder / name for name in (".lock", "checkpoints/latest", *WRITTEN) if name not in folders):
        if path.is_dir() or (path.name == ".lock" and path.exists() and not os.access(path, os.W_OK)):
            why = f"{path} is no file that can be written to"
            yield About("run_dir", "training.run_dir", run_dir).error(why, "move it away, or choose another folder")
    theirs = [name for name in WRITTEN if (folder / name).exists()]
    # Folders named checkpoints are common in other projects.
    if theirs and not any(any(folder.glob(name)) for name in (".lock", "checkpoints/step-*")):
        yield About("run_dir", "training.run_dir", run_dir).found(
            _level(required),
            f"holds {' and '.join(theirs)}, which no run of SageTrain wrote there: the run's own would replace them",
            "choose a folder of its own for the run",
        )


def _run_url(cfg: RunConfig, required: bool) -> Iterator[Finding]:
    """Find a store whose package is not installed, and a run that has checkpoints on a disk already."""
    url, run_dir = cfg.training.run_url, Path(cfg.training.run_dir)
    keys = {"training.run_url": url, "training.init_from": cfg.training.init_from}
    for name in ("train", "valid"):
        keys |= {f"data.{name}.{i}.path": each.path for i, each in enumerate(getattr(cfg.data, name))}
    for key, value in keys.items():
        scheme = value.partition("://")[0] if value else ""
        if (package := PACKAGES.get(scheme)) and find_spec(package) is None:
            fix = f"pip install 'sagetrain[{scheme}]', or do without a URL in {key}"
            yield About("url_installed", key, value).found(_level(required), f"{package} is not installed here", fix)
    if url is None:
        return
    if there := sorted(run_dir.glob("checkpoints/step-*")):
        yield About("run_url_begins_anew", "training.run_url", url).error(
            f"the run has {there[-1]} on a disk, and would look for its checkpoints in {url} alone",
            "leave training.run_url out to go on there, or choose another training.run_dir, with training.init_from: "
            f"{run_dir} to begin with its weights",
        )


def _unwritable(rule: str, key: str, value: str, folder: Path, required: bool, fix: str) -> Iterator[Finding]:
    """Find a folder that cannot be made or written to, by the key that names it or a folder above it."""
    folder = folder.absolute()
    # A link that leads nowhere is in the way of a folder.
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    usable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    # If the file system has no part of the path, the plan is for another machine.
    if not usable and (required or there != Path(there.anchor)):
        why, level = f"{there} is no folder that can be written to", _level(required or not there.is_dir())
        yield About(rule, key, value).found(level, why, f"choose another folder, or {fix}")


def _caches(required: bool) -> Iterator[Finding]:
    """Find a folder for compiled code that cannot be made or written to. The first step would end with a traceback."""
    for name in _CACHES:
        if folder := os.environ.get(name):
            yield from _unwritable("cache_dir", name, folder, Path(folder), required, f"unset {name}")


def _parts(key: str, path: str, files: list[str]) -> Iterator[Finding]:
    """Find parts of `sagetrain prepare --shard` that a pattern does not match because they are not prepared or not
    copied yet."""
    parts = [match.groups() for file in files if (match := _PART.fullmatch(Path(file).name))]
    for name, count in sorted({(name, count) for name, _, count in parts}):
        there = {int(number) for other, number, of in parts if (other, of) == (name, count)}
        lacking = [number for number in range(1, int(count) + 1) if number not in there]
        if lacking:
            yield About("missing_parts", key, path).warning(
                f"of {int(count)} parts of {name} there are {len(there)}; the first that is missing: {lacking[0]}",
                f"finish it with `sagetrain prepare --shard {lacking[0]}/{int(count)}`, or copy it there",
            )


def _weights(cfg: RunConfig) -> Iterator[Finding]:
    """Find lists of weights in which some are numbers and some are proportional. The two have no common measure."""
    for name in ("train", "valid"):
        weights = [source.weight for source in getattr(cfg.data, name)]
        if "proportional" in weights and set(weights) != {"proportional"}:
            number = next(i for i, weight in enumerate(weights) if weight != "proportional")
            yield About("mixed_weights", f"data.{name}.{number}.weight", weights[number]).error(
                "is a number, and other weights of the list are proportional: the two have no common measure",
                "make all of them proportional or all numbers; a pattern (path: data/web-*) takes many files as one "
                "source, with one number, each by its size",
            )


def _start(cfg: RunConfig, required: bool) -> Iterator[Finding]:
    """Find a run to start from that is this run itself, or that does not exist although it will be read."""
    start, run_dir = cfg.training.init_from, Path(cfg.training.run_dir)
    if start is None:
        if cfg.training.init_moments:
            yield no_effect("training.init_moments", True, "no training.init_from")
    elif is_url(start):
        if cfg.training.run_url and f"{start}/".startswith(f"{cfg.training.run_url}/"):
            yield About("init_from_itself", "training.init_from", start).error(
                "is this run's own training.run_url: it goes on from its checkpoints anyway",
                "leave it out to go on, or choose another training.run_url and training.run_dir for a new run",
            )
    elif Path(start).resolve().is_relative_to(run_dir.resolve()):
        yield About("init_from_itself", "training.init_from", start).error(
            "is this run's own folder: it goes on from its checkpoints anyway",
            "leave it out to go on, or choose another training.run_dir for a new run",
        )
    elif not (cfg.training.run_url or any(run_dir.glob("checkpoints/step-*")) or prepared.manifests(start)):
        fix, message = "name the folder of a run, one of its checkpoints/step-N, or what `sagetrain import` wrote", ""
        if Path(start, "config.json").is_file():
            message = ", and a config.json as in Hugging Face folders"
            fix = f"read it first, `sagetrain import {start} RUN`, and name RUN"
        yield _missing(required, "training.init_from", start, f"no checkpoint there{message}", fix)


def repeats(cfg: RunConfig) -> Iterator[Finding]:
    """Find training sources that the run reads more than once. The finding is a warning past four passes: up to there,
    repeated text is nearly as good as new text (arXiv 2305.16264)."""
    sizes = [sum(map(_tokens, source.files)) for source in cfg.data.train]
    weights = [
        size if source.weight == "proportional" else source.weight
        for source, size in zip(cfg.data.train, sizes, strict=True)
    ]
    step = next(iter(run_of(cfg).tokens_per_step.named_tokens.values()))
    for i, (source, held) in enumerate(zip(cfg.data.train, sizes, strict=True)):
        read = cfg.training.total_tokens * weights[i] / (sum(weights) or 1)
        if held and read > 1.05 * held:  # A smaller ratio would be printed as 1.0 times.
            few = read <= 4 * held
            fix = "up to about four passes are nearly as good as new text"
            if not few:
                tokens = int(cfg.training.total_tokens * 4 * held / read)
                fix = f"prepare more text, or set training.total_tokens={tokens:_}, for four passes: {fix}"
                if tokens < _FEW_STEPS * step:
                    fix += f". That is below {_FEW_STEPS} steps of {step:,} tokens: take fewer tokens_per_step, too"
            yield About("data_repeats", f"data.train.{i}.path", source.path).found(
                "info" if few else "warning",
                f"holds {held:,} tokens, which training.total_tokens passes over {read / held:.1f} times",
                fix,
            )


def _tokens(prefix: str) -> int:
    """Return the number of tokens of a token file, from the file size and the type code of the index. Return 0 if the
    file cannot be read; data.token_file.TokenFile opens it before training and says why. TokenFile is not used here
    because it needs numpy, which `sagetrain plan` does without."""
    try:
        with Path(f"{prefix}.idx").open("rb") as index:
            code = index.read(18)[17]
        return Path(f"{prefix}.bin").stat().st_size // {3: 2, 4: 4, 5: 8, 8: 2}[code]
    except (OSError, IndexError, KeyError):
        return 0


def _missing(required: bool, key: str, value: str | None, message: str, fix: str) -> Finding:
    return About("data_files", key, value).found(_level(required), message, fix)


def _level(required: bool) -> Level:
    """Return the level of a finding about files that are required here, or about another machine's."""
    return "error" if required else "warning"

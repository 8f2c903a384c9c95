"""A run is built in five acts, and each act returns what it found."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import tiny
from distributed import run_distributed
from sagetrain.auto.settled import settle
from sagetrain.auto.timed_choice import StartOfRun
from sagetrain.checkpoint import on_disk
from sagetrain.config import ConfigError, RunConfig, load_config
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.schema import EvaluationConfig
from sagetrain.training.build_run import assemble, build, check_files, make_engine, meet, resume
from sagetrain.training.run import Run
from sagetrain.training.start_times import StartTimes
from sagetrain.training.trainer import Trainer


def config(corpus: str, run_dir: str, steps: int) -> RunConfig:
    data = {"train": [{"path": f"{corpus}/train"}], "micro_batch_size": 2}
    training = {"run_dir": run_dir, "total_tokens": steps * 4 * tiny.SEQ}
    return tiny.config(1, data=data, training=training, attention={"backend": "auto"})


def by_hand(cfg: RunConfig) -> Run:
    """Go through the acts one by one, and check what each changes and leaves alone."""
    folder = Path(cfg.training.run_dir)
    files = check_files(cfg)
    assert not folder.exists()
    assert files.identity.vocab_size == files.vocab_size and files.identity.order == files.train.fingerprint
    met = meet(cfg, files)
    assert folder.exists() and met.main and met.checkpoint is None and met.hashes["data.train"]
    vocab_size, say = padded_vocab_size(files.vocab_size), met.reporter.say
    start = StartOfRun(cfg, met.groups, vocab_size, met.device, files.dtype, False, files.folder, say)
    settled = settle(start, None, files.train)
    assert (settled.cfg.attention.backend, settled.cfg.linear.precision) == ("sdpa", "bf16")
    assert settled.cfg.parallel.tensor_parallel_overlap == "off" and cfg.attention.backend == "auto"
    engine = make_engine(settled, files, met)
    resumed = resume(files, met, settled, engine)
    assert (resumed.state.step, resumed.changed, resumed.init_from) == (0, [], None)
    for found in (files, met, settled, resumed):
        with pytest.raises(FrozenInstanceError):
            found.cfg = cfg
    return assemble(files, met, settled, engine, resumed, StartTimes(0.0))


def begin_and_go_on(corpus: str, run_dir: str) -> None:
    cfg = config(corpus, run_dir, 2)
    first = Trainer(by_hand(cfg))
    assert first.train() and first.run.cfg.attention.backend == "sdpa"
    assert load_config(Path(run_dir) / "config.yaml") == cfg  # as the user wrote it, with `auto`
    written = on_disk.read_state(on_disk.newest(Path(run_dir) / "checkpoints"))
    assert written == first.run.record(first.state) and written.step == 2

    longer = cfg.training.model_copy(update={"total_tokens": 3 * 4 * tiny.SEQ})
    again = build(cfg.model_copy(update={"training": longer}))
    assert again.resumed.state == first.state and again.met.checkpoint.name == on_disk.folder_name(2)
    assert again.resumed.changed == ["training.total_tokens: 128 -> 192"]
    assert again.cfg.attention == first.run.cfg.attention
    assert "as the run had it" in again.settled.reasons.attention
    assert again.record(again.resumed.state) == replace(written, files=again.met.hashes)


def train_without_functions(corpus: str, run_dir: str) -> None:
    for key, value in (("samples_every_tokens", 64), ("tasks", ["arc_easy"])):
        cfg = config(corpus, f"{run_dir}/{key}", 2)
        run = build(cfg.model_copy(update={"evaluation": EvaluationConfig(**{key: value})}))
        with pytest.raises(ConfigError, match=rf"evaluation.{key} = .*: this Trainer was given no function"):
            Trainer(run)


def test_a_trainer_needs_the_functions_that_its_keys_ask_for(corpus: Path, tmp_path: Path) -> None:
    run_distributed(train_without_functions, 1, str(corpus), str(tmp_path))


def test_the_acts_by_hand_make_the_run_that_build_goes_on_with(corpus: Path, tmp_path: Path) -> None:
    run_distributed(begin_and_go_on, 1, str(corpus), str(tmp_path / "run"))

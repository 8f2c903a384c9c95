"""Texts that a model writes while it trains: their place, their state after a resume, and refused settings."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checked_config import run_config
from runs import STEPS, log_of, rows_of, write_config
from sagetrain.__main__ import main
from sagetrain.config import ConfigError
from sagetrain.config.check import check
from sagetrain.config.load import load_config
from sagetrain.config.rules import fit
from sagetrain.inference.generate import Sampling, generate
from sagetrain.inference.load import load_run
from sagetrain.training.writers import MetricsWriter


def test_a_run_writes_samples_at_their_pace_and_at_the_end(pair: Path) -> None:
    """Two ranks share the model. The last samples are those of `sagetrain generate`."""
    found = rows_of(pair, "samples")
    assert [(row["step"], row["number"]) for row in found] == [(n, k) for n in (22, 34, STEPS) for k in (1, 2)]
    last = {row["prompt"]: row["text"] for row in found[-2:]}
    assert list(last) == ["def ", ""]
    completions = generate(load_run(pair, print), list(last), Sampling(8))
    assert {done.prompt: done.text for done, _ in completions if done.finish} == last
    assert len({row["text"] for row in found}) > 3, "the model changes"
    timed = [row["step"] for row in rows_of(pair) if row.get("samples/seconds", 0) > 0]
    assert timed == [22, 34, STEPS]
    log = log_of(pair.parent / "run.yaml")
    assert f"step {STEPS}: sample 1: def" in log and log.count(": sample 2: ") == 3
    board = EventAccumulator(str(pair / "tensorboard"))
    board.Reload()
    texts = {name: board.Tensors(f"samples/{name}") for name in (1, 2)}
    assert [event.step for event in texts[1]] == [22, 34, STEPS]
    shown = texts[1][-1].tensor_proto.string_val[0].decode()
    assert shown.replace("\n    ", "\n") == f"    def {last['def ']}"
    assert board.SummaryMetadata("samples/1").plugin_data.plugin_name == "text"


def test_samples_of_steps_that_are_taken_again_are_dropped(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0, 0, 1000)
    assert not (tmp_path / "samples.jsonl").exists(), "of few runs"
    for step in (1, 2):
        writer.sample(step, 100 * step, 1, "Once", " upon\n\u2028a time")
    writer.close()
    MetricsWriter(tmp_path, 1, 100, 1000).close()
    assert [(row["step"], row["prompt"] + row["text"]) for row in rows_of(tmp_path, "samples")] == [
        (1, "Once upon\n\u2028a time")
    ]


EVERY = "evaluation.samples_every_tokens=1000"


@pytest.mark.parametrize(("overrides", "level", "said"), [
    ([EVERY, "parallel.zero_stage=3"], "error", "samples_every_tokens: null and take `sagetrain generate`"),
    (
        [EVERY, "evaluation.samples_tokens=8", "evaluation.samples_prompts=[x]", "parallel.zero_stage=3"],
        "error",
        r"set parallel.zero_stage: 2, or evaluation.samples_every_tokens: null \(and leave out "
        r"evaluation.samples_prompts, evaluation.samples_tokens\)",
    ),
    ([EVERY, "model.vocab_size=512"], "error", "no tokenizer that makes text of tokens"),
    (["evaluation.samples_tokens=8"], "warning", "samples_tokens"),
    (["evaluation.samples_prompts=[x]"], "warning", "samples_prompts"),
])  # fmt: skip
def test_samples_that_nobody_can_write_or_asked_for(
    corpus: Path, tmp_path: Path, capsys, overrides: list[str], level: str, said: str
) -> None:
    if "vocab_size" in overrides[-1]:
        for end in ("bin", "idx"):
            (tmp_path / f"train.{end}").symlink_to(corpus / f"train.{end}")
        overrides = [*overrides, f"data.train.0.path={tmp_path}/train", "data.valid=[]"]
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    findings = check(load_config(config, overrides), 1, path=config, overrides=overrides)
    (found,) = [finding for finding in findings if "samples_" in finding.key]
    assert found.level == level
    assert re.search(said, str(found))
    if level == "error":
        assert main(["train", str(config), *overrides]) == 2 and "samples_every_tokens" in capsys.readouterr().err


def test_samples_are_written_where_no_weights_are_sharded() -> None:
    for parallel, refused in (({"shard_size": 1}, False), ({"shard_size": 2}, True), ({}, True)):
        given = {"engine": "fsdp", "zero_stage": 3, **parallel}
        cfg = run_config(parallel=given, evaluation={"samples_every_tokens": 1000})
        # `plan` asks these rules of what it proposes.
        found = [each.rule for each in fit(cfg, 4)]
        assert ("samples_at_zero_3" in found) == refused, parallel


def test_plan_says_what_samples_cost(corpus: Path, tmp_path: Path, capsys) -> None:
    words = [f"data.train.0.path={corpus}/train", "data.valid=[]", f"training.run_dir={tmp_path}/run", "--world-size=8"]
    costs = []
    for more in (["evaluation.samples_tokens=10"], ["evaluation.samples_tokens=20"], ["model.num_layers=40"]):
        assert main(["plan", "325m", *words, EVERY, "evaluation.samples_prompts=[a, b]", *more]) == 0
        found = r"samples +2 of (\d+) tokens, every 1,000 tokens: at most about (\d+\.\d) s"
        said = re.search(found, capsys.readouterr().out)
        costs.append((int(said[1]), float(said[2])))
    assert costs == [(10, 0.2), (20, 0.3), (64, 2.2)]


@pytest.mark.parametrize("prompts", ["[]", "text"])
def test_prompts_are_a_list_that_is_not_empty(corpus: Path, tmp_path: Path, prompts: str) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"evaluation\.samples_prompts.* must be a list of at least one item"):
        load_config(config, [EVERY, f"evaluation.samples_prompts={prompts}"])

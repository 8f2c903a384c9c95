"""Stages of the tokens-per-step schedule that have a sequence length: the parts of a run, and what is refused."""

import pytest
import yaml

from sagetrain.config import RunConfig
from sagetrain.config.check import check
from sagetrain.config.run_parts import begin_of, end_of, part_at, parts, run_of
from sagetrain.costs.hardware import H200
from sagetrain.planning.plan import make_plan

YARN = {"type": "yarn", "factor": 8.0, "original_seq_length": 4096}
SHORT = {"from_tokens": 0, "tokens": 65536, "seq_length": 4096, "micro_batch_size": 4}
MORE = {**SHORT, "from_tokens": 655360, "tokens": 131072}
LONG = {"from_tokens": 1310720, "tokens": 131072, "seq_length": 32768, "micro_batch_size": 1, "rope_scaling": YARN}


def config(*stages: dict, **sections: dict) -> RunConfig:
    tree = {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 2,
            "vocab_size": 512,
        },
        "data": {"train": [{"path": "corpus"}], "seq_length": 4096, "micro_batch_size": 4},
        "tokens_per_step": {"schedule": "stages", "stages": list(stages or (SHORT, MORE, LONG))},
        "optimizer": {"lr": 1e-3},
        "training": {"run_dir": "none", "total_tokens": 2_000_000},
    }
    return RunConfig.model_validate(
        {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {*tree, *sections}}
    )


def errors(cfg: RunConfig, world_size: int = 1) -> dict[str, str]:
    return {f.key: f"{f.rule}: {f.message}; {f.fix}" for f in check(cfg, world_size, files=False) if f.level == "error"}


def test_parts_are_runs_of_their_stages() -> None:
    """Stages with equal sequences are one part. A part is its own part, and knows the run."""
    cfg = config()
    first, second = parts(cfg)
    assert (first.data.seq_length, first.data.micro_batch_size, first.model.rope_scaling) == (4096, 4, None)
    assert (second.data.seq_length, second.data.micro_batch_size) == (32768, 1)
    assert (
        second.model.rope_scaling.type == "yarn"
        and second.model_dump()["tokens_per_step"] == cfg.model_dump()["tokens_per_step"]
    )
    assert [(begin_of(part), end_of(part)) for part in (first, second)] == [(0, 1310720), (1310720, 2_000_000)]
    assert list(second.tokens_per_step.named_tokens) == ["tokens_per_step.stages.2.tokens"]
    assert parts(second) == [second] and parts(run_of(first)) == parts(run_of(second)) == [first, second]
    assert [part_at(cfg, tokens) for tokens in (0, 1310719, 1310720)] == [0, 0, 1]
    assert errors(cfg) == {}


@pytest.mark.parametrize(("stages", "sections", "key", "said"), [
    ([SHORT, {**LONG, "seq_length": None}], {}, "stages.1.seq_length", "either all stages have both, or none"),
    ([{"from_tokens": 0, "tokens": 65536, "rope_scaling": YARN}], {}, "stages.0.rope_scaling", "no seq_length"),
    ([SHORT, LONG], {"data": {"seq_length": 8192}}, "data.seq_length", "first stage: 4096, 4, null"),
    ([{**SHORT, "tokens": 16384}, {**LONG, "from_tokens": 1294336}], {}, "stages.1.from_tokens", "no multiple of"),
    ([SHORT, {**LONG, "micro_batch_size": 3}], {}, "stages.1.tokens", "micro_batch_size 3 x seq_length 32768"),
    ([SHORT, LONG], {"parallel": {"offload": "optimizer"}}, "parallel.offload", "not proven"),
    ([SHORT, LONG], {"stability": {"spikes": {"policy": "rewind"}}}, "stability.spikes.policy", "use stop or skip"),
    ([SHORT, LONG], {"checkpoint": {"in_memory_every": 5}}, "checkpoint.in_memory_every", "training.init_from"),
])  # fmt: skip
def test_what_contradicts_itself_or_was_not_proven(stages, sections, key, said) -> None:
    ranks = 2 if "parallel" in sections else 1
    found = errors(config(*stages, **sections), ranks)
    name = key if key.split(".")[0] in sections else f"tokens_per_step.{key}"
    assert '"null"' not in "".join(map(str, check(config(*stages, **sections), ranks, files=False)))
    assert name in found and said in found[name], found


def test_keys_of_a_part_are_those_of_its_stage() -> None:
    """Context parallelism cuts sequences of both lengths."""
    stages = [SHORT, {**LONG, "seq_length": 32769, "tokens": 131076}]
    found = errors(config(*stages, parallel={"context_parallel_size": 2}), 2)
    assert "tokens_per_step.stages.1.seq_length" in found and "data.seq_length" not in found
    found = errors(config(SHORT, {**LONG, "micro_batch_size": 3}))
    assert "or tokens_per_step.stages.1.micro_batch_size 2" in found["tokens_per_step.stages.1.tokens"]


@pytest.mark.parametrize(
    ("tokens", "said"), [(8192, []), (65536, ["the longest tokens_per_step.stages.seq_length 32768"])]
)
def test_a_window_counts_where_any_stage_is_longer(tokens: int, said: list[str]) -> None:
    found = check(config(model={"windows": {"tokens": tokens, "pattern": "WF"}}), 1, files=False)
    whys = [f.message.removeprefix("has no effect with ") for f in found if f.key == "model.windows.tokens"]
    assert whys == said


def test_plan_has_memory_and_time_of_each_part() -> None:
    plan = make_plan(config(), [], 1, H200)
    (later,) = plan.later
    assert plan.cfg.data.seq_length == 4096 and later.cfg.data.seq_length == 32768
    assert [row.from_tokens for row in plan.schedule] == [0, 655360] and later.schedule[0].from_tokens == 1310720
    assert later.shown.prediction.tokens_per_second != plan.shown.prediction.tokens_per_second
    assert [f.rule for f in plan.findings].count("text_again") == 1
    assert plan.errors == 0 and len(plan.proposed) == 1


@pytest.mark.parametrize(("second", "third", "warned"), [
    (LONG, None, []),
    ({**LONG, "rope_scaling": None}, None, [1]),
    (LONG, {**LONG, "rope_scaling": None}, [2]),
    (LONG, {**SHORT, "micro_batch_size": 2, "seq_length": 8192}, [2]),
    (LONG, SHORT, []),
    (LONG, {**LONG, "seq_length": 65536}, [2]),
])  # fmt: skip
def test_positions_that_no_stage_met_with_a_rope_are_said(second, third, warned) -> None:
    """A stage that drops the scaling has the RoPE of the stages without it, however long those between were."""
    stages = [SHORT, second, *([{**third, "from_tokens": 1572864, "tokens": 131072}] if third else [])]
    found = [f for f in check(config(*stages), 1, files=False) if f.rule == "new_positions"]
    assert [f.key for f in found] == [f"tokens_per_step.stages.{place}.seq_length" for place in warned]


def test_steps_are_counted_over_all_parts() -> None:
    """Later steps have twice the tokens. A run has 26 steps, and a shorter one ends in the first part."""
    half = {"training": {"total_tokens": 100_000, "run_dir": "none"}, "lr_schedule": {"batch_rule": "linear"}}
    found = check(config(SHORT, LONG, training={"drop_steps": [20]}), 1, files=False)
    assert "no_effect" not in [each.rule for each in found]
    assert [each.rule for each in check(config(SHORT, LONG, **half), 1, files=False) if each.level == "error"] == [
        "batch_rule_reference"
    ]


def test_plan_says_each_finding_of_a_run_with_parts_once(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    tree = {**config().model_dump(mode="json"), "lr_schedule": {"warmup_tokens": 4096}}
    path.write_text(yaml.safe_dump(tree))
    overrides = ["checkpoint.in_memory_every=5", "lr_schedule.warmup=0.1"]
    found = [(each.rule, each.key) for each in make_plan(path, overrides, 1, H200).findings]
    assert len(found) == len(set(found)) and len({"sequences_not_by_stage", "falls_away"} & {*dict(found)}) == 2, found

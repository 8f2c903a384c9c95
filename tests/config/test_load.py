# ruff: noqa: E501 - one message a line reads best
"""Loading a configuration: values, overrides, and every message a user can get."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagetrain.config import ConfigError, RunConfig, dump_config, load_config, other_names, yaml_nodes
from sagetrain.config.check import check
from sagetrain.config.load import config_path, located, saved_config
from sagetrain.config.overrides import assignments
from sagetrain.config.reference import keys
from sagetrain.config.rules.findings import About

GOOD = """\
model:
  num_layers: 4
  hidden_size: 256
  ffn_hidden_size: 768
  num_attention_heads: 4
data:
  train:
    - {path: a, weight: 3}
    - path: b
  seq_length: 1_024
  micro_batch_size: 2
tokens_per_step:
  schedule: ramp
  start: 16384
  end: 65536
  ramp_tokens: 2.1e6
optimizer:
  lr: 3e-4
training:
  run_dir: runs/x
  total_tokens: 1e9
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(tmp_path: Path, old: str, new: str, *overrides: str) -> str:
    """Return the error of GOOD with `old` replaced by `new`. The file's folder is cut from the message."""
    assert old in GOOD
    with pytest.raises(ConfigError, match=r"problems? in the configuration") as error:
        load_config(write(tmp_path, GOOD.replace(old, new, 1)), overrides)
    return str(error.value).replace(f"{tmp_path}/", "")


def test_values_defaults_and_number_forms(tmp_path):
    config = load_config(write(tmp_path, GOOD))
    assert config.model.num_key_value_heads == 4
    assert config.model.head_dim == 64
    assert config.data.seq_length == 1024
    assert config.tokens_per_step.ramp_tokens == 2_100_000
    assert type(config.tokens_per_step.ramp_tokens) is int
    assert config.training.total_tokens == 10**9
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.betas == (0.9, 0.95)
    assert [source.weight for source in config.data.train] == [3.0, 1.0]


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("auto", "auto"), ('"on"', "on")])
def test_compile_switch_is_a_word_not_a_boolean(tmp_path, text, value):
    assert load_config(write(tmp_path, GOOD), [f"training.compile={text}"]).training.compile == value


@pytest.mark.parametrize("text", ["2026-11-21", "010x", "1:30", "on", "yes", "0x1F", "a: b", "1e5x", "~x", "null0"])
def test_words_that_older_yaml_turns_into_something_else(tmp_path, text):
    quoted = f'"{text}"' if ":" in text and " " in text else text
    config = load_config(write(tmp_path, GOOD), [f"evaluation.samples_prompts.0={quoted}"])
    assert config.evaluation.samples_prompts == [text]


@pytest.mark.parametrize("text", ["2024_", "1__0", "1_.5", "1._5", ".5_"])
def test_digits_that_python_does_not_take_for_a_number_are_text(tmp_path, text):
    assert load_config(write(tmp_path, GOOD), [f"training.run_dir={text}"]).training.run_dir == text
    assert f'training.seed = "{text}": must be a whole number' in problems(tmp_path, "", "", f"training.seed={text}")


def test_a_path_may_begin_at_the_home_folder(tmp_path, monkeypatch):
    """The shell replaces ~ neither in a file nor behind KEY=."""
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(write(tmp_path, GOOD.replace("path: b", "path: ~/b")), ["training.run_dir=~/runs/x"])
    assert (config.data.train[1].path, config.training.run_dir) == ("/home/me/b", "/home/me/runs/x")


def test_overrides(tmp_path):
    config = load_config(
        write(tmp_path, GOOD),
        [
            "optimizer.lr=1e-3",
            "data.train.1.path=other",
            "logging.every_steps=5",
            "data.valid=[{path: held_out}]",
            "data.valid.0.weight=2",
            "tokens_per_step={schedule: constant, tokens: 262_144}",
            "optimizer.betas=[0.8, 0.99]",
            "model.vocab_size=null",
            "optimizer.lr=2e-3",
            "evaluation.samples_prompts.0=Once",
            "stability.monitor.layers.0=1",
        ],
    )
    assert config.optimizer.lr == 2e-3
    assert config.data.train[1].path == "other"
    assert config.logging.every_steps == 5
    assert config.data.valid[0].weight == 2
    assert config.tokens_per_step.tokens == 262144
    assert config.optimizer.betas == (0.8, 0.99)
    assert (config.evaluation.samples_prompts, config.stability.monitor.layers) == (["Once"], [1])
    assert load_config(write(tmp_path, GOOD), ["optimizer.betas.1=0.99"]).optimizer.betas == (0.9, 0.99)


def test_a_text_that_python_gives_stays_a_text(tmp_path):
    """YAML 1.1 would leave out the quotes around 1e5, and 1e16 would come back as a whole number."""
    values = {"training.run_dir": "1e5", "data.tokenizer": Path("on"), "optimizer.lr_of": {"head": 1e16}}
    config = load_config(write(tmp_path, GOOD), assignments(values))
    assert (config.training.run_dir, config.data.tokenizer, config.optimizer.lr_of.head) == ("1e5", "on", 1e16)


def test_every_problem_is_reported_at_once_with_its_place(tmp_path):
    text = (
        GOOD.replace("num_layers: 4", "num_layer: 4").replace("lr: 3e-4", "lr: 260K").replace("weight: 3", "weight: 0")
    )
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text), ["attention.backend=saga"])
    lines = str(error.value).replace(f"{tmp_path}/", "").splitlines()
    assert lines[0] == "5 problems in the configuration run.yaml:"
    assert sorted(line.strip().split(": ")[0] for line in lines[1:]) == [
        "override attention.backend=saga",
        "run.yaml:1",
        "run.yaml:18",
        "run.yaml:2",
        "run.yaml:8",
    ]


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("num_layers: 4", "num_layer: 4", "run.yaml:2: model.num_layer = 4: unknown key; did you mean model.num_layers?"),
    ("num_layers: 4", "num_layer: 4", "run.yaml:1: model.num_layers: missing; it takes a whole number above 0 and of at most 10000: Trans"),
    ("optimizer:\n  lr", "lr", "unknown key; did you mean optimizer.lr?"),
    ("num_layers: 4", "xyzzy: 4", "run.yaml:2: model.xyzzy = 4: unknown key; model takes {num_layers, hidden_size, "),
    ("  - path: b", "  - pth: b", "run.yaml:9: data.train.1.pth = \"b\": unknown key; did you mean data.train.1.path?"),
    ("start: 16384", "tokens: 16384", "run.yaml:14: tokens_per_step.tokens = 16384: unknown key for schedule: ramp; it belongs to constant"),
    ("hidden_size: 256", 'hidden_size: "256"', 'run.yaml:3: model.hidden_size = "256": must be a whole number above 0; numbers'),
    ("hidden_size: 256", "hidden_size: 256.5", "run.yaml:3: model.hidden_size = 256.5: must be a whole number above 0"),
    ("hidden_size: 256", "hidden_size: true", "model.hidden_size = true: must be a whole number above 0"),
    ("hidden_size: 256", "hidden_size: -2", "model.hidden_size = -2: must be a whole number above 0"),
    ("hidden_size: 256", "hidden_size: [1, 2]", "model.hidden_size = [1, 2]: must be a whole number above 0"),
    ("num_attention_heads: 4", "num_attention_heads: 512", "run.yaml:1: model.head_dim = 0: must be a whole number above 0: Width of one head. Default: hidden_size / num"),
    ("hidden_size: 256", "hidden_size:", "model.hidden_size = null: must be a whole number above 0"),
    ("lr: 3e-4", "lr: .inf", "optimizer.lr = Infinity: must be a number above 0"),
    ("lr: 3e-4", "lr: .nan", "optimizer.lr = NaN: must be a number above 0"),
    ("lr: 3e-4", "lr: 3e-4\n  betas: [0.9, 1.0]", "optimizer.betas.1 = 1.0: must be a number of at least 0 and below 1"),
    ("lr: 3e-4", "lr: 3e-4\n  betas: [0.9]", "optimizer.betas"),
    ("lr: 3e-4", "lr: 3e-4\n  betas: 0.9", "optimizer.betas = 0.9: must be a list of 2, each a number of at least 0"),
    ("  run_dir: runs/x", "  run_dir: 7", "training.run_dir = 7: must be text"),
    ("  run_dir: runs/x", "  dtype: fp16", 'training.dtype = "fp16": must be one of bf16, fp32'),
    ("  run_dir: runs/x", "  dtype: fp8", 'training.dtype = "fp8": must be one of bf16, fp32; did you mean linear.precision: fp8?'),
    ("  run_dir: runs/x", "  dtype: INT8", "must be one of bf16, fp32; did you mean linear.precision: int8?"),
    ("  run_dir: runs/x", "  dtype: float8", "must be one of bf16, fp32; did you mean linear.precision: fp8?"),
    ("data:\n", "attention: {smooth_k: yes}\ndata:\n", 'attention.smooth_k = "yes": must be true or false'),
    ("data:\n", "attention: {smooth_k: 1}\ndata:\n", "attention.smooth_k = 1: must be true or false"),
    ("data:\n", "attention: {backend: Sdpa}\ndata:\n", "must be one of sage, sdpa, flash, reference, auto; did you mean sdpa?"),
    ("data:\n", "parallel: {zero_stage: 4}\ndata:\n", "parallel.zero_stage = 4: must be a whole number of at least 0 and of at most 3"),
    ("data:\n", "parallel: {zero_stage: true}\ndata:\n", "parallel.zero_stage = true: must be a whole number of at least 0"),
    ("data:\n", "logging: 3\ndata:\n", "logging = 3: must be a section: {every_steps, tensorboard, layer_norms_every_steps, wandb}"),
    ("data:\n", "logging:\ndata:\n", "run.yaml:6: logging = null: must be a section: {every_steps, tensorboard, layer_norms_every_steps, wandb}"),
    ("data:\n", "logging: []\ndata:\n", "logging = []: must be a section: {every_steps, tensorboard, layer_norms_every_steps, wandb}"),
    ("data:\n", "guidance: {override: x}\ndata:\n", 'guidance.override = "x": must be a list whose items are each text'),
    ("data:\n", "guidance: {override: [1]}\ndata:\n", "guidance.override.0 = 1: must be text"),
    ("data:\n", "deepspeed: {log_level: info}\ndata:\n", "is no longer there: further keys of DeepSpeed made no run as fast"),
    ("    - {path: a, weight: 3}\n    - path: b\n", "    []\n", "data.train = []: must be a list of at least one item"),
    ("    - {path: a, weight: 3}\n    - path: b\n", "    a\n", 'data.train = "a": must be a list of at least one item'),
    ("    - path: b\n", "    - b\n", 'data.train.1 = "b": must be a section: {path, weight}'),
    ("schedule: ramp", "schedule: ramps", 'tokens_per_step.schedule = "ramps": must be one of constant, ramp, stages, noise_aware; did you mean'),
    ("schedule: ramp", "schedule: 7", "tokens_per_step.schedule = 7: must be one of constant, ramp, stages"),
    ("  schedule: ramp\n", "", "tokens_per_step.schedule: missing; it takes one of constant, ramp, stages"),
    (
        "tokens_per_step:\n  schedule: ramp\n  start: 16384\n  end: 65536\n  ramp_tokens: 2.1e6",
        "tokens_per_step: 262144",
        "run.yaml:12: tokens_per_step = 262144: must be a section: {schedule: constant, tokens} or {schedule: ramp, start",
    ),
    (
        "tokens_per_step:\n  schedule: ramp\n  start: 16384\n  end: 65536\n  ramp_tokens: 2.1e6\n",
        "",
        "run.yaml: tokens_per_step: missing; it takes a section: {schedule: constant, tokens} or",
    ),
    ("num_layers: 4", "num_layers: 4\n  num_layers: 5", "run.yaml:3: model.num_layers: given twice: first on line 2"),
    ("optimizer:\n  lr: 3e-4", "optimizer.lr: 3e-4", "run.yaml:17: optimizer.lr = 0.0003: unknown key; dots are for overrides"),
    ("schedule: ramp", "schedule: [1]", "tokens_per_step.schedule = [1]: must be one of constant, ramp, stages"),
    ("optimizer:", "data:", "run.yaml:17: data: given twice: first on line 6"),
    ("num_layers: 4", "num_layers: !!python/name:os.system", "run.yaml:2: model.num_layers: the tag 'python/name:os.system' is not taken"),
    ("num_layers: 4", "num_layers: &a [*a]", "run.yaml:2: model.num_layers.0: the alias *a is not taken here: write out what it"),
    ("num_layers: 4", "[1, 2]: 4", "run.yaml:2: model: a key must be a word"),
    ("num_layers: 4", "<<: {num_layers: 4}", "run.yaml:2: model.<<: merge keys are not taken here: write the keys out"),
    ("num_layers: 4", "num_layers: [4", "not valid YAML"),
    ("num_layers: 4", "num_layers:\t4\n\t- x", "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token; write spaces in place of tabs"),
    ("  num_layers: 4", "   num_layers: 4", "run.yaml:3: not valid YAML: expected <block end>, but found '<block mapping start>'; indent"),
    ("  num_layers: 4", "  num_layers:4", "run.yaml:3: not valid YAML: mapping values are not allowed here; a key ends with a colon and a space"),
    ("hidden_size: 256", "hidden_size: 256.0", "model.hidden_size = 256.0: must be a whole number above 0; written without a point: 256"),
    ("data:\n", "attention: {smooth_k: 'True'}\ndata:\n", "must be true or false; did you mean true, without quotes?"),
    ("data:\n", "attention: {smooth_k: off}\ndata:\n", 'attention.smooth_k = "off": must be true or false; did you mean false?'),
    ("lr: 3e-4", "lr: 1e300", 'run.yaml:18: optimizer.lr: "1e300" is larger than any number of a run: up to 1e18 if whole, else 3e38'),
    ("num_layers: 4", "num_layers: 9223372036854775808", 'model.num_layers: "9223372036854775808" is larger than any number'),
    ("seq_length: 1_024", "num_workers: 1e6", "data.num_workers = 1000000: must be a whole number of at least 0 and of at most 256"),
    ("run_dir: runs/x", "timeout_minutes: 1e-9", "must be a number of at least 0.1 and of at most 43200"),
    ("run_dir: runs/x", "timeout_minutes: 1e9", "must be a number of at least 0.1 and of at most 43200"),
    ("lr: 3e-4", "lr: 3e-4\n  eps: 1e8", "optimizer.eps = 100000000: must be a number above 0 and below 1"),
    ("num_layers: 4", "num_layers: 4\n  norm_eps: 1.0", "model.norm_eps = 1.0: must be a number above 0 and below 1"),
    ("num_layers: 4", "num_layers: 4\n  init_std: 20", "model.init_std = 20: must be a number above 0 and of at most 1"),
    ("num_layers: 4", "num_layers: 4\n  rope_theta: 0.5", "model.rope_theta = 0.5: must be a number above 1"),
    ("num_layers: 4", "num_layers: 4\n  windows: {tokens: 9, pattern: WXF}", 'model.windows.pattern = "WXF": must be text of the letters W and F: The layers with a window (W) and with full attention (F), repeated'),
    ("num_layers: 4", "num_layers: 4\n  delta_net: {key_heads: 2, pattern: dddf}", '"dddf": must be text of the letters D and F: The layers with a gated delta net (D) and'),
    ("run_dir: runs/x", "run_dir: ''", 'training.run_dir = "": must be text that is not empty'),
    ("- path: b", "- path: ''", 'data.train.1.path = "": must be text that is not empty'),
    ("lr: 3e-4", "lr: 3e\u22124", "must be a number above 0; it has MINUS SIGN (U+2212): type it anew\n"),
    ("num_layers: 4", "num_layers: 4\u00a0", "must be a whole number above 0 and of at most 10000; it has NO-BREAK SPACE (U+00A0): type it anew\n"),
    ("num_layers: 4", "num_layers:\u00a04  # \u00fc", "this line or the one above it has NO-BREAK SPACE (U+00A0): type it anew"),
    ("num_layers: 4", "num_layers: " + "[" * 3000, "run.yaml:1: not valid YAML: brackets or lists stand in one another too deep"),
    ("run_dir: runs/x", "run_dir: >\n    runs/x", 'training.run_dir = "runs/x\\n": holds \'\\n\': write the path in one line'),
    ("run_dir: runs/x", f"run_dir: runs/{'x' * 256}", "has a name of more than 255 bytes, which file systems do not take"),
    ("run_dir: runs/x", f"run_dir: {'runs/' * 801}", "has more than 4,000 bytes, which is no path: shorten it"),
    ("run_dir: runs/x", "run_dir: 'runs/x '", "has a blank at an end, or a character that nobody sees: type the path anew"),
    ("run_dir: runs/x", "run_dir: runs/\u200bx", "has a blank at an end, or a character that nobody sees: type the path anew"),
    ("run_dir: runs/x", "run_dir: ~nobody-here/x", "begins with ~, and no user has this name: write the path in full"),
    ("run_dir: runs/x", "run_dir: %RUN%", "found character '%' that cannot start any token; put the text in quotes"),
    ("run_dir: runs/x", 'run_dir: "runs/x\n  seed: 1', "run.yaml:20: not valid YAML: found unexpected end of stream; a quote or a bracket that opens"),
    ("- path: b", "- path: 'it's'", "run.yaml:9: not valid YAML: expected <block end>, but found '<scalar>'; indent it like the keys above it of the same section; a quote inside"),
    ("optimizer:\n  lr: 3e-4", "optimizer: {lr:3e-4}", "optimizer.lr:3e-4 = null: unknown key; a key ends with a colon and a space"),
    ("  lr: 3e-4", "  LR: 3e-4", "optimizer.LR = 0.0003: unknown key; did you mean optimizer.lr?"),
    ("  lr: 3e-4", "\u00a0 lr: 3e-4", "unknown key; it has NO-BREAK SPACE (U+00A0): type it anew"),
    ("data:\n", "guidance:\ndata:\n", "guidance = null: must be a section: {override}; leave it out for its defaults"),
    ("lr: 3e-4", "lr: 3e-4\n  clip_grad: null", "must be a number of at least 0; its default is 1.0"),
    ("num_layers: 4", "num_layers: 1e9", "num_layers = 1000000000: must be a whole number above 0 and of at most 10000"),
    ("num_layers: 4", "num_layers: 4\n  rope_scaling: {type: yarn, factor: 0.5, original_seq_length: 9}", "factor = 0.5: must be a number of at least 1"),
    ("run_dir: runs/x", "seed: 1e19", "must be a whole number of at least 0; the largest is 1e18"),
    ("    - {path: a, weight: 3}\n    - path: b\n", "    a\n", "; a list is written [{path: a}]"),
    ("num_layers: 4", "num_layers: *nowhere", "run.yaml:2: model.num_layers: the alias *nowhere is not taken here"),
])  # fmt: skip
def test_messages(tmp_path, old, new, expected):
    assert expected in problems(tmp_path, old, new) + "\n"


def test_a_schedule_is_changed_by_its_key(tmp_path):
    """Keys of the file that belong to another schedule fall away and are named, and so does the other way to say how
    long the warm-up or the decay is, unless the override is the default. What the overrides themselves contradict stays an
    error."""
    path = write(tmp_path, GOOD + "lr_schedule:\n  shape: wsd\n  warmup: 0.02\n  decay_tokens: 9\n")
    changes = ["tokens_per_step.tokens=65536", "tokens_per_step.schedule=constant", "lr_schedule.warmup_tokens=8"]
    changes += ["lr_schedule.decay=0.3"]
    config = load_config(path, changes)
    assert config.tokens_per_step.model_dump() == {"schedule": "constant", "tokens": 65536}
    assert (config.lr_schedule.warmup, config.lr_schedule.warmup_tokens) == (0, 8)
    assert (config.lr_schedule.decay, config.lr_schedule.decay_tokens) == (0.3, None)
    said = [str(found) for found in check(config, 1, path=path, overrides=changes) if found.rule == "falls_away"]
    assert len(said) == 3
    assert 'constant": in the place of start 16384, end 65536, ramp_tokens 2100000 of ' in said[0]
    assert "warmup_tokens = 8: in the place of warmup 0.02 of" in said[1]
    assert "decay = 0.3: in the place of decay_tokens 9 of" in said[2]
    idle = ["lr_schedule.decay=null", "lr_schedule.warmup_tokens=0"]
    kept = load_config(path, idle)
    assert kept == load_config(path)
    said = [str(found) for found in check(kept, 1, path=path, overrides=idle) if found.rule == "stays"]
    assert (
        f"warmup_tokens = 0: leaves warmup 0.02 of {path}:24 as it is [stays]\n    fix: lr_schedule.warmup=0.0"
        in said[0]
    )
    assert "decay = null: leaves decay_tokens 9 of" in said[1] and "fix: lr_schedule.decay_tokens=null takes" in said[1]
    idle += ["lr_schedule.warmup=0", "lr_schedule.decay_tokens=null"]
    none = load_config(path, idle)
    assert none.lr_schedule.model_dump(exclude_defaults=True) == {"shape": "wsd"}
    assert not [found for found in check(none, 1, path=path, overrides=idle) if found.rule == "stays"]
    twice = ["optimizer.lr=1e-3", *changes, "optimizer.lr=2e-3", "optimizer.lr=2e-3"]
    (said,) = [f"{found}" for found in check(config, 1, path=path, overrides=twice) if found.rule == "given_twice"]
    assert said.startswith("override optimizer.lr=2e-3: optimizer.lr = 0.002: optimizer.lr=1e-3 stands before it")
    whole = ["optimizer.eps=1e-9", "optimizer={lr: 1e-3}", "lr_schedule={warmup: 0.1}"]
    said = [f"{found}" for found in check(config, 1, path=path, overrides=whole)]
    assert 'optimizer = {"lr": 0.001}: optimizer.eps=1e-9 stands before it and counts for nothing' in "".join(said)
    assert f"in the place of shape wsd, decay_tokens 9 of {path} [falls_away]" in "".join(said)
    contradiction = problems(tmp_path, "", "", *changes, "tokens_per_step.end=3")
    assert "unknown key for schedule: constant; it belongs to ramp\n      fix: leave it out, or set" in contradiction
    assert problems(tmp_path, "", "", "tokens_per_step.schedule=constant").count("tokens_per_step.tokens: missing") == 1


def test_aliases_of_aliases_do_not_grow(tmp_path):
    """Ten lines stand for 9^10 values, also in the configuration that lies in a checkpoint."""
    lines = [
        "a: &a [x, x]",
        *(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghij")),
    ]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    for read in (load_config, saved_config):
        with pytest.raises(ConfigError, match=r"run\.yaml:2: .*the alias \*a is not taken here"):
            read(tmp_path / "run.yaml")


@pytest.mark.parametrize(("override", "expected"), [
    ("optimizer.lr", "override optimizer.lr: must be dotted.key=value in one word, for example optimizer.lr=3e-4"),
    ("=3", "override =3: must be dotted.key=value"),
    ("model..x=3", "override model..x=3: must be dotted.key=value"),
    ("data.train.2.path=c", "data.train = [{\"path\": \"a\", \"weight\": 3}, {\"path\": \"b\"}]: is a list of 2, counted from 0: there is no item '2'\n      fix: name one that there is, or give the whole list: data.train=[...]"),
    ("data.valid.1.path=c", "data.valid = []: is a list of 0, counted from 0: there is no item '1'"),
    ("optimizer.betas.2=0.9", "optimizer.betas = [0.9, 0.95]: is a list of 2, counted from 0: there is no item '2'"),
    ("data.train.x=c", "there is no item 'x'"),
    ("data.train.\u00b2=c", "there is no item '\u00b2'"),
    ("data.seq_length.x=1", "data.seq_length = 1024: is a single value: nothing can be set inside it"),
    ("optimzer.lr=1", "override optimzer.lr=1: optimzer = {\"lr\": 1}: unknown key; did you mean optimizer?"),
    ("xyzzy=1", "override xyzzy=1: xyzzy = 1: unknown key; the configuration takes {model, attention, "),
    ("optimizer.xyzzy=1", "unknown key; optimizer takes {name, lr, lr_of, lr_base_width, betas, eps, weight_decay, weight_decay_lr, clip_grad, moments, master, muon}\n"),
    ("data.train.0.files=1", "unknown key; data.train.0 takes {path, weight}\n"),
    ("tokens_per_step={schedule: constant, x: 3}", "unknown key; tokens_per_step takes {schedule: constant, tokens}\n"),
    ("training.micro_batch_size=8", "unknown key; did you mean data.micro_batch_size? training takes {run_dir, "),
    ("data.micro_batchsize=8", "unknown key; did you mean data.micro_batch_size?\n"),
    ("lr_schedule.warmup_token=8", "unknown key; did you mean lr_schedule.warmup_tokens?\n"),
    ("model.delta_net={key_heads: 2, heads: 4}", "did you mean model.delta_net.key_heads or model.delta_net.value_heads?\n"),
    ("optimizer.betas=(0.9, 0.95)", "must be a list of 2, each a number of at least 0 and below 1; a list is written [0.9, 0.95]\n"),
    ("data.train.0.path=*", "but found '\\x00'; put the text in quotes"),
    ("lr_schedule.warmup=1000", "of at least 0 and below 1; lr_schedule.warmup_tokens takes a whole number of at least 0\n"),
    ("lr_schedule.decay_tokens=0.1", "a whole number above 0 or null; lr_schedule.decay takes a number of at least 0 and below 1 or null\n"),
    ("optimizer.lr=[1", "override optimizer.lr=[1: not valid YAML"),
    ("optimizer.lr=fast", 'override optimizer.lr=fast: optimizer.lr = "fast": must be a number above 0'),
    ("tokens_per_step={schedule: constant, tokns: 3}", "did you mean tokens_per_step.tokens?"),
    ("tokens_per_step={schedule: constant, schedule: ramp}", "given twice"),
    ("model=null", "override model=null: model = null: must be a section: {num_layers, hidden_size"),
])  # fmt: skip
def test_override_messages(tmp_path, override, expected):
    assert expected in problems(tmp_path, "", "", override) + "\n"


@pytest.mark.parametrize(("override", "expected"), [
    ("optimizer.learning_rate=1", "unknown key; the key here is optimizer.lr\n"),
    ("training.precision=fp8", "the key here is training.dtype (bf16 or fp32; 8 bits are linear.precision)\n"),
    ("training.max_steps=100", "the key here is training.total_tokens, in tokens: steps times tokens_per_step\n"),
    ("training.batch_size=8", "the key here is tokens_per_step.tokens (of a step of all ranks), beside data.micro_"),
    ("parallel.data_parallel_size=2", "there is nothing to set here: it follows from the ranks of the launch"),
    ("parallel.virtual_pipeline_model_parallel_size=2", "the key here is parallel.pipeline_chunks (ranges of"),
    ("parallel.expert_model_parallel_size=2", "the key here is parallel.expert_parallel_size\n"),
    ("datasets=[]", "the key here is data.train, a list of token files of `sagetrain prepare`\n"),
    ("training.lora_r=8", "there is nothing to set here: all weights are trained, in 16 bits or more; there are no"),
    ("model.rope_parameters={rope_theta: 1e4}", "the key here is model.rope_theta, and model.rope_scaling for"),
    ("model.num_experts=8", "the key here is model.experts.number\n"),
    ("parallel.Reshard-After-Forward=true", "the key here is parallel.zero_stage (3 shards weights"),
    ("optimizer.type=lion", "the key here is optimizer.name\n"),
    ("lr_schedule.type=cosine", "the key here is lr_schedule.shape\n"),
    ("model.rope_scaling.typ=yarn", "did you mean model.rope_scaling.type?\n"),
    ("activation_checkpoint={mode: full}", "the key here is training.activation_checkpointing\n"),
    ("parallelism={tensor_parallel_degree: 2, mine: 1}", "; tensor_parallel_degree: the key here is parallel.tensor_parallel_size\n"),
    ("lr_scheduler.warmup_steps=10", "warmup_steps: the key here is lr_schedule.warmup_tokens, in tokens\n"),
    ("metrics.enable_wandb=true", "enable_wandb: the key here is logging.wandb\n"),
    ("lr_decay_style=cosine", "the key here is lr_schedule.shape\n"),
    ("model.flavor=8B", "there is nothing to set here: `sagetrain config NAME` prints a whole configuration"),
    ("model.kv_heads=8", "the key here is model.num_key_value_heads (key heads, or their groups)\n"),
    ("model.num_mtp_layers=1", "there is nothing to set here: there is no prediction of several tokens\n"),
    ("include=base.yaml", "there is nothing to set here: a file is one whole configuration, which KEY=VALUE on the"),
    ("logging.every=5", "did you mean logging.every_steps?\n"),
    ("checkpoint.keep=5", "did you mean checkpoint.keep_last or checkpoint.keep_every_tokens?\n"),
    ("parallel.engine=FSDP2", "must be one of auto, deepspeed, fsdp; did you mean fsdp?\n"),
    ("parallel.offload=cpu", "must be one of none, optimizer, all; did you mean optimizer?\n"),
    ("parallel.shard_size=auto", "must be a whole number above 0 and of at most 1000000 or null\n"),
    ("attention.backend=eager", "did you mean reference?\n"),
    ("attention.backend=flash_attention_2", "did you mean flash?\n"),
    ("linear.precision=FP8", "must be one of bf16, fp8, int8, auto; did you mean fp8?\n"),
    ("training.dtype=float32", "did you mean fp32?\n"),
    ("training.activation_checkpointing=true", "or a whole number of at least 0 or auto; did you mean full?\n"),
    ("training.activation_checkpointing=on", "or a whole number of at least 0 or auto; did you mean full?\n"),
    ("training.activation_checkpointing=-1", "must be one of none, selective, attention, full or a whole number of at least 0"),
    ("optimizer.name=adamw_8bit", "did you mean adamw, with optimizer.moments int8?\n"),
    ("parallel.pipeline_blocks=[4, 0]", "1 problem in the configuration run.yaml:\n  override parallel.pipeline_blocks=[4, 0]: parallel.pipeline_blocks.1 = 0: must be a whole number above 0\n"),
    ("lr_schedule.shape=none", "did you mean constant?\n"),
    ("lr_schedule.shape=cosine_with_min_lr", "did you mean cosine?\n"),
    ("checkpoint.resume=true", "must be one of auto, never; did you mean auto?\n"),
    ("parallel.pipeline_blocks=4", "parallel.pipeline_blocks = 4: must be auto or a list whose items are each a whole"),
    ("stability.monitor.layers=[0, x]", '.layers.1 = "x": must be a whole number\n'),
])  # fmt: skip
def test_names_and_values_of_other_libraries(tmp_path, override, expected):
    """An error names the key or the value that is meant, and one mistake is one problem."""
    assert expected in problems(tmp_path, "", "", override) + "\n"


def test_names_of_other_libraries_lead_to_keys_that_there_are():
    known = {key.name for key in keys()} | {key.name.partition(".")[0] for key in keys()}
    for other, ours in other_names._KEYS.items():
        name = ours.split(" ")[0].strip(",:")
        assert name == "none" or name in known, (other, ours)


def test_the_first_item_of_a_missing_list_can_be_named(tmp_path):
    """configs/minimal.yaml has no data.valid, and the other shipped configurations have one."""
    config = load_config(write(tmp_path, GOOD), ["data.valid.0.path=held_out", "data.valid.0.weight=2"])
    assert [(source.path, source.weight) for source in config.data.valid] == [("held_out", 2)]
    assert 'data.valid.0.pth = "held_out": unknown key; did you mean data.valid.0.path?' in problems(
        tmp_path, "", "", "data.valid.0.pth=held_out"
    )
    with pytest.raises(ConfigError, match="is a list of 1, counted from 0: there is no item '1'"):
        load_config(write(tmp_path, GOOD), ["data.valid.0.path=a", "data.valid.1.path=b"])


@pytest.mark.parametrize(
    "number", ["1e99999999999999999999", "1e-99999999999999999999", "1e1000000", "9" * 5000, "!!int x"]
)
def test_a_number_that_python_cannot_read_is_one_problem(tmp_path, number):
    rule = r": \"\S+ cannot be read as a number; numbers are written 262144, 262_144, 2\.1e6 or 3e-4"
    text = problems(tmp_path, "lr: 3e-4", f"lr: {number}")
    assert re.fullmatch(r"1 problem in .*\n  run\.yaml:18: optimizer\.lr" + rule, text)
    for override in (f"optimizer.lr={number}", f"optimizer={{lr: {number}}}"):
        text = problems(tmp_path, "", "", override)
        assert re.fullmatch(r"1 problem in .*\n  override " + re.escape(override) + rule, text)


def test_a_derived_default_adds_no_second_message(tmp_path):
    text = problems(tmp_path, "num_attention_heads: 4", "num_attention_heads: 0")
    assert text.startswith(
        "1 problem in the configuration run.yaml:\n  run.yaml:5: model.num_attention_heads = 0: must"
    )


@pytest.mark.parametrize(("content", "expected"), [
    (b"", "sections such as `model:` are expected"), (b"- 1\n", "sections such as `model:` are expected"),
    (b"a: 1\n---\nb: 2\n", "not valid YAML: but found another document; a file is one run: no --- inside of it"),
    (b"a: 1\nb: \x00\n", "run.yaml:2: not valid YAML: special characters are not allowed"),
    (b"a: \xff\n", "cannot be read"),
])  # fmt: skip
def test_files_that_hold_no_configuration(tmp_path, content, expected):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_config(path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot be read: No such file or directory"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match=r"is a folder; that of a run has its configuration in .*/config\.yaml"):
        load_config(tmp_path)


def test_locations_name_line_or_override(tmp_path):
    path = write(tmp_path, GOOD)
    places = {
        "model.hidden_size": f"{path}:3",
        "data.train.1.path": f"{path}:9",
        "optimizer.lr": "override optimizer.lr=1",
    }
    found = located([About("a_rule", key, 1).info("") for key in places], path, ["optimizer.lr=1"])
    assert [each.where for each in found] == [*places.values()]


words = st.text(min_size=1, max_size=12)
names = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=1, max_size=12)
awkward = st.sampled_from(
    ["on", "no", "1e5", "1_0", "null", "~", "true", "0x1", "2026-01-01", "1:30", ".5", "- a", "#", "é", "=", "<<"]
)
whole, real = st.integers(-(10**18), 10**18), st.floats(-3e38, 3e38)  # Larger numbers are no numbers of a run.
trees = st.recursive(
    st.none() | st.booleans() | whole | real | words | awkward,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | awkward, inner, max_size=3),
    max_leaves=8,
)
counts = st.integers(1, 10**15)
rates = st.floats(1e-12, 1e3)


paths = st.sampled_from(
    [key.name.split(".") for key in keys()] + [[s] for s in RunConfig.model_fields] + [["data", "train", "1"], ["x"]]
)


@settings(max_examples=80)
@given(
    path=paths, value=trees, override=words | awkward | st.builds("{}={}".format, paths.map(".".join), words | awkward)
)
def test_every_file_gives_a_configuration_or_a_list_of_problems(tmp_path_factory, path, value, override):
    tree = yaml_nodes.parse(GOOD)[0]
    target = tree
    for part in path[:-1]:
        inner = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        target = inner if isinstance(inner, dict | list) else {}
    target[int(path[-1]) if isinstance(target, list) else path[-1]] = value
    file = tmp_path_factory.mktemp("fuzz") / "run.yaml"
    file.write_text(yaml_nodes.dump(tree), encoding="utf-8")
    try:
        config = load_config(file, [override])
    except ConfigError as error:
        assert re.match(r"\d+ problems? in the configuration", str(error))  # noqa: PT017
    else:
        assert isinstance(config, RunConfig)


plain = (names | awkward).filter(lambda text: text == text.strip() and text.isprintable() and text[:1] != "~")


@st.composite
def configs(draw) -> RunConfig:
    schedule = draw(
        st.fixed_dictionaries({"schedule": st.just("constant"), "tokens": counts})
        | st.fixed_dictionaries({"schedule": st.just("ramp"), "start": counts, "end": counts, "ramp_tokens": counts})
        | st.fixed_dictionaries(
            {
                "schedule": st.just("stages"),
                "stages": st.lists(
                    st.fixed_dictionaries({"from_tokens": counts, "tokens": counts}), min_size=1, max_size=4
                ),
            }
        )
    )
    return RunConfig.model_validate(
        {
            "model": {name: draw(counts) for name in ("ffn_hidden_size", "head_dim", "hidden_size")}
            | {name: draw(st.integers(1, 10_000)) for name in ("num_layers", "num_attention_heads")},
            "data": {
                "train": [{"path": draw(plain), "weight": draw(rates)}],
                "seq_length": draw(counts),
                "micro_batch_size": draw(counts),
                "document_attention": draw(st.booleans()),
            },
            "tokens_per_step": schedule,
            "optimizer": {"lr": draw(rates), "betas": (draw(st.floats(0, 0.999)), 0.95)},
            "training": {
                "run_dir": draw(plain),
                "total_tokens": draw(counts),
                "compile": draw(st.sampled_from(["on", "off"])),
            },
            "guidance": {"override": draw(st.lists(words | awkward, max_size=2))},
        }
    )


@settings(max_examples=50)
@given(config=configs())
def test_dump_and_load_give_the_same_configuration(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("dump") / "run.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    again = load_config(path)
    assert again == config
    assert dump_config(again) == dump_config(config)


def test_a_shipped_configuration_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "325m").mkdir()  # A folder is no configuration.
    cfg = load_config("325m", ["data.train.0.path=mine"])
    assert (cfg.model.num_layers, cfg.data.train[0].path) == (20, "mine")
    (found,) = located([About("a_rule", "model.num_layers", 1).info("")], "325m", ())
    assert found.where.startswith(str(config_path("325m")))
    (tmp_path / "7b").write_text(GOOD)
    assert load_config("7b").model.num_layers == 4
    with pytest.raises(ConfigError, match=r"325: no such file, .* there are 1b, .*, quickstart, qwen3-30b-a3b, short$"):
        load_config("325")
    (tmp_path / "configs").mkdir()
    with pytest.raises(ConfigError, match=r"configs: is a folder, and no shipped configuration"):
        load_config("configs")
    with pytest.raises(ConfigError, match=r"325m.yaml: cannot be read"):
        load_config("325m.yaml")
    with pytest.raises(ConfigError, match=r"s3://runs/run.yaml is a URL, which is not taken here"):
        load_config("s3://runs/run.yaml")
    with pytest.raises(ConfigError, match=r"optimizer.lr=1: name a configuration before what it changes"):
        load_config("optimizer.lr=1")


@pytest.mark.parametrize(("override", "idle", "fix"), [
    (
        "stability.precision={rungs: [sdpa], spike_tokens: 1000}",
        "stability.precision=null",
        "write attention.recipe: scores",
    ),
    ("stability.qk_gain.cap=1.25", "stability.qk_gain={cap: null, decay: 0.0}", "leave it out"),
    ("attention.recipe=gradients", "attention.recipe=auto", "write attention.backend: sdpa"),
    ("attention.smooth_q=true", "attention.smooth_q=false", "leave it out"),
    ("linear.recipe=tensorwise", "linear.recipe=rowwise", "leave it out; linear.precision bf16"),
    ("parallel.gather_8_bits=true", "parallel.gather_8_bits=false", "leave it out"),
    ("optimizer.muon.adamw_lr=0.002", "optimizer.muon.adamw_lr=null", "write optimizer.lr_of: {embedding"),
])  # fmt: skip
def test_a_key_of_an_earlier_version_says_what_to_write(tmp_path, override, idle, fix) -> None:
    """Runs of earlier versions have every key in their config.yaml, and are read."""
    file, heard = tmp_path / "a.yaml", list[str]()
    file.write_text(GOOD)
    plain = load_config(file)
    with pytest.raises(ConfigError, match=r"is no longer there: .*\n      fix: " + re.escape(fix)):
        load_config(file, [override])
    assert load_config(file, [idle]) == plain
    assert load_config(file, [override], passed_over=heard.append) == plain
    assert "counts for nothing now" in heard[0] and len(heard) == 1


def test_the_configuration_of_another_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(
        ConfigError, match=r"config\.json is the config\.json of a Hugging Face model: .* import FOLDER"
    ):
        load_config(tmp_path / "config.json")

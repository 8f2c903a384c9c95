# ruff: noqa: E501 - one case a line reads best
"""The printed plan: numbers, findings and speed, without torch or data. Every shipped configuration is planned."""

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from planned import NOISE_AWARE
from runs import sagetrain
from sagetrain.config import ConfigError, dump_config, load_config
from sagetrain.config.reference import keys
from sagetrain.config.schema import DataConfig, RunConfig
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.costs.accounting import flops_per_token, num_parameters
from sagetrain.costs.hardware import H200, HARDWARE, usable_bytes
from sagetrain.costs.memory import memory_per_rank
from sagetrain.data.token_file import TokenFile
from sagetrain.planning import plan as planning
from sagetrain.planning import priced
from sagetrain.planning.plan import ASSUMED_VOCAB_SIZE, document_span, make_plan
from sagetrain.planning.priced import Target
from sagetrain.planning.show import show_plan

CONFIGS = Path(__file__).parents[2] / "configs"
# Each has a world size that it is made for, and its parameters with a vocabulary of 32,768 (2,048 for quickstart).
SHIPPED = {
    "minimal": (1, None),
    "quickstart": (1, None),
    "325m": (8, 306_228_736),
    "short": (1, 339_783_168),
    "1b": (8, 1_036_082_176),
    "24gb": (1, 1_036_082_176),
    "7b": (64, 7_248_031_744),
    "8b": (8, 8_030_269_440),
    "olmoe-1b-7b": (8, 6_919_161_856),
    "qwen3-30b-a3b": (64, 30_532_122_624),
}


def plan(name: str, world_size: int, *overrides: str, brief: bool = False) -> tuple[int, str]:
    """Plan a shipped configuration. Return the number of errors, and the text with runs of spaces made one."""
    out = io.StringIO()
    errors = show_plan(CONFIGS / f"{name}.yaml", overrides, world_size, Console(file=out, width=400), brief=brief)
    return errors, re.sub(r" +", " ", out.getvalue())


def test_all_shipped_configurations_are_listed_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_load_fit_and_plan(name, tmp_path):
    world_size, parameters = SHIPPED[name]
    path = CONFIGS / f"{name}.yaml"
    cfg = load_config(path)
    (tmp_path / "dump.yaml").write_text(dump_config(cfg))
    assert load_config(tmp_path / "dump.yaml") == cfg
    errors, text = plan(name, world_size, "data.tokenizer=/nowhere/tokenizer.model", "training.run_dir=/nowhere/run")
    levels = set(re.findall(r"\[(\w+)\]\n", text))
    known = {"data_files", "sage_in_fp32", "linear_precision_auto", "recomputation", "short_micro_steps"}
    known |= {"linear_int8_costs_loss", "lr_above_published"} if name == "short" else set()
    assert errors == 0 and levels <= known
    assert (", MLP " in text) == (cfg.model.experts is None)  # All layers of a mixture that ships have experts.
    # The file tells its reader to plan it for these ranks. Commands of README are in test_documented_commands.py.
    told = re.findall(rf"^#   sagetrain plan {name}(?: --world-size (\d+))?\b(?!.*=)", path.read_text(), re.MULTILINE)
    assert told == ([] if name == "minimal" else ["" if world_size == 1 else str(world_size)])
    if parameters:
        assert re.search(rf"parameters {parameters:,} (and [\d,]+ active )?\(", text)
        needed = sum(item.bytes for item in memory_per_rank(cfg, world_size, ASSUMED_VOCAB_SIZE))
        assert needed < (usable_bytes(24 * 2**30) if name == "24gb" else 80e9)


def test_the_minimal_configuration_has_what_every_run_needs():
    tree = yaml.safe_load((CONFIGS / "minimal.yaml").read_text())
    given = {f"{section}.{key}" for section, keys in tree.items() for key in keys}
    must = {
        f"{name}.{key}"
        for name, section in RunConfig.model_fields.items()
        if section.is_required() and name != "tokens_per_step"
        for key, field in section.annotation.model_fields.items()
        if field.is_required()
    }
    assert given == must | {"tokens_per_step.schedule", "tokens_per_step.tokens", "lr_schedule.warmup"}


def test_one_shipped_configuration_holds_every_key():
    tree = yaml.safe_load((CONFIGS / "325m.yaml").read_text())
    for key in keys():
        parts = key.name.split(".")
        if key.doc.startswith("(") and not key.doc.startswith("(constant)") and parts[0] == "tokens_per_step":
            continue
        value = tree
        for part in parts:
            value = value[int(part) if isinstance(value, list) else part]
            if value is None:  # The path names an optional section, or the key itself.
                break


@pytest.mark.parametrize("name", sorted({*SHIPPED} - {"minimal"}))
def test_keys_of_shipped_configurations_have_comments(name):
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    bare = [line.strip() for line in lines if re.match(r"  \w+: \S", line) and "#" not in line]
    assert [line for line in bare if not re.match(r"(start|end): \d", line)] == []


@pytest.mark.parametrize("name", ["1b", "7b"])
def test_large_shipped_configurations_are_never_slower(name):
    """Attention is the fastest on the GPU at hand, in 16 bits or INT8, and linear layers are not in INT8 by name."""
    cfg = load_config(CONFIGS / f"{name}.yaml")
    assert (cfg.attention.backend, cfg.attention.recipe) == ("auto", "auto")
    assert cfg.linear.precision in ("bf16", "auto")


def test_documents_are_as_long_as_those_of_present_data(corpus):
    def planned(folder, *overrides: str):
        paths = (f"data.{name}.0.path={folder}/{name}" for name in ("train", "valid"))
        return make_plan(CONFIGS / "1b.yaml", [*paths, "model.vocab_size=512", *overrides], 8, H200)

    there, absent = planned(corpus), planned("/nowhere")
    assert there.span == TokenFile(corpus / "train").document_span(4096)
    assert (
        absent.span is None
        and planned(corpus, "data.document_attention=false", "data.document_positions=false").span is None
    )
    for plan_, span in ((there, there.span), (absent, 0.58 * 4096)):
        for prediction in (plan_.chosen.prediction, plan_.proposed[0].prediction):
            assert prediction.flops_per_token == flops_per_token(plan_.cfg.model, 512, span)
    assert there.chosen.prediction.attention != absent.chosen.prediction.attention


def test_every_price_uses_the_documents_of_the_data(corpus, monkeypatch):
    """The prices are those of layouts, their 16-bit versions, the choices of auto, and the calibration."""
    paths = [f"data.{name}.0.path={corpus}/{name}" for name in ("train", "valid")]
    span, told = TokenFile(corpus / "train").document_span(4096), set()

    def noted(cfg, world_size, vocab_size, hardware, span, predict=priced.predict):
        told.add(span)
        return predict(cfg, world_size, vocab_size, hardware, span)

    monkeypatch.setattr(priced, "predict", noted)
    overrides = ["model.vocab_size=512", "model.num_layers=2", "linear.precision=auto", *paths]
    made = make_plan(CONFIGS / "1b.yaml", overrides, 1, H200, 300_000.0)
    assert made.chosen.prediction.tokens_per_second == pytest.approx(300_000, rel=1e-6)
    assert made.cfg.linear.low_bit
    make_plan(CONFIGS / "1b.yaml", [*overrides, "linear.precision=int8"], 1, H200)
    assert told == {span}


def test_documents_of_a_blend_are_as_long_as_in_its_shares(monkeypatch, tmp_path):
    """The largest file of a pattern stands for it. Of many files some are opened, whose text stands for all."""
    for name, length, count in (("a-0", 8, 3), *((f"a-{i}", 4, 17) for i in range(1, 5)), ("b", 16, 5)):
        writer = TokenFileWriter(tmp_path / name).begin(100)
        writer.add(np.ones(length * count, np.int64), np.full(count, length))
        writer.finish()
        writer.publish({})

    def span(a, b) -> float:
        weights = {"a-*": a, "b": b}
        train = [{"path": f"{tmp_path}/{name}", "weight": weight} for name, weight in weights.items()]
        return document_span(DataConfig(train=train, seq_length=16, micro_batch_size=1))

    assert (span(1, 1), span(3, 1)) == (10, 7)
    text = 24 + 4 * 68, 80
    assert span("proportional", "proportional") == pytest.approx((4 * text[0] + 16 * text[1]) / sum(text))
    monkeypatch.setattr(planning, "_SPAN_SOURCES", 2)
    text = (24 + 68) / 2 * 5, 80
    assert span("proportional", "proportional") == pytest.approx((4 * text[0] + 16 * text[1]) / sum(text))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_325m_runs_on_any_part_of_a_node(world_size):
    assert plan("325m", world_size)[0] == 0


@pytest.mark.parametrize(("name", "ranks", "command", "size"), [
    ("325m", 4, r"4 GPUs, \d+ GiB each by `plan`:.*?train configs/325m.yaml ([^\n]+)", r"4 GPUs, (\d+) GiB each"),
    ("8b", 8, r"plan 8b --world-size 8 --gpu h100 ([^\n]+)", r"predicts (\d+) GiB of each H100"),
])  # fmt: skip
def test_the_memory_that_the_guide_to_clusters_names(name: str, ranks: int, command: str, size: str):
    text = (CONFIGS.parent / "docs/cluster.md").read_text().replace("\\\n", " ")
    _, planned = plan(name, ranks, *shlex.split(re.search(command, text, re.DOTALL)[1]), brief=True)
    assert f"{float(re.search(r'memory ([0-9.]+) GiB', planned)[1]):.0f}" == re.search(size, text)[1]


def test_numbers_of_the_plan():
    errors, text = plan("1b", 8)
    assert errors == 0
    for line in (
        "tensor parallel 1 x data parallel 8",
        "micro-step 4 sequences x 4,096 tokens x 8 = 131,072 tokens",
        "FLOPs per token 6.40 G, forward and backward; attention is 9% of it (6.82 G and 15% over whole sequences)",
        " 0 262,144 2 76,294 1.966e-08 2.781e-04",
        "20,000,014,336 524,288 4 152,588 2.781e-04 3.000e-05",
        "228,882 steps, 100,000,071,680 tokens",
        "warm-up over 2,000,000,000 tokens (7,630 steps)",
        "every 1,000,000,000 tokens on 256 sequences",
        "the last 2 kept; written in the background from 1.45 GiB of host memory per rank",
        "vocabulary 32,768, padded (assumed: no tokenizer found, model.vocab_size not set)",
    ):
        assert line in text, line


def test_step_time_communication_and_layouts():
    constant = "tokens_per_step={schedule: constant, tokens: 1048576}"
    _, text = plan("1b", 16, "parallel.tensor_parallel_size=2", constant, "training.cuda_graphs=off")
    for line in (
        "Step time, predicted: as configured on 16 x NVIDIA H200 in 2 hosts",
        "1,048,576 tokens in 8 micro-steps: ",
        "tensor forward: out of the layers all-reduce 328 64.0 MiB ",
        "data gradients reduce-scatter 20 86.0 MiB 1.47 GiB ",
        "Layouts proposed for NVIDIA H200, fastest first",
        " 1 1 1 no 2 none 16 ",
        ": parallel.tensor_parallel_size=1 parallel.zero_stage=2 data.micro_batch_size=16\n",
        "now 2 1 1 no 1 none 4 ",
    ):
        assert line in text, line
    _, text = plan("7b", 1024)
    assert "No layout divides tokens_per_step over these ranks" in text
    assert "tokens_per_step.start=1048576" in text


def test_errors_are_counted_and_shown_with_place_and_way_out():
    overrides = ["attention.qk_norm=none", "tokens_per_step.tokens=2_097_152"]
    errors, text = plan("325m", 8, *overrides)
    assert errors == 1
    assert "Findings: 1 error, 1 warning" in text
    assert "error override tokens_per_step.tokens=2_097_152: tokens_per_step.tokens = 2097152: INT8 attention" in text
    assert "[qk_norm_for_large_steps]" in text
    assert "Schedule" in text
    errors, text = plan("325m", 8, *overrides, "guidance.override=[qk_norm_for_large_steps]")
    assert errors == 0
    assert "overridden (error): INT8 attention without QK-norm" in text


@pytest.mark.parametrize(("world_size", "overrides", "rule", "shown", "hidden"), [
    (6, ["parallel.tensor_parallel_size=4"], "world_size", "Layout 1 on 6 ranks", "Layout on"),
    (3, ["parallel.tensor_parallel_size=3"], "tensor_parallel_split", "estimated: layout 1", "now "),
    (5, ["parallel.context_parallel_size=5"], "context_parallel_split", "estimated: layout 1", "now "),
    (7, [], "whole_micro_steps", "Step time, predicted: layout 1", "as configured on"),
    (8, ["lr_schedule.warmup_tokens=1e12"], "warmup_before_end", "Memory per rank", "Schedule"),
    (1, ["model.delta_net.key_heads=2", "training.activation_checkpointing=attention"], "not_proven_with_delta_net", "use none, full", "GPU with"),
])  # fmt: skip
def test_what_cannot_be_computed_is_left_out(world_size, overrides, rule, shown, hidden):
    errors, text = plan("325m", world_size, *overrides)
    assert errors
    assert f"[{rule}]" in text
    assert shown in text
    assert hidden not in text


def test_a_long_ramp_is_shown_by_its_ends():
    ramp = "tokens_per_step={schedule: ramp, start: 32768, end: 1048576, ramp_tokens: 1e10}"
    _, text = plan("325m", 1, ramp)
    assert "... 20 more" in text
    assert "1,048,576 32 " in text


@pytest.mark.parametrize(("override", "line"), [
    ("lr_schedule.shape=wsd", "wsd, peak 3e-05, warm-up over 1,966,080,000 tokens (7,500 steps), decay from token 70,778,880,000"),
    ("lr_schedule={shape: constant, batch_rule: sqrt, reference_tokens_per_step: 131_072}", "constant, peak 3e-05, times (tokens per step / 131,072)^0.5"),
    ("lr_schedule={shape: linear, batch_rule: linear, warmup_tokens: 1, reference_tokens_per_step: 262_144}", "times (tokens per step / 262,144)"),
    ("data.valid=[]", "evaluation none: data.valid is empty"),
])  # fmt: skip
def test_wording_follows_the_settings(override, line):
    assert line in plan("325m", 8, override)[1]


def test_tasks_are_named_with_their_pace(tmp_path):
    """The tasks are files, because listing those of the harness takes seconds."""
    files = [f"{tmp_path}/{name}.yaml" for name in ("one", "two")]
    for file in files:
        Path(file).write_text(f"{{task: {Path(file).stem}, output_type: loglikelihood}}")
    override = f"evaluation={{tasks: [{', '.join(files)}], tasks_every_tokens: 1_000_000}}"
    assert f"tasks {', '.join(files)}, every 1,000,000 tokens" in plan("325m", 8, override)[1]


def test_the_vocabulary_comes_from_the_configuration_when_given():
    cfg = load_config(CONFIGS / "325m.yaml", ["model.vocab_size=50257"])
    _, text = plan("325m", 8, "model.vocab_size=50257")
    assert "vocabulary 50,304, padded\n" in text
    assert f"{num_parameters(cfg.model, cfg.attention, 50304):,}" in text
    _, brief = plan("325m", 8, "model.vocab_size=50257", brief=True)
    assert "model 324,185,600 parameters\n" in brief


def test_a_broken_file_raises_all_its_problems():
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*layers.*heads"):
        plan("325m", 8, "model.num_layers=x", "model.num_attention_heads=0")


def test_it_needs_no_torch_and_little_time():
    code = (
        "import sys, io; from rich.console import Console; from sagetrain.planning.show import show_plan\n"
        f"show_plan({str(CONFIGS / '7b.yaml')!r}, [], 64, Console(file=io.StringIO()))\n"
        "print(sorted({'torch', 'deepspeed', 'triton', 'numpy', 'sagekernels'} & set(sys.modules)))"
    )
    begin = os.times().children_user
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert os.times().children_user - begin < 5  # User time hardly depends on how busy the machine is.


@pytest.mark.parametrize(("arguments", "code", "shown"), [
    (["configs/325m.yaml", "--world-size", "4"], 0, "as configured on 4 x NVIDIA H200"),
    (["configs/325m.yaml", "parallel.world_size=4"], 0, "as configured on 4 x NVIDIA H200"),
    (["configs/325m.yaml", "--world-size", "8", "parallel.world_size=4"], 2, "this launch has 8 ranks"),
    (["configs/7b.yaml", "--world-size", "2", "--gpu", "a100"], 2, "[gpu_memory]"),
    (["configs/1b.yaml", "--measured-tokens-per-second", "50000"], 0, "NVIDIA H200, calibrated"),
    (
        ["configs/1b.yaml", "--measured-tokens-per-second", "5e4", "parallel.tensor_parallel_size=32"]
        + ["--world-size", "32"],
        2,
        "use 32 with num_key_value_heads 32",
    ),
    (["configs/24gb.yaml", "--gpu", "RTX 4090"], 0, "as configured on 1 x NVIDIA RTX 4090"),
    (["configs/none.yaml"], 2, "configs/none.yaml: cannot be read"),
    (["configs/1b.yaml", "--world-size", "8", "--brief"], 0, "228,882 of 262,144 to 524,288 tokens"),
    (["--keys"], 0, "Peak learning rate."),
    (["--keys", "optimizer.l"], 0, "Peak learning rate."),
    (["--keys", "lr"], 0, "optimizer.lr  (required)"),
    (["--keys", "micro_batchsize"], 2, "did you mean data.micro_batch_size? The sections are model, "),
])  # fmt: skip
def test_the_command_and_its_exit_code(monkeypatch, arguments, code, shown):
    monkeypatch.setenv("COLUMNS", "80")  # The width is that of the terminal, not of a pipe.
    monkeypatch.chdir(CONFIGS.parent)
    done = sagetrain("plan", *arguments)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, said
    assert " ".join(shown.split()) in said


@pytest.mark.parametrize(("gpu", "world_size", "offered"), [("rtx4090", 1, False), ("a100", 4, True)])
def test_layouts_are_offered_where_there_are_some(gpu, world_size, offered):
    made = make_plan(CONFIGS / "7b.yaml", ["parallel.tensor_parallel_size=1"], world_size, HARDWARE[gpu])
    (finding,) = (finding for finding in made.findings if finding.rule == "gpu_memory")
    assert bool(made.proposed) == offered and ("more parallel.tensor_parallel_size" in finding.fix) == (world_size > 1)
    assert ("proposed below" in finding.fix) == offered
    assert finding.fix.startswith("no layout of 1 GPU fits: from 8 NVIDIA RTX 4090") != offered


def test_linear_layers_in_8_bits_are_planned():
    """The plan has memory for codes where a rank has whole weights. A GPU without such matmuls is an error."""
    eight = ("linear.precision=fp8", "linear.keep_first_blocks=2", "linear.head=fp8")
    errors, text = plan("1b", 8, *eight)
    assert errors == 0
    assert "linear layers fp8 in 18 of 20 blocks: qkv, out, gate_up, down; output projection fp8" in text
    assert re.search(r"MFU 0\.\d+ of the peaks of its precisions \(perf/mfu, by the 16-bit peak: 0\.\d+; perf", text)
    assert "in 16 bits in the last" not in text
    _, text = plan("1b", 8, *eight, "linear.keep_last_fraction=0.1")
    assert "down; all in 16 bits in the last 10 %, which the speeds below leave out" in text
    _, text = plan("1b", 8, "linear.precision=auto", "model.ffn_hidden_size=5640")
    assert "in 20 of 20 blocks: qkv, out\n" in text
    cfg = load_config(CONFIGS / "1b.yaml", eight)
    of_block = (2048 + 2 * 512 + 2048 + 3 * 5632) * 2048
    found = {item.name: item.bytes for item in memory_per_rank(cfg, 8, ASSUMED_VOCAB_SIZE)}
    of_head = ASSUMED_VOCAB_SIZE * 2048
    assert found["8-bit weights"] == 2 * 18 * of_block + 2 * of_head
    names = {item.name for item in memory_per_rank(load_config(CONFIGS / "1b.yaml"), 8, ASSUMED_VOCAB_SIZE)}
    assert "8-bit weights" not in names
    partitioned = load_config(CONFIGS / "1b.yaml", [*eight, "parallel.zero_stage=3"])
    assert "8-bit weights" not in {item.name for item in memory_per_rank(partitioned, 8, ASSUMED_VOCAB_SIZE)}
    fewer = load_config(CONFIGS / "1b.yaml", [*eight, "linear.keep_layers_below=8_000_000"])
    found = {item.name: item.bytes for item in memory_per_rank(fewer, 8, ASSUMED_VOCAB_SIZE)}
    assert found["8-bit weights"] == 2 * 18 * 3 * 5632 * 2048 + 2 * of_head
    for measured, asked in ((None, ["linear.precision=fp8"]), (50_000.0, ["linear.precision=int8", "linear.head=fp8"])):
        out = io.StringIO()
        arguments = (asked, 8, Console(file=out, width=400))
        assert show_plan(CONFIGS / "1b.yaml", *arguments, HARDWARE["a100"], measured) == 1
        assert "NVIDIA A100 SXM 80 GB has no fp8 matmuls [linear_precision_of_gpu]" in out.getvalue()
        assert "fix: use bf16 or int8, or plan for another GPU (--gpu)" in out.getvalue()


def test_the_choices_of_a_run_are_planned_as_predicted():
    """Linear layers are in 8 bits where they are large enough and the GPU has such matmuls."""
    small = ("model.hidden_size=256", "model.ffn_hidden_size=512", "model.head_dim=16", "attention.backend=sdpa")
    for overrides, gpu, says in (
        ((), "h200", "int8,"),
        ((), "a100", "int8,"),
        (small, "h200", "bf16,"),
        (("linear.keep_layers_below=12_000_000",), "h200", "int8 for layers of 12,000,000 weights"),
    ):
        made = make_plan(CONFIGS / "1b.yaml", ["linear.precision=auto", *overrides], 8, HARDWARE[gpu])
        (found,) = [f for f in made.findings if f.rule == "linear_precision_auto"]
        assert found.level == "info" and says in f"{found.message},", (overrides, found.message)
        assert made.cfg.linear.low_bit == ("int8" in says) and made.chosen
        found = made.cfg.linear.model_dump(exclude_none=True)
        named = [*overrides, *(f"linear.{name}={value}" for name, value in found.items())]
        cfg = load_config(CONFIGS / "1b.yaml", named)
        assert Target(8, ASSUMED_VOCAB_SIZE, HARDWARE[gpu]).priced(cfg).prediction == made.chosen.prediction
    # The host limits a B200 with little to do, so all choices are equally fast there, and bf16 stays.
    for name, gpu, micro_batch, expected in (("7b", "h200", 2, "int8"), ("1b", "b200", 1, "bf16")):
        asked = ["linear.precision=auto", f"data.micro_batch_size={micro_batch}", "training.cuda_graphs=off"]
        assert make_plan(CONFIGS / f"{name}.yaml", asked, 8, HARDWARE[gpu]).cfg.linear.precision == expected
    errors, text = plan("1b", 8, "linear.precision=auto", "parallel.tensor_parallel_size=3")
    assert errors and "the faster of bf16 and int8 in layout 1; the run times it [linear_precision_auto]" in text
    wide = make_plan(CONFIGS / "1b.yaml", ["linear.precision=auto", "training.dtype=fp32"], 8, H200)
    assert wide.cfg.linear.precision == "bf16" and "linear_precision_auto" not in {f.rule for f in wide.findings}
    assert {layout.cfg.linear.precision for layout in wide.proposed} == {"bf16"}


def test_eight_bits_that_do_not_pay_are_a_finding():
    """A model whose matmuls are small has nothing to gain either way."""
    small = ("model.hidden_size=256", "model.ffn_hidden_size=512", "model.head_dim=16", "attention.backend=sdpa")
    for overrides, pays in (
        (["linear.precision=auto", *small], True),  # Nobody has written the int8.
        *(([f"linear.precision={name}", *more], not more) for name in ("fp8", "int8") for more in ((), small)),
    ):
        errors, text = plan("1b", 8, *overrides)
        assert errors == 0
        assert ("[linear_precision_gain]" in text) == (not pays), overrides
    assert "is not predicted to be faster:" in text


def test_brief_says_what_one_needs():
    errors, text = plan("1b", 8, brief=True)
    assert errors == 0
    lines = [line for line in text.splitlines() if line.strip()]
    for name in ("model 1,036,082,176 parameters (vocabulary of 32,768 assumed)",
                 "layout tensor parallel 1 x data parallel 8, ZeRO 1", "memory ",
                 "steps 228,882 of 262,144 to 524,288 tokens", "speed ", "fastest layout "):  # fmt: skip
        assert any(line.strip().startswith(name) for line in lines), name
    assert len(lines) < 25
    errors, text = plan("7b", 1024, brief=True)
    assert errors == 2
    assert "fastest layout ~3," in text and "tokens_per_step.start=1048576" in text
    assert re.search(r"layout layout 1: tensor parallel 8 .*ZeRO 2", text) and "speed ~3," in text


@pytest.mark.parametrize(("name", "world_size", "override", "says"), [
    ("325m", 1, "lr_schedule.min_lr=0.1", "none until the errors above are mended"),
    ("7b", 1, "model.hidden_size=16384", "none fits 1 x NVIDIA H200"),
    ("7b", 3, "model.hidden_size=32768", "none fits 3 x NVIDIA H200"),
])  # fmt: skip
def test_why_no_layout_is_proposed(name, world_size, override, says):
    """The reason is errors that no layout mends, or memory."""
    errors, text = plan(name, world_size, override, brief=True)
    assert errors
    assert f"fastest layout {says}\n" in text
    _, text = plan(name, world_size, override)
    assert ("Layouts proposed: none until the errors above are mended\n" in text) == ("until" in says)


@pytest.mark.parametrize(("documents", "said"), [("true", "packed documents"), ("false", "whole sequences")])
def test_the_caption_of_attention_follows_the_documents(documents, said):
    settings = [f"data.document_attention={documents}", f"data.document_positions={documents}"]
    _, text = plan("1b", 8, *settings)
    assert re.search(rf"attention [\d.,]+ ms \d+% sage scores, forward and backward; {said}", text)
    assert ("packed documents" in text) == (documents == "true")


def test_a_noise_aware_schedule_is_planned_by_its_bounds():
    overrides = (f"tokens_per_step={NOISE_AWARE}", "stability.quant_noise.every_steps=200", "data.micro_batch_size=4")
    errors, text = plan("325m", 8, *overrides)
    assert errors == 0
    assert "Schedule, decided while training" in text
    for row in ("start 262,144 2 300,000", "floor 131,072 1 600,000", "ceiling 1,048,576 8 75,000"):
        assert row in text
    assert "quantization's error below 0.1 of the gradient noise, in every layer, in multiples of 131,072" in text
    brief = "steps of 131,072 to 1,048,576 tokens, decided while training"
    assert brief in plan("325m", 8, *overrides, brief=True)[1]

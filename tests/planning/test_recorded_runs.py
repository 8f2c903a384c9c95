"""Predictions of speed and memory agree with recorded runs on H200s (results/log/layouts.md) and H100s
(log/step.md)."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from sagetrain.config import load_config
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.layout import Layout
from sagetrain.costs import deepspeed_prices, operations
from sagetrain.costs.accounting import num_parameters
from sagetrain.costs.hardware import H200, HARDWARE
from sagetrain.costs.memory import memory_per_rank
from sagetrain.planning.evidence import MARGINS, evidence
from sagetrain.planning.performance import predict

CONFIGS = Path(__file__).parents[2] / "configs"
H100 = HARDWARE["h100"]
NCCL = replace(H200, copy_bandwidth=0.0)
"""The hardware before sequence parallelism's collectives went by copy engines."""
VOCAB = padded_vocab_size(32_000)
EVEN = "tokens_per_step={schedule: constant, tokens: %d}"
THREE = (
    "model={num_layers: 28, hidden_size: 3072, ffn_hidden_size: 8192, num_attention_heads: 24, "
    "num_key_value_heads: 8, vocab_size: 32000}"
)
"""The model of 3B."""
WIDE = (
    "model={num_layers: 8, hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_key_value_heads: 8, "
    "vocab_size: 32000}"
)
SHAPE_24 = "model={num_layers: 24, hidden_size: 1024, ffn_hidden_size: 2816, num_attention_heads: %d}"


FINE = ["attention.backend=sage", "attention.recipe=fine"]
SCORES, HALVES, WHOLE = (
    "attention.recipe=scores",
    "parallel.tensor_parallel_overlap=on",
    "parallel.tensor_parallel_overlap=off",
)
WHOLE_SEQUENCES = ["data.document_attention=false", "data.document_positions=false"]
SAGE = ["attention={backend: sage, recipe: scores}"]
LONG = ["data.seq_length=131072", "data.document_attention=false", SCORES]


@pytest.fixture(autouse=True)
def as_these_runs_were(monkeypatch, other_operations):
    """Restore the arithmetic of these runs.

    ZeRO 1 kept 16-bit gradients beside their fp32 sum, zeroed them and added to them: 26 bytes a parameter and
    micro-batch, 6 of which wrote them in fp32. Today it is 10 bytes, none in fp32 (docs/gradients.md; the last test).
    QK-norm and rotary embedding were torch's, priced by their bytes. The bytes are as few where torch compiles them.
    Where it does not, many more are moved, and many more kept. INT8 was multiplied by Triton, and casts to 8 bits read
    every operand twice.
    """
    monkeypatch.setattr(operations, "_FIRST_READ", (0, 0))
    monkeypatch.setitem(H200.precisions, "int8", 1.9)
    monkeypatch.setitem(deepspeed_prices._STATE_BYTES, 1, (26, 36, 34))
    monkeypatch.setitem(deepspeed_prices._CONVERTED, 1, 6)
    monkeypatch.setattr(operations, "_IN_ONE_PASS", None)


@pytest.fixture
def today(as_these_runs_were, monkeypatch):
    """Leave the arithmetic as it is today."""
    monkeypatch.undo()


@pytest.fixture
def casts_read_twice(today, monkeypatch):
    """Leave all but casts to 8 bits as it is today. No kernel left largest magnitudes before 2026-11-28."""
    monkeypatch.setattr(operations, "_FIRST_READ", (0, 0))


def run_of(name, overrides):
    """Load the configuration of a run whose micro-steps the host launched, as in all of these runs."""
    return load_config(CONFIGS / f"{name}.yaml", ["training.cuda_graphs=off", *overrides])


def layout_of(text: str) -> tuple[int, int, list[str]]:
    """Return (ranks, replicas, overrides) of a layout such as `tp2-dp2-z3-sp`, as benchmarks/layouts.py reads it."""
    sizes = {"tp": 1, "dp": 1, "cp": 1, "z": 1, "sp": 0}
    for part in text.split("-"):
        name, number = part[: 1 if part[0] == "z" else 2], part.lstrip("tpdcsz")
        sizes[name] = int(number or 1)
    ranks = sizes["tp"] * sizes["dp"] * sizes["cp"]
    return ranks, sizes["dp"], [
        f"parallel.tensor_parallel_size={sizes['tp']}",
        f"parallel.context_parallel_size={sizes['cp']}",
        f"parallel.zero_stage={sizes['z']}",
        # In runs at ZeRO 3 weights and gradients went through FSDP2's hooks, as they still do with this key.
        *([f"parallel.shard_size={sizes['dp']}"] if sizes["z"] == 3 else []),
        f"parallel.sequence_parallel={'true' if sizes['sp'] else 'false'}",
        "parallel.engine=deepspeed",
    ]  # fmt: skip


LAYOUTS = [
    ("1b", "tp1", (8, 4), [], 64_732, 60.0),
    ("1b", "tp1", (8, 4), [SCORES], 84_136, 59.9),
    ("1b", "tp1", (8, 4), ["attention.backend=sdpa"], 76_504, 65.1),
    ("1b", "tp1", (16, 2), [], 66_803, 99.2),
    ("1b", "tp1", (16, 2), [SCORES], 84_190, 99.2),
    ("1b", "dp2", (8, 4), [], 122_275, 54.2),
    ("1b", "dp2-z2", (8, 4), [], 122_625, 50.3),
    ("1b", "dp4", (8, 4), [], 249_354, 51.3),
    ("1b", "dp2", (8, 4), [SCORES], 162_481, 54.1),
    ("1b", "dp4", (8, 4), [SCORES], 326_569, 51.2),
    ("1b", "dp4-z2", (8, 4), [], 238_290, 46.5),
    ("1b", "tp2-sp", (8, 4), [HALVES], 103_974, 33.3),
    ("1b", "tp2-sp", (16, 2), [], 113_049, 55.6),
    ("1b", "tp2-sp", (32, 1), [], 115_502, 98.9),
    ("1b", "tp2-sp", (8, 4), [SCORES, HALVES], 135_434, 33.3),
    ("1b", "tp2-sp", (16, 2), [SCORES], 141_844, 55.6),
    ("1b", "tp2-sp", (32, 1), [SCORES], 144_486, 98.9),
    ("1b", "tp4-sp", (8, 4), [], 164_032, 19.8),
    ("1b", "tp4-sp", (8, 4), [SCORES], 204_073, 19.8),
    ("1b", "tp4-sp", (8, 4), [HALVES], 141_234, 19.3),
    ("1b", "tp4-sp", (8, 4), [SCORES, HALVES], 149_341, 19.3),
    ("1b", "tp4-sp", (16, 2), [], 188_407, 33.6),
    ("1b", "tp4-sp", (16, 2), [SCORES], 243_395, 33.6),
    ("1b", "tp4-sp", (32, 1), [], 207_118, 60.5),
    ("1b", "tp4-sp", (32, 1), [SCORES], 257_167, 60.5),
    ("1b", "cp2", (1, 1), LONG, 27_439, 96.0),
    ("1b", "cp4", (1, 1), LONG, 54_232, 51.5),
    ("7b", "tp2-sp", (1, 2), [], 16_546, 88.1),
    ("7b", "tp2-dp2-sp", (1, 2), [], 30_853, 67.9),
    ("325m", "tp1", (8, 4), [], 166_131, 30.2),
    ("325m", "tp2", (8, 4), [], 256_403, 18.2),
    ("325m", "tp2", (8, 4), [HALVES], 181_587, 18.2),
    ("325m", "tp2-sp", (8, 4), [], 237_008, 16.9),
    ("325m", "tp2-sp", (8, 4), [HALVES], 140_604, 16.9),
    ("325m", "tp4", (8, 4), [], 341_467, 12.3),
    ("325m", "tp4-sp", (8, 4), [], 249_241, 10.3),
    ("325m", "tp4-sp", (8, 4), [HALVES], 164_888, 9.8),
    ("325m", "dp2-z0", (8, 4), [], 332_082, 28.2),
    ("325m", "dp2", (8, 4), [], 327_839, 28.2),
    ("325m", "dp2-z2", (8, 4), [], 317_131, 27.1),
    ("325m", "dp4", (8, 4), [], 673_810, 27.4),
    ("325m", "dp4-z2", (8, 4), [], 641_404, 26.0),
]
BY_NCCL = [
    ("1b", "tp2", (8, 4), [HALVES], 104_796, 35.9),
    ("1b", "tp4", (8, 4), [WHOLE], 154_719, 23.5),
    ("1b", "tp2-sp", (8, 4), [WHOLE], 102_552, 33.5),
    ("1b", "tp4-sp", (8, 4), [WHOLE], 157_092, 19.7),
    ("1b", "tp4-sp", (8, 4), [HALVES], 161_601, 19.3),
]
ONE_H100 = [
    ("1b", "tp1", (8, 4), [], 61_725, 59.9),
    ("1b", "tp1", (8, 4), [SCORES], 79_807, 59.9),
    ("1b", "tp1", (8, 4), ["attention.backend=sdpa"], 71_969, 65.1),
    ("325m", "tp1", (8, 4), [], 163_550, 29.9),
    ("325m", "tp1", (8, 4), [SCORES], 194_245, 29.9),
    ("325m", "tp1", (8, 4), ["attention.backend=sdpa"], 172_571, 31.1),
]


@pytest.mark.parametrize(
    ("gpu", "name", "layout", "batch", "overrides", "tokens_per_second", "gib"),
    [(gpu, *row) for gpu, rows in ((H200, LAYOUTS), (NCCL, BY_NCCL), (H100, ONE_H100)) for row in rows],
)
def test_layouts_are_met(gpu, name, layout, batch, overrides, tokens_per_second, gib):
    """The runs are from benchmarks/layouts.py, with packed documents and sage. Each row gives the sequences of a
    micro-batch and the micro-steps. The prediction is within the margin that plan prints for speed, and within 10 % for
    memory."""
    cfg, ranks = configured(name, layout, batch, overrides)
    is_within_its_margin(cfg, ranks, VOCAB, gpu, tokens_per_second)
    assert memory_then(cfg, ranks) == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(("name", "layout", "batch", "overrides", "tokens_per_second"), [
    ("1b", "tp1", (8, 4), [SCORES], 77_500),
    ("1b", "tp1", (8, 4), ["attention.backend=sdpa"], 75_500),
    ("1b", "tp1", (8, 4), [], 58_400),
    ("7b", "tp2-sp", (2, 4), [SCORES], 20_300),
])  # fmt: skip
def test_runs_without_documents_are_met_and_slower(name, layout, batch, overrides, tokens_per_second):
    cfg, ranks = configured(name, layout, batch, [*overrides, *WHOLE_SEQUENCES])
    rate = predict(cfg, ranks, VOCAB, H200).tokens_per_second
    assert rate == pytest.approx(tokens_per_second, rel=0.05)
    packed, _ = configured(name, layout, batch, overrides)
    assert rate < predict(packed, ranks, VOCAB, H200).tokens_per_second


def test_sequence_parallelism_is_neither_too_fast_nor_too_slow():
    """The mean error of all runs by copies is small."""
    errors = []
    for name, layout, batch, overrides, tokens_per_second, _ in LAYOUTS:
        if layout.endswith("-sp"):
            cfg, ranks = configured(name, layout, batch, overrides)
            errors.append(predict(cfg, ranks, VOCAB, H200).tokens_per_second / tokens_per_second - 1)
    assert len(errors) > 15 and abs(sum(errors) / len(errors)) < 0.02


@pytest.mark.parametrize(("overrides", "milliseconds"), [
    (["attention.backend=sdpa"], 831), ([SCORES], 824), ([SCORES, "linear.precision=fp8"], 643),
])  # fmt: skip
def test_steps_without_deepspeed_are_met(overrides, milliseconds):
    """The runs are from benchmarks/step.py at commit 0dbf5ff: 1B, two micro-batches, and a fused AdamW that moves 28
    bytes."""
    cfg, _ = configured("1b", "tp1", (8, 2), [*overrides, *WHOLE_SEQUENCES])
    step, size = predict(cfg, 1, VOCAB, H200), num_parameters(cfg.model, cfg.attention, VOCAB)
    seconds = step.matmul + step.attention + step.elementwise + 28 * size / H200.memory_bandwidth
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(("seq_length", "span", "milliseconds"), [
    (4096, None, {"flash": 840, "scores": 842, "sdpa": 856}),
    (4096, None, {"flash int8": 721, "scores int8": 716, "sdpa int8": 733, "flash fp8": 676, "scores fp8": 661}),
    (4096, 1324, {"flash": 765, "scores": 768, "sdpa": 821, "flash int8": 644, "scores int8": 646, "sdpa int8": 705}),
    (16384, None, {"flash": 1203, "scores": 1193, "sdpa": 1277, "flash int8": 1079, "scores int8": 1070}),
])  # fmt: skip
def test_backends_on_an_h100_are_met(seq_length, span, milliseconds):
    """The runs are from benchmarks/step.py at commit 2cac892, 2026-11-26: 1B, two micro-batches of 32,768 tokens a
    step, whole sequences or documents of this span. The order of backends is that of the runs where these are 3 %
    apart."""
    predicted = {name: step_on_an_h100(name, seq_length, span) for name in milliseconds}
    assert predicted == pytest.approx(milliseconds, rel=0.1)
    for one, other in itertools.permutations(milliseconds, 2):
        if milliseconds[one] < 0.97 * milliseconds[other]:
            assert predicted[one] < predicted[other]


def step_on_an_h100(name, seq_length, span, *model):
    """Return the milliseconds that are predicted for two micro-batches of benchmarks/step.py, by a name of --ours."""
    backend, _, precision = name.partition(" ")
    cfg, _ = configured("1b", "tp1", (32_768 // seq_length, 2), [
        *model,
        f"data.seq_length={seq_length}",
        f"attention.backend={backend.replace('scores', 'sage')}",
        SCORES,
        f"linear.precision={precision or 'bf16'}",
        *([] if span else WHOLE_SEQUENCES),
    ])  # fmt: skip
    step, size = predict(cfg, 1, VOCAB, H100, span), num_parameters(cfg.model, cfg.attention, VOCAB)
    assert evidence(cfg, step, H100).margin == 0.1
    return 1e3 * (step.matmul + step.attention + step.elementwise + 28 * size / H100.memory_bandwidth)


def test_wide_layers_on_an_h100_are_met():
    """The runs are those of results/log/step.md, 2026-11-25: 8 layers of 4096, where INT8 is further behind FP8 than at
    1B."""
    rates = {"sdpa": 49_359, "scores": 50_043, "scores int8": 64_257, "scores fp8": 72_197}
    predicted = {name: 65_536e3 / step_on_an_h100(name, 4096, None, WIDE) for name in rates}
    assert predicted == pytest.approx(rates, rel=0.06)
    gap = predicted["scores fp8"] / predicted["scores int8"]
    assert gap == pytest.approx(rates["scores fp8"] / rates["scores int8"], rel=0.03)


@pytest.mark.parametrize(("model", "milliseconds"), [
    ("training.seed=1", {"int8": 580.0, "fp8": 602.6, "fp8, fp8": 589.8}),
    (WIDE, {"int8": 809.7, "fp8": 882.5, "fp8, fp8": 835.3}),
])  # fmt: skip
def test_int8_in_one_process_on_an_h200_is_met(model, milliseconds, monkeypatch):
    """The runs are those of results/step, 2026-11-30, also with an output projection in FP8. 882.5 ms are of a day
    before. INT8 is faster than FP8, as it is measured."""
    monkeypatch.undo()
    found = {}
    for name, measured in milliseconds.items():
        precision, _, head = name.partition(", ")
        linear = [f"linear.precision={precision}", f"linear.head={head or 'bf16'}"]
        cfg, _ = configured("1b", "tp1", (8, 2), [model, SCORES, *linear, *WHOLE_SEQUENCES])
        step, size = predict(cfg, 1, VOCAB, H200), num_parameters(cfg.model, cfg.attention, VOCAB)
        seconds = step.matmul + step.attention + step.elementwise + 28 * size / H200.memory_bandwidth
        assert 1e3 * seconds == pytest.approx(measured, rel=MARGINS[H200.name][f"linear layers in {precision}"])
        found[name] = seconds
    assert found["int8"] < found["fp8"]


@pytest.mark.parametrize(("overlap", "tokens_per_second"), [("on", 33_130), ("off", 53_510), ("auto", 53_510)])
def test_3b_on_two_h100s_is_met(overlap, tokens_per_second, casts_read_twice):
    """The runs have 8K tokens without documents and 8 micro-steps, at commits dd04b14 and f315f7c, 2026-11-26, when a
    reduction of our own ran in DeepSpeed at ZeRO 1. `auto` is the faster choice."""
    more = ["attention={backend: sage, recipe: scores, qk_norm: none}", "data.micro_batch_size=2"]
    overlap = f"parallel.tensor_parallel_overlap={overlap}"
    meets_3b("fp8", "tp2-sp", "deepspeed", tokens_per_second, None, *more, overlap)


@pytest.mark.parametrize(("linear", "layout", "engine", "tokens_per_second", "gib"), [
    ("bf16", "dp2", "deepspeed", 45_457, 54.7),
    ("fp8", "dp2", "deepspeed", 57_836, 59.3),
    ("int8", "dp2", "deepspeed", 54_610, 59.3),
    ("bf16", "tp2-sp", "deepspeed", 40_417, 37.2),
    ("fp8", "tp2-sp", "deepspeed", 32_877, 38.9),
    ("fp8", "dp2", "fsdp", 60_794, 59.3),
    ("bf16", "dp2", "fsdp", 47_372, 54.9),
    ("bf16", "dp2-z3", "fsdp", 42_663, 45.0),
    ("fp8", "dp2-z3", "fsdp", 51_694, 44.3),
    ("bf16", "dp2", "fsdp", 46_500, 54.7),
    ("fp8", "dp2", "fsdp", 57_666, 59.3),
    ("bf16", "dp2-z3", "fsdp", 42_158, 44.8),
    ("bf16", "tp2-sp", "fsdp", 40_719, 37.3),
    ("fp8", "tp2-sp", "fsdp", 47_649, 38.9),
])  # fmt: skip
def test_both_engines_on_two_h100s_are_met(linear, layout, engine, tokens_per_second, gib, casts_read_twice):
    """The runs are those of results/engines: 3B with 8K tokens and 8 micro-steps. Of a run that was
    repeated these are the slowest and the fastest."""
    meets_3b(linear, layout, engine, tokens_per_second, gib)


@pytest.mark.parametrize(("linear", "layout", "tokens_per_second", "gib"), [
    ("fp8", "dp2-z3", 62_552, 46.2), ("bf16", "dp2-z3", 49_016, None), ("fp8", "dp2", 65_751, None),
])  # fmt: skip
def test_blocks_by_copy_engines_are_met(linear, layout, tokens_per_second, gib, today):
    """The runs are those of results/engines on two H200s. The memory is torch's, with the rows and the slots that are
    outside of torch's allocator."""
    meets_3b(linear, layout, "fsdp", tokens_per_second, gib, "parallel.shard_size=null", gpu=H200)


def test_memory_of_recorded_micro_steps_at_zero_3_is_met(today):
    """The run is that of results/log/step.md on two H200s: 1B in INT8 with `cuda_graphs: on`. Its 13.2 GiB are torch's
    peak of allocated memory. Rows are outside of torch's allocator. The pool of a recording is not allocated any more
    when its capture has ended, but nobody else gets it."""
    cfg = load_config(CONFIGS / "1b.yaml", [
        "model={num_layers: 20, hidden_size: 2048, ffn_hidden_size: 5632, num_attention_heads: 16, "
        "num_key_value_heads: 4, vocab_size: 32000}",
        "attention={backend: sage, recipe: scores, qk_norm: none}", *WHOLE_SEQUENCES, "data.micro_batch_size=1",
        "data.seq_length=4096", "linear.precision=int8", "stability.monitor.every_steps=null", EVEN % 131_072,
        "parallel.zero_stage=3", "training.cuda_graphs=on",
    ])  # fmt: skip
    items = {item.name: item.bytes / 2**30 for item in memory_per_rank(cfg, 2, 32_000)}
    elsewhere = items["rows of weights"] + items["recordings"]
    assert sum(items.values()) - elsewhere == pytest.approx(13.2, abs=0.05) and elsewhere > 5.9


@pytest.mark.parametrize(("layout", "tokens_per_second", "gib"), [("dp2", 38_002, 42.7), ("dp2-z3", 37_272, 33.0)])
def test_four_sequences_on_two_h100s_are_met(layout, tokens_per_second, gib, today):
    """The runs are those of results/engines with four sequences in a micro-step, which are recomputed in full."""
    four = ["data.micro_batch_size=4", "training.activation_checkpointing=full"]
    meets_3b("bf16", layout, "fsdp", tokens_per_second, gib, *four, within=0.07)


@pytest.mark.parametrize(("offload", "stage", "gpu", "tokens_per_second", "gib"), [
    ("none", 1, H200, 47_066, 54.6), ("optimizer", 1, H200, 36_949, 37.8), ("optimizer", 2, H200, 28_122, 26.7),
    ("all", 3, H200, 24_324, 21.5), ("optimizer", 1, H100, 34_787, 37.9),
])  # fmt: skip
def test_state_in_the_hosts_memory_is_met(offload, stage, gpu, tokens_per_second, gib, today):
    """The runs are those of results/offload, 16 threads a rank on the CPU. At ZeRO 3 each backward pass waits for its
    copies, and plan counts those of the pass before it as well."""
    within, offload = 0.06 if stage == 3 else 0.03, f"parallel.offload={offload}"
    meets_3b("bf16", f"dp2-z{stage}", "fsdp", tokens_per_second, gib, offload, within=within, gpu=gpu)


def meets_3b(linear, layout, engine, tokens_per_second, gib, *more, within=0.02, gpu=H100):
    """Check speed and memory of 3B with 8K tokens on two GPUs."""
    meets_today("1b", [
        THREE,
        *layout_of(layout)[2][:-1],
        "attention={backend: sdpa, qk_norm: none}", f"linear.precision={linear}", f"parallel.engine={engine}",
        "parallel.tensor_parallel_overlap=off", "data.seq_length=8192", "data.micro_batch_size=1", *more,
    ], 131_072, tokens_per_second, gib, within, gpu, ranks=2, vocab=32_000)  # fmt: skip


@pytest.mark.parametrize(("layout", "engine", "linear", "card", "tokens_per_second", "gib"), [
    ("tp2-dp2-sp", "deepspeed", "fp8", "h100", 47_515, 70.2),
    ("tp2-dp2-sp", "deepspeed", "bf16", "h100", 38_110, 66.3),
    ("tp2-dp2-sp", "deepspeed", "int8", "h100", 41_774, 70.2),
    ("tp2-dp2-sp", "fsdp", "fp8", "h100", 45_611, 70.2),
    ("tp2-dp2-sp", "fsdp", "fp8", "h100", 47_896, 70.2),
    ("tp4-sp", "fsdp", "fp8", "h100", 29_127, 48.0),
    ("tp4-sp-m2", "fsdp", "fp8", "h100", 43_929, 57.4),
    ("dp4-z3", "fsdp", "fp8", "h100", 49_406, 70.5),
    ("dp4-z3-qk", "fsdp", "fp8", "h100", 49_770, 70.5),
    ("dp4", "fsdp", "fp8", "h200", 61_420, 114.6),
])  # fmt: skip
def test_8b_on_four_gpus_is_met(layout, engine, linear, card, tokens_per_second, gib, casts_read_twice):
    """The runs are those of results/8b and its log, micro-batches whole. A rank had 4.7 % more memory than plan says at
    ZeRO 3. In DeepSpeed's runs in bf16 and INT8 a reduction of our own ran beside the backward pass. Runs by four
    stages are in test_pipeline_plan.py."""
    norm, gathered = "before_rope" if "-qk" in layout else "none", "z3" in layout
    behind = meets_today("8b", [
        *layout_of(layout.removesuffix("-m2").removesuffix("-qk"))[2][:-1],
        WHOLE,
        f"parallel.engine={engine}",
        f"attention={{backend: {'sdpa' if linear == 'bf16' else 'sage'}, recipe: scores, qk_norm: {norm}}}",
        f"linear={{precision: {linear}}}",
        f"data.micro_batch_size={2 if '-m2' in layout else 1}",
        "training.activation_checkpointing=none",
    ], 262_144, tokens_per_second, gib, 0.05 if gathered else 0.01, HARDWARE[card], ranks=4, vocab=128_256)  # fmt: skip
    assert behind.margin == (0.15 if gathered else 0.1)


@pytest.mark.parametrize(("card", "ranks", "tokens_per_second"), [
    ("h100", 2, 185_160), ("h100", 4, 370_612), ("h200", 1, 99_850), ("h200", 4, 387_505),
])  # fmt: skip
def test_1b_by_replicas_in_fp8_is_met(card, ranks, tokens_per_second, casts_read_twice):
    """The runs are those of results/8b: 1B on FSDP2 with four micro-steps of 32,768 tokens."""
    settings = ["parallel.engine=fsdp", *SAGE, "linear={precision: fp8}"]
    meets_today(
        "1b", settings, ranks * 131_072, tokens_per_second, None, None, HARDWARE[card], ranks=ranks, vocab=VOCAB
    )


@pytest.mark.parametrize(("linear", "tokens_per_second", "gib"), [
    ("int8", 64_155, 115.3), ("int8", 66_208, 115.3), ("bf16", 51_484, 109.3), ("bf16", 53_265, 109.3),
])  # fmt: skip
def test_a_mixture_on_one_h200_is_met(linear, tokens_per_second, gib, today):
    """The runs are those of results/olmoe, each on two cards."""
    assert of_a_mixture(linear, [], 1, tokens_per_second, gib, 0.01).margin == 0.1


@pytest.mark.parametrize(("linear", "experts", "tokens_per_second", "gib"), [
    ("int8", 1, 238_594, 49.5), ("int8", 2, 232_314, 44.0), ("bf16", 1, 196_124, 46.6), ("bf16", 2, 192_154, 42.6),
])  # fmt: skip
def test_experts_between_two_h200s_are_met(linear, experts, tokens_per_second, gib, today):
    """Eight of OLMoE's layers at two replicas, with all experts on each and with half of them (results/olmoe)."""
    settings = ["model.num_layers=8", f"parallel.expert_parallel_size={experts}"]
    assert of_a_mixture(linear, settings, 2, tokens_per_second, gib, 0.11).margin == 0.1


def of_a_mixture(linear, settings, ranks, tokens_per_second, gib, within):
    """Check speed and memory of a run of OLMoE with four micro-steps of 16,384 tokens on each rank."""
    attention = "sdpa" if linear == "bf16" else "sage, recipe: scores"
    return meets_today("olmoe-1b-7b", [
        f"attention={{backend: {attention}, qk_norm: all_heads}}", f"linear.precision={linear}",
        "optimizer.moments=int8", "data.micro_batch_size=4", *settings,
    ], ranks * 65_536, tokens_per_second, gib, within, H200, ranks=ranks, vocab=50_304)  # fmt: skip


@pytest.mark.parametrize(("layers", "blocks", "head", "gain"), [
    (20, "fp8", "fp8", 1.0231), (20, "int8", "fp8", 1.0284), (20, "int8", "int8", 1.0109), (8, "fp8", "fp8", 1.0373),
])  # fmt: skip
def test_an_output_projection_in_8_bits_is_met(layers, blocks, head, gain, today):
    """The steps are those of results/log/step.md on an H200, 20 layers of 1B and 8 of 7B's width, two micro-steps each,
    as times the same model's with the head in 16 bits."""
    name, alone = "1b" if layers == 20 else "8b", ["parallel={zero_stage: 1}", "data.micro_batch_size=8"]
    settings = [*SAGE, *WHOLE_SEQUENCES, *alone, f"model.num_layers={layers}", f"linear.precision={blocks}"]
    cfg, wide = (
        run_of(name, [*settings, "data.seq_length=4096", EVEN % 65_536, f"linear.head={how}"]) for how in (head, "bf16")
    )
    speeds = [predict(each, 1, 32_000, H200) for each in (cfg, wide)]
    assert speeds[0].tokens_per_second / speeds[1].tokens_per_second == pytest.approx(gain, abs=0.01)
    assert evidence(cfg, speeds[0], H200).mark == "" and evidence(cfg, speeds[0], H100).mark == "~"


@pytest.mark.parametrize(("layout", "tokens_per_second", "margin", "gib"), [
    ("tp2", 41_564, 0.2, 32.2), ("tp2-sp", 38_444, 0.1, 31.3),
])  # fmt: skip
def test_halves_in_int8_on_two_h100s_are_met(layout, tokens_per_second, margin, gib, today):
    """The runs are 12 layers of 7B's width by FSDP2 at commit a5d6f92, with a vocabulary of 4,096. The host is the
    limit."""
    settings = ["model.num_layers=12", *layout_of(layout)[2][:-1], "parallel.engine=fsdp", HALVES, *SAGE]
    settings += ["linear={precision: int8}", "data.micro_batch_size=1"]
    behind = meets_today("7b", settings, 16_384, tokens_per_second, gib, 0.02, H100, ranks=2, vocab=4096)
    assert behind.margin == margin


@pytest.mark.parametrize(("linear", "tokens_per_second", "gib"), [("int8", 34_500, 18.42), ("bf16", 45_946, 17.33)])
def test_1b_for_24_gb_on_an_h100_is_met(linear, tokens_per_second, gib, casts_read_twice):
    """The runs are those of results/small-card: micro-batches of one sequence, which leave a GPU waiting for its
    host."""
    settings = ["parallel.engine=deepspeed", *SAGE, f"linear.precision={linear}", "model.vocab_size=32000"]
    settings += ["training.activation_checkpointing=none"]
    meets_today("24gb", settings, 131_072, tokens_per_second, gib, 0.015, H100, ranks=1, vocab=32_000)


def test_muon_on_an_h100_is_met(today):
    """The runs are those of results/muon: 1B, 131,072 tokens a step, on FSDP2. Muon's step was measured with an update
    that took 36.8 ms more than today's."""
    seconds, fixed = {}, ["parallel.engine=fsdp", "linear.precision=bf16", "attention.backend=sdpa"]
    for name, milliseconds, gib in (("adamw", 1785.7, 39.07), ("muon", 1903.2 - 36.8, 35.71)):
        rate, settings = 131_072 / milliseconds * 1e3, [f"optimizer.name={name}", *fixed, "model.vocab_size=32000"]
        meets_today("1b", settings, 131_072, rate, gib, 0.02, H100, ranks=1, vocab=32_000)
        cfg = run_of("1b", [*settings, *WHOLE_SEQUENCES, EVEN % 131_072])
        seconds[name] = predict(cfg, 1, 32_000, H100).seconds
        assert seconds[name] == pytest.approx(milliseconds / 1e3, rel=0.02)
    assert seconds["muon"] - seconds["adamw"] == pytest.approx(0.081, rel=0.03)


def meets_today(name, settings, tokens, tokens_per_second, gib, within, gpu, *, ranks, vocab):
    """Check speed and memory of a run of whole sequences with so many tokens a step, and return the evidence."""
    cfg = run_of(name, [*WHOLE_SEQUENCES, *settings, EVEN % tokens])
    if gib is not None:
        takes(cfg, ranks, vocab, gib, within)
    return is_within_its_margin(cfg, ranks, vocab, gpu, tokens_per_second)


def test_every_margin_is_that_of_some_recorded_run():
    """A run can use every name in MARGINS. The cards are those with rates of their own."""
    assert {*MARGINS} == {hardware.name for hardware in HARDWARE.values() if hardware.measured}
    told = ["parallel.engine=fsdp", "parallel.zero_stage=3"]
    cfg, _ = configured("7b", "tp2-dp2", (1, 2), [SCORES, "linear.precision=int8", *told])
    for hardware in (H200, H100, HARDWARE["a100"]):
        behind = evidence(cfg, predict(cfg, 4, VOCAB, hardware), hardware)
        assert (behind.margin, behind.mark) == ((0.15, "") if hardware.measured else (None, "~"))
    many = evidence(cfg, predict(cfg, 16, VOCAB, H200), H200)
    assert many.missing == ("2 hosts",) and "NVIDIA H200 stands behind this: 2 hosts" in many.explained(H200.name)
    assert evidence(cfg, predict(cfg, 8, VOCAB, H200), H200).missing == ("8 GPUs (at most 4 were)",)


def test_mfu_of_packed_documents_counts_what_is_computed():
    """The run is 1B at 128K with documents of English text. By the convention of whole sequences MFU would be above
    1."""
    cfg, ranks = configured("1b", "tp1", (1, 1), ["data.seq_length=131072", SCORES])
    step = predict(cfg, ranks, VOCAB, H200)
    assert step.mfu_16_bit < 0.6 < 1 < step.mfu_full_attention
    whole, _ = configured("1b", "cp4", (1, 1), LONG)
    step = predict(whole, 4, VOCAB, H200)
    recorded = pytest.approx(0.521, rel=0.02)
    assert step.mfu_16_bit == step.mfu_full_attention == recorded


def is_within_its_margin(cfg, ranks, vocab_size, hardware, tokens_per_second):
    """Check that the prediction of a recorded run rests on recorded runs and is as near to it as plan says."""
    prediction = predict(cfg, ranks, vocab_size, hardware)
    behind = evidence(cfg, prediction, hardware)
    assert behind.missing == () and behind.mark == ""
    assert prediction.tokens_per_second == pytest.approx(tokens_per_second, rel=behind.margin)
    return behind


def takes(cfg, ranks, vocab_size, gib, within):
    """Check that a rank is predicted to take this memory."""
    assert sum(item.bytes for item in memory_per_rank(cfg, ranks, vocab_size)) / 2**30 == pytest.approx(gib, rel=within)


def memory_then(cfg, ranks):
    """Return the GiB that plan predicts, with the 16-bit gradients of those runs."""
    items = {item.name: item.bytes for item in memory_per_rank(cfg, ranks, VOCAB)}
    kept = items["gradients"] / 2 if Layout.of(cfg).zero_stage == 1 else 0
    return (sum(items.values()) + kept) / 2**30


def configured(name, layout, batch, overrides):
    """Return the configuration of a run and its ranks. batch: sequences of a micro-batch, and micro-steps."""
    ranks, replicas, sizes = layout_of(layout)
    sequences, accumulation = batch
    settings = [*FINE, *sizes, f"data.micro_batch_size={sequences}", *overrides]
    length = run_of(name, settings).data.seq_length
    tokens = EVEN % (sequences * length * accumulation * replicas)
    return run_of(name, [*settings, tokens]), ranks


@pytest.mark.parametrize(("shape", "seq_length", "backend", "documents", "tokens", "ranks", "tokens_per_second"), [
    ("24 of 16", 2048, "sdpa", False, 32_768, 1, 187_500),
    ("325m", 4096, "sdpa", False, 32_768, 1, 186_800),
    ("325m", 4096, "sdpa", True, 262_144, 1, 183_700),
    ("325m", 4096, "sage", True, 262_144, 1, 173_800),
    ("325m", 4096, "sdpa", True, 65_536, 1, 175_000),
    ("325m", 4096, "sdpa", True, 65_536, 2, 343_000),
])  # fmt: skip
def test_speeds_of_other_shapes_are_met(shape, seq_length, backend, documents, tokens, ranks, tokens_per_second):
    model = [] if shape == "325m" else [SHAPE_24 % int(shape.split()[-1])]
    cfg = run_of("325m", [
        *model,
        *FINE,
        "parallel.engine=deepspeed",
        f"attention.backend={backend}",
        f"data.document_attention={str(documents).lower()}",
        f"data.seq_length={seq_length}",
        f"data.micro_batch_size={32_768 // seq_length}",
        f"tokens_per_step.tokens={tokens}",
    ])  # fmt: skip
    assert predict(cfg, ranks, VOCAB, H200).tokens_per_second == pytest.approx(tokens_per_second, rel=0.1)


@pytest.mark.parametrize(("backend", "gib"), [("sage", 30.2), ("sdpa", 31.4)])
def test_memory_of_the_papers_model_is_met(backend, gib):
    """The measured value is torch's own count, so it lacks the memory that the estimate leaves out."""
    cfg = run_of("325m", [f"attention.backend={backend}", "parallel.engine=deepspeed"])
    assert memory_then(cfg, 1) == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(("layout", "overrides", "tokens_per_second", "gib"), [
    ("dp2", [], 166_704, 50.2),
    ("dp2", ["parallel.gradient_reduction=bf16"], 166_890, 50.2),
    ("dp2-z2", [], 159_950, 49.0),
])  # fmt: skip
def test_gradients_on_their_way_are_met(layout, overrides, tokens_per_second, gib, today):
    """The run is 1B on two H100s of one host, with a vocabulary of 4,096, and with today's kernels and ZeRO 1."""
    cfg, ranks = configured("1b", layout, (8, 2), [SCORES, *overrides])
    vocab = padded_vocab_size(4096)
    rate = predict(cfg, ranks, vocab, HARDWARE["h100"]).tokens_per_second
    assert rate == pytest.approx(tokens_per_second, rel=0.07)
    takes(cfg, ranks, vocab, gib, 0.03)

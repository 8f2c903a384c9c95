"""A plan prices a pipeline: idle time, memory by what is in flight, transfers. It proposes pipelines where they win."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sagetrain.config import load_config
from sagetrain.config.arithmetic import idle_share, padded_vocab_size
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.costs.accounting import rank_of, total_bytes
from sagetrain.costs.hardware import HARDWARE
from sagetrain.costs.memory import _activations, _linear_errors, _memory, _probe, memory_per_rank
from sagetrain.costs.stages import different_stages, held
from sagetrain.parallel.orders import in_flight, orders
from sagetrain.planning import performance
from sagetrain.planning.changes import overrides_to
from sagetrain.planning.evidence import MARGINS, evidence
from sagetrain.planning.layouts import propose
from sagetrain.planning.performance import predict
from sagetrain.planning.priced import Target

CONFIGS, H100 = Path(__file__).parents[2] / "configs", HARDWARE["h100"]
VOCAB = padded_vocab_size(128_256)
LLAMA_70B = [
    "model.num_layers=80", "model.hidden_size=8192", "model.ffn_hidden_size=28672", "model.num_attention_heads=64",
    "model.num_key_value_heads=8", "tokens_per_step={schedule: constant, tokens: 4194304}",
]  # fmt: skip


def config(stages: int, chunks: int, micros: int, *more: str) -> RunConfig:
    """8B on `stages` GPUs without data parallelism, with so many micro-batches of 8,192 tokens."""
    return load_config(CONFIGS / "8b.yaml", [
        "parallel.engine=fsdp", "parallel.tensor_parallel_size=1", f"parallel.pipeline_parallel_size={stages}",
        f"parallel.pipeline_chunks={chunks}", "parallel.sequence_parallel=false", "data.micro_batch_size=1",
        f"tokens_per_step={{schedule: constant, tokens: {8192 * micros}}}", *more,
    ])  # fmt: skip


@pytest.mark.parametrize(("stages", "chunks", "micros"), [(2, 1, 8), (4, 1, 32), (4, 2, 8), (8, 1, 5)])
def test_figures_are_those_of_the_order(stages: int, chunks: int, micros: int) -> None:
    unwatched = "stability.monitor.every_steps=null"
    cfg = config(stages, chunks, micros, unwatched)
    prediction, order = predict(cfg, stages, VOCAB, H100), orders(stages, chunks, micros)
    (sends,) = (each for each in prediction.collectives if each.axis == "pipeline")
    # A stage in the middle receives an input and a gradient for each micro-batch and chunk.
    assert sends.count == len(order[1]) and sends.payload == 8192 * 4096 * 2
    assert sends.exposed == sends.seconds > 0
    working = prediction.matmul + prediction.attention + prediction.elementwise + prediction.launching
    assert prediction.idle == pytest.approx(working * (stages - 1) / (chunks * micros))
    assert prediction.idle / (prediction.idle + working) == pytest.approx(idle_share(stages, chunks, micros))
    layout = Layout.of(cfg, stages)
    for stage in range(stages):
        part = held(cfg, layout, VOCAB, stage)
        assert part.kept == in_flight(order[stage]) / chunks
        kept = next(item for item in _memory(cfg, layout, VOCAB, stage) if item.name == "activations")
        one, _ = _activations(part, rank_of(cfg))
        assert kept.bytes == pytest.approx(part.kept * one.bytes, rel=1e-6)


@pytest.mark.parametrize("again", ["none", "full"])
def test_recorded_passes_keep_the_memory_of_all_slots(again: str) -> None:
    """Each slot also has what the forward pass of a block needs and does not keep: most of it with recomputation.
    Nothing of that serves the backward passes, which make gradients of gate, up, SwiGLU and the weights."""
    unwatched, way = "stability.monitor.every_steps=null", f"training.activation_checkpointing={again}"
    cfg = config(4, 2, 16, unwatched, way, "training.cuda_graphs=on")
    memory = {item.name: item.bytes for item in _memory(cfg, Layout.of(cfg, 4), VOCAB, 1)}
    slots, recomputed = in_flight(orders(4, 2, 16)[1]), memory.get("recomputed", 0)
    streams, inner = 2 * 2 * 8192 * 4096, 14_336
    backward = max(memory["workspace"], 3 * 2 * 8192 * inner + streams + 2 * 2 * inner * 4096)
    held = memory["activations"] + recomputed + backward
    assert memory["recordings"] == held + slots * max(recomputed, streams) and (recomputed > 0) == (again == "full")


@pytest.mark.parametrize("more", [[], ["training.activation_checkpointing=11"], ["parallel.pipeline_chunks=2"]])
def test_stages_that_are_left_out_are_no_larger_and_no_slower(more: list[str]) -> None:
    cfg = config(8, 1, 16, *more)
    layout = Layout.of(cfg, 8)
    every = max(total_bytes(_memory(cfg, layout, VOCAB, stage)) for stage in range(8))
    assert total_bytes(memory_per_rank(cfg, 8, VOCAB)) == every and len(different_stages(cfg, VOCAB)) < 7
    slowest = max(sum(performance._Step(cfg, layout, VOCAB, H100, None, stage).compute()) for stage in range(8))
    prediction = predict(cfg, 8, VOCAB, H100)
    assert prediction.matmul + prediction.attention + prediction.elementwise == pytest.approx(16 * slowest)


def test_stages_without_embeddings_of_values_are_as_others() -> None:
    """Chunks are single blocks, and every second stage has all tables."""
    more = ["parallel.zero_stage=2", f"parallel.pipeline_blocks={[1] * 32}"]
    cfg, plain = (config(4, 8, 16, *more, f"model.value_embeddings={has}") for has in ("true", "false"))
    layout = Layout.of(cfg, 8)
    for stage in range(4):
        same = _memory(cfg, layout, VOCAB, stage) == _memory(plain, layout, VOCAB, stage)
        assert same == (stage % 2 == 0), stage


def test_measurements_have_a_head_on_the_last_stage_alone() -> None:
    cfg = config(4, 2, 8, *EIGHT, "stability.monitor.every_steps=10", "stability.quant_noise.every_steps=10")
    for stage in range(4):
        part = held(cfg, Layout.of(cfg, 4), VOCAB, stage)
        for moments in (_probe(part), _linear_errors(part)):
            assert ("logits" in {item.name for moment in moments for item in moment}) == (stage == 3)


def test_the_mean_peak_is_that_of_the_whole_model() -> None:
    """Six of eight stages are alike."""
    cut, whole = (config(stages, 1, 8, *EIGHT, f"parallel.pipeline_blocks={[4] * 8}") for stages in (8, 1))
    peaks = [predict(cfg, ranks, VOCAB, H100).peak_of_precisions for cfg, ranks in ((cut, 8), (whole, 1))]
    assert peaks[0] == pytest.approx(peaks[1])


EIGHT = ["attention.qk_norm=none", "linear.precision=fp8", "attention.backend=sage", "attention.recipe=scores",
         "data.document_attention=false", "data.document_positions=false"]  # fmt: skip
THREE = ["model={num_layers: 28, hidden_size: 3072, ffn_hidden_size: 8192, num_attention_heads: 24, "
         "num_key_value_heads: 8, head_dim: 128, vocab_size: 32768}", "stability.monitor.every_steps=null",
         "attention={backend: sdpa, qk_norm: none}", *EIGHT[4:]]  # fmt: skip


@pytest.mark.parametrize(("stage", "gib", "within"), [(0, 5.26, 0.03), (1, 3.46, 0.12)])
def test_pools_of_recorded_stages_are_met(stage: int, gib: float, within: float) -> None:
    """The run is that of results/log/step.md on two H200s, 2026-11-30: 1B in INT8, 16 sequences of 4,096 tokens. A part
    of the last stage's pools is not explained."""
    cfg = load_config(CONFIGS / "1b.yaml", [
        *EIGHT, "linear.precision=int8", "model.vocab_size=32000", "data.micro_batch_size=1", "training.cuda_graphs=on",
        "tokens_per_step={schedule: constant, tokens: 65536}", "parallel.pipeline_parallel_size=2",
        "stability.monitor.every_steps=null",
    ])  # fmt: skip
    memory = {item.name: item.bytes for item in _memory(cfg, Layout.of(cfg, 2), 32_000, stage)}
    assert memory["recordings"] / 2**30 == pytest.approx(gib, rel=within)


@pytest.mark.parametrize(("model", "stages", "chunks", "micros", "more", "rate", "gib"), [
    ("8B", 4, 1, 32, ["optimizer.moments=bf16"], 50_472, 65.0),
    ("8B", 4, 1, 32, ["optimizer.moments=bf16"], 51_586, 65.0),
    ("8B", 4, 2, 32, ["optimizer.moments=int8"], 49_273, None),
    ("3B", 2, 1, 8, ["linear.precision=bf16"], 40_648, 45.1),
    ("3B", 2, 1, 16, ["linear.precision=bf16"], 43_556, 45.1),
    ("3B", 2, 2, 8, ["linear.precision=bf16"], 41_609, 50.3),
    ("3B", 2, 2, 16, ["linear.precision=bf16"], 42_796, 50.3),
    ("3B", 2, 1, 8, ["linear.precision=fp8"], 50_297, 47.2),
])  # fmt: skip
def test_recorded_runs_are_within_the_margin(model, stages, chunks, micros, more, rate, gib) -> None:
    """The rows are those of results/log/layouts.md: H100s of one host, 2026-11-27, tokens/s and the fullest GPU."""
    cfg = config(stages, chunks, micros, *(EIGHT if model == "8B" else THREE), *more)
    vocab = VOCAB if model == "8B" else 32_768
    prediction = predict(cfg, stages, vocab, H100)
    assert prediction.tokens_per_second == pytest.approx(rate, rel=MARGINS[H100.name]["pipeline parallelism"])
    assert not evidence(cfg, prediction, H100).missing
    if gib:
        assert total_bytes(memory_per_rank(cfg, stages, vocab)) / 2**30 == pytest.approx(gib, rel=0.06)


def test_pipelines_are_proposed_where_they_win() -> None:
    """8B, which does not fit uncut at ZeRO 1, is proposed as a pipeline beside ZeRO 3. What fits, and what has
    DeepSpeed, is not cut."""
    eight = load_config(CONFIGS / "8b.yaml")
    sharded, *others = propose(eight, Target(8, VOCAB, H100))
    assert sharded.layout.zero_stage == 3
    best = next(item for item in others if item.layout.stages > 1)
    pasted = load_config(CONFIGS / "8b.yaml", overrides_to(eight, best.cfg))
    assert pasted.parallel.pipeline_parallel_size == best.cfg.parallel.pipeline_parallel_size > 1
    again = pasted.model_copy(update={"linear": best.cfg.linear})
    assert Target(8, VOCAB, H100).priced(again).prediction == best.prediction
    named = load_config(CONFIGS / "8b.yaml", ["parallel.engine=deepspeed"])
    uncut = propose(named, Target(8, VOCAB, H100))
    assert {item.cfg.parallel.pipeline_parallel_size for item in uncut} == {1}
    small = propose(load_config(CONFIGS / "1b.yaml"), Target(8, padded_vocab_size(32_000), H100))
    assert {item.cfg.parallel.pipeline_parallel_size for item in small} == {1}


def test_70b_on_512_gpus_is_a_pipeline() -> None:
    """On the usual network a pipeline is a little ahead of every layout at ZeRO 3, and on a quarter of it far ahead."""
    rates = {}
    for network, engine in ((1.0, "fsdp"), (0.25, "fsdp"), (0.25, "deepspeed")):
        hardware = replace(H100, network_bandwidth=network * H100.network_bandwidth)
        cfg = load_config(CONFIGS / "8b.yaml", [*LLAMA_70B, f"parallel.engine={engine}"])
        for item in propose(cfg, Target(512, VOCAB, hardware)):
            parallel = item.cfg.parallel
            way = item.layout.engine if parallel.pipeline_parallel_size == 1 else "pipeline"
            assert parallel.tensor_parallel_size <= 8
            rates.setdefault((network, way), item.prediction.tokens_per_second)
    assert 1.0 < rates[1.0, "pipeline"] / rates[1.0, "fsdp"] < 1.05
    assert rates[0.25, "pipeline"] / rates[0.25, "fsdp"] > 1.1


@pytest.mark.parametrize(("tensor", "fits"), [(4, False), (8, True)])
def test_recordings_that_do_not_fit_are_not_priced(tensor: int, fits: bool) -> None:
    """`auto` leaves passes to the host where 80 GB lack the memory of recordings. The host needs longer."""
    how = [f"parallel.tensor_parallel_size={tensor}", "parallel.pipeline_parallel_size=8"]
    overrides = [*LLAMA_70B, *how, "parallel.sequence_parallel=true", "linear.precision=fp8"]
    ways = (
        load_config(CONFIGS / "8b.yaml", [*overrides, f"training.cuda_graphs={way}"]) for way in ("off", "auto", "on")
    )
    by_host, chosen, recorded = (Target(512, VOCAB, H100).priced(cfg) for cfg in ways)
    assert by_host.prediction.tokens_per_second < 0.95 * recorded.prediction.tokens_per_second
    assert (recorded.memory <= Target(512, VOCAB, H100).usable) == fits
    assert chosen.prediction == (recorded if fits else by_host).prediction and chosen.memory == by_host.memory


def test_the_tables_of_the_cluster_guide_are_what_is_planned() -> None:
    """Each row has overrides, tokens/s (70B: also at 100 Gbit/s), GiB and the idle share."""
    text = (CONFIGS.parent / "docs/cluster.md").read_text()
    slow = replace(H100, network_bandwidth=100e9 / 8)
    for title, ranks, base, networks in (("8B on 8", 8, [], [H100]), ("70B on 512", 512, LLAMA_70B, [H100, slow])):
        table = text[text.index(f"**{title} H100s**") :].split("\n\n")[1]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        assert len(rows) == 3
        for overrides, *figures in rows:
            cfg = load_config(CONFIGS / "8b.yaml", [*base, *re.findall(r"[\w.]+=\w+", overrides)])
            cfg = cfg.model_copy(update={"linear": Target(ranks, VOCAB, H100).fastest_linear(cfg)})
            found = [Target(ranks, VOCAB, hardware).priced(cfg) for hardware in networks]
            idle = found[0].prediction.idle / found[0].prediction.seconds
            planned = [f"{item.prediction.tokens_per_second:,.0f}" for item in found]
            assert figures == [*planned, f"{found[0].memory / 2**30:.1f}", f"{idle:.0%}".replace("%", " %")]
            assert found[0].memory <= Target(ranks, VOCAB, H100).usable

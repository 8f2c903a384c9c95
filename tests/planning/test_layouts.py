"""Proposed layouts can run, fit memory and are the fastest, and tokens per step are raised no further than needed."""

import dataclasses
import math
from argparse import Namespace

import pytest

from planned import CONFIGS, NOISE_AWARE, VOCAB, config, layout_of
from sagetrain.config import load_config
from sagetrain.config.check import check
from sagetrain.config.layout import Layout
from sagetrain.config.rules import fit
from sagetrain.costs.accounting import overlaps, total_bytes
from sagetrain.costs.hardware import H200, HARDWARE
from sagetrain.planning import priced
from sagetrain.planning.changes import overrides_to
from sagetrain.planning.layouts import fewest_gpus, propose
from sagetrain.planning.performance import predict, with_overlap
from sagetrain.planning.plan import ASSUMED_VOCAB_SIZE, make_plan
from sagetrain.planning.priced import Target


@pytest.mark.parametrize("gpu", HARDWARE)
def test_no_prediction_passes_the_peaks_of_its_gpu(gpu):
    """In INT8 perf/mfu may be above 1 on a GeForce, whose peak in INT8 is four times the peak in 16 bits. MFU counts
    each product against the peak of its precision."""
    card = HARDWARE[gpu]
    for precision, speed in card.precisions.items():
        assert card.matmul_flops * speed < card.peak_flops * card.peaks[precision], precision
        if precision in ("bf16", "fp32"):
            continue
        attention = ["attention.backend=auto", f"linear.precision={precision}", "data.document_attention=false"]
        best = predict(config("7b", *layout_of(1), *attention), 1, VOCAB, card)
        assert 0.2 < best.mfu < 1 and best.mfu_16_bit < card.peaks[precision]
    for name, rate in card.attention.items():
        peak = card.peak_flops * (card.peaks["int8"] if name.startswith("sage") else 1)
        assert max(rate.narrow, rate.wide) < peak, name


def test_1024_ranks_of_7b_stay_in_the_host():
    """The configured layout would need 2,048 sequences in a step of 32. The proposed layouts keep tokens few."""
    for item in propose(config("7b"), Target(1024, VOCAB, H200)):
        parallel = item.cfg.parallel
        assert parallel.tensor_parallel_size * parallel.context_parallel_size == 8
        assert item.cfg.tokens_per_step.named_tokens == {"tokens_per_step.start": 2**20, "tokens_per_step.end": 2**20}
        assert 0.1 < item.prediction.mfu_16_bit < 0.4


def test_proposals_keep_the_multiple_of_a_ramp():
    """131,072 tokens are not whole micro-steps of 96 ranks. The fewest tokens that are whole, at both ends, are
    proposed."""
    cfg = config("7b", "tokens_per_step.multiple=131072")
    assert "whole_micro_steps" in {f.rule for f in fit(cfg, 96, VOCAB)}
    proposed = propose(cfg, Target(96, VOCAB, H200))
    assert proposed
    for item in proposed:
        again = config("7b", *overrides_to(cfg, item.cfg))
        assert again.tokens_per_step.rounding % Layout.of(again, 96).micro_step == 0
        assert not [f for f in fit(again, 96, VOCAB) if f.level == "error"]


@pytest.mark.parametrize(("world_size", "seq_length"), [(1, 4096), (8, 1024)])
def test_raised_tokens_leave_micro_batches_large(world_size, seq_length):
    """The fewest tokens that 8 ranks can have are one sequence at a time on all of them, which would be 66 times as
    slow."""
    cfg = config("325m", "tokens_per_step.tokens=260000", f"data.seq_length={seq_length}")
    best = propose(cfg, Target(world_size, VOCAB, H200))[0]
    assert best.cfg.tokens_per_step.tokens == 2**18
    assert best.cfg.data.micro_batch_size == 32
    able = config("325m", "tokens_per_step.tokens=262144", f"data.seq_length={seq_length}")
    assert best.prediction == propose(able, Target(world_size, VOCAB, H200))[0].prediction


def test_what_has_to_be_raised_is_raised_by_little():
    """Larger micro-batches would be faster, but they would begin with 8 times the tokens."""
    ramp = "tokens_per_step={schedule: ramp, start: 16384, end: 1000000, ramp_tokens: 1e10}"
    for item in propose(config("325m", ramp), Target(1, VOCAB, H200)):
        tokens = item.cfg.tokens_per_step
        assert tokens.start == 2**14 and 1_000_000 < tokens.end < 1.1e6


def test_memory_is_that_of_the_predicted_way():
    """The prediction is for halves, although the work of a block alone would suggest whole blocks."""
    cfg = config("1b", *layout_of(4), "data.micro_batch_size=8", "parallel.tensor_parallel_overlap=auto")
    ways = [Target(4, VOCAB, H200).priced(with_overlap(cfg, how)) for how in ("off", "on")]
    faster = max(ways, key=lambda way: way.prediction.tokens_per_second)
    assert faster.prediction.overlap != overlaps(cfg) and ways[0].memory != ways[1].memory
    decided = Target(4, VOCAB, H200).priced(cfg)
    assert (decided.memory, decided.prediction) == (faster.memory, faster.prediction)
    words = ["parallel.tensor_parallel_size=4", "data.micro_batch_size=8"]
    plan = make_plan(CONFIGS / "1b.yaml", words, 4, H200)
    assert total_bytes(plan.memory) == plan.chosen.memory


def test_more_memory_allows_more_and_too_little_is_a_finding():
    cfg = config("7b", *layout_of(1))
    made = {gpu: make_plan(CONFIGS / "7b.yaml", layout_of(1), 4, HARDWARE[gpu]) for gpu in ("h200", "h100")}
    found = {gpu: [f for f in plan.findings if f.rule == "gpu_memory"] for gpu, plan in made.items()}
    assert not found["h200"]
    (finding,) = found["h100"]
    assert finding.level == "error" and "NVIDIA H100 SXM leaves to a run" in str(finding)
    assert propose(cfg, Target(1, VOCAB, HARDWARE["a100"])) == []
    small, large = (propose(cfg, Target(4, VOCAB, HARDWARE[gpu]))[0] for gpu in ("h100", "h200"))
    assert small.memory < large.memory
    assert math.isfinite(small.prediction.seconds)


def test_few_key_heads_are_copied_inside_of_a_host():
    """Eight ranks of a host share long sequences of two key heads, and have four copies of each. Two hosts take twice
    as many sequences instead."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2}
    cfg = config("1b", "data.seq_length=131072", "tokens_per_step={schedule: constant, tokens: 131072}")
    cfg = cfg.changed({"model": {"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, **heads}})
    for ranks in (8, 16):
        for item in propose(cfg, Target(ranks, VOCAB, H200)):
            assert (item.layout.tensor * item.layout.context, item.layout.copies_of_keys) == (8, 4)
            assert item.cfg.tokens_per_step.named_tokens == {"tokens_per_step.tokens": ranks // 8 * 131072}


def test_a_search_over_gpus_chooses_each_precision_once(monkeypatch):
    """The choice hangs neither on the optimizer nor on the number of replicas."""
    asked = []

    def choose(target, cfg, original=Target.fastest_linear):
        asked.append(cfg)
        return original(target, cfg)

    monkeypatch.setattr(Target, "fastest_linear", choose)
    cfg = config("7b", "optimizer.name=muon")
    assert fewest_gpus(cfg, Target(1, VOCAB, HARDWARE["rtx4090"]), smaller_states=True) > 2
    keys = [(each.parallel.tensor_parallel_size, each.parallel.context_parallel_size,
             each.parallel.pipeline_parallel_size, each.parallel.sequence_parallel, each.data.micro_batch_size)
            for each in asked]  # fmt: skip
    assert 0 < len(keys) == len(set(keys))


def test_proposed_layouts_are_priced_as_a_run_would_decide(monkeypatch):
    """A rank may have sizes that 8 bits do not take under linear.precision auto. This keeps no layout out. Neither does
    a size above which layers gain at the configured tensor_parallel_size."""
    odd = ["linear.precision=auto", "model.ffn_hidden_size=5640"]  # 5640 is 8 x 705.
    made = make_plan(CONFIGS / "1b.yaml", odd, 8, H200)
    assert made.proposed[0].cfg.linear.low_bit
    named = make_plan(CONFIGS / "1b.yaml", ["linear.precision=fp8", odd[1]], 8, H200)
    assert named.errors and not named.proposed  # With a named precision this is an error.
    auto, asked = load_config(CONFIGS / "1b.yaml", ["linear.precision=auto"]), []
    # The less of a layer is in 8 bits, the faster it is here. Gate and up are one layer.
    with monkeypatch.context() as patched:
        patched.setattr(priced, "predict", lambda cfg, *_: Namespace(tokens_per_second=cfg.linear.keep_layers_below))
        assert Target(8, ASSUMED_VOCAB_SIZE, H200).fastest_linear(auto).keep_layers_below == 2 * 5632 * 2048

    def decide(_, cfg):
        how = cfg.parallel
        ranks = how.tensor_parallel_size, how.context_parallel_size, how.sequence_parallel
        asked.append((*ranks, cfg.data.micro_batch_size))
        return cfg.linear.model_copy(update={"precision": "fp8", "keep_layers_below": least(cfg)})

    def least(cfg):
        return 20_000_000 // cfg.parallel.tensor_parallel_size + cfg.data.micro_batch_size

    monkeypatch.setattr(Target, "fastest_linear", decide)
    found = propose(auto, Target(4, ASSUMED_VOCAB_SIZE, H200))
    assert len(set(asked)) == len(asked) > 3
    for item in found:
        assert item.cfg.linear.keep_layers_below == least(item.cfg)


def test_layouts_for_a_noise_aware_schedule_keep_its_multiple():
    overrides = [f"tokens_per_step={NOISE_AWARE[:-1]}, multiple: 65536}}", "stability.quant_noise.every_steps=200"]
    found = make_plan(CONFIGS / "325m.yaml", overrides, 8, H200).proposed
    assert found
    for item in found:
        tokens, data, micro_step = item.cfg.tokens_per_step, item.cfg.data, item.layout.micro_step
        assert all(size % tokens.rounding == 0 for size in (tokens.start, tokens.floor, tokens.ceiling))
        assert tokens.rounding % micro_step == 0
        assert tokens.floor > data.micro_batch_size * data.seq_length


def test_a_vocabulary_with_more_padding_keeps_no_layout_out():
    given = make_plan(CONFIGS / "325m.yaml", ["model.vocab_size=50257"], 8, H200)
    padded = make_plan(CONFIGS / "325m.yaml", ["model.vocab_size=50304"], 8, H200)
    assert given.proposed and not given.errors
    assert [item.prediction for item in given.proposed] == [item.prediction for item in padded.proposed]


WIDE = ("model={num_layers: 80, hidden_size: 8192, ffn_hidden_size: 28672, num_attention_heads: 64, "
        "num_key_value_heads: 8, vocab_size: 128256}")  # fmt: skip
THREE = ("model={num_layers: 28, hidden_size: 3072, ffn_hidden_size: 8192, num_attention_heads: 24, "
         "num_key_value_heads: 8, vocab_size: 32000}")  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "gpu", "overrides"), [
    ("1b", 1, "rtx4090", ["optimizer.moments=int8"]),
    ("1b", 2, "l40s", ["parallel.engine=fsdp", "parallel.offload=optimizer", "training.activation_checkpointing=auto"]),
    ("1b", 4, "h200", ["optimizer.name=muon", "linear.precision=fp8"]),
    ("1b", 8, "h100", ["optimizer.master=bf16_chance", "training.activation_checkpointing=7"]),
    ("1b", 64, "rtx4090", [THREE, "parallel.engine=deepspeed", "parallel.tensor_parallel_overlap=off"]),
    ("1b", 4, "h100", [THREE, "parallel.pipeline_parallel_size=2", "parallel.engine=deepspeed"]),
    ("8b", 1, "h200", ["parallel.offload=all"]),
    ("8b", 4, "l40s", ["optimizer.master=bf16_kahan", "optimizer.moments=int8", "attention.backend=sage"]),
    ("8b", 8, "a100", ["parallel.engine=fsdp", "optimizer.moments=bf16"]),
    ("8b", 16, "h200", [WIDE, "optimizer.moments=int8", "tokens_per_step={schedule: constant, tokens: 4194304}"]),
    ("325m", 6, "h100", []),
    ("24gb", 1, "h100", []),
    ("7b", 4, "h200", []),
    ("7b", 512, "rtxpro6000", []),
])  # fmt: skip
def test_every_proposal_holds_when_it_is_pasted(name, ranks, gpu, overrides):
    """A proposal that is pasted into the configuration runs, fits, and is priced the same. None is slower than the
    configuration as it is, and the first one finds no better one."""
    hardware, file = HARDWARE[gpu], CONFIGS / f"{name}.yaml"
    plan = make_plan(file, overrides, ranks, hardware)
    assert plan.proposed
    assert len({item.key[:-1] for item in plan.proposed}) == len(plan.proposed)
    rates = [item.prediction.tokens_per_second for item in plan.proposed]
    assert rates == sorted(rates, reverse=True)
    if plan.chosen and not plan.errors:
        assert plan.chosen.prediction.tokens_per_second <= rates[0] * (1 + 1e-9)
    first, asked, target = None, load_config(file, overrides), Target(ranks, plan.vocab_size, hardware)
    for item in plan.proposed:
        changes = [*overrides, *overrides_to(asked, item.cfg)]
        cfg = load_config(file, changes)
        assert cfg.linear == asked.linear  # A precision of auto stays auto, which is decided for each layout.
        assert not [f for f in check(cfg, ranks, files=False) if f.level == "error"], changes
        cfg = cfg.model_copy(update={"linear": target.fastest_linear(cfg)})
        pasted = target.priced(cfg)
        assert pasted == dataclasses.replace(item, cfg=cfg), changes
        assert pasted.memory <= target.usable < hardware.memory
        assert 0.02 < item.prediction.mfu < 0.7
        # ZeRO 2 and 3 share nothing where a model has one replica.
        assert item.layout.zero_stage == 1 or item.layout.replicas > 1 or asked.parallel.offload != "none"
        assert target.host_finding(cfg) is None
        first = first or cfg
    best, *_ = propose(first, target)
    assert best.prediction.tokens_per_second == pytest.approx(rates[0], rel=1e-9)
    assert overrides_to(first, best.cfg) == []

"""Parameters, FLOPs and memory of the estimates agree with the real model, as torch itself counts, traces and saves
them."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from counted import VOCAB, block_activation_bytes, live_tensors, run_config, saved_bytes_per_token, transformer
from distributed import run_distributed
from sagekernels import lowbit
from sagetrain.auto.recomputation_choice import least_recomputation
from sagetrain.cluster.join import init_distributed
from sagetrain.config import RunConfig
from sagetrain.config.layer_specs import layers
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.costs import deepspeed_prices
from sagetrain.costs.accounting import (
    active_parameters,
    flops_per_token,
    num_parameters,
    overlaps,
    parameters_per_rank,
    rank_of,
)
from sagetrain.costs.deepspeed_prices import reduce_bucket_size
from sagetrain.costs.memory import memory_per_rank
from sagetrain.costs.operation_kinds import AttentionCost, MatmulCost, of_kind
from sagetrain.costs.operations import block_operations, end_operations
from sagetrain.data.batch import Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.model.backends import AttentionFunction
from sagetrain.model.selection import matmuls_of
from sagetrain.model.tensors import tensors
from sagetrain.parallel.topology import ParallelGroups, Topology

QK_NORMS = ["none", "before_rope", "after_rope"]


def model_config(tie: bool = True, kv_heads: int = 2) -> ModelConfig:
    return ModelConfig(
        num_layers=3,
        hidden_size=96,
        ffn_hidden_size=200,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        head_dim=18, tie_embeddings=tie, value_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize("qk_norm", QK_NORMS)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_parameters_are_counted_exactly(qk_norm, tie, kv_heads):
    model, attention = model_config(tie, kv_heads), AttentionConfig(qk_norm=qk_norm, backend="sdpa")
    real = sum(p.numel() for p in transformer(model, attention).parameters())
    assert num_parameters(model, attention, VOCAB) == real


@pytest.mark.parametrize(
    ("model", "attention", "vocab", "total", "active"),
    [
        ({"num_layers": 16, "num_attention_heads": 16, "ffn_hidden_size": 1024,
          "experts": {"number": 64, "per_token": 8, "ffn_size": 1024}},
         "all_heads", 50304, 6_919_161_856, 1_282_017_280),
        ({"num_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
          "ffn_hidden_size": 6144, "experts": {"number": 128, "per_token": 8, "ffn_size": 768}},
         "before_rope", 151936, 30_532_122_624, 3_353_032_704),
    ],
    ids=["OLMoE-1B-7B", "Qwen3-30B-A3B"],
)  # fmt: skip
def test_parameters_and_flops_of_published_mixtures(model, attention, vocab, total, active):
    """Total and active parameters are those that were published, and FLOPs are those of the active ones."""
    shape, qk = ModelConfig(hidden_size=2048, **model), AttentionConfig(qk_norm=attention)
    assert (num_parameters(shape, qk, vocab), active_parameters(shape, qk, vocab)) == (total, active)
    gains = sum(spec.size for spec in tensors(shape, qk, vocab) if spec.kind == "gain")
    embedding = vocab * shape.hidden_size
    assert flops_per_token(shape, vocab, 0) == 6 * (active - gains - embedding)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_parameters_of_one_tensor_parallel_rank(tensor_parallel):
    model, attention = model_config(), AttentionConfig(backend="sdpa")
    groups = ParallelGroups(Topology(tensor_parallel, tensor_parallel), rank=0)
    real = sum(p.numel() for p in transformer(model, attention, groups=groups).parameters())
    assert parameters_per_rank(model, attention, VOCAB, tensor_parallel) == real


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_listed_matmuls_are_those_of_the_model(tensor_parallel):
    parallel = {"tensor_parallel_size": tensor_parallel}
    cfg = run_config(parallel=parallel, model={"num_key_value_heads": 2}, attention={"backend": "sdpa"})
    groups = ParallelGroups(Topology(tensor_parallel, tensor_parallel), rank=0)
    network = transformer(cfg.model, cfg.attention, groups=groups)
    real = {name.removesuffix(".weight").rpartition(".")[2]: p for name, p in network.blocks[0].named_parameters()}
    block = block_operations(layers(cfg.model, cfg.attention.qk_norm)[0], cfg.attention, rank_of(cfg))
    listed = {matmul.name: (matmul.outputs, matmul.inputs) for matmul in of_kind(MatmulCost, block)}
    assert listed == {name: tuple(p.shape) for name, p in real.items() if p.ndim == 2}
    ends = end_operations(cfg.model, VOCAB, rank_of(cfg))
    assert (ends.head.outputs, ends.head.inputs) == network.head.weight.shape


def test_the_papers_model_has_its_size():
    """The paper's model has hidden size 1024, 20 layers, 16 heads, MLP 3072, tied embeddings and GPT-2's 50257 tokens:
    324.1M parameters without padding and QK-norm."""
    model = ModelConfig(
        num_layers=20, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16, tie_embeddings=True
    )
    assert num_parameters(model, AttentionConfig(qk_norm="none"), 50257) == 324_134_912


class Sums(AttentionFunction):
    """A stand-in for attention without a matmul."""

    def __call__(self, q, k, v, layout):
        return q + k.mean(2, keepdim=True) + v.mean(2, keepdim=True)


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_flops_are_those_of_the_matmuls(kv_heads):
    """torch counts forward and backward of everything but attention. Attention is counted by its formula."""
    model, attention, tokens = model_config(kv_heads=kv_heads), AttentionConfig(backend="sdpa"), 32
    network = transformer(model, attention)
    for block in network.blocks:
        block.attention.function = Sums()
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        network(ids).sum().backward()
    assert flops_per_token(model, VOCAB, 0) == counter.get_total_flops() / tokens
    added = flops_per_token(model, VOCAB, tokens) - flops_per_token(model, VOCAB, 0)
    square = 4 * model.num_attention_heads * tokens * tokens * model.head_dim  # q k^T and p v multiply and add.
    assert added * tokens == 3 * model.num_layers * square / 2


@pytest.mark.parametrize(("compile_", "qk_norm", "backend", "kv_heads"), [
    *(("off", *case) for case in itertools.product(QK_NORMS, ["sage"], [4, 1])),
    *(("off", qk_norm, "sdpa", 4) for qk_norm in QK_NORMS),
    ("on", "before_rope", "sage", 1),
    ("on", "after_rope", "sage", 4),
])  # fmt: skip
def test_saved_activations_are_those_of_autograd(backend, qk_norm, compile_, kv_heads):
    """sdpa with grouped heads is left out: torch's CPU attention expands them, and its GPU kernels do not."""
    cfg = run_config(
        model={"num_key_value_heads": kv_heads, "value_embeddings": kv_heads == 1},
        attention={"backend": backend, "qk_norm": qk_norm},
        training={"compile": compile_},
    )
    tolerance = 0.02 if compile_ == "on" else 0.0  # torch.compile may recompute other tensors in other versions.
    assert saved_bytes_per_token(cfg, compile_ == "on") == pytest.approx(block_activation_bytes(cfg), rel=tolerance)


@pytest.mark.parametrize(("compile_", "linear", "qk_norm"), [
    # The layer `out` keeps attention's output, which is kept anyway.
    ("on", {"keep_layers_below": 100_000}, "none"),
    ("off", {}, "before_rope"),
])  # fmt: skip
def test_linear_layers_in_8_bits_keep_8_bits_of_their_inputs(compile_, linear, qk_norm):
    """`plan` promises 10 %. The scales of columns are not counted; with so few tokens they are some bytes a token."""
    attention = {"qk_norm": qk_norm}
    how = {"training": {"compile": compile_}, "model": {"value_embeddings": compile_ == "off"}}
    cfg = run_config(attention=attention, linear={"precision": "fp8", **linear}, **how)
    assert saved_bytes_per_token(cfg, compile_ == "on") == pytest.approx(block_activation_bytes(cfg), rel=0.005)


@pytest.mark.parametrize(("compile_", "linear", "shared", "again"), [
    ("on", {"precision": "bf16"}, 0, "none"),
    ("on", {"precision": "int8"}, 1, "none"),
    ("on", {"precision": "bf16"}, 1, "selective"),
    ("off", {"precision": "int8"}, 0, "none"),
    ("off", {"precision": "int8", "keep_layers_below": 100_000}, 0, "none"),  # The experts stay in 16 bits.
    ("off", {"precision": "fp8"}, 1, "none"),
])  # fmt: skip
def test_experts_keep_what_is_predicted(compile_, linear, shared, again):
    """Transposed codes fill up tiles: with so few tokens they take twice what rows do."""
    experts = {"number": 8, "per_token": 2, "ffn_size": 144, "shared": shared}
    how = {"training": {"compile": compile_, "activation_checkpointing": again}, "attention": {"backend": "sdpa"}}
    cfg = run_config(model={"experts": experts}, linear=linear, **how)
    assert saved_bytes_per_token(cfg, compile_ == "on") == pytest.approx(block_activation_bytes(cfg), rel=0.005)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    "linear",
    [{"head": "fp8"}, {"keep_first_blocks": 1}, {"keep_layers_below": 100_000}, {"precision": "int8", "head": "int8"}],
)
def test_codes_of_weights_are_as_many_as_layers_keep(linear, tp_size):
    """The scales are not counted. They are one number for each row and column."""
    cfg = run_config(linear={"precision": "fp8", **linear}, parallel={"tensor_parallel_size": tp_size})
    place = {"tensor_parallel_size": tp_size, "device": torch.device("cpu"), "dtype": torch.float32}
    groups = replace(ParallelGroups.single(), topology=Topology(tp_size, tp_size))
    network = transformer(
        cfg.model, cfg.attention, groups=groups, matmuls=matmuls_of(cfg.linear, cfg.model, **place)[0], seed=None
    )
    network.keep_weights()
    kept = [tensor for module in network.modules() for tensor in getattr(module, "kept", ())]
    assert 0 < items(cfg, tp_size)["8-bit weights"] == sum(x.nbytes for x in kept if x.element_size() == 1)


def test_every_kind_of_blocks_has_its_own_codes() -> None:
    """The first block has a wider MLP than the one beside the experts of the others, and the last one is in 16 bits."""
    experts = {"number": 8, "per_token": 2, "ffn_size": 128, "shared": 1, "dense_layers": 1}
    cfg = run_config(model={"num_layers": 3, "experts": experts}, linear={"precision": "int8", "keep_last_blocks": 1})
    dense, mixed, _ = layers(cfg.model)
    codes = sum(each.weights for layer in (dense, mixed) for each in layer.linear_layers(1).values())
    codes += 8 * 3 * 128 * cfg.model.hidden_size
    assert items(cfg, 1)["8-bit weights"] == 2 * codes


def test_blocks_that_stay_in_16_bits_keep_16():
    def activations(**linear) -> int:
        cfg = run_config(model={"num_layers": 4}, data={"micro_batch_size": 64}, linear=linear)
        return items(cfg, 1)["activations"]

    eight, sixteen = activations(precision="fp8"), activations()
    assert eight < 0.9 * sixteen
    assert activations(precision="fp8", keep_last_blocks=1) == (3 * eight + sixteen) // 4


def test_a_run_that_ends_in_16_bits_needs_the_larger_part():
    """The first part has codes of the weights, and the last part has activations in 16 bits."""
    for sequences, larger in ((1, {"precision": "fp8"}), (64, {})):
        sections = {"data": {"micro_batch_size": sequences}, "stability": {"monitor": {"every_steps": None}}}
        both = run_config(linear={"precision": "fp8", "keep_last_fraction": 0.1}, **sections)
        assert items(both, 1) == items(run_config(linear=larger, **sections), 1)


@pytest.mark.parametrize(("compile_", "again", "backend", "kv_heads"), [
    ("off", "selective", "sage", 1), ("off", "selective", "sdpa", 4), ("on", "selective", "sage", 4),
    ("on", "attention", "sage", 1), ("on", "attention", "sdpa", 4),
])  # fmt: skip
def test_selective_checkpointing_keeps_what_is_predicted(compile_, again, backend, kv_heads):
    """`plan` promises 10 %. torch's CPU attention expands grouped heads, and its GPU kernels do not."""
    cfg = run_config(
        model={"num_key_value_heads": kv_heads, "value_embeddings": kv_heads == 1},
        attention={"backend": backend},
        training={"compile": compile_, "activation_checkpointing": again},
    )
    kept = saved_bytes_per_token(cfg, compile_ == "on")
    assert kept == pytest.approx(block_activation_bytes(cfg), rel=0.01)
    plain = run_config(
        model={"num_key_value_heads": kv_heads}, attention={"backend": backend}, training={"compile": compile_}
    )
    assert kept < 0.75 * block_activation_bytes(plain)


@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_what_auto_may_become_fits(again):
    """The run decides when it begins, so the estimate is the largest of all possible choices."""

    def kept(**attention) -> int:
        return block_activation_bytes(run_config(attention=attention, training={"activation_checkpointing": again}))

    ways = ({"backend": "sdpa"}, *({"backend": "sage", "recipe": recipe} for recipe in ("auto", "fine", "scores")))
    assert kept(backend="auto") == max(kept(**way) for way in ways)


def test_flash_attention_is_recomputed_by_selective_checkpoints():
    """torch does not see the operators of flash-attn. Neither the output nor the log-sum-exp of 4 heads is kept."""
    kept, again = {}, {}
    for backend in ("sdpa", "flash"):
        cfg = run_config(attention={"backend": backend}, training={"activation_checkpointing": "selective"})
        kept[backend] = block_activation_bytes(cfg)
        (attention,) = of_kind(
            AttentionCost, block_operations(layers(cfg.model, cfg.attention.qk_norm)[0], cfg.attention, rank_of(cfg))
        )
        again[backend] = attention.recomputed
    assert kept["sdpa"] - kept["flash"] == 2 * 256 + 4 * 4
    assert again == {"sdpa": False, "flash": True}


@pytest.mark.parametrize(("compile_", "linear"), [
    ("on", {"precision": "fp8", "keep_layers_below": 300_000}),
    ("off", {"precision": "int8"}),
    ("on", {"precision": "int8"}),
    ("off", {"precision": "int8", "keep_layers_below": 300_000}),  # Only gate_up is in 8 bits.
])  # fmt: skip
def test_selective_checkpointing_in_8_bits_is_as_predicted(monkeypatch, compile_, linear):
    """The operators are those of a GPU."""
    monkeypatch.setattr(lowbit, "product", lowbit.library_product)
    how = {"compile": compile_, "activation_checkpointing": "selective"}
    cfg = run_config(attention={"backend": "sage"}, linear=linear, training=how)
    assert saved_bytes_per_token(cfg, compile_ == "on") == pytest.approx(block_activation_bytes(cfg), rel=0.005)


def parallel_cases() -> list[RunConfig]:
    return [
        run_config(
            parallel={"tensor_parallel_size": 2, "sequence_parallel": sharded},
            attention={"backend": "sage"},
            model={"value_embeddings": True},
            training={"compile": compile_, "activation_checkpointing": again},
            data={"micro_batch_size": 4},  # Gains are small beside so many tokens.
        )
        for sharded, compile_, again in itertools.product((False, True), ("off", "on"), ("none", "selective"))
        if compile_ == "off" or (sharded and again == "selective")
    ]


def saved_in_two_processes() -> list[float]:
    init_distributed(timeout_minutes=10)
    groups = ParallelGroups.create(Topology(2, 2))
    first = groups.rank == 0  # The other rank calls the same collectives from Python, and compiles nothing.
    return [saved_bytes_per_token(cfg, first and cfg.training.compile == "on", groups) for cfg in parallel_cases()]


def test_saved_activations_under_tensor_parallelism():
    """A layer keeps its input gathered, as it read it. The cases include sequence parallelism."""
    saved = run_distributed(saved_in_two_processes, 2)[0]
    assert saved == pytest.approx([block_activation_bytes(cfg) for cfg in parallel_cases()], rel=0.01)


def items(cfg: RunConfig, world_size: int, vocab_size: int = VOCAB) -> dict[str, int]:
    return {item.name: item.bytes for item in memory_per_rank(cfg, world_size, vocab_size)}


@pytest.mark.parametrize(("dtype", "stage", "weights", "gradients", "optimizer"), [
    ("bf16", 0, 2, 4, 3),  # This case runs as stage 1.
    ("bf16", 1, 2, 4, 3),
    ("bf16", 2, 2, 1, 3),
    ("fp32", 0, 4, 4, 8),
    ("fp32", 1, 4, 4, 3),
    ("fp32", 2, 4, 1, 3),
])  # fmt: skip
def test_model_state_by_zero_stage_on_four_ranks(dtype, stage, weights, gradients, optimizer):
    cfg = run_config(parallel={"engine": "deepspeed", "zero_stage": stage}, training={"dtype": dtype})
    size, memory = num_parameters(cfg.model, cfg.attention, VOCAB), items(cfg, 4)
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == pytest.approx(
        (weights * size, gradients * size, optimizer * size), rel=1e-4
    )


def still_held(before: dict[int, torch.Tensor]) -> int:
    """Return the bytes of the tensors that have come since."""
    return sum(t.untyped_storage().nbytes() for address, t in live_tensors().items() if address not in before)


def measured_model_state() -> dict[tuple[str, int], tuple[int, int]]:
    """Return, for each (dtype, stage), the bytes of all tensors that an engine holds after its last backward pass, and
    the estimate."""
    init_distributed(timeout_minutes=10)
    groups = ParallelGroups.create(Topology(2, 1))
    result, kept = {}, []
    deepspeed_prices._REDUCE_BUCKET = 1000
    for dtype, stage in itertools.product(("bf16", "fp32"), range(3)):
        cfg = run_config(
            parallel={"engine": "deepspeed", "zero_stage": stage},
            training={"dtype": dtype},
            attention={"backend": "sdpa"},
        )
        before = live_tensors()
        kept.append(before)  # No address is used twice while these tensors live.
        torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        engine = build_engine(cfg, transformer(cfg.model, cfg.attention, groups=groups, dtype=torch_dtype))
        tokens = torch.zeros(1, 16, dtype=torch.long)
        for _ in range(2):
            engine._ds.backward(engine._ds(tokens, tokens))
        # The collective's thread lets go of the tensors of the collective before.
        torch.distributed.barrier(groups.replica_group)
        memory = items(cfg, 2)
        estimated = sum(memory[name] for name in ("weights", "gradients", "optimizer"))
        held = still_held(before)
        for _ in range(100):  # gloo has other threads, too, which may be late on a busy machine.
            if held <= 1.01 * estimated:
                break
            time.sleep(0.1)
            held = still_held(before)
        result[dtype, stage] = (held, estimated)
    return result


def test_model_state_is_what_deepspeed_holds():
    """There are two data-parallel ranks, every stage and both dtypes. The measurement is at the end of an
    accumulation."""
    for measured in run_distributed(measured_model_state, 2):
        assert len(measured) == 6
        for case, (held, estimated) in measured.items():
            assert held == pytest.approx(estimated, rel=0.01), case


def measured_peak() -> dict[tuple[int, str], tuple[int, int]]:
    """Return the peak bytes of a step of few tokens and the estimate, keyed by ZeRO stage and the dtype that gradients
    travel in."""
    init_distributed(timeout_minutes=10)
    tokens, result, ranks = torch.zeros(1, 16, dtype=torch.long), {}, torch.distributed.get_world_size()
    groups = ParallelGroups.create(Topology(ranks, 1))
    batch = Batch(tokens, tokens, positions=None, cu_seqlens=None, max_seqlen=None, sample_ids=[])
    all_reduce = torch.distributed.all_reduce

    def slowly(*args, **kwargs):
        """Reduce, and leave gloo's thread time to let go of the tensor. Memory that the thread itself frees is not
        recorded."""
        work = all_reduce(*args, **kwargs)
        time.sleep(0.02)
        return work

    torch.distributed.all_reduce = slowly
    for stage, reduction in itertools.product((1, 2), ("fp32", "bf16")):
        parallel = {"zero_stage": stage, "gradient_reduction": reduction}
        parallel["engine"], few = "deepspeed", {"seq_length": 16, "micro_batch_size": 1}
        cfg = run_config(parallel=parallel, attention={"backend": "sdpa"}, data=few)
        before = live_tensors()
        model = transformer(cfg.model, cfg.attention, groups=groups, dtype=torch.bfloat16)
        engine = build_engine(cfg, model)
        engine._optimizer.param_groups[0]["fused"] = True  # The fused optimizer of a GPU has no temporary tensors.
        memory = items(cfg, ranks)
        # gloo gathers by a copy.
        gathered = sum(memory[name] for name in ("weights", "weights", "gradients", "optimizer"))
        estimated, peaks = max(sum(memory.values()), gathered), []
        for _ in range(5):
            held = sum(t.untyped_storage().nbytes() for address, t in live_tensors().items() if address not in before)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
                engine.step([batch, batch], 2, 1e-3)
            events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
            changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
            peaks.append(held + max(itertools.accumulate(changes)))
            # A thread of gloo may be late and hold a tensor too long; then the next step is looked at. Ranks agree on
            # that.
            late = torch.tensor(float(len(peaks) == 1 or peaks[-1] > 1.04 * estimated))
            all_reduce(late, torch.distributed.ReduceOp.MAX)
            if not late:
                break
        result[stage, reduction] = (min(peaks[1:]), estimated)  # The first step allocates tensors that stay.
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_peak_memory_of_a_step_holds_what_deepspeed_copies(ranks: int):
    """The gradients' reduction has buckets that are no larger than the model."""
    for measured in run_distributed(measured_peak, ranks):
        for case, (peak, estimated) in measured.items():
            assert peak == pytest.approx(estimated, rel=0.05), case


def test_buckets_are_no_larger_than_the_rank():
    assert reduce_bucket_size(1000) == 1000
    assert reduce_bucket_size(10**10) == 500_000_000


def test_tensor_and_sequence_parallelism_split_memory():
    batch, two = {"micro_batch_size": 64}, {"tensor_parallel_size": 2}
    sections = ({}, two, {**two, "sequence_parallel": True})
    cases = [run_config(data=batch, parallel=section) for section in sections]
    a, b, c = (items(cfg, cfg.parallel.tensor_parallel_size) for cfg in cases)
    for name in ("weights", "optimizer"):
        assert b[name] == pytest.approx(a[name] / 2, rel=2e-2)
    assert c["activations"] < b["activations"] < a["activations"]
    # The value is bytes per token and block. The inputs of attention and MLP are whole on every rank.
    gathered = 2 * 2 * 256 // 2
    assert c["activations"] == pytest.approx(a["activations"] / 2 + 2 * 64 * 256 * gathered, rel=1e-3)


def test_context_parallelism_splits_the_activations():
    batch = {"micro_batch_size": 16}
    one, four = run_config(data=batch), run_config(data=batch, parallel={"context_parallel_size": 4})
    a, b = items(one, 4, 32_000), items(four, 4, 32_000)
    # ZeRO shards over slices as over replicas.
    assert a["weights"] == b["weights"] and a["optimizer"] == b["optimizer"]
    assert b["logits"] == a["logits"] / 4
    twice = 2 * 4096 // 4 * 2 * 256  # Attention's output is kept as it left the kernel, and as the projection reads it.
    assert b["activations"] == a["activations"] / 4 + twice


def test_recordings_keep_the_activations_of_a_micro_step():
    """Recordings of ZeRO 3 also keep the memory through which a block comes to its place without copy engines."""
    found = {}
    for stage, graphs in itertools.product((2, 3), ("off", "on")):
        cfg = run_config(parallel={"zero_stage": stage}, training={"cuda_graphs": graphs})
        found[stage, graphs] = items(cfg, 2)
    assert not any("recordings" in found[stage, "off"] for stage in (2, 3))
    kept, passing = (found[stage, "on"]["recordings"] for stage in (2, 3))
    assert kept > found[2, "on"]["activations"]
    assert passing - kept == 2 * (4 * 256 * 256 + 3 * 256 * 768)


def test_checkpointing_keeps_block_inputs_and_one_block():
    batch, tokens = {"micro_batch_size": 64}, 64 * 256
    memory = items(run_config(training={"activation_checkpointing": "full"}, data=batch, model={"num_layers": 50}), 1)
    assert memory["activations"] == 50 * tokens * 2 * 256
    assert memory["recomputed"] == tokens * block_activation_bytes(run_config())


def test_recomputed_blocks_keep_inputs_and_others_everything():
    batch, model = {"micro_batch_size": 64}, {"num_layers": 50}
    kept = {
        how: items(run_config(training={"activation_checkpointing": how}, data=batch, model=model), 1)["activations"]
        for how in ("none", 0, 10, 50, "full")
    }
    assert kept[0] == kept["none"] and kept[50] == kept["full"]
    assert kept[10] == pytest.approx(0.8 * kept["none"] + 0.2 * kept["full"])


def test_auto_recomputes_as_little_as_fits():
    """Selective where it costs less than the blocks that would be needed."""
    memory = {"selective": 60, **{blocks: 100 - blocks + bool(blocks) for blocks in range(41)}}

    def least(room: int) -> object:
        return least_recomputation(40, lambda how: memory[how] <= room)

    assert [least(room) for room in (100, 97, 85, 84, 61, 60, 59, 20)] == [
        "none", 4, 16, "selective", "selective", "selective", "full", "full",
    ]  # fmt: skip
    memory["selective"] = 200
    assert [least(room) for room in (90, 62, 61, 60)] == [11, 39, "full", "full"]


def test_selective_checkpointing_lies_between_none_and_full():
    sizes, batch = {}, {"micro_batch_size": 64}
    for how in ("none", "selective", "full"):
        cfg = run_config(training={"activation_checkpointing": how}, data=batch, model={"num_layers": 50})
        memory = items(cfg, 1)
        sizes[how] = memory["activations"]
        if how == "selective":  # The block whose backward runs has its recomputed tensors as well.
            rest = block_activation_bytes(run_config()) - block_activation_bytes(cfg)
            assert memory["recomputed"] == 64 * 256 * rest
    assert sizes["full"] < 0.5 * sizes["selective"] and sizes["selective"] < 0.75 * sizes["none"]


def test_logits_exist_in_chunks():
    small, large = run_config(data={"micro_batch_size": 16}), run_config(data={"micro_batch_size": 256})
    assert items(small, 1, 32_000)["logits"] == 4096 * 32_000 * 4
    assert items(large, 1, 32_000)["logits"] == 8192 * 32_000 * 4


@pytest.mark.parametrize(("tensor", "sequences", "choice", "expected"), [
    (2, 1, "auto", False), (2, 32, "auto", True), (4, 32, "auto", False), (2, 1, "on", True), (2, 32, "off", False),
])  # fmt: skip
def test_a_block_with_enough_work_is_computed_in_halves(tensor, sequences, choice, expected):
    """A block needs three TFLOP on each rank: 2.6M weights, 16,384 tokens a sequence."""
    sizes = {"hidden_size": 512, "ffn_hidden_size": 1024}
    cfg = run_config(
        model=sizes,
        data={"seq_length": 16384, "micro_batch_size": sequences},
        parallel={"tensor_parallel_size": tensor, "tensor_parallel_overlap": choice},
    )
    assert overlaps(cfg) == expected


def test_a_micro_batch_in_two_parts_halves_the_logits():
    even, odd = (
        items(
            run_config(
                parallel={"tensor_parallel_size": 2, "tensor_parallel_overlap": "on"},
                data={"micro_batch_size": 1, "seq_length": n},
            ),
            2,
            32_000,
        )
        for n in (4096, 4095)
    )
    assert (even["logits"], odd["logits"]) == (2048 * 16_000 * 4, 4095 * 16_000 * 4)
    one_token = 3 * 2 * 256 + 4
    # The first part's gradient of the output projection is in 16 bits.
    assert even["loss"] - odd["loss"] == one_token + 2 * 16_000 * 256


def test_the_largest_of_three_moments_counts():
    """The peak is in the loss where the vocabulary is large, in a block's backward where it is small, and in the
    reduction where there are few tokens."""
    many = {"micro_batch_size": 16}
    assert {"logits", "loss"} <= items(run_config(data=many), 1, 32_000).keys()
    assert {"workspace"} <= items(run_config(data=many), 1).keys()
    few = items(run_config(data={"micro_batch_size": 1, "seq_length": 16}, parallel={"engine": "deepspeed"}), 1)
    assert {"reduction"} <= few.keys() and not {"logits", "workspace", "activations"} & few.keys()


def test_activations_are_gone_as_far_as_the_first_full_bucket(monkeypatch):
    size = num_parameters(run_config().model, AttentionConfig(), VOCAB)
    monkeypatch.setattr(deepspeed_prices, "_REDUCE_BUCKET", size // 2)
    parallel = {"engine": "deepspeed", "zero_stage": 2}
    cfg = run_config(parallel=parallel, data={"micro_batch_size": 1, "seq_length": 64})
    memory, saved = items(cfg, 1), 2 * 64 * block_activation_bytes(cfg)
    assert memory["reduction"] == 6 * (size // 2)
    assert memory["activations"] == pytest.approx(saved / 2, rel=1e-4)

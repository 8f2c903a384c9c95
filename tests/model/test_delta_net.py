"""Layers with a gated delta net: their recurrence, their module, their prices, and the model around them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from fla.ops.utils.index import prepare_chunk_indices, prepare_chunk_offsets
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next

import counted
import tiny
from distributed import run_distributed
from fake_graph import FakeGraph
from sagetrain.config.layer_specs import layers
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.costs.accounting import flops_per_token, num_parameters, rank_of
from sagetrain.costs.memory import kept_bytes
from sagetrain.costs.operation_kinds import MatmulCost, of_kind
from sagetrain.costs.operations import block_operations
from sagetrain.inference.cache import CachedModel
from sagetrain.model.backends import TokenLayout, document_chunks, token_layout
from sagetrain.model.compile import compile_blocks
from sagetrain.model.delta_net import DeltaNet
from sagetrain.model.delta_rule import DeltaRule, Fla, Recurrent, delta_rule
from sagetrain.model.rotary import rotary_tables
from sagetrain.model.selection import attention_functions
from sagetrain.optim.build import groups, rule_of
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.topology import ParallelGroups

DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 32}
HYBRID = {"num_layers": 4, "delta_net": DELTA, "value_embeddings": True}
CPU = torch.device("cpu")


def layout_of(sequences: int, length: int, documents: list[int] | None = None) -> TokenLayout:
    ends = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    tables = rotary_tables(torch.arange(sequences * length), 16, 1e4, None)
    return token_layout({"cu_seqlens"}, sequences, sequences * length, *tables, ends, None)


def inputs(length: int, dtype: torch.dtype = torch.float64, sequences: int = 2) -> list[Tensor]:
    """Return q, k, v, g and beta with 2 heads of q and k, and 4 of v."""
    draw = torch.Generator().manual_seed(length)
    shapes = ((2, 6), (2, 6), (4, 5), (4,), (4,))
    q, k, v, g, beta = (torch.randn(sequences, length, *shape, generator=draw, dtype=dtype) for shape in shapes)
    return [q, k, v, -g.exp(), beta.sigmoid()]


def from_the_paper(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return o of one sequence and one head by equation 10 of arXiv 2412.06464: each token multiplies the state by a
    matrix."""
    state, made = q.new_zeros(q.shape[-1], v.shape[-1]), []
    for token in range(len(q)):
        key, query = (x[token] / (x[token].square().sum() + 1e-6).sqrt() for x in (k, q))
        state = g[token].exp() * (torch.eye(len(key)) - beta[token] * key.outer(key)) @ state
        state = state + beta[token] * key.outer(v[token])
        made.append(query @ state / math.sqrt(len(query)))
    return torch.stack(made)


@pytest.mark.parametrize("documents", [None, [0, 1, 5, 13, 20, 26, 26]])
def test_the_recurrence_is_the_papers_in_float64(documents: list[int] | None) -> None:
    """Documents end at the ends of sequences too, and one is empty. Every value head has the q and k of its group."""
    given = inputs(13)
    found, state = Recurrent().rule(*given, layout_of(2, 13, documents))
    assert found.dtype == torch.float64 and state is None
    flat = [x.flatten(0, 1) for x in given]
    for head in range(4):
        q, k, v, g, beta = (x[:, head * x.shape[1] // 4] for x in flat)
        ends = documents or [0, 13, 26]
        parts = [
            from_the_paper(*(x[first:last] for x in (q, k, v, g, beta)))
            for first, last in itertools.pairwise(ends)
            if last > first
        ]
        torch.testing.assert_close(found.flatten(0, 1)[:, head], torch.cat(parts), rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 3, 64, 67])
def test_it_agrees_with_flas_own_reference(length: int) -> None:
    """fla's references, by token and in chunks, are in fp32 and take as many heads of q and k as of v, of length 1."""
    q, k, v, g, beta = given = inputs(length, torch.float32)
    found, state = Recurrent().rule(*given, layout_of(2, length), final=True)
    unit = [(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(2, 2) for x in (q, k)]
    o, last = naive_recurrent_gated_delta_rule(*unit, v, beta, g, output_final_state=True)
    torch.testing.assert_close((found, state), (o, last), rtol=0, atol=1e-6)
    chunks, _ = naive_chunk_gated_delta_rule(*unit, v, g, beta)
    torch.testing.assert_close(found, chunks, rtol=0, atol=1e-5)


@pytest.mark.parametrize("documents", [None, [0, 3, 4, 7]])
def test_gradients_are_those_of_finite_differences(documents: list[int] | None) -> None:
    function, layout = Recurrent(), layout_of(1, 7, documents)
    given = [x.requires_grad_() for x in inputs(7, sequences=1)]
    assert torch.autograd.gradcheck(lambda *x: function.rule(*x, layout)[0], given)
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((1, 7, 3), (3, 4)))
    both = [x.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(lambda x, w: function.convolved([x], [w], layout)[0], both)


def test_extreme_gates_do_what_they_say() -> None:
    """A decay of nearly zero forgets all but the token itself, no correction leaves nothing, and without decay the last
    value of a key is what the key finds."""
    q, k, v, g, beta = inputs(9)
    grouped = [x.repeat_interleave(2, 2) for x in (q, k)]
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in grouped)

    def made(*given: Tensor) -> Tensor:
        leaves = [x.detach().clone().requires_grad_() for x in given]
        o, _ = Recurrent().rule(*leaves, layout_of(2, 9))
        assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), leaves))
        return o

    own = (query * key).sum(-1, keepdim=True) * beta.unsqueeze(-1) * v / math.sqrt(6)
    torch.testing.assert_close(made(q, k, v, torch.full_like(g, -1e4), beta), own)
    assert made(q, k, v, g, torch.zeros_like(beta)).abs().max() == 0
    same = k[:, :1].expand_as(k)
    found = made(same, same, v, torch.zeros_like(g), torch.ones_like(beta))
    torch.testing.assert_close(found, v / math.sqrt(6), rtol=0, atol=1e-6)  # Keys are shorter than 1 by fla's eps.


def test_convolutions_stay_within_documents() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((2, 8, 3), (3, 4)))
    (found,) = Recurrent().convolved([x], [weight], layout_of(2, 8, [0, 3, 8, 10, 16]))
    for first, last in ((0, 3), (3, 8), (8, 10), (10, 16)):
        part = torch.nn.functional.pad(x.flatten(0, 1)[first:last].T, (3, 0))
        wanted = torch.nn.functional.conv1d(part, weight.unsqueeze(1), groups=3).T
        torch.testing.assert_close(found.flatten(0, 1)[first:last], torch.nn.functional.silu(wanted))


def test_chunks_of_other_documents_are_found_without_the_host() -> None:
    """The chunks of documents are recorded once, for boundaries that are written anew. fla's own function reads their
    number on the host."""
    ends, found = torch.tensor([0, 10, 10, 75, 256, 256], dtype=torch.int32), []
    recording = FakeGraph.of(lambda: found.append(document_chunks(ends, 256)))
    for documents in ([0, 10, 10, 75, 256, 256], [0, 64, 128, 192, 255, 256], [0, 256, 256, 256, 256, 256]):
        ends.copy_(torch.tensor(documents))
        recording.replay()
        (chunks,), wanted = found, prepare_chunk_indices(ends.clone(), 64)
        assert chunks.dtype == torch.int32 and len(chunks) == 256 // 64 + 5
        torch.testing.assert_close(chunks[: len(wanted)], wanted)
        # A chunk left over is behind the end of its document.
        assert all(64 * place >= documents[number + 1] - documents[number] for number, place in chunks[len(wanted) :])


def test_fla_is_given_the_chunks_of_each_pass() -> None:
    """fla keeps what it makes of boundaries for each tensor of them, so a pass has other tensors than the one before,
    whatever memory its micro-batch is in."""
    cfg, found = tiny.config(0, model=HYBRID), []

    def rule(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, **how: Any) -> tuple[Tensor, None]:
        ends, chunks = how["cu_seqlens"], how["chunk_indices"]
        found.append((prepare_chunk_offsets(ends, 64).tolist(), chunks.tolist()))
        return v, None

    function = Fla(rule, lambda x, weight, **how: (found.append(how["chunk_indices"].tolist()) or x, None))
    attention = attention_functions(cfg.attention, cfg.model, device=CPU, dtype=torch.float32)[-1]
    model = tiny.model(cfg, ParallelGroups.single(), functions=[function] * 3 + [attention])
    tokens, ends = torch.zeros(1, 128, dtype=torch.long), torch.zeros(4, dtype=torch.int32)
    for documents, offsets in (([0, 64, 128, 128], [0, 1, 2, 2]), ([0, 1, 2, 128], [0, 1, 2, 4])):
        ends.copy_(torch.tensor(documents))
        model(tokens, tokens, cu_seqlens=ends)
        chunks = document_chunks(ends, 128).tolist()
        assert found == 3 * [chunks, chunks, chunks, (offsets, chunks)]
        found.clear()


def test_a_layer_is_qwen3_nexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers puts q, k, v and z of each group of heads behind each other, and b and a too. Where fla is
    installed, it would run its kernels, which no CPU has."""
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(modeling_qwen3_next, name, getattr(modeling_qwen3_next, name).__wrapped__)
    cfg = tiny.config(0, model=HYBRID)
    ours = tiny.model(cfg, ParallelGroups.single()).blocks[0].attention
    shape = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    theirs = modeling_qwen3_next.Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(hidden_size=32, num_hidden_layers=4, linear_value_head_dim=32, rms_norm_eps=1e-6, **shape), 0
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("a_log", "dt_bias"):
            ours.get_parameter(name).normal_(generator=draw)
        ours.o_norm.gain.uniform_(0.5, 1.5, generator=draw)
        heads = [getattr(ours.qkv, name).unflatten(0, (2, -1)) for name in ("q", "k", "v", "z")]
        theirs.in_proj_qkvz.weight.copy_(torch.cat(heads, 1).flatten(0, 1))
        gates = [getattr(ours.gates, name).unflatten(0, (2, -1)) for name in ("b", "a")]
        theirs.in_proj_ba.weight.copy_(torch.cat(gates, 1).flatten(0, 1))
        theirs.conv1d.weight.copy_(torch.cat([ours.q_conv, ours.k_conv, ours.v_conv]).unsqueeze(1))
        theirs.A_log.copy_(ours.a_log)
        theirs.dt_bias.copy_(ours.dt_bias)
        theirs.norm.weight.copy_(ours.o_norm.gain)
        theirs.out_proj.weight.copy_(ours.out.weight)
    x = torch.randn(2, 21, 32, generator=draw)
    layout = layout_of(2, 21)
    made = ours(*ours.project(x.flatten(0, 1), layout.cos, layout.sin, {}), layout, {})
    with torch.no_grad():
        torch.testing.assert_close(ours.out(made).view_as(x), theirs(x), rtol=0, atol=1e-6)


def hybrid_steps(zero_stages: list[int]) -> list[list[tuple[float, float]]]:
    """Return the (loss, gradient norm) pairs of 2 steps at each stage."""
    found, joined = [], tiny.join(1)
    for stage in zero_stages:
        cfg = tiny.config(stage, model=HYBRID, optimizer={"eps": 1e-6, "clip_grad": 0.5})
        engine = tiny.engine(cfg, joined)
        steps = [tiny.global_step(engine, step, sequences=2) for step in range(2)]
        found.append([(step.loss, step.grad_norm) for step in steps])
    return found


def test_shards_change_no_number() -> None:
    """Two ranks shard even the vectors of a head each."""
    ((alone,),) = run_distributed(hybrid_steps, 1, [0])
    for rank in run_distributed(hybrid_steps, 2, [1, 3]):
        for steps in rank:
            assert steps == [pytest.approx(pair, rel=1e-4) for pair in alone]


@pytest.mark.parametrize("norms", ["pre", "post", "sandwich"])
def test_generation_keeps_states_and_changes_no_logits(norms: str) -> None:
    """Rows of different lengths are read, continued, dropped and read again. A text may be shorter than a
    convolution."""
    model = tiny.model(tiny.config(0, model={**HYBRID, "norms": norms}), ParallelGroups.single())
    texts = [torch.randint(0, tiny.VOCAB, (20,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]
    rows = [(0, 2), (1, 7), (2, 9)]
    """The text of each row, and the tokens that it holds."""
    with torch.no_grad():

        def check(logits: Tensor, row: int) -> None:
            text, held = rows[row]
            torch.testing.assert_close(logits, model(torch.tensor([texts[text][:held]]))[0, -1], rtol=0, atol=1e-5)

        def step() -> None:
            logits = cached([texts[text][held] for text, held in rows])
            rows[:] = [(text, held + 1) for text, held in rows]
            for row in range(len(rows)):
                check(logits[row], row)

        cached = CachedModel(model, rows=3, capacity=32)
        for row, (text, held) in enumerate(rows):
            check(cached.read(row, texts[text][:held]), row)
        step()
        step()
        cached.drop(0)
        rows[:] = [rows[2], rows[1]]
        step()
        rows[1] = 0, 5
        check(cached.read(1, texts[0][:5]), 1)
        step()


def test_compiled_blocks_compute_the_same() -> None:
    """torch.compile makes graphs of what is around the recurrence, with the weights recomputed and without. No graph is
    for any size: torch 2.11 has none of a layer in 8 bits whose input alone is of any width."""
    tokens = torch.randint(0, tiny.VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))

    def of_one_size(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> object:
        assert not any(isinstance(x, torch.SymInt) for x in inputs)
        return aot_eager(graph, inputs)

    torch.compiler.reset()  # Sizes that other tests have changed would be any.
    for again in ("none", "full"):
        cfg, found = tiny.config(0, model=HYBRID, training={"activation_checkpointing": again}), []
        for compiled in (False, True):
            model = tiny.model(cfg, ParallelGroups.single())
            if compiled:
                compile_blocks(model, of_one_size)
            loss = model(tokens, tokens, cu_seqlens=torch.tensor([0, 9, 24, 48], dtype=torch.int32))
            loss.backward()
            found.append([loss, *(parameter.grad for parameter in model.parameters())])
        torch.testing.assert_close(*found)


def test_parameters_and_flops_are_counted() -> None:
    """The recurrence takes three products of a vector with the state of each head, forward: the decayed state by the
    key, the key by the correction, and the query by the state."""
    model, attention = ModelConfig(**{**tiny.config(0).model.model_dump(), **HYBRID}), AttentionConfig(backend="sdpa")
    real = tiny.transformer(model, attention, vocab_size=tiny.VOCAB, groups=ParallelGroups.single())
    assert num_parameters(model, attention, tiny.VOCAB) == sum(p.numel() for p in real.parameters())
    matrices = sum(spec.size for spec in real.specs.values() if spec.kind == "matrix")
    recurrence = 3 * 6 * 4 * 16 * 32
    assert flops_per_token(model, tiny.VOCAB, 0) == 6 * (matrices + tiny.VOCAB * 32) + 3 * recurrence
    assert flops_per_token(model, tiny.VOCAB, 50) - flops_per_token(model, tiny.VOCAB, 0) == 6 * 50 * 32


class Saving(torch.autograd.Function):
    """Keep tensors for the backward pass, in the place of a kernel."""

    @staticmethod
    def forward(ctx, made: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.shapes = [x.shape for x in kept]
        return made.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, *[None] * len(ctx.shapes)


class LikeFla(DeltaRule):
    """Keep what the kernels of fla keep, by its source: the input of a convolution; normalized q and k with their
    norms, v, both gates, and the inverse of each chunk of 64 tokens."""

    how = "not at all"

    @torch._disable_dynamo
    def convolved(self, x: Sequence[Tensor], weights: Sequence[Tensor], layout: TokenLayout) -> list[Tensor]:
        return [Saving.apply(each, each) for each in x]

    @torch._disable_dynamo
    def rule(self, q, k, v, g, beta, layout, *, final=False):
        norms = [x.new_empty(x.shape[:3], dtype=torch.float32) for x in (q, k)]
        chunks = v.new_empty(*v.shape[:3], 64)
        return Saving.apply(v, q.clone(), k.clone(), v, g, beta, *norms, chunks), None


@pytest.mark.parametrize("linear", [{"precision": "bf16"}, {"precision": "int8"}])
def test_saved_activations_are_those_of_autograd(linear: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block of two has the delta net. What eager torch keeps beside is its fp32 copies in the gated norm and
    in the gates, so a graph is made of each piece."""
    delta = {"key_heads": 2, "value_heads": 4, "key_dim": 64, "value_dim": 64, "pattern": "FD"}
    cfg = counted.run_config(model={"delta_net": delta}, attention={"backend": "sdpa"}, linear=linear)
    monkeypatch.setattr("sagetrain.model.selection.delta_rule", lambda *_: LikeFla())
    block = block_operations(layers(cfg.model, cfg.attention.qk_norm)[1], cfg.attention, rank_of(cfg))
    kept = kept_bytes(block)
    assert counted.saved_bytes_per_token(cfg, True) == pytest.approx(kept, rel=0.02)
    listed = {matmul.name: (matmul.outputs, matmul.inputs) for matmul in of_kind(MatmulCost, block)}
    assert listed == {
        **dict.fromkeys("qk", (128, 256)), **dict.fromkeys("vz", (256, 256)), "a and b": (8, 256), "out": (256, 256),
        **dict.fromkeys(("gate", "up"), (768, 256)), "down": (256, 768),
    }  # fmt: skip


def test_tensors_begin_and_move_as_documented() -> None:
    """Muon takes matrices alone, and the width rule too; convolutions and vectors do not decay."""
    model = {**HYBRID, "delta_net": {**DELTA, "key_heads": 64, "value_heads": 256}}
    optimizer = {"name": "muon", "lr": 1e-2, "lr_base_width": 16}
    cfg = tiny.config(0, model=model, optimizer=optimizer)
    real = tiny.model(cfg, ParallelGroups.single())
    mixer = real.requires_grad_(False).blocks[0].attention
    rates, steps = mixer.a_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 0 < rates.min() < 1 and 15 < rates.max() <= 16 and rates.mean() == pytest.approx(8, rel=0.1)
    assert 1e-3 <= steps.min() < 2e-3 and 0.05 < steps.max() <= 0.1
    assert steps.log().mean() == pytest.approx(math.log(0.01), rel=0.05)
    assert mixer.v_conv.std() == pytest.approx(12**-0.5, rel=0.05)
    assert not torch.equal(mixer.a_log, real.blocks[1].attention.a_log)
    rules = {name: rule_of(spec, cfg) for name, spec in real.specs.items()}
    muon = {name.removeprefix("blocks.0.attention.") for name, rule in rules.items() if rule == "muon"}
    assert {"qkv.z", "gates.a", "gates.b", "out.weight"} <= muon
    assert not muon & {"q_conv", "k_conv", "v_conv", "a_log", "dt_bias", "o_norm.gain"}
    still = {name for group in groups(real.specs.values(), cfg) for name in group.names if not group.weight_decay}
    assert {f"blocks.0.attention.{name}" for name in ("q_conv", "a_log", "dt_bias", "o_norm.gain")} <= still
    factors = {name: group.lr_factor for group in groups(real.specs.values(), cfg) for name in group.names}
    assert factors["blocks.0.attention.q_conv"] == 1 and factors["blocks.0.attention.qkv.z"] == 0.5**0.5


def test_a_gpu_needs_fla_a_triton_and_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert isinstance(delta_rule(cuda, torch.bfloat16), Fla)
    with pytest.raises(ValueError, match=r"model\.delta_net needs training\.dtype bf16 on a GPU; use bf16"):
        delta_rule(cuda, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, triton, wrong in (
        (9, "3.6.0", True),
        (9, "3.7.1", False),
        (9, "3.8.0+git1", False),
        (8, "3.6.0", False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=capability: (major, 0))
        monkeypatch.setattr("sagetrain.model.delta_rule.version", lambda _, found=triton: found)
        if not wrong:
            assert isinstance(delta_rule(cuda, torch.bfloat16), Fla)
            continue
        with pytest.raises(ValueError, match=r"needs Triton 3\.7\.1 or newer .* this is Triton 3\.6\.0"):
            delta_rule(cuda, torch.bfloat16)
    monkeypatch.setitem(__import__("sys").modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(ValueError, match=r"model\.delta_net needs the package fla .*pip install 'sagetrain\[fla\]'"):
        delta_rule(cuda, torch.bfloat16)
    cfg = tiny.config(0, model=HYBRID)
    found = attention_functions(cfg.attention, cfg.model, device=CPU, dtype=torch.float32)
    assert [type(function).__name__ for function in found] == ["Recurrent"] * 3 + ["Sdpa"]


def test_ranks_with_parts_of_heads_are_refused_by_the_module() -> None:
    cfg = tiny.config(0, model=HYBRID)
    groups = ParallelGroups(tiny.Topology(2, 2), rank=0)
    with pytest.raises(ValueError, match="needs tensor_parallel_size 1"):
        DeltaNet(layers(cfg.model)[0], Recurrent(), Region(groups), matmuls={})

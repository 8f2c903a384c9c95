"""The model in one process agrees with an independent float64 reference, and its switches agree with each other."""

import copy
import math
from collections import Counter
from concurrent.futures import wait
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

import tiny
from llama_reference import reference_loss
from sagekernels import attention_reference
from sagetrain.config.schema import AttentionConfig, ModelConfig, RopeScaling
from sagetrain.model import initialization, walks
from sagetrain.model.backends import AttentionFunction, Flash, Sage, Sdpa, TokenLayout, find_varlen_attn, token_layout
from sagetrain.model.compile import compile_blocks
from sagetrain.model.rotary import apply_rotary, rotary_tables
from sagetrain.model.tensors import tensors
from sagetrain.model.transformer import Transformer
from sagetrain.model.walks import Half
from sagetrain.parallel.topology import ParallelGroups, Topology

VOCAB = 128
SINGLE = ParallelGroups.single()
SHAPES = {
    "plain": ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4),
    "grouped_tied": ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=40,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        tie_embeddings=True,
        rope_theta=500.0,
        norm_eps=1e-5,
    ),
}
SHAPES["values"] = SHAPES["grouped_tied"].model_copy(update={"num_layers": 3, "value_embeddings": True})


def _model(
    shape: str = "grouped_tied", qk_norm: str = "before_rope", backend: str = "sdpa", **arguments: object
) -> Transformer:
    attention = AttentionConfig(backend=backend, qk_norm=qk_norm)
    return tiny.transformer(SHAPES[shape], attention, vocab_size=VOCAB, groups=SINGLE, **arguments)


def _shake(model: Transformer) -> Transformer:
    """Make weights so large that every term of the forward pass matters."""
    return tiny.enlarged(model, SINGLE, 0.3)


def _batch(sequences: int = 2, length: int = 13, seed: int = 0) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCAB, (sequences, length + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


PACKED = {
    "cu_seqlens": torch.tensor([0, 4, 5, 13, 22, 26, 26, 26, 26], dtype=torch.int32),
    "positions": torch.tensor([[*range(4), 0, *range(8)], [*range(9), *range(4)]]),
    "max_seqlen": 9,
}
DOCUMENTS = [[0] * 4 + [1] + [2] * 8, [3] * 9 + [4] * 4]


def _gradients(model: Transformer, *batch: Tensor, **packing: object) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(*batch, **packing)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def _assert_same(actual: tuple[Tensor, dict], expected: tuple[Tensor, dict], tolerance: float) -> None:
    torch.testing.assert_close(actual[0].double(), expected[0].double(), rtol=tolerance, atol=0)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in actual[1].items():
        error = (gradient.double() - expected[1][name].double()).norm() / expected[1][name].double().norm()
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("qk_norm", ["none", "before_rope", "after_rope"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_loss_and_gradients_equal_the_reference(shape: str, qk_norm: str, packed: bool, backend: str) -> None:
    model = _shake(_model(shape, qk_norm, backend))
    tokens, labels = _batch()
    packing = PACKED if packed else {}
    actual = _gradients(model, tokens, labels, **packing)

    truth = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    positions, documents = (PACKED["positions"], DOCUMENTS) if packed else (None, None)
    loss = reference_loss(truth, SHAPES[shape], qk_norm, tokens, labels, positions, documents)
    loss.backward()
    _assert_same(actual, (loss.detach(), {name: p.grad for name, p in truth.items()}), 2e-5)


def test_packed_documents_equal_separate_ones() -> None:
    model = _shake(_model())
    tokens, labels = _batch()
    packed = model(tokens, labels, **PACKED)
    pieces = [(0, 0, 4), (0, 4, 5), (0, 5, 13), (1, 0, 9), (1, 9, 13)]
    separate = sum(model(tokens[b : b + 1, i:j], labels[b : b + 1, i:j]) * (j - i) for b, i, j in pieces) / 26
    torch.testing.assert_close(packed, separate, rtol=1e-6, atol=0)
    assert abs(packed - model(tokens, labels)) > 1e-3


def test_positions_alone_leave_attention_across_documents() -> None:
    model = _shake(_model())
    tokens, labels = _batch()
    losses = [
        model(tokens, labels, **{k: PACKED[k] for k in keys})
        for keys in ((), ("positions",), ("cu_seqlens",), ("positions", "cu_seqlens"))
    ]
    assert len({round(loss.item(), 5) for loss in losses}) >= 3
    # Rotary attention depends only on differences of positions, which are the same within documents either way.
    torch.testing.assert_close(losses[2], losses[3], rtol=1e-5, atol=0)


def test_no_token_sees_the_future() -> None:
    model = _shake(_model())
    tokens, _ = _batch()
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCAB
    after = model(changed)
    torch.testing.assert_close(after[:, :7], logits[:, :7], rtol=1e-5, atol=1e-5)
    assert (after[:, 7:] - logits[:, 7:]).abs().amax(-1).min() > 1e-3


def test_logits_are_those_of_the_loss() -> None:
    model = _shake(_model())
    tokens, labels = _batch()
    logits = model(tokens)
    assert logits.shape == (2, 13, VOCAB)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model(tokens, labels), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "sage"])
def test_activation_checkpointing_changes_nothing(backend: str, compiled: bool) -> None:
    # Whole blocks are recomputed in the same way around every backend; `selective` and `attention` list the operators
    # of each. A graph costs a second, so each mode is compiled with one backend (and by test_accounting.py).
    modes = ["none", "selective", "attention", "full", 1]
    if compiled:
        modes = ["none", "selective", 1] if backend == "sage" else ["attention"]
    eager = [_gradients(_shake(_model(backend=backend)), *_batch(), **packing) for packing in ({}, PACKED)]
    found = {} if "none" in modes else {"none": eager}
    for mode in modes:
        packings = (PACKED,) if compiled and mode != "none" else ({}, PACKED)
        model = _shake(_model(backend=backend, activation_checkpointing=mode))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if compiled:
            compile_blocks(model, backend="aot_eager")
        found[mode], graphs = [], []
        for packing in packings:
            found[mode].append(_gradients(model, *_batch(), **packing))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert not torch._dynamo.utils.counters["graph_break"]
        if mode == "none":
            # All blocks share a graph, and the first norm has its own, which other packing leaves as it is.
            assert graphs == ([2, 3] if compiled else [0, 0])
            for ours, theirs in zip(found["none"], eager, strict=True):
                _assert_same(ours, theirs, 1e-5 if compiled else 0.0)
        # The blocks behind those that are recomputed begin with a graph of their own, whose gradient is added up apart.
        near = 1e-5 if modes[0] != "none" else 1e-6 if compiled and mode == 1 else 0.0
        for plain, recomputed in zip(found["none"][-len(packings) :], found[mode], strict=True):
            _assert_same(recomputed, plain, near)


class Counted(TorchDispatchMode):
    """A counter of the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.calls[operator.name()] += 1
        return operator(*arguments, **(options or {}))


def test_expensive_operators_run_once() -> None:
    """A block has seven matmuls forward and twice as many backward, and the head has its own."""
    calls = {}
    for mode in ("none", "selective", "attention", "full"):
        model = _model(backend="sage", activation_checkpointing=mode)
        with Counted() as counted:
            model(*_batch()).backward()
        calls[mode] = counted.calls
    names = "aten::mm", "sagekernels::forward", "aten::silu", "aten::rsqrt"
    once, kept, but_attention, twice = ([calls[mode][name] for name in names] for mode in calls)
    mm, attention, silu, norms = once
    assert kept == [mm, attention, 2 * silu, 2 * norms - 1]  # The final norm is outside of the blocks.
    assert but_attention == [mm + 2 * 7, attention, 2 * silu, 2 * norms - 1]
    assert twice == [mm + 2 * 7, 2 * attention, 2 * silu, 2 * norms - 1]


def test_attention_and_matmuls_of_a_gpu_are_expensive() -> None:
    """The test asks for the names that the operators have in this torch."""
    aten, here = torch.ops.aten, find_varlen_attn() is not None  # The import registers its operator.
    operators = [
        aten._scaled_mm,
        torch.ops.sagekernels.int8_product,
        *([torch.ops.torch_attn._varlen_attn] if here else []),
    ]
    operators += [
        getattr(aten, f"_scaled_dot_product_{kernel}_attention") for kernel in ("cudnn", "flash", "efficient")
    ]
    for operator in operators:
        assert walks._policy(walks.DEAR["selective"], None, operator.default) == CheckpointPolicy.MUST_SAVE, operator
    assert walks._policy(walks.DEAR["selective"], None, aten.silu.default) == CheckpointPolicy.PREFER_RECOMPUTE


def test_activation_checkpointing_keeps_block_inputs_only() -> None:
    saved = {}
    for mode in ("none", 1, "full"):
        model, sizes = _model(activation_checkpointing=mode), []
        pack = lambda t: sizes.append(t.numel()) or t  # noqa: B023, E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(*_batch())
        saved[mode] = sum(sizes)
    assert saved["full"] < saved["none"] / 2
    blocks = len(_model().blocks)
    assert saved[1] == pytest.approx(saved["none"] - (saved["none"] - saved["full"]) / blocks, rel=0.02)


def test_blocks_compile_to_one_graph() -> None:
    """test_activation_checkpointing_changes_nothing counts the graphs of other backends."""
    model = _shake(_model(backend="reference"))
    eager = _gradients(model, *_batch(), **PACKED)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(model, backend="aot_eager")  # This backend needs no C++ compiler.
    _assert_same(_gradients(model, *_batch(), **PACKED), eager, 1e-5)
    # The graphs are those of the blocks and of the first norm.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_compiled_blocks_check_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, real = [], torch.compile

    def compiled(*arguments, **how):
        found.append(how["options"])
        return real(*arguments, **how)  # The real function knows all options by name.

    monkeypatch.setattr(torch, "compile", compiled)
    compile_blocks(_model(backend="sdpa"))
    assert found and all(options == {"size_asserts": False, "alignment_asserts": False} for options in found)


class Watched(AttentionFunction):
    """A function that records the tensors that pass through a layer's attention, as a monitor would."""

    def __init__(self, function: AttentionFunction) -> None:
        self.function, self.documents, self.gradients = function, function.documents, []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        o = self.function(q, k, v, layout)
        o.register_hook(self.gradients.append)
        self.inputs, self.output = (q, k, v), o
        return o


def _with_functions(*functions: AttentionFunction) -> Transformer:
    return _shake(_model(functions=functions))


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["plain", "packed"])
def test_layers_with_different_attention(packing: dict) -> None:
    """Each layer's output is that of its own function, and a function that watches sees q, k, v and dO."""
    kinds = Sage("paper"), Sdpa()
    mixed, same = [Watched(function) for function in kinds], [Watched(kinds[0]) for _ in kinds]
    loss, _ = _gradients(_with_functions(*mixed), *_batch(), **packing)
    other_loss, _ = _gradients(_with_functions(*same), *_batch(), **packing)
    assert loss != other_loss
    assert torch.equal(mixed[0].output, same[0].output) and torch.equal(mixed[1].inputs[0], same[1].inputs[0])
    exact = []
    for function, watched in zip(kinds, mixed, strict=True):
        layout = token_layout({function.documents, "mask"}, 2, 26, None, None, packing.get("cu_seqlens"), None)
        leaves = [x.detach().requires_grad_() for x in watched.inputs]
        assert torch.equal(watched.output, function(*leaves, layout))
        exact.append(function.reference(*leaves, layout))
        (gradient,) = watched.gradients
        assert gradient.shape == watched.output.shape and gradient.abs().amax() > 0
    errors = [(w.output - o).norm() / o.norm() for w, o in zip(mixed, exact, strict=True)]
    assert errors[1] < 1e-6 < 1e-3 < errors[0] < 0.05


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("packing", "alone"), [(PACKED, False), ({}, True)], ids=["onward", "alone"])
def test_a_layer_that_gets_another_attention_costs_one_graph(packing: dict, alone: bool) -> None:
    """Only the first layer that has an attention costs a graph. The model has more layers than torch compiles graphs
    for one function."""
    shape = SHAPES["grouped_tied"].model_copy(update={"num_layers": 10})
    model, eager = (
        _shake(tiny.transformer(shape, AttentionConfig(backend="sdpa"), vocab_size=VOCAB, groups=SINGLE))
        for _ in range(2)
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(model, backend="eager", blocks_alone=alone)  # It makes the same graphs.
    counts = []
    for changes in ({}, {3: Sage()}, {3: Sdpa()}, {0: Sage("paper"), 9: Sage()}, {9: Sdpa(), 5: Sage()}):
        for layer, function in changes.items():
            for network in (model, eager):
                network.blocks[layer].attention.function = function
        _assert_same(_gradients(model, *_batch(), **packing), _gradients(eager, *_batch(), **packing), 1e-4)
        counts.append(_graphs())
    first = 1 if alone else 2  # The graphs are those of the blocks and of the first norm.
    assert counts == [first, first + 1, first + 1, first + 2, first + 2]
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_function_that_cannot_be_traced_is_compiled_around() -> None:
    package = ModuleType("flash")
    package.flash_attn_func = attention_reference
    model = _with_functions(Flash(package), Sdpa())
    eager = _gradients(model, *_batch())
    torch._dynamo.reset()
    compile_blocks(model, backend="eager")  # It makes the same graphs.
    _assert_same(_gradients(model, *_batch()), eager, 1e-5)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_range_of_blocks_goes_on_from_the_residual_stream(recompute: str) -> None:
    """The next stage of a pipeline works like this. Two ranges one after the other equal the model, bit for bit."""
    model = _shake(_model(activation_checkpointing=recompute))
    tokens, labels = _batch()
    expected = model(tokens, labels)
    layouts, halves = model._layouts(tokens, None, None, None), [model._embed(tokens.flatten())]
    first = model.through(range(0, 1), layouts, halves)
    second = model.through(range(1, 2), layouts, [Half(half.stream, None) for half in first])
    assert torch.equal(model.head([second[0].made], labels.flatten()), expected)


def test_bf16_stays_near_fp32() -> None:
    model = _shake(_model())
    half = copy.deepcopy(model).bfloat16()
    (loss, gradients), (half_loss, half_gradients) = _gradients(model, *_batch()), _gradients(half, *_batch())
    assert half_loss.dtype == torch.float32
    assert abs(half_loss - loss) < 0.02 * loss
    for name, gradient in gradients.items():
        assert (half_gradients[name] - gradient).norm() < 0.15 * gradient.norm(), name
    assert half(_batch()[0]).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", ["plain", "values"])
def test_initialization(shape: str) -> None:
    model = _model(shape, seed=3)
    config = SHAPES[shape]
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("gates.values"):
            assert (parameter == (parameter.ndim == 1)).all(), name
            continue
        residual = name.endswith(("out.weight", "down.weight"))
        std = config.init_std / math.sqrt(2 * config.num_layers) if residual else config.init_std
        assert parameter.std().item() == pytest.approx(std, rel=0.1), name
        assert abs(parameter.mean()) < 0.1 * std, name
    same, other = _model(shape, seed=3), _model(shape, seed=4)
    for a, b, c in zip(model.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not a.any() or not torch.equal(a, c)
    half = _model(shape, seed=3, dtype=torch.bfloat16)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(model.parameters(), half.parameters(), strict=True))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_that_were_begun_are_those_of_the_seed(tp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads draw what has room. Weights of another run, seed or slice are drawn anew."""
    cfg, one = tiny.config(1).model, ParallelGroups.single()
    groups = ParallelGroups(Topology(tp_size, tp_size), rank=tp_size - 1)
    specs = [spec for spec in tensors(cfg, AttentionConfig(), tiny.VOCAB) if spec.begins is None]
    place = groups, 7, torch.bfloat16

    def drawn() -> list[torch.Tensor]:
        found = []
        for spec in specs:
            shape = list(spec.shape)
            if spec.cut:
                shape[spec.dim] //= tp_size
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
            initialization.initialize([(spec, parameter)], cfg, groups, 7, torch.device("cpu"), None)
            found.append(parameter.detach().clone())
        return found

    alone = drawn()
    for other in ({"seed": 8}, {"groups": one} if tp_size == 2 else {"seed": 9}):
        how = {"groups": groups, "seed": 7, **other}
        initialization.begin(specs, cfg, how["groups"], how["seed"], torch.bfloat16, 1e9)
        assert all(map(torch.equal, drawn(), alone)) and len(initialization._begun) == len(specs)
    room = sum(weights.nbytes for weights in alone[:3])
    initialization.begin(specs, cfg, *place, room)
    assert len(initialization._begun) == 3
    initialization.begin(specs, cfg, *place, 1e9)
    wait(initialization._begun.values())
    monkeypatch.setattr(initialization, "_drawn", None)  # Nothing is drawn a second time.
    assert all(map(torch.equal, drawn(), alone)) and not initialization._begun


def test_weights_of_a_layer_do_not_depend_on_the_depth() -> None:
    deeper = SHAPES["plain"].model_copy(update={"num_layers": 3})
    three = tiny.transformer(deeper, AttentionConfig(backend="sdpa"), vocab_size=VOCAB, groups=SINGLE)
    two = _model("plain")
    assert torch.equal(three.blocks[1].attention.qkv.q, two.blocks[1].attention.qkv.q)


def test_rotary_is_exact_far_out_and_relative() -> None:
    positions = torch.tensor([0, 1_000_003, 1_000_005])
    cos, sin = rotary_tables(positions, 4, 10000.0, None)
    expected = [math.cos(1_000_003), math.cos(1_000_003 * 0.01)]
    assert cos[1, 0].tolist() == pytest.approx(expected, abs=1e-6)
    x = torch.randn(1, 2, 4, dtype=torch.float32)
    rotated = apply_rotary(x.expand(3, 2, 4), cos, sin)
    torch.testing.assert_close(rotated[0], x[0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1).expand(3, 2), rtol=1e-6, atol=1e-6)
    near = apply_rotary(x.expand(2, 2, 4), *rotary_tables(torch.tensor([0, 2]), 4, 10000.0, None))
    torch.testing.assert_close((rotated[1] * rotated[2]).sum(-1), (near[0] * near[1]).sum(-1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="even head_dim, not 5"):
        rotary_tables(positions, 5, 10000.0, None)


@pytest.mark.parametrize("qk_norm", ["before_rope", "after_rope"])
def test_norms_leave_q_and_k_as_long_as_the_rotation_makes_them(qk_norm: str) -> None:
    """The factors of YaRN and of query_scale are behind the norms, whatever the order of norm and rotation."""
    yarn = RopeScaling(type="yarn", factor=2.0, original_seq_length=8, attention_factor=1.5)
    shape = SHAPES["plain"].model_copy(update={"rope_scaling": yarn, "query_scale": 64})
    attention = AttentionConfig(backend="sdpa", qk_norm=qk_norm)
    layer = tiny.transformer(shape, attention, vocab_size=VOCAB, groups=SINGLE).blocks[0].attention
    tables = rotary_tables(torch.arange(5), shape.head_dim, 1e4, yarn, (shape.head_dim / 64) ** 0.25)
    q, k, _ = layer.project(torch.randn(5, shape.hidden_size), *tables, {})
    for x in (q, k):
        length = x.square().mean(-1).sqrt()
        torch.testing.assert_close(
            length, torch.full_like(length, 1.5 * (shape.head_dim / 64) ** 0.25), rtol=1e-3, atol=0
        )


def test_attention_is_compiled_for_one_model_after_another() -> None:
    """A program may train a second model, whose numbers of heads are unknown to torch.compile."""
    layout = token_layout({None}, 1, 16, torch.empty(16, 1, 8), torch.empty(16, 1, 8), None, None)
    compiled = torch.compile(lambda *qkv: Sdpa()(*qkv, layout), backend="aot_eager", fullgraph=True)
    for heads, shared in ((4, 2), (6, 3), (8, 8), (10, 5)):
        q, k, v = (torch.randn(1, 16, number, 16) for number in (heads, shared, shared))
        assert torch.equal(compiled(q, k, v), Sdpa()(q, k, v, layout))

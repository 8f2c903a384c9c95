"""sagekernels.Linear8bit and convert: their numbers, the parts that they leave alone, refusals, and modules that wrap
them."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.fsdp import fully_shard

import sagekernels
from sagekernels import Linear8bit, convert
from sagekernels.lowbit import LOW_BIT

ERRORS = {"int8": 0.02, "fp8": 0.08}
"""Relative errors of products of normal numbers in 8 bits: about 0.012 for INT8 by rows, 0.04 for e4m3."""


class Block(nn.Module):
    """Attention with QK-norm and a SwiGLU MLP, by the functions of sagekernels alone, as a reader would write it."""

    def __init__(self, hidden: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.q_gain, self.k_gain = (nn.Parameter(torch.ones(hidden // heads)) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(F.rms_norm(x, x.shape[-1:])).flatten(0, 1).chunk(3, -1)
        heads = sagekernels.qk_norm_rope(q, k, v, self.q_gain, self.k_gain, cos, sin, 1e-6)
        o = sagekernels.sage_attention(*(y.unflatten(0, x.shape[:2]) for y in heads), causal=True)
        x = x + self.out(o.flatten(2))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[-1:])).flatten(0, 1).chunk(2, -1)
        return x + self.down(sagekernels.swiglu(gate, up)).view(x.shape)


class Decoder(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(64, 48, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(tokens.numel()) % tokens.shape[1]
        angles = angles[:, None, None] / 100.0 ** (torch.arange(8) / 8)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(x)


def decoder(blocks: int = 2) -> Decoder:
    torch.manual_seed(0)
    return Decoder(blocks)


def gradients(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    return logits.detach(), {name: each.grad for name, each in model.named_parameters()}


TOKENS = torch.randint(0, 48, (2, 24), generator=torch.Generator().manual_seed(1))


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("precision", LOW_BIT)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_a_linear_layer(precision: str, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear8bit(48, 32, bias, precision=precision)
    exact = nn.Linear(48, 32, bias).double()
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(3, 5, 48, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    grad = torch.randn(3, 5, 32)
    found, wanted = layer(x), exact(x64)
    assert found.shape == wanted.shape and found.dtype == torch.float32
    found.backward(grad)
    wanted.backward(grad.double())
    limit = ERRORS[precision]
    assert 0 < error(found, wanted.detach()) < limit and 0 < error(x.grad, x64.grad) < limit
    assert 0 < error(layer.weight.grad, exact.weight.grad) < limit
    if bias:
        torch.testing.assert_close(layer.bias.grad, exact.bias.grad.float())


def test_without_gradients_nothing_else_comes_out() -> None:
    layer, x = Linear8bit(32, 16), torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.requires_grad_()))
    assert layer(torch.empty(0, 3, 32)).shape == (0, 3, 16)
    assert layer(x[0]).shape == (16,)


def test_autocast_decides_the_dtype_and_masters_get_gradients() -> None:
    layer, x = Linear8bit(32, 16), torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    narrow = copy.deepcopy(layer).bfloat16()
    assert y.dtype == torch.bfloat16 and torch.equal(y, narrow(x.detach().bfloat16()))
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_a_layer_names_itself_where_it_refuses_an_input() -> None:
    model = convert(decoder().bfloat16())
    layer = model.blocks[1].down
    for dtype in (torch.float64, torch.int64, torch.float32, torch.float16):
        with pytest.raises(TypeError, match=rf"^blocks\.1\.down \(128 to 64 features\): .* got {dtype}"):
            layer(torch.ones(2, 128).to(dtype))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"down .* got torch"):
        layer(torch.ones(2, 128, dtype=torch.int64))
    wide = Linear8bit(16, 16)
    assert wide(torch.ones(2, 16).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"^Linear8bit \(16 to 16 features\): .*float64"):
        wide(torch.ones(2, 16).double())


def test_a_model_is_built_without_memory_first() -> None:
    with torch.device("meta"):
        model, tokens = convert(Decoder()), torch.zeros(2, 24, dtype=torch.int64)
        assert model(tokens).shape == (2, 24, 48)
    model.to_empty(device="cpu").load_state_dict(decoder().state_dict())
    assert torch.equal(gradients(model, TOKENS)[0], gradients(convert(decoder()), TOKENS)[0])


def test_convert_takes_the_blocks_and_leaves_their_parameters() -> None:
    model = decoder()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    layers, seen = dict(model.named_modules()), []
    model.blocks[0].out.register_forward_hook(lambda *_: seen.append("hook"))
    assert convert(model) is model
    converted = {name for name, layer in model.named_modules() if isinstance(layer, Linear8bit)}
    assert converted == {f"blocks.{n}.{name}" for n in (0, 1) for name in ("qkv", "out", "gate_up", "down")}
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert dict(model.named_modules()) == layers
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    logits, found = gradients(model, TOKENS)
    assert seen == ["hook"]
    expected, wanted = gradients(decoder(), TOKENS)
    assert 0 < error(logits, expected.double()) < 0.05
    assert all(error(found[name], wanted[name].double()) < 0.1 for name in wanted)
    Decoder().load_state_dict(model.state_dict())  # The weights also load into plain layers.


def test_convert_asks_the_filter_and_may_be_called_again() -> None:
    model = convert(decoder(), lambda layer, name: name.endswith("down"), precision="fp8")
    kinds = {name: repr(layer) for name, layer in model.named_modules() if isinstance(layer, Linear8bit)}
    assert kinds.keys() == {"blocks.0.down", "blocks.1.down"} and all("fp8" in text for text in kinds.values())
    convert(model, lambda layer, name: True)
    assert "int8" in repr(model.blocks[0].down) and isinstance(model.head, Linear8bit)
    assert "int8" in repr(pickle.loads(pickle.dumps(model)).head)
    (alone,) = [convert(nn.Linear(16, 16), lambda layer, name: name == "")]
    assert isinstance(alone, Linear8bit)


class OwnForward(nn.Linear):
    """A layer such as those of other trainers, with arithmetic of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)

    def fill(self) -> None:
        """Initialize the layer, as the trainer asks of its layers."""
        nn.init.zeros_(self.weight)


def test_convert_refuses_by_name_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10), nn.Linear(24, 16), nn.Linear(16, 16).double())
    with pytest.raises(ValueError, match=r"1: 32 to 10 features: 10 is not a multiple of 16\n2: 24 to 16[^\n]*\n3: .*"
                       "must be bfloat16, float16 or float32, got torch.float64$"):  # fmt: skip
        convert(model)
    assert not any(isinstance(layer, Linear8bit) for layer in model)
    lazy = nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(16))
    with pytest.raises(ValueError, match=r"1: a LazyLinear, .*: call the model once before"):
        convert(lazy)
    lazy(torch.ones(2, 16))
    assert all(isinstance(layer, Linear8bit) for layer in convert(lazy))
    with pytest.raises(ValueError, match=r"no layer to convert\. The model has 1 linear layers"):
        convert(nn.Linear(16, 16))
    own = nn.Sequential(OwnForward(16, 16))
    with pytest.raises(ValueError, match=r"none inside an nn\.ModuleList, .* is of class Linear"):
        convert(own)
    with pytest.raises(ValueError, match="none that the filter chose is of class Linear"):
        convert(own, lambda layer, name: True)
    with pytest.raises(TypeError, match=r"filter is 'fp8', and must be a function .* precision is by name"):
        convert(own, "fp8")
    layer = convert(convert(own, classes=[OwnForward]), precision="fp8")[0]
    assert isinstance(layer, Linear8bit) and isinstance(layer, OwnForward) and "8bit" in repr(layer)
    copy.deepcopy(layer).fill()
    stored = io.BytesIO()
    torch.save(own, stored)
    loaded = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)[0]
    assert type(pickle.loads(pickle.dumps(layer))) is type(loaded) is type(layer)
    assert torch.equal(loaded(torch.ones(2, 16)), layer(torch.ones(2, 16))) and "fp8" in repr(loaded)
    assert layer(torch.ones(2, 16)).abs().sum() > 0
    with pytest.raises(ValueError, match="Linear8bit: 20 to 16 features: 20 is not a multiple"):
        Linear8bit(20, 16)
    with pytest.raises(TypeError, match="float64"):
        Linear8bit(16, 16, dtype=torch.float64)


def test_compile_traces_attention_norms_mlp_and_layers() -> None:
    """The compiled model has no graph break and computes the same numbers."""
    model = convert(decoder(blocks=1))
    expected, wanted = gradients(model, TOKENS)
    logits, found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), TOKENS)
    torch.testing.assert_close(logits, expected)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], grad)


def test_compiled_layers_round_an_input_that_they_share_once() -> None:
    """The layers q, k and v of other trainers share their input. In the backward pass each gradient is rounded."""
    layers = convert(nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), lambda layer, name: True)
    calls: dict[str, list[str]] = {"forward": [], "backward": []}

    def noted(direction: str) -> Callable:
        def inspect(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
            calls[direction] += [str(node.target) for node in graph.graph.nodes]
            return make_boxed_func(graph.forward)

        return inspect

    partition = {"partition_fn": min_cut_rematerialization_partition}
    backend = aot_autograd(fw_compiler=noted("forward"), bw_compiler=noted("backward"), **partition)
    call = torch.compile(lambda x: sum(layer(x) for layer in layers), backend=backend, fullgraph=True)
    call(torch.randn(4, 8, 32, requires_grad=True)).sum().backward()
    rounded = {direction: names.count("sagekernels.quantize_both.default") for direction, names in calls.items()}
    assert rounded["forward"] == 1 and rounded["backward"] <= 3


def test_fully_shard_takes_a_converted_model() -> None:
    """torchtitan and others shard like this: the model is converted first."""
    expected, wanted = gradients(convert(decoder()), TOKENS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = convert(decoder())
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        logits, found = gradients(model, TOKENS)
        assert torch.equal(logits, expected)
        assert all(torch.equal(found[name].full_tensor(), grad) for name, grad in wanted.items())
    finally:
        dist.destroy_process_group()

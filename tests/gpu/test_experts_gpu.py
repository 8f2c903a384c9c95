"""Mixtures of experts on a GPU: kernels agree with their twins and with a loop over experts in float64."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from distributed import run_distributed
from kernel_inputs import random_choices, router_results
from on_gpu import needs_gpu, over_nccl, poison
from sagekernels import grouped_casts
from sagekernels.admission import median_seconds
from sagekernels.casts import E4M3, INT8
from sagekernels.grouped import TILE, plan_rows, plan_rows_twin
from sagekernels.grouped_casts import grouped_largest_twin
from sagekernels.grouped_matmul import GROUPED_LOW_BIT, GroupedMatmul, grouped_gated, grouped_matmul
from sagekernels.grouped_swiglu import WEIGHTED_SWIGLU, WEIGHTED_SWIGLU_GRADIENTS
from sagekernels.testing import rel_l2
from sagetrain.auto.linear_choice import time_experts
from sagetrain.config.schema import ExpertsConfig
from sagetrain.engines.build_engine import build_engine
from sagetrain.model.backends import attention_function
from sagetrain.model.compile import compile_blocks
from sagetrain.model.transformer import gradients
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.stability.choices import Flips

pytestmark = needs_gpu((8, 9))  # FP8 matmuls
LOADS, TOP, HIDDEN, INNER = (0, 17, 128, 1, 129, 0, 700, 0), 3, 256, 144
CHOICES = random_choices(LOADS, TOP)
WAYS = {
    "float16": (torch.float16, GroupedMatmul(), 0.002),
    "float32": (torch.float32, GroupedMatmul(), 1e-5),
    "bfloat16": (torch.bfloat16, GroupedMatmul(), 0.01),
    **{
        precision: (torch.bfloat16, matmul, {"int8": 0.04, "fp8": 0.1}[precision])
        for precision, matmul in GROUPED_LOW_BIT.items()
    },
}


def tensors(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return x, the router's weights, gate_up and down as leaves, and the gradient of the output."""
    draw = torch.Generator("cuda").manual_seed(0)
    experts, tokens = len(LOADS), len(CHOICES)
    sizes = (tokens, HIDDEN), (tokens, TOP), (experts, 2 * INNER, HIDDEN), (experts, HIDDEN, INNER), (tokens, HIDDEN)
    x, weights, gate_up, down, grad = (torch.randn(size, device="cuda", generator=draw) for size in sizes)
    made = (x, weights.sigmoid(), gate_up / HIDDEN**0.5, down / INNER**0.5)
    narrow = [tensor.to(torch.bfloat16).to(torch.float64) for tensor in (*made, grad)]
    *leaves, grad = (tensor.to(dtype) for tensor in narrow)
    leaves[1] = narrow[1].to(torch.promote_types(dtype, torch.float32))
    return [leaf.requires_grad_() for leaf in leaves], grad


def mlp(x, weights, gate_up, down, choices, matmul, room):  # type: ignore[no-untyped-def]
    rows = plan_rows(choices, len(gate_up), room)
    inner = grouped_gated(x, gate_up, weights, rows, matmul, gathers=True)
    return grouped_matmul(inner, down, rows, matmul, combines=True)


def loop(x, weights, gate_up, down, choices):  # type: ignore[no-untyped-def]
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        gate, up = F.linear(x, gate_up[expert]).chunk(2, 1)
        weight = torch.where(choices == expert, weights, 0).sum(1, keepdim=True)
        y = y + F.linear(F.silu(gate) * up * weight, down[expert])
    return y


def results(way, dtype: torch.dtype, *arguments: object) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaves, grad = tensors(dtype)
    poison()
    y = way(*leaves, CHOICES.cuda(), *arguments)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def without_waiting(dtype: torch.dtype, matmul) -> None:  # type: ignore[no-untyped-def]
    leaves, grad = tensors(dtype)
    choices = CHOICES.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(mlp(*leaves, choices, matmul, None), leaves, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "number", ["bfloat16", "int8", *(pytest.param(name, marks=pytest.mark.long) for name in ("float16 float32", "fp8"))]
)
def test_a_mixture_is_a_loop_over_experts(number):
    """Loads are odd, and some are none. Room that is left over, torch.compile and another call change no bit. The host
    does not wait."""
    truth = results(loop, torch.float64)
    for name, (dtype, matmul, limit) in WAYS.items():
        if name.split()[0] not in number.split():
            continue
        found = results(mlp, dtype, matmul, None)
        for ours, exact in zip(found, truth, strict=True):
            assert ours.isfinite().all() and rel_l2(ours, exact) < limit, name
        for expert, load in enumerate(LOADS):
            assert load or not (found[3][expert].any() or found[4][expert].any()), name
        without_waiting(dtype, matmul)
        torch._dynamo.reset()
        compiled = torch.compile(mlp, fullgraph=True, dynamic=False)
        # Other dtypes are compiled as bfloat16 is.
        for way, room in ((mlp, None), (mlp, 1500), *[(compiled, None)] * (dtype == torch.bfloat16)):
            for ours, theirs in zip(results(way, dtype, matmul, room), found, strict=True):
                assert torch.equal(ours, theirs), (name, way, room)


def test_auto_times_experts_that_are_right():
    """Experts in 8 bits are judged by fp32 before they are timed."""
    experts = ExpertsConfig(number=8, per_token=TOP, ffn_size=INNER)
    how = {"tokens": 512, "kept": True, "compiled": False, "device": torch.device("cuda"), "dtype": torch.bfloat16}
    ways = ["int8"]  # Each compiles for ten seconds.
    seconds = partial(median_seconds, device="cuda")
    for biased in (False, True):
        how["activation"] = "clamped_swiglu" if biased else "geglu"
        times, refused = time_experts(experts, HIDDEN, ways, biased=biased, **how, seconds=seconds)
        assert not refused and times.keys() == {"bf16", *ways} and all(0 < value < 1 for value in times.values())


@pytest.mark.parametrize(("activation", "biased"), [("geglu", False), ("clamped_swiglu", True), ("swiglu", True)])
def test_activations_and_biases_are_those_of_the_twin(activation, biased):
    """Largest magnitudes are exactly those of what is written, and another call gives the same bits. Float64 is the
    judge."""
    rows = plan_rows(CHOICES.cuda(), len(LOADS), 1500)
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = (1500, 2 * INNER), (1500, INNER), (len(LOADS), 2 * INNER)
    gate_up, grad, bias = (4 * torch.randn(size, device="cuda", generator=draw).bfloat16() for size in sizes)
    given, grad = [gate_up, bias if biased else None], grad / 4
    weights = torch.rand(rows.slot.shape, device="cuda", generator=draw)
    gate_up[rows.choice < 0] = torch.nan

    def both(wide: bool) -> list[Tensor]:
        tensors = [x if x is None or not wide else x.double() for x in (*given, weights, grad)]
        *inputs, of_result = tensors
        place, more = (rows.choice, rows.ends, rows.tiles), (activation, not wide)
        poison()
        y, largest = WEIGHTED_SWIGLU(*inputs, *place, *more)
        places = rows.choice, rows.slot, rows.ends, rows.tiles, rows.first
        return [y, largest, *WEIGHTED_SWIGLU_GRADIENTS(of_result, *inputs, *places, *more)]

    found, truth = both(False), both(True)
    for place, limit in ((0, 3e-3), (2, 3e-3), (3, 1e-5), *[(4, 1e-5)] * biased):
        assert found[place].isfinite().all() and rel_l2(found[place], truth[place]) < limit, place
    for written, measured in ((found[0], found[1]), (found[2], found[5])):
        assert torch.equal(measured, grouped_largest_twin(written, rows.ends))
    assert all(map(torch.equal, found, both(False)))


def test_routers_multiply_with_the_error_of_fp32():
    draw = torch.Generator("cuda").manual_seed(0)
    x, weight, grad = (
        torch.randn(size, device="cuda", generator=draw) for size in ((999, 512), (128, 512), (999, 128))
    )
    x = x.bfloat16()
    poison()
    found, truth = router_results(x, weight, grad), router_results(x.double(), weight.double(), grad.double())
    for ours, exact, limit in zip(found, truth, (1e-6, 3e-3, 1e-6), strict=True):
        assert rel_l2(ours, exact) < limit


def test_plans_are_those_of_the_sort():
    many = torch.rand(1000, 128, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :8] - 5
    for (choices, experts), room in itertools.product(((CHOICES, 8), (many, 120)), (None, 3000, 500)):
        poison()
        found = plan_rows(choices.cuda(), experts, room)
        for ours, twin in zip(found, plan_rows_twin(choices, experts, room or choices.numel()), strict=True):
            assert torch.equal(ours.cpu(), twin)


@pytest.mark.parametrize("number", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_casts_are_their_twins_bit_for_bit(number, dtype):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(len(CHOICES), 300, generator=draw) * torch.exp2(30 * torch.randn(len(CHOICES), 1, generator=draw))
    x[::7] = 0
    x = x.to(dtype)
    rows, own = plan_rows(CHOICES, len(LOADS)), sum(LOADS)
    expected = grouped_casts.grouped_casts(x, rows, number, True)
    poison()
    found = grouped_casts.grouped_casts(x.cuda(), plan_rows(CHOICES.cuda(), len(LOADS)), number, True)
    columns = TILE * int(rows.first[-1])
    for ours, twin, last in zip(found, expected, ((own,), (own,), (300, columns), (len(LOADS),)), strict=True):
        part = tuple(slice(end) for end in last)
        assert torch.equal(ours.cpu()[part].float(), twin[part].float())
    weight = torch.randn(3, 144, 80, generator=draw).to(dtype)
    for ours, twin in zip(
        grouped_casts.weight_casts(weight.cuda(), number), grouped_casts.weight_casts(weight, number), strict=True
    ):
        assert torch.equal(ours.cpu().float(), twin.float())


@pytest.mark.long
def test_flips_of_choices_are_counted() -> None:
    """A model in INT8 goes forward and backward once more in 16 bits, beside the 8-bit weights that it keeps."""
    experts = {"number": 16, "per_token": 4, "ffn_size": 128}
    shape = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 256, "num_attention_heads": 4, "experts": experts}
    how = {"attention": {"backend": "sage", "recipe": "scores"}, "linear": {"precision": "int8"}}
    cfg, groups = tiny.config(1, "bf16", model=shape, **how), ParallelGroups(Topology(1, 1), 0)
    model = tiny.model(cfg, groups, device=torch.device("cuda"), partition=None)
    model.keep_weights()
    tokens = torch.randint(0, tiny.VOCAB, (4, 513), generator=torch.Generator().manual_seed(0)).cuda()
    exact = attention_function("sdpa", cfg.attention, torch.device("cuda"))
    call = partial(model, tokens[:, :-1], tokens[:, 1:])
    Flips(model, exact, dict(model.named_parameters())).measure([partial(gradients, call)])
    found = groups.metrics.reduce(torch.device("cuda"))
    assert [*found] == ["moe/0/flips", "moe/1/flips"] and all(0 < share < 0.5 for share in found.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def _spread() -> list[list[list[float]]]:
    """Return the losses of three steps with all experts on each of two ranks, and with half of them, for two experts of
    a token and for one."""
    device, found = over_nccl(), []
    for top in (2, 1):
        experts = {"number": 8, "per_token": top, "ffn_size": 128}
        shape = {"hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2, "experts": experts}
        losses = []
        for ranks in (1, 2):
            groups = ParallelGroups.create(Topology(2, 1, expert_parallel_size=ranks))
            parallel = {"engine": "fsdp", "expert_parallel_size": ranks, "expert_room": 1}
            cfg = tiny.config(1, "bf16", model=shape, parallel=parallel)
            model = tiny.model(cfg, groups, device=device)
            compile_blocks(model, hooks=True)
            engine = build_engine(cfg, model)
            losses.append([tiny.global_step(engine, step).loss for step in range(3)])
        found.append(losses)
    return found


@pytest.mark.long
def test_ranks_with_experts_between_them_take_the_same_steps() -> None:
    """Tokens with two experts are gathered, and rows of tokens with one go by an all-to-all."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for rank in run_distributed(_spread, 2):
        for alone, spread in rank:
            assert spread == pytest.approx(alone, rel=2e-3) and alone[2] != alone[0]

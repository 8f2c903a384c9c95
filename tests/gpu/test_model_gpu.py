"""The model on a GPU: backends beside exact attention, compiled beside eager, the loss's accuracy and memory."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import late_copies
import tiny
from distributed import run_distributed
from on_gpu import needs_gpu, over_nccl
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.data.batch import Batch, Sample, batch_of
from sagetrain.model.activation_offload import ActivationOffload
from sagetrain.model.backends import attention_function, token_layout
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import resolve_backend
from sagetrain.parallel.cross_entropy import linear_cross_entropy
from sagetrain.parallel.topology import ParallelGroups, Topology

pytestmark = needs_gpu()
SINGLE = ParallelGroups.single()
SHAPE = ModelConfig(
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_embeddings=True,
)
# Halves of a batch have bounds like these, with no tokens at either end.
CU_SEQLENS = [0, 0, 0, 1, 200, 512, 812, 1024, 1024, 1024]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("backend", "tolerance"), [("sdpa", 1.0), ("sage", 20.0)])
def test_backend_against_exact_attention(backend: str, tolerance: float, packed: bool) -> None:
    """Output and gradients are compared. The unit of `tolerance` is the error of the exact formula evaluated on bf16
    results."""
    device = torch.device("cuda")
    config = AttentionConfig(backend=backend)
    name, _ = resolve_backend(config, SHAPE, device=device, dtype=torch.bfloat16)
    attend = attention_function(name, config, device)
    exact = attention_function("reference", config, device)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device) if packed else None
    layout = token_layout({attend.documents}, 2, 1024, None, None, cu_seqlens, 312 if packed else None)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, 512, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    results = []
    for function, dtype in ((exact, torch.float64), (attend, torch.bfloat16)):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        o = function(*leaves, layout)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))])
    for what, truth, actual in zip(("o", "dq", "dk", "dv"), *results, strict=True):
        error = (actual.double() - truth).norm() / truth.norm()
        assert error < 0.005 * tolerance, f"{what} of {backend}: {error:.4f}"


# Documents are compiled by INT8 attention in the first pass, and whole sequences by sdpa.
@pytest.mark.parametrize(("backend", "packed"), [
    ("sage", True), ("sdpa", False), pytest.param("sage", False, marks=pytest.mark.long),
    pytest.param("sdpa", True, marks=pytest.mark.long),
])  # fmt: skip
def test_compiled_model_equals_eager(backend: str, packed: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tokens = torch.randint(0, 1024, (2, 512), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    packing = {}
    if packed:
        packing = {"cu_seqlens": torch.tensor(CU_SEQLENS, dtype=torch.int32, device="cuda"), "max_seqlen": 312}
    results = []
    for compiled in (False, True):
        model = tiny.transformer(
            SHAPE,
            AttentionConfig(backend=backend),
            vocab_size=1024,
            groups=SINGLE,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
        )
        if compiled:
            compile_blocks(model)
        loss = model(tokens, tokens, **packing)
        loss.backward()
        results.append((loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}))
    assert not torch._dynamo.utils.counters["graph_break"]
    (eager, eager_gradients), (fused, fused_gradients) = results
    assert fused == pytest.approx(eager, rel=1e-3)
    for name, gradient in eager_gradients.items():
        assert (fused_gradients[name] - gradient).norm() < 0.1 * gradient.norm(), name


def test_embeddings_of_values_are_beside_those_in_fp32() -> None:
    """Tables and gates get gradients in compiled blocks in bf16. The fp32 model is not compiled."""
    shape, draw = SHAPE.model_copy(update={"value_embeddings": True}), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1024, (2, 512), generator=draw).cuda()
    place = {"vocab_size": 1024, "groups": SINGLE, "device": torch.device("cuda")}
    wide, narrow = (
        tiny.transformer(shape, AttentionConfig(backend="sdpa"), dtype=dtype, **place)
        for dtype in (torch.float32, torch.bfloat16)
    )
    torch.nn.init.normal_(narrow.get_parameter("blocks.1.attention.gates.values"), std=0.1)
    wide.load_state_dict(narrow.state_dict())
    compile_blocks(narrow)
    losses = [model(tokens, tokens) for model in (wide, narrow)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    exact = dict(wide.named_parameters())
    assert {name.rpartition("attention.")[2] for name in exact} >= {"values", "gates.values"}
    for name, parameter in narrow.named_parameters():
        error = (parameter.grad.float() - exact[name].grad).norm() / exact[name].grad.norm()
        assert error < 0.03, f"{name}: {error:.4f}"


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels give the same bits each time. torch.empty is filled with nan then."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("again", [pytest.param("full", marks=pytest.mark.long), "attention"])
def test_activations_in_host_memory_change_no_bit(deterministic: None, again: str) -> None:
    """The GPU is busy before copies, so that whoever reads memory before a copy has ended reads old values."""
    shape = SHAPE.model_copy(update={"num_layers": 6})
    draw = torch.Generator("cuda").manual_seed(0)
    batches = [torch.randint(0, 1024, (2, 513), device="cuda", generator=draw) for _ in range(3)]
    found = []
    for seed in (None, 1, 2):
        place = {"groups": SINGLE, "dtype": torch.bfloat16, "device": torch.device("cuda")}
        how = {"vocab_size": 1024, "activation_checkpointing": again}
        model = tiny.transformer(shape, AttentionConfig(backend="sage"), **how, **place)
        compile_blocks(model, "aot_eager_decomp_partition")
        model.offload = None if seed is None else ActivationOffload.on(place["device"])
        with nullcontext() if seed is None else late_copies.busy(seed):
            for tokens in batches:
                model(tokens[:, :-1], tokens[:, 1:]).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        pinned = [place for places in model.offload._places.values() for place in places] if model.offload else []
        assert bool(pinned) == (seed is not None) and all(place.is_pinned() for place in pinned)
    for plain, *others in zip(*found, strict=True):
        assert all(other.equal(plain) for other in others)


@pytest.mark.parametrize("backend", ["sdpa", "sage"])
def test_a_micro_batch_never_waits_for_the_gpu(backend: str) -> None:
    tokens, cu_seqlens = torch.zeros(2, 512, dtype=torch.long), torch.tensor(CU_SEQLENS, dtype=torch.int32)
    batch = Batch(tokens, tokens, positions=None, cu_seqlens=cu_seqlens, max_seqlen=312, sample_ids=[0, 1])
    place = {"groups": SINGLE, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    model = tiny.transformer(SHAPE, AttentionConfig(backend=backend), vocab_size=1024, **place)
    for mode in ("default", "error"):  # The first pass compiles the kernels.
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model(**batch.inputs(place["device"])).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
def test_loss_is_accurate_and_needs_no_full_logits(compiled: bool) -> None:
    tokens, hidden_size, vocab = 16384, 256, 32000
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, device="cuda") / 16).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    linear_cross_entropy(hidden, weight, labels, SINGLE, compiled=compiled)  # This call compiles.
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, labels, SINGLE, compiled=compiled)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    peak = torch.cuda.max_memory_allocated() - before
    if compiled:
        assert peak < 4 * tokens * vocab, "more than all logits in fp32"

    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    truth = F.cross_entropy(F.linear(*exact), labels)
    expected = torch.autograd.grad(truth, exact)
    assert loss.item() == pytest.approx(truth.item(), rel=1e-4)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert (actual.float() - wanted).norm() < 0.01 * wanted.norm()


def _gathered_errors() -> dict[str, float]:
    """Return the largest error of a gradient, relative to that of one GPU, by attention function and documents."""
    device = over_nccl()
    shape = ModelConfig(num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=1, head_dim=128)
    groups, found = ParallelGroups.create(Topology(2, 1, 2, context_gather=2)), {}
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 512, (1024 + 1,), generator=draw).numpy() for _ in range(2)]
    samples = [Sample(each, starts, 0, None) for each, starts in zip(tokens, ([100, 700], [513]), strict=True)]
    for backend in ("sage", "sdpa"):
        for documents in (False, True):
            batch, grads = batch_of(samples, documents, documents), []
            for place in (ParallelGroups.single(), groups):
                attention = AttentionConfig(backend=backend, recipe="scores")
                how = {"groups": place, "seed": 3, "device": device, "dtype": torch.bfloat16}
                model = tiny.transformer(shape, attention, vocab_size=512, **how)
                model(**batch.inputs(device, place)).backward()
                grads.append([parameter.grad.float() for parameter in model.parameters()])
            for grad in grads[1]:
                dist.all_reduce(grad, op=dist.ReduceOp.AVG)
            pairs = zip(*grads, strict=True)
            found[f"{backend}, documents {documents}"] = max(float((a - b).norm() / a.norm()) for a, b in pairs)
    return found


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_that_gather_keys_are_like_one() -> None:
    for found in run_distributed(_gathered_errors, 2):
        assert max(found.values()) < 0.05, found

"""Ulysses context parallelism: slices of every sequence on several ranks give the loss and the gradients of one rank.

Training in this layout is tested beside the other layouts: test_engine.py, test_checkpoint.py, test_resume.py.
"""

import pytest
import torch
from torch import Tensor

import tiny
from counted import block_activation_bytes, run_config, saved_bytes_per_token
from distributed import of_first_rank, run_distributed
from sagekernels import sage_attention
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.config.sections.model import WindowsConfig
from sagetrain.data.batch import Batch
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.collectives import gather_heads, scatter_heads
from sagetrain.parallel.topology import ParallelGroups, Topology

VOCAB, SEQUENCES, LENGTH = 128, 2, 64
SHAPE = ModelConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=48, num_attention_heads=8, num_key_value_heads=4, head_dim=16
)
WINDOWS = WindowsConfig(tokens=21, pattern="WF")
DOCUMENTS = (7, 9, 30, 18, 33, 31)
"""The lengths of documents in tokens. Some end at the edge of a slice, some lie across it."""


def batch(documents: bool) -> Batch:
    text = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS]).view(SEQUENCES, LENGTH)
    return Batch(
        text[:, :-1].contiguous(),
        text[:, 1:].contiguous(),
        positions=positions if documents else None,
        cu_seqlens=cu_seqlens() if documents else None,
        max_seqlen=LENGTH if documents else None,
        sample_ids=[0, 1],
    )


def cu_seqlens() -> Tensor:
    return torch.tensor([0, *DOCUMENTS, 0]).cumsum(0).int()


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(groups: ParallelGroups, backend: str, shape: ModelConfig = SHAPE, **arguments: object) -> Transformer:
    shape = shape.model_copy(update={"value_embeddings": backend == "sdpa"})
    network = tiny.transformer(shape, AttentionConfig(backend=backend), vocab_size=VOCAB, groups=groups, **arguments)
    return tiny.enlarged(network, groups)


def in_half(inputs: dict, number: int) -> dict:
    """Return the inputs of one of two sequences."""
    rows = {name: x[number : number + 1] for name, x in inputs.items() if torch.is_tensor(x) and x.ndim == 2}
    documents = inputs["cu_seqlens"]
    if documents is not None:
        rows["cu_seqlens"] = (documents - number * LENGTH).clamp(0, LENGTH)
    return {**inputs, **rows}


def check_model(
    groups: ParallelGroups, backend: str, documents: bool, shape: ModelConfig = SHAPE, **arguments: object
) -> None:
    """Compare one forward and backward pass with the model on one rank: the mean loss, and gradients averaged as
    DeepSpeed does."""
    dense, sliced = model(ParallelGroups.single(), backend, shape), model(groups, backend, shape, **arguments)
    ours, theirs = batch(documents).inputs("cpu", groups), batch(documents).inputs("cpu")
    assert ours["tokens"].shape == (SEQUENCES, LENGTH // groups.cp_size)
    # Under tensor parallelism the halves of packed sequences are smoothed by their own means.
    halves = [in_half(theirs, i) for i in range(2)] if groups.tp_size > 1 else [theirs]
    case = f"tp {groups.tp_size}, cp {groups.cp_size}, {backend}, documents {documents}, {shape}, {arguments}"
    # A product of fewer rows rounds differently, and that moves an INT8 code by one step now and then.
    limits = (1e-5, 1e-2) if backend == "sage" else (1e-6, 1e-6 if groups.tp_size == 1 else 1e-5)
    tiny.check_slices(dense, lambda: torch.stack([dense(**half) for half in halves]).mean(), sliced, ours, limits, case)


def check_sage(groups: ParallelGroups, documents: bool, key_heads: int = 4, dtype: torch.dtype = torch.float32) -> None:
    """Check that INT8 attention on slices of q, k and v has bit by bit the output and gradients of attention over whole
    sequences, a share of the heads at a time. K-smoothing subtracts an exact mean, which is large here and different in
    every slice.

    Where ranks have copies of a key head, dK and dV are sums over the copies. In bf16 o and dQ then also have the bits
    of attention over all heads at a time. In fp32 the CPU's products of another number of heads round differently.
    """
    length = LENGTH // groups.cp_size
    own = slice(groups.cp_rank * length, (groups.cp_rank + 1) * length)
    whole = [random(seed, SEQUENCES, LENGTH, heads, 16) for seed, heads in enumerate((8, key_heads, key_heads, 8))]
    whole[1] += torch.arange(LENGTH).view(-1, 1, 1) / 8
    whole = [x.to(dtype).requires_grad_() for x in whole]
    parts = [x.detach()[:, own].flatten(0, 1).requires_grad_() for x in whole]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not documents:
            return sage_attention(q, k, v)
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
        return sage_attention(q, k, v, cu_seqlens=cu_seqlens()).view(SEQUENCES, LENGTH, -1, 16)

    copies = max(1, groups.cp_size // key_heads)
    repeated = [whole[0], *(x.repeat_interleave(copies, 2) for x in whole[1:3])]
    parts_of = [x.chunk(groups.cp_size, 2) for x in repeated]
    shares = [[x.contiguous() for x in share] for share in zip(*parts_of, strict=True)]

    def by_one() -> list[Tensor]:
        o = torch.cat([attend(*share) for share in shares], 2)
        return [o, *torch.autograd.grad(o, whole[:3], whole[3].detach())]

    def all_heads() -> list[Tensor]:
        o = attend(*whole[:3])
        return [o, *torch.autograd.grad(o, whole[:1], whole[3].detach())]

    o, *grads = of_first_rank(by_one)
    scattered = scatter_heads(parts[:3], SEQUENCES, groups)
    for x, part in zip(shares[groups.cp_rank], scattered, strict=True):
        assert torch.equal(part, x)
    o_own = gather_heads(attend(*scattered), groups)
    ours = o_own, *torch.autograd.grad(o_own, parts[:3], parts[3].detach())
    for number, (x, part) in enumerate(zip((o, *grads), ours, strict=True)):
        if copies == 1 or number < 2:
            assert torch.equal(part, x[:, own].flatten(0, 1))
        else:
            error = (part - x[:, own].flatten(0, 1)).norm() / part.norm()
            assert error < (1e-6 if dtype == torch.float32 else 1e-2)
    if dtype == torch.bfloat16:
        for x, part in zip(of_first_rank(all_heads), ours, strict=False):
            assert torch.equal(part, x[:, own].flatten(0, 1))


def check_copies(groups: ParallelGroups, key_heads: int) -> None:
    """Check attention, and a model with a window layer, in which ranks have copies of key heads."""
    shape = SHAPE.model_copy(update={"num_key_value_heads": key_heads, "windows": WINDOWS})
    if groups.tp_size == 1:
        check_sage(groups, True, key_heads)
        check_sage(groups, False, key_heads, torch.bfloat16)
    for backend, documents in (("sdpa", True), ("sage", False)):
        check_model(groups, backend, documents, shape)


def check_sums(groups: ParallelGroups) -> None:
    """Check that gradients of copies in bf16 are added up in fp32, and rounded once. Added up in bf16, one after the
    other, these are 1."""
    k = torch.zeros(LENGTH, 1, 16, dtype=torch.bfloat16, requires_grad=True)
    (copy,) = scatter_heads([k], 1, groups)
    copy.backward(torch.full_like(copy, 1.0 if groups.cp_rank == 0 else 2**-9))
    assert (k.grad == 1 + 2**-6).all()


def check_compiled(groups: ParallelGroups) -> None:
    """Check that the all-to-alls inside the compiled blocks break no graph and change no number."""
    results = []
    for compiled in (False, True):
        network = model(groups, "sage")
        if compiled:
            tiny.compile_first_rank(network)
        loss = network(**batch(True).inputs("cpu", groups))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in network.parameters())])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def in_four_processes() -> None:
    """Run all checks of numbers."""
    torch.set_num_threads(1)
    for tp, cp, repeated in ((1, 4, (1, 2)), (1, 2, (1,)), (2, 2, (2,))):
        groups = ParallelGroups.create(Topology(4, tp, cp))
        for documents in (False, True):
            if tp == 1:  # Attention on its own does not see tensor parallelism.
                check_sage(groups, documents)
            for backend in ("sdpa", "sage") if cp == 4 else ("sage",) if documents else ("sdpa",) if tp == 2 else ():
                check_model(groups, backend, documents)
        for key_heads in repeated:
            check_copies(groups, key_heads)
        check_model(groups, "sage", True, SHAPE.model_copy(update={"sinks": True, "windows": WINDOWS}))
    for how in ("full", "selective"):
        check_model(groups, "sdpa", True, sequence_parallel=True, activation_checkpointing=how)
    check_compiled(groups)
    with pytest.raises(ValueError, match=r"8 heads and 4 key/value heads do not divide among tensor_parallel_size \(4"):
        model(ParallelGroups(Topology(16, 4, 4), rank=0), "sdpa")


def in_eight_processes() -> None:
    """Check copies of key heads on as many ranks as there are query heads."""
    torch.set_num_threads(1)
    groups = ParallelGroups.create(Topology(8, 1, 8))
    check_copies(groups, 1)
    check_sums(groups)
    check_copies(ParallelGroups.create(Topology(8, 2, 4)), 2)


def memory_cases() -> list:
    sections = {"parallel": {"context_parallel_size": 2}, "data": {"micro_batch_size": 4}}
    kinds = (("sage", "off", 4), ("sdpa", "off", 1), ("sage", "on", 1))
    return [
        run_config(
            attention={"backend": name},
            training={"compile": c},
            model={"num_key_value_heads": n, "sinks": n == 4},
            **sections,
        )
        for name, c, n in kinds
    ]


def saved_in_two_processes() -> list[float]:
    """Return the bytes per token that autograd saves for a block with a context-parallel size of 2."""
    torch.set_num_threads(1)
    groups = ParallelGroups.create(Topology(2, 1, 2))
    first = groups.rank == 0  # The other rank calls the same collectives from Python, and compiles nothing.
    return [saved_bytes_per_token(cfg, first and cfg.training.compile == "on", groups) for cfg in memory_cases()]


def test_slices_give_the_losses_and_gradients_of_sequences() -> None:
    run_distributed(in_four_processes, 4)


def test_ranks_beyond_the_key_heads_have_copies_of_them() -> None:
    run_distributed(in_eight_processes, 8)


def test_saved_activations_of_slices_are_what_is_predicted() -> None:
    saved = run_distributed(saved_in_two_processes, 2)[0]
    assert saved == pytest.approx([block_activation_bytes(cfg) for cfg in memory_cases()], rel=1e-3)

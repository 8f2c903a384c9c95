"""Context parallelism past the query heads: ranks that gather keys give the loss and the gradients of one rank."""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiny
from counted import block_activation_bytes, run_config, saved_bytes_per_token
from distributed import run_distributed
from kernel_inputs import chunk_bounds
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.config.sections.model import WindowsConfig
from sagetrain.data.batch import Batch
from sagetrain.engines.step import Engine
from sagetrain.model.backends import Reference, Sdpa, VarlenSdpa, token_layout
from sagetrain.model.chunk_layouts import with_chunks
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups, Topology

VOCAB, SEQUENCES = 128, 2


def topology(world: int, cp: int, gather: int, tp: int = 1) -> Topology:
    return Topology(world, tp, cp, context_gather=gather)


@pytest.mark.parametrize(("cp", "gather"), [(2, 2), (4, 2), (4, 4), (6, 2), (6, 6)])
def test_ranks_have_all_tokens_and_equal_work(cp: int, gather: int) -> None:
    """The ranks of a gather have the same number of keys to see. Ulysses neighbours have neighbouring parts."""
    length, found = 48, []
    shape = topology(cp, cp, gather)
    for rank in range(cp):
        own = torch.cat([torch.arange(length)[place] for place in shape.places(rank, length)])
        assert len(own) == length // cp and own.equal(own.sort().values)
        found.append(own)
    assert torch.cat(found).sort().values.equal(torch.arange(length))
    work = [sum(int(found[rank].sum()) for rank in shape.ulysses_ranks(first)) for first in range(0, cp, cp // gather)]
    assert len(set(work)) == 1
    assert all(rank in shape.gather_ranks(rank) and rank in shape.ulysses_ranks(rank) for rank in range(cp))


def by_document(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int,
    window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Compute what torch's varlen_attn does on a GPU: each document is a call, with the queries at the ends of the
    keys."""
    found = []
    for a, b, c, d in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
        own, seen = slice(int(a), int(b)), slice(int(c), int(d))
        assert b - a <= max_q and d - c <= max_k
        i, j = torch.arange(d - c - (b - a), d - c)[:, None], torch.arange(d - c)
        mask = (j <= i) & ((j >= i - window_size[0]) if window_size[0] >= 0 else True)
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q[own], k[seen], v[seen])]
        o = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=enable_gqa)
        found.append(o.squeeze(0).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [None, (0, 3, 9, 16, 17, 24, 40, 40, 48, 48)])
def test_chunks_of_queries_see_what_the_whole_sees(documents: tuple[int, ...] | None, window: int | None) -> None:
    """Two sequences of 24 tokens are cut into chunks of 4."""
    length, size, draw = 24, 4, torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(SEQUENCES, length, heads, 16, generator=draw) for heads in (2, 1, 1))
    tables, given = torch.zeros(2, 48, 1, 8), None if documents is None else torch.tensor(documents, dtype=torch.int32)
    functions = Reference(), Sdpa(), VarlenSdpa(by_document, True, True)
    wanted = {"bounds", *(function.wants(window is not None) for function in functions)}
    layout = token_layout(wanted, SEQUENCES, 48, *tables, given, None, window)
    whole = Reference()(q, k, v, layout)
    for rank in range(3):
        chunks = with_chunks(layout, wanted, length, rank, 3).chunks
        for number, chunk in zip((rank, 5 - rank), chunks, strict=True):
            own, end = slice(number * size, (number + 1) * size), (number + 1) * size
            for function in functions:
                o = function(q[:, own], k[:, :end], v[:, :end], chunk)
                torch.testing.assert_close(o, whole[:, own], rtol=0, atol=1e-6)
            if documents is not None and window is None:
                cut = [[min(b, s + end) - max(a, s) for a, b in pairwise(documents)] for s in (0, length)]
                lengths = [[n for n in row if n > 0] for row in cut]
                assert chunk.bounds.equal(chunk_bounds(size, end, lengths)), number


def batch(length: int, documents: bool) -> Batch:
    text = torch.randint(0, VOCAB, (SEQUENCES, length + 1), generator=torch.Generator().manual_seed(5))
    # Documents end inside of chunks and at their edges, one spans several chunks, and one is a token.
    ends = [0, 9, length // 4, length // 4 + 1, length, length + length // 8, 2 * length]
    lengths = [b - a for a, b in pairwise(ends)]
    positions = torch.cat([torch.arange(n) for n in lengths]).view(SEQUENCES, length)
    labels = text[:, 1:].clone()
    labels[:, ::7] = -100
    counted = int((labels >= 0).sum())
    bounds = torch.tensor([*ends, 2 * length, 2 * length], dtype=torch.int32)
    return Batch(
        text[:, :-1].contiguous(), labels, positions if documents else None, bounds if documents else None,
        length if documents else None, [0, 1], divisor=counted,
    )  # fmt: skip


def model(groups: ParallelGroups, backend: str, heads: tuple[int, int], windows: bool, **how: object) -> Transformer:
    """Build a model with larger weights, which are the same in every layout."""
    shape = ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=16,
        windows=WindowsConfig(tokens=21, pattern="WF") if windows else None,
        sinks=windows and backend == "sage",
        value_embeddings=True,
    )
    name, _, smooth = backend.partition(" ")
    # Without K-smoothing codes are those of one rank. With it a chunk has the mean of the keys up to its end.
    attention = AttentionConfig(backend=name, recipe="scores", smooth_k=bool(smooth))
    return tiny.enlarged(tiny.transformer(shape, attention, vocab_size=VOCAB, groups=groups, **how), groups)


class Case(NamedTuple):
    """A layout, and the model and data in it."""

    tp: int
    cp: int
    gather: int
    backend: str
    heads: tuple[int, int]
    documents: bool
    windows: bool = False
    compiled: bool = False
    how: dict[str, object] = {}


def check_model(case: Case, groups: ParallelGroups) -> None:
    """Compare the loss and the gradients with those of one rank."""
    which = case.backend, case.heads, case.windows
    dense, cut = model(ParallelGroups.single(), *which), model(groups, *which, **case.how)
    if case.compiled:
        tiny.compile_first_rank(cut)
    data = batch(32 * case.gather, case.documents)
    # A product of fewer rows rounds differently, and that moves an INT8 code by one step now and then.
    exact = (1e-6, 1e-6) if groups.tp_size == 1 else (1e-6, 1e-5)
    limits = {"sage": (1e-5, 1e-2), "sage smooth": (1e-3, 0.03)}.get(case.backend, exact)
    tiny.check_slices(dense, lambda: dense(**data.inputs("cpu")), cut, data.inputs("cpu", groups), limits, case)


def in_processes(cases: list[Case]) -> None:
    torch.set_num_threads(1)
    made: dict[tuple[int, int, int], ParallelGroups] = {}
    for case in cases:
        sizes = case.tp, case.cp, case.gather
        made[sizes] = made.get(sizes) or ParallelGroups.create(
            topology(dist.get_world_size(), case.cp, case.gather, case.tp)
        )
        check_model(case, made[sizes])


def test_two_ranks_that_gather_keys_are_like_one() -> None:
    run_distributed(in_processes, 2, [
        Case(1, 2, 2, "sdpa", (1, 1), False),
        Case(1, 2, 2, "sdpa", (1, 1), True, windows=True),
        Case(1, 2, 2, "sage smooth", (1, 1), False),
        Case(1, 2, 2, "sage", (1, 1), True, windows=True),
        Case(1, 2, 2, "reference", (1, 1), True),
        Case(1, 2, 2, "sdpa", (1, 1), True, how={"activation_checkpointing": "selective"}),
        Case(1, 2, 2, "sage", (1, 1), True, compiled=True),
    ])  # fmt: skip


def test_four_ranks_that_gather_keys_are_like_one() -> None:
    run_distributed(in_processes, 4, [
        Case(1, 4, 2, "sdpa", (2, 1), True),
        Case(1, 4, 2, "sage", (2, 2), False),
        Case(1, 4, 4, "sdpa", (1, 1), False, windows=True),
        Case(1, 4, 4, "sage", (1, 1), True),
        Case(2, 2, 2, "sdpa", (2, 2), True, how={"sequence_parallel": True, "overlap": True}),
    ])  # fmt: skip


# -- engines -----------------------------------------------------------------------------------------------------------

MODEL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sinks": True}
LAYOUTS: dict[str, tuple[int, int, dict[str, object]]] = {
    "gather, recomputed": (4, 2, {"zero_stage": 1}),
    "copies, ZeRO 3": (2, 1, {"zero_stage": 3}),
}
"""The context-parallel size, the ranks that gather keys, and the rest of the layout."""


def engine(name: str, seed: int) -> Engine:
    cp, gather, parallel = LAYOUTS[name]
    again = {"activation_checkpointing": "full", "activation_offload": True} if "recomputed" in name else {}
    sections = {"model": MODEL, "attention": {"backend": "reference"}, "training": again}
    return tiny.engine(
        tiny.config(1, optimizer={"eps": 1e-6}, parallel={"engine": "fsdp", **parallel}, **sections),
        tiny.join(1, cp, gather=gather),
        seed,
    )


def saved_and_continued(root: str) -> dict[object, list[float]]:
    later, resumed = tiny.saved_and_continued(Path(root), [*LAYOUTS], engine, lambda name: False)
    return later | resumed


def test_checkpoints_continue_at_any_layout(tmp_path: Path) -> None:
    for rank in run_distributed(saved_and_continued, 4, str(tmp_path)):
        for name, losses in rank.items():
            assert losses == pytest.approx(rank["copies, ZeRO 3"], rel=1e-4), name


def saved_bytes() -> tuple[float, int]:
    """Return the bytes per token that a block saves and that are predicted. Without a GPU, sdpa saves masks too."""
    cfg = run_config(
        attention={"backend": "sage", "recipe": "scores"},
        model={"num_attention_heads": 1, "head_dim": 64},
        parallel={"context_parallel_size": 2},
        data={"micro_batch_size": 4},
        training={"compile": "off"},
    )
    return saved_bytes_per_token(cfg, False, tiny.join(1, 2, gather=2)), block_activation_bytes(cfg)


def test_saved_activations_are_what_is_predicted() -> None:
    for saved, predicted in run_distributed(saved_bytes, 2):
        assert saved == pytest.approx(predicted, rel=1e-3)

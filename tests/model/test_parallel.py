"""The whole model under tensor, sequence and data parallelism agrees with the one-process model, on gloo, in fp32."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiny
from distributed import of_first_rank, run_distributed
from sagekernels import qk_norm_rope
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.backends import Projected, Sdpa, TokenLayout
from sagetrain.model.compile import compile_blocks
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.layers import shard
from sagetrain.parallel.topology import ParallelGroups, Topology

VOCAB, SEQUENCES, LENGTH = 128, 4, 16
SHAPE = ModelConfig(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    value_embeddings=True,
)
PACKED = {
    "cu_seqlens": torch.tensor([0, 5, 16, 32, 41, 48, 64, 64], dtype=torch.int32),
    "positions": torch.cat([torch.arange(n) for n in (5, 11, 16, 9, 7, 16)]).view(SEQUENCES, LENGTH),
}


def _model(groups: ParallelGroups, *, tied: bool, qk_norm: str = "before_rope", **arguments: object) -> Transformer:
    shape = SHAPE.model_copy(update={"tie_embeddings": tied})
    attention = AttentionConfig(backend="sdpa", qk_norm=qk_norm)
    return tiny.transformer(shape, attention, vocab_size=VOCAB, groups=groups, seed=11, **arguments)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100)
    # Every shard has some of the tokens.
    text = torch.randint(0, VOCAB // 8, (SEQUENCES, LENGTH + 1), generator=generator) * 8 + 3
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _equal_on_all_ranks(x: Tensor, groups: ParallelGroups) -> bool:
    copies = [torch.empty_like(x) for _ in range(groups.tp_size)]
    dist.all_gather(copies, x.contiguous(), group=groups.tp_group)
    return all(torch.equal(copies[0], copy) for copy in copies)


class NormedSdpa(Sdpa):
    """Exact attention that applies QK-norm and the rotary embedding itself."""

    normalizes = True

    def normed(self, projected: Projected, layout: TokenLayout) -> Tensor:
        *qkv, q_gain, k_gain, eps = projected
        qkv = qk_norm_rope(*qkv, q_gain, k_gain, layout.cos, layout.sin, eps)
        return self(*(x.unflatten(0, (layout.num_sequences, -1)) for x in qkv), layout)


def _check_model(groups: ParallelGroups, packing: dict, normalizing: bool = False, **arguments: object) -> None:
    dense = _model(ParallelGroups.single(), **{k: v for k, v in arguments.items() if k in ("tied", "qk_norm")})
    sharded = _model(groups, **arguments)
    for block in sharded.blocks if normalizing else ():
        block.attention.function = NormedSdpa()
    pairs = list(zip(dense.named_parameters(), sharded.parameters(), strict=True))
    for (name, whole), part in pairs:
        spec = sharded.specs[name]
        assert torch.equal(shard(whole, spec.dim, groups), part), f"{name} starts otherwise than the dense one"
        assert spec.shape == tuple(whole.shape)

    single = ParallelGroups.single()
    tiny.enlarged(dense, single, 0.2)
    tiny.enlarged(sharded, groups, 0.2)
    tokens, labels = _batch()

    def by_one() -> list[Tensor]:
        truth = dense(tokens, labels, **packing)
        truth.backward()
        return [truth, *(parameter.grad for parameter in dense.parameters()), dense(tokens, **packing)]

    truth, *grads, logits = of_first_rank(by_one)
    loss = sharded(tokens, labels, **packing)
    loss.backward()
    torch.testing.assert_close(loss, truth, rtol=1e-6, atol=0)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0  # Every collective that was started was finished.
    assert _equal_on_all_ranks(loss.detach(), groups)
    for (name, part), whole in zip(sharded.named_parameters(), grads, strict=True):
        expected = shard(whole, sharded.specs[name].dim, groups)
        error = (part.grad - expected).norm() / whole.norm()
        assert error < 1e-5, f"gradient of {name} off by {error:.1e} with {arguments}"
        if sharded.specs[name].cut is None:
            assert _equal_on_all_ranks(part.grad, groups), f"gradient of {name} differs between the ranks"
    with torch.no_grad():
        torch.testing.assert_close(sharded(tokens, **packing), logits, rtol=1e-5, atol=1e-5)


def _check_compiled(groups: ParallelGroups, sequence_parallel: bool, overlap: bool, ways: tuple[str, ...]) -> None:
    """Check that collectives inside the compiled blocks break no graph and change no number, and that selective
    recomputation changes no bit. Collectives whose results are needed again run again."""
    plain, compiles = [], compile_blocks if "selective" in ways else tiny.compile_first_rank
    for compiled in (False, True):
        results = {}
        for how in ways if compiled else ("none", *ways):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            place = {"sequence_parallel": sequence_parallel, "overlap": overlap, "activation_checkpointing": how}
            model = _model(groups, tied=True, **place)
            if compiled:
                compiles(model, "aot_eager")  # This backend needs no C++ compiler.
            loss = model(*_batch(), **PACKED)
            loss.backward()
            results[how] = [loss.detach(), *(p.grad for p in model.parameters())]
            torch.testing.assert_close(results[how], results[next(iter(results))], rtol=0, atol=0)
            # The blocks that add embeddings to values share a graph, and so do the norms outside of blocks.
            if compiled and how == ways[0] and groups.rank == 0:
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
            # Every collective that was started was finished.
            assert torch._C._distributed_c10d._get_work_registry_size() == 0
        plain.append(results[how])
    torch.testing.assert_close(*plain, rtol=1e-5, atol=1e-7)


def _check_tensor_parallel(tp_size: int) -> None:
    groups = ParallelGroups.create(Topology(dist.get_world_size(), tp_size))
    _check_model(groups, {}, tied=False)
    _check_model(groups, PACKED, tied=True, sequence_parallel=True, activation_checkpointing="full")
    if tp_size == 2:
        _check_model(groups, PACKED, tied=True, qk_norm="after_rope")
        _check_model(groups, {}, tied=False, sequence_parallel=True, qk_norm="none")
        _check_model(groups, {}, tied=True, activation_checkpointing=1)
        _check_model(groups, PACKED, tied=True, overlap=False, normalizing=True)
        _check_model(groups, {}, tied=True, sequence_parallel=True, normalizing=True)
        _check_model(groups, PACKED, tied=False, overlap=False, sequence_parallel=True)
        _check_compiled(groups, True, True, ("selective",))
        _check_compiled(groups, False, False, ("none",))
    with pytest.raises(ValueError, match="not a multiple of tensor_parallel_size"):
        tiny.transformer(SHAPE, AttentionConfig(backend="sdpa"), vocab_size=VOCAB + 1, groups=groups)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_model_equals_dense(tp_size: int) -> None:
    run_distributed(_check_tensor_parallel, tp_size, tp_size)

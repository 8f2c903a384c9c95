"""DeepSpeed's ZeRO 3 builds the model partitioned. No rank ever holds the whole model, and its values are those of any
other layout."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from distributed import run_distributed
from process_memory import peak_of, return_what_is_freed
from sagetrain.costs.accounting import num_parameters
from sagetrain.costs.memory import memory_per_rank
from sagetrain.parallel.layers import shard
from sagetrain.parallel.topology import ParallelGroups

# The weights take 403 MB in fp32.
BY_DEEPSPEED = {"engine": "deepspeed"}
MODEL = {"num_layers": 24, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8}


def build() -> tuple[int, int, int]:
    """Return three numbers of bytes: the most that this rank took to build the model, what it holds of the model then,
    and plan's weights."""
    return_what_is_freed()
    groups = tiny.join(1)
    cfg = tiny.config(3, model=MODEL, parallel=BY_DEEPSPEED)
    # This loads libraries, and makes what DeepSpeed makes once.
    tiny.model(tiny.config(3, parallel=BY_DEEPSPEED), groups)
    built = []
    peak = peak_of(lambda: built.append(tiny.model(cfg, groups)))
    held = sum(p.ds_tensor.untyped_storage().nbytes() for p in built[0].parameters())
    return peak, held, sum(item.bytes for item in memory_per_rank(cfg, 2, tiny.VOCAB) if "weights" in item.name)


def test_no_rank_ever_holds_the_whole_model() -> None:
    for peak, held, estimated in run_distributed(build, 2):
        cfg = tiny.config(3, model=MODEL, parallel=BY_DEEPSPEED)
        whole = 4 * num_parameters(cfg.model, cfg.attention, tiny.VOCAB)
        print(f"{whole / 2**20:.0f} MiB: {held / 2**20:.0f} held, at most {peak / 2**20:.0f} while it was built")
        assert held == pytest.approx(whole / 2, rel=0.01)
        assert peak < 0.75 * whole  # The rank holds half of the model, and a few parameters that are drawn at a time.
        assert peak < estimated  # The estimate includes the weights gathered in a step, at least the largest one.


def values(tp_size: int) -> bool:
    """Return whether every rank's part of the fp32 weights is that of the model which one process builds."""
    groups = tiny.join(tp_size)
    equal = []
    for tie, dtype in ((True, "fp32"), (False, "bf16")):
        cfg = tiny.config(3, dtype, model={"tie_embeddings": tie}, parallel=BY_DEEPSPEED)
        engine = tiny.engine(cfg, groups)
        single, kind = ParallelGroups.single(), torch.bfloat16 if dtype == "bf16" else torch.float32
        whole = tiny.transformer(cfg.model, cfg.attention, vocab_size=tiny.VOCAB, groups=single, seed=3, dtype=kind)
        for part, (name, parameter) in zip(engine.owned(), whole.named_parameters(), strict=True):
            assert (part.name, part.spec.shape) == (name, tuple(parameter.shape))
            own = shard(parameter.detach(), part.spec.dim, groups).flatten()[part.start : part.stop].float()
            equal.append(torch.equal(part.weight, own))
    return len(equal) > 30 and all(equal)


@pytest.mark.parametrize(("world", "tp_size"), [(2, 1), (4, 2)])
def test_initial_values_do_not_depend_on_the_layout(world: int, tp_size: int) -> None:
    assert all(run_distributed(values, world, tp_size))


def losses_after_loading() -> list[float]:
    """Return the losses of two steps in recomputed halves, after the weights were set as a resume sets them."""
    again, spread = {"activation_checkpointing": "full"}, {"tensor_parallel_size": 2, "sequence_parallel": True}
    engine = tiny.engine(tiny.config(3, parallel={**BY_DEEPSPEED, **spread}, training=again), tiny.join(2))
    engine.state_changed(0)
    return [tiny.global_step(engine, step).loss for step in range(2)]


def test_recomputed_halves_go_on_from_a_checkpoint() -> None:
    """Blocks that normalize for the next one found its gain given back, where no block is compiled."""
    assert all(math.isfinite(loss) for rank in run_distributed(losses_after_loading, 2) for loss in rank)

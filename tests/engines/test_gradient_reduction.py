"""Gradients are summed over micro-batches and over ranks in several ways. The tests hold which ways give the same
losses to the last bit, when ranks exchange gradients, and that a continued run repeats its losses."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from distributed import run_distributed
from sagetrain.checkpoint import on_disk, reading
from sagetrain.checkpoint.reading import Reader
from sagetrain.config import ConfigError
from sagetrain.config.rules import fit
from sagetrain.engines import deepspeed as engine_module
from sagetrain.engines.protocol import Engine
from sagetrain.engines.reduction import REPLACED, check
from sagetrain.parallel.rng import rng_state

BY_DEEPSPEED = {"engine": "deepspeed"}
LATER = {"bf16": {"enabled": True, "immediate_grad_update": False}}
OVERLAP, SYNC, OWNERS = {"overlap_comm": True}, {"overlap_comm": False}, {"use_multi_rank_bucket_allreduce": False}
SMALL = {"reduce_bucket_size": 8000}  # The model has some 25,000 parameters.
WAYS = {
    "1": (1, "fp32", {}, {}),
    "1, added later": (1, "fp32", {}, LATER),
    "1, overlapped": (1, "fp32", {**SMALL, **OVERLAP}, {}),
    "1 in bf16": (1, "bf16", {}, {}),
    "1 in bf16, overlapped": (1, "bf16", {**SMALL, **OVERLAP}, {}),
    "2": (2, "fp32", SMALL, {}),
    "2, overlapped": (2, "fp32", {**SMALL, **OVERLAP}, {}),
    "2, to owners": (2, "fp32", {**SMALL, **OWNERS}, {}),
    "2 in bf16": (2, "bf16", SMALL, {}),
    "3": (3, "fp32", {**SMALL, **SYNC}, {}),
    "3, overlapped": (3, "fp32", SMALL, {}),
    "3 in bf16": (3, "bf16", {**SMALL, **SYNC}, {}),
}
"""The ways: ZeRO stage, the dtype that gradients travel in, DeepSpeed's keys for ZeRO, and the keys that replace
generated ones."""


class Reductions(TorchDispatchMode):
    """A counter of the collectives that reduce gradients, of the ranks' own group or of a group of one, and of the
    16-bit gradients that are added to an fp32 sum as they are."""

    count = added = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor:
            self.added += (args[0].dtype, args[1].dtype) == (torch.float32, torch.bfloat16)
        self.count += func.name().startswith("c10d::") and "reduce" in func.name()
        return func(*args, **(kwargs or {}))


Step = tuple[float, float]
"""The loss and the gradient norm."""


def engine_of(way: str) -> Engine:
    stage, reduction, zero, replaced = WAYS[way]
    parallel, told = {"gradient_reduction": reduction}, {"zero_optimization": zero}
    cfg = tiny.config(stage, "bf16", parallel=parallel, deepspeed=told, optimizer={"clip_grad": 0.5, "eps": 1e-6})
    generated = engine_module.deepspeed_config
    engine_module.deepspeed_config = lambda *arguments: {**generated(*arguments), **replaced}
    try:
        engine = tiny.engine(cfg, tiny.join(1))
    finally:
        engine_module.deepspeed_config = generated
    if replaced:  # DeepSpeed's own addition is used then.
        del engine._ds.optimizer._update_hp_grad
    return engine


def steps(engine: Engine, first: int, last: int) -> list[Step]:
    """Take steps of 2 micro-batches a rank, then of 4."""
    results = [tiny.global_step(engine, step, sequences=4 if step < 2 else 8) for step in range(first, last)]
    return [(result.loss, result.grad_norm) for result in results]


def of_all_ways() -> tuple[dict[str, list[Step]], dict[str, int], dict[str, int]]:
    """Return, for each way, its steps, the number of gradients held in bf16 after backward, and the number of
    collectives that had begun when backward came to the embedding's gradient, the last one."""
    found, held, begun = {}, {}, {}
    for way, (stage, *_) in WAYS.items():
        engine = engine_of(way)
        assert engine._ds.zero_overlap_comm() == (way.endswith("overlapped") and stage > 1)
        found[way] = steps(engine, 0, 4)
        tokens = torch.zeros(1, tiny.SEQ, dtype=torch.long)
        loss = engine._ds(tokens, tokens)
        with Reductions() as reductions:

            def note(grad: torch.Tensor, way: str = way, reductions: Reductions = reductions) -> None:
                begun[way] = reductions.count

            hook = engine.model.embedding.weight.register_hook(note)
            if engine._reduction:
                engine._reduction.begin()
            engine._ds.backward(loss)
        hook.remove()
        held[way] = sum(p.grad is not None for p in engine.model.parameters())
        added = reductions.added / len(list(engine.model.parameters()))
        assert added == (stage == 1 and way != "1, added later"), f"{way}: {added} gradients were added as they are"
    return found, held, begun


def test_losses_are_equal_where_the_arithmetic_is() -> None:
    for found, held, begun in run_distributed(of_all_ways, 2):
        for way in ("1, added later", "2, overlapped", "2, to owners", "3, overlapped"):
            assert found[way] == found[way[0]], way
        assert held.pop("1, added later") > 0 and not any(held.values())
        assert all((count > 1) == (way[0] != "1" or "overlapped" in way) for way, count in begun.items()), begun
        for way in ("1 in bf16", "2 in bf16", "3 in bf16"):
            narrow, wide = torch.tensor(found[way]), torch.tensor(found[way[0]])
            assert narrow[0, 0] == wide[0, 0] and not torch.equal(narrow, wide), way  # The first loss saw no gradient.
            torch.testing.assert_close(narrow, wide, rtol=0.02, atol=0)


LAYOUTS = {
    "two ranks": (2, 1, 1, 2000, 0.0),
    "a reduce to each owner": (4, 1, 1, 2000, 0.5),
    "a bucket of several owners": (4, 1, 1, 8000, 0.5),
    "tensor and sequence parallel": (4, 2, 1, 2000, 0.5),
    "context parallel": (4, 1, 2, 2000, 0.5),
}
"""Ranks, tensor and context parallel size, elements of a bucket, and clipping."""


def beside_and_after(layout: str) -> tuple[list[Step], list[Step], set[str]]:
    """Return the steps of ZeRO 1 that reduces beside backward, those that reduce after it, and the collectives of the
    former."""
    _, tensor, context, size, clip = LAYOUTS[layout]
    groups, found, called = tiny.join(tensor, context), [], set[str]()
    parallel = {"tensor_parallel_size": tensor, "context_parallel_size": context, "sequence_parallel": tensor > 1}
    for beside in (True, False):
        zero = {"overlap_comm": beside, "reduce_bucket_size": size}
        model = {"tie_embeddings": True, "num_attention_heads": 2}
        told = {"zero_optimization": zero}
        cfg = tiny.config(1, "bf16", parallel=parallel, deepspeed=told, model=model, optimizer={"clip_grad": clip})
        engine = tiny.engine(cfg, groups)
        if beside:
            parts = engine._reduction._buckets
            called = {"all-reduce" if part.owner is None else "reduce" for part in parts}
            assert [part.first for part in parts] == sorted((part.first for part in parts), reverse=True)
            assert len(parts) > 3
        results = [tiny.global_step(engine, step, sequences=8) for step in range(4)]
        found.append([(result.loss, result.grad_norm) for result in results])
    return found[0], found[1], called


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_1_beside_backward_learns_as_behind_it(layout: str) -> None:
    ranks, *_, clip = LAYOUTS[layout]
    for beside, after, called in run_distributed(beside_and_after, ranks, layout):
        ours, theirs = torch.tensor(beside), torch.tensor(after)
        if not clip:  # Two gradients have one sum. The norm is added up in another order.
            assert ours[:, 0].equal(theirs[:, 0])
        torch.testing.assert_close(ours[0], theirs[0], rtol=2e-6, atol=0)
        # Sums are in another order, and weights are in 16 bits.
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)
        assert called == ({"all-reduce"} if "several" in layout else {"all-reduce", "reduce"})  # The gains are few.


def without_gradients() -> tuple[list[float], float]:
    """Return the gradient norms of two steps on two ranks: the loss of the first knows the embedding alone, and in the
    second one rank has no gradient at all."""
    groups = tiny.join(1)
    cfg = tiny.config(1, "bf16", deepspeed={"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 500}})
    engine = tiny.engine(cfg, groups)
    norms = []
    for alone in (False, True):
        engine._reduction.begin()
        if groups.dp_rank == 0 or not alone:
            weight = engine.model.embedding.weight
            engine._ds.backward(weight[:3].float().sum())
        engine._optimizer.update = lambda masters: None
        engine._ds.step()
        norms.append(float(engine._ds.optimizer._global_grad_norm))
    return norms, float(engine.model.embedding.weight[:3].numel())


def test_parameters_without_a_gradient_hold_nothing_up_for_good() -> None:
    for (both, one), elements in run_distributed(without_gradients, 2):
        assert both == pytest.approx(elements**0.5)
        assert one == pytest.approx(elements**0.5 / 2)  # The norm is that of the mean of ones and zeros.


def alone() -> list[tuple[list[Step], int]]:
    """Return steps of one replica, our way and DeepSpeed's, and the number of buckets that DeepSpeed has reduced."""
    found = []
    for beside in (True, False):
        told = {"zero_optimization": {"overlap_comm": beside}}
        engine, reduced = tiny.engine(tiny.config(1, "bf16", deepspeed=told), tiny.join(1)), []
        reduce = engine._ds.allreduce_bucket
        engine._ds.allreduce_bucket = lambda *how, reduced=reduced, reduce=reduce: reduced.append(1) or reduce(*how)
        found.append((steps(engine, 0, 3), len(reduced)))
    return found


def test_one_replica_reduces_nothing() -> None:
    ((plain, by_deepspeed),) = run_distributed(alone, 1)
    assert plain[0] == by_deepspeed[0] and (plain[1], by_deepspeed[1] > 0) == (0, True)


def renamed() -> list[str]:
    """Return the errors at the start of an engine when DeepSpeed calls a replaced member by another name, or lacks
    it."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

    cfg, groups, said = tiny.config(1, "bf16", parallel=BY_DEEPSPEED), tiny.join(1), []
    engine, classes = tiny.engine(cfg, groups), {"optimizer": BF16_Optimizer, "engine": DeepSpeedEngine}
    for owner, method in REPLACED.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(classes[owner], method, lambda self: self.by_another_name())
            with pytest.raises(ConfigError) as caught:
                check(engine._ds) if said else tiny.engine(cfg, groups)
        said.append(str(caught.value))
    return said


def test_a_deepspeed_with_renamed_members_is_an_error() -> None:
    """DeepSpeed must use every member that we replace. Otherwise gradients would stay unreduced in silence."""
    (said,) = run_distributed(renamed, 1)
    assert len(said) == len(REPLACED)
    for name, words in zip(REPLACED, said, strict=True):
        assert words.startswith(f"DeepSpeed {version('deepspeed')} ") and f"{name} (in " in words
        assert "constraints.txt" in words


def without_a_call() -> None:
    """Take a step with a DeepSpeed that takes it for the middle of an accumulation, as version 0.18 does."""
    engine = tiny.engine(tiny.config(1, parallel=BY_DEEPSPEED), tiny.join(1))
    tiny.global_step(engine, 0)
    engine._ds.is_gradient_accumulation_boundary = lambda: False
    with pytest.raises(RuntimeError, match=f"DeepSpeed {version('deepspeed')} has not called the optimizer"):
        tiny.global_step(engine, 1)


def test_a_step_in_which_the_optimizer_is_not_called_is_no_step() -> None:
    run_distributed(without_a_call, 1)


def continued(root: str) -> dict[str, tuple[list[Step], list[Step]]]:
    """Return the steps after a checkpoint, and those after an engine that had gone on loaded it."""
    found = {}
    for way in ("1, overlapped", "1 in bf16, overlapped", "2, overlapped", "3 in bf16"):
        engine, folder = engine_of(way), Path(root) / way
        steps(engine, 0, 1)
        writer = tiny.saver(folder, engine.groups)
        writer.start(tiny.run_state(1, 64), "{}", engine.owned(), rng_state())
        writer.wait()
        dist.barrier()
        before = steps(engine, 1, 3)
        reading.load_engine(Reader(folder / on_disk.folder_name(1)), engine, optimizer_steps=1)
        found[way] = before, steps(engine, 1, 3)
    return found


def test_a_run_that_continues_gives_the_same_losses(tmp_path: Path) -> None:
    for found in run_distributed(continued, 2, str(tmp_path)):
        for way, (before, after) in found.items():
            assert before == after, way


def test_buckets_of_zero_1_have_a_least_size():
    """Each bucket is a collective of its own, so with tiny buckets a step would seem to hang. No bucket cuts a weight
    at ZeRO 2 and 3, where any size works."""

    def refused(size: int, stage: int) -> list:
        cfg = tiny.config(stage, "bf16", deepspeed={"zero_optimization": {"reduce_bucket_size": size}})
        return [finding for finding in fit(cfg, 2) if finding.rule == "deepspeed_bucket"]

    (finding,) = refused(1, 1)
    assert (finding.level, finding.key) == ("error", "deepspeed.zero_optimization.reduce_bucket_size")
    least = int(finding.fix.split()[1])
    assert refused(least - 1, 1) and not refused(least, 1)
    assert not any(refused(1, stage) for stage in (2, 3))

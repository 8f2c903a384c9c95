"""The model under DeepSpeed's ZeRO 3: every module's forward must read only parameters that the module owns."""

from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiny
from distributed import run_distributed
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.engines.deepspeed.mpu import Mpu
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups, Topology

VOCAB, SEQUENCES, LENGTH, STEPS = 128, 2, 12, 4
SHAPE = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_key_value_heads=2)


def _model(
    groups: ParallelGroups, tied: bool, activation_checkpointing: str = "none", overlap: bool = True
) -> Transformer:
    shape = SHAPE.model_copy(update={"tie_embeddings": tied})
    return tiny.transformer(
        shape,
        AttentionConfig(backend="sdpa"),
        vocab_size=VOCAB,
        groups=groups,
        overlap=overlap,
        activation_checkpointing=activation_checkpointing,
    )


def _batch(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCAB // 8, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _optimizer(model: Transformer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _plain(tied: bool) -> list[float]:
    model = _model(ParallelGroups.single(), tied)
    optimizer = _optimizer(model)
    losses = []
    for step in range(STEPS):
        loss = model(*_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _zero3(cases: list[tuple[int, bool, str, bool]]) -> list[list[float]]:
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # This saves probes, and a C++ build that training never uses.
    deepspeed.init_distributed("gloo", verbose=False)
    curves = []
    for tp_size, tied, activation_checkpointing, overlap in cases:
        groups = ParallelGroups.create(Topology(dist.get_world_size(), tp_size))
        model = _model(groups, tied, activation_checkpointing, overlap)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=_optimizer(model),
            mpu=Mpu(groups),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": SEQUENCES // groups.dp_size,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,
                "steps_per_print": 1 << 30,
            },
        )
        assert all(p.numel() == 0 for p in model.parameters()), "ZeRO 3 has not partitioned the parameters"
        losses = []
        for step in range(STEPS):
            tokens, labels = (x.chunk(groups.dp_size)[groups.dp_rank] for x in _batch(step))
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        curves.append(losses)
        engine.destroy()
    return curves


def test_zero3_trains_like_plain_torch() -> None:
    cases = [(1, True, "none", True), (1, False, "full", True), (2, True, "full", True), (2, True, "selective", True)]
    # The block is recomputed as a whole, and `down` is the last layer that the second pass calls.
    cases.append((2, False, "full", False))
    expected = [_plain(tied) for _, tied, *_ in cases]
    for curves in run_distributed(_zero3, 2, cases):
        for actual, truth in zip(curves, expected, strict=True):
            assert truth[-1] < truth[0] - 0.5
            assert actual == pytest.approx(truth, abs=1e-5)


def _between_evaluations() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    groups, by_deepspeed = tiny.join(1), {"engine": "deepspeed"}
    for how in ("none", "selective", "full"):
        engine = tiny.engine(tiny.config(3, training={"activation_checkpointing": how}, parallel=by_deepspeed), groups)
        found[how] = []
        for step in range(3):
            found[how].append(tiny.global_step(engine, step).loss)
            tiny.evaluation(engine, ["a"])
    return found


def test_an_evaluation_does_not_disturb_recomputation() -> None:
    """The blocks are not compiled. DeepSpeed gathers inside a block at other times in forward than in the
    recomputation."""
    for found in run_distributed(_between_evaluations, 2):
        assert found["selective"] == found["none"] == found["full"]

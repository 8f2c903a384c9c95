"""A user's loss that sees whole sequences gives the steps of float64 autograd at every layout."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from distributed import run_distributed
from llama_reference import reference_logits
from sagetrain import by_sequence
from sagetrain.cluster.failures import Failures
from sagetrain.config import RunConfig
from sagetrain.data.batch import MASKED, Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training.loss import GuardedLoss

LR, STEPS, SEQUENCES = 0.5, 3, 8


@by_sequence
def preference(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for both sequences of a pair how little the mean log-probability of the first exceeds the second's."""
    counted = labels >= 0
    log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    chosen, other = ((log_p * counted).sum(1) / counted.sum(1).clamp(min=1)).unflatten(0, (-1, 2)).unbind(1)
    return -F.logsigmoid(8 * (chosen - other)).repeat_interleave(2)


def sequences_of(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of a step. Few labels of the first sequences count, and none of the third."""
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(0, tiny.VOCAB, (SEQUENCES, tiny.SEQ + 1), generator=draw)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].clone()
    labels[0, :13], labels[1, ::2], labels[2] = MASKED, MASKED, MASKED
    return tokens, labels


def config(stage: int, parallel: dict) -> RunConfig:
    return tiny.config(stage, data={"micro_batch_size": 2}, optimizer={"clip_grad": 0.0}, parallel=parallel)


LAYOUTS: dict[str, tuple[int, int, int, dict]] = {
    "alone": (1, 1, 1, {}),
    "replicas": (2, 1, 1, {}),
    "sharded": (2, 1, 3, {}),
    "by DeepSpeed": (2, 1, 2, {"engine": "deepspeed"}),
    "tensor": (2, 2, 1, {}),
    "tensor, sequence": (2, 2, 1, {"sequence_parallel": True, "tensor_parallel_overlap": "on"}),
    "pipeline": (2, 1, 0, {"pipeline_parallel_size": 2}),
}
"""The ranks, the tensor-parallel size, the ZeRO stage and the layout."""


def steps_of(names: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Return (loss, gradient norm) of steps by SGD for each layout."""
    tiny.SGD.use()
    found = {}
    for name in names:
        _, tensor, stage, parallel = LAYOUTS[name]
        groups = tiny.join(tensor, 1, parallel.get("pipeline_parallel_size", 1))
        cfg = tiny.on(config(stage, parallel), groups)
        engine = build_engine(cfg, tiny.model(cfg, groups, loss=GuardedLoss(preference, Failures())))
        found[name] = []
        for step in range(STEPS):
            pairs = zip(*(each.split(2) for each in sequences_of(step)), strict=True)
            # The loader's divisor is the number of labels that count, which says nothing of sequences.
            every = [Batch(*pair, None, None, None, [], divisor=float((pair[1] >= 0).sum())) for pair in pairs]
            own = every[groups.dp_rank :: groups.dp_size]
            result = engine.step(own, len(own), LR)
            found[name].append((result.loss, result.grad_norm))
    return found


@pytest.fixture(scope="module")
def reference() -> Tensor:
    """Return loss and gradient norm of each step, by autograd in float64 through all sequences at once."""
    cfg, taken = config(1, {}), []
    weights = {name: x.detach().double() for name, x in tiny.model(cfg, ParallelGroups.single()).named_parameters()}
    for step in range(STEPS):
        weights = {name: weight.requires_grad_() for name, weight in weights.items()}
        tokens, labels = sequences_of(step)
        loss = preference(reference_logits(weights, cfg.model, cfg.attention.qk_norm, tokens), labels).mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        taken.append((loss.item(), norm.item()))
        moved = zip(weights.items(), gradients, strict=True)
        weights = {name: (weight - LR * gradient).detach() for (name, weight), gradient in moved}
    return torch.tensor(taken, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layout_takes_the_steps_of_autograd(ranks: int, reference: Tensor) -> None:
    names = [name for name, (number, *_) in LAYOUTS.items() if number == ranks]
    for found in run_distributed(steps_of, ranks, names):
        for name, steps in found.items():
            taken = torch.tensor(steps, dtype=torch.float64)
            torch.testing.assert_close(
                taken, reference, rtol=1e-5, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_wrong_shape_inside_of_a_step_is_kept_and_no_number() -> None:
    failures = Failures()
    guarded = GuardedLoss(by_sequence(lambda logits, labels: logits.mean((1, 2))[:1]), failures)
    found = guarded(torch.randn(2, 4, 5, requires_grad=True), torch.zeros(2, 4, dtype=torch.int64))
    assert found.isnan().tolist() == [True, True]

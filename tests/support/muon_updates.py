"""Muon's passes over many parts in one launch, held to the same operations part by part, and whole updates by them."""

import torch
from torch import Tensor

from sagekernels import muon
from sagetrain.config.schema import OptimizerConfig
from sagetrain.config.sections.optimizer import MuonConfig
from sagetrain.model.tensors import TensorSpec
from sagetrain.optim.muon import Muon
from sagetrain.optim.pieces import TensorPiece
from sagetrain.optim.states import state_of
from sagetrain.optim.weights import weights_of
from updates import gradients, guarded

FORMS = [("fp32", "fp32"), ("int8", "bf16_chance"), ("bf16", "bf16_kahan")]
"""The settings optimizer.moments and optimizer.master, each of them once."""
PARTS = [(0, 5000), (512, 512), (768, 769), (256, 4352), (4096, 8192)]
"""The range of each part in its tensor: cut blocks, nothing, one value, whole blocks, and two programs."""


def draw(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def assert_same_passes(
    moments: str, master: str, nesterov: bool, dtype: torch.dtype = torch.float32, device: str = "cpu", shift: int = 0
) -> None:
    """Check directions, momentum and weights of all parts, and what lies between the parts and around the tensors.

    Args:
        shift: how many values later than at a multiple of 16 bytes the memory begins.
    """
    decay, clip, keep, scale, sides = 0.95, 0.7, 0.999, -0.01, []
    sizes = [stop - start for start, stop in PARTS]
    places = [3 * shift + sum(sizes[:n]) for n in range(len(sizes))]
    for together in (True, False):
        states, masters, memory = [], [], []
        for number, (_, stop) in enumerate(PARTS):
            weight, whole = guarded(draw(stop + 5, number).to(device), shift)
            if master != "fp32":
                weight, whole = guarded(weight.bfloat16(), shift)
            spec = TensorSpec(f"{number}", (64, 2 * (stop // 64 + 1)), "tensor", 1, "matrix", 0)
            spec = spec if master != "bf16_chance" else TensorSpec("w", (64, 600), "tensor", 1, "matrix", 0)
            masters.append(weights_of(master, TensorPiece(spec, 1, 2, 7, 7 + len(weight), weight), 2**40 + 5))
            states.append(state_of(moments, weight))
            states[-1].write(draw(len(weight), number + 10).to(device))
            memory.append(whole)
        given = [gradients(size, 1 + n, dtype=dtype).to(device) for n, size in enumerate(sizes)]
        found, whole = guarded(torch.empty(sum(sizes), dtype=torch.bfloat16, device=device), shift)
        update, all_updates = guarded(draw(sum(sizes) + 3 * shift, 5).to(device).bfloat16(), shift)
        if together:
            held = [state.moment(*part) for state, part in zip(states, PARTS, strict=True)]
            muon.directions(held, given, found, decay, nesterov, clip)
            held = [weights.master(3, *part) for weights, part in zip(masters, PARTS, strict=True)]
            muon.add_updates(held, update, places, keep, scale)
        else:
            for number, (start, stop) in enumerate(PARTS):
                gradient, average = given[number].float() * clip, states[number].read(start, stop).clone()
                twin = average.clone(), torch.empty_like(gradient)
                muon.direction_twin(twin[0], gradient, twin[1], decay, nesterov)
                average += (gradient - average) * (1 - decay)
                states[number].write(average, start)
                ahead = average - (average - gradient) * (1 - decay) if nesterov else average
                # The twin rounds products and sums together.
                torch.testing.assert_close((average, ahead), twin, rtol=1e-5, atol=1e-6)
                first = sum(sizes[:number])
                found[first : first + stop - start] = ahead
                weight = masters[number].read(start, stop).clone()
                part = update[places[number] :][: stop - start].float()
                twin_weight = weight.clone()
                muon.add_update_twin(twin_weight, part, keep, scale)
                weight = weight * keep + part * scale
                torch.testing.assert_close(weight, twin_weight, rtol=1e-6, atol=1e-6)
                masters[number].write(weight, start, 3)
        state = [t for s in states for t in vars(s).values() if isinstance(t, Tensor)]
        rest = [t for w in masters for t in vars(w).values() if isinstance(t, Tensor)]
        sides.append([*memory, whole, all_updates, *state, *rest])
    for number, (ours, expected) in enumerate(zip(*sides, strict=True)):
        if ours.dtype == torch.bfloat16 and number == len(PARTS):  # The interpreter cuts bits of directions off.
            torch.testing.assert_close(ours, expected, rtol=2**-7, atol=1e-6)
            continue
        differ = (ours.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
        assert not len(differ), f"memory {number}: {len(differ)} bytes, first {differ[0]}"


def muon_of(shapes: list[tuple[int, int]], moments: str, master: str, device: str = "cpu") -> Muon:
    """Build a Muon of whole matrices of these shapes, and of three experts in one tensor."""
    specs = [TensorSpec(f"{n}", shape, None, None, "matrix", 0) for n, shape in enumerate(shapes)]
    specs.append(TensorSpec("experts", (3 * 40, 64), None, 0, "matrix", 0, matrices=3))
    pieces = []
    for number, spec in enumerate(specs):
        weight = draw(spec.size, number).to(device, torch.float32 if master == "fp32" else torch.bfloat16)
        pieces.append(TensorPiece(spec, 0, 1, 0, spec.size, weight))
    return Muon(
        pieces, OptimizerConfig(lr=1e-2, moments=moments, master=master, muon=MuonConfig(steps=1)), 2**40 + 5, None, 0.1
    )


def gradients_of(optimizer: Muon, update: int) -> list[Tensor]:
    pieces = optimizer.weights
    return [draw(len(kept.read()), 100 * update + n).to(kept.read().device) for n, kept in enumerate(pieces)]


def weights_of_all(optimizer: Muon) -> list[Tensor]:
    return [kept.read().clone() for kept in optimizer.weights]

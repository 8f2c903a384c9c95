"""AdamW's update in one pass on a GPU has the bits of its twin, always the same, also inside of a CUDA graph."""

import torch

from on_gpu import needs_gpu
from sagetrain.config.schema import OptimizerConfig
from sagetrain.model.tensors import TensorSpec
from sagetrain.optim.adamw import AdamW
from sagetrain.optim.pieces import TensorPiece
from updates import KINDS, Updates, assert_levels_are_the_nearest, assert_same_bits, gradients

pytestmark = needs_gpu()


def test_an_update_has_the_bits_of_its_twin() -> None:
    """Lengths are odd, and the memory of a piece begins anywhere, as ZeRO cuts it."""
    for moments, master in KINDS:
        assert_same_bits(100_003, moments, master, torch.bfloat16, device="cuda")
    for count, scale in ((1, 1.0), (4096, 1.0), (1_000_001, 1e-38), (1_000_001, 1e-19), (1_000_001, 1e18)):
        assert_same_bits(count, "int8", "fp32", scale=scale, device="cuda")
    assert_levels_are_the_nearest("cuda")


def test_a_graph_has_the_bits_of_a_launch() -> None:
    launched, recorded = (Updates(5000, "int8", "fp32", True, "cuda") for _ in range(2))
    gradient = gradients(5000, 1).cuda()
    launched(gradient)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded(gradient)
    graph.replay()
    assert all(map(torch.equal, launched.memory, recorded.memory))


def test_the_optimizer_is_near_that_of_the_cpu() -> None:
    """On a CPU torch's AdamW reads moments in parts, and clips gradients before."""
    spec, found = TensorSpec("weight", (3000,), None, None, "gain", 0), {}
    for device in ("cuda", "cpu"):
        piece = TensorPiece(spec, 0, 1, 0, 3000, torch.zeros(3000, device=device))
        optimizer = AdamW([piece], OptimizerConfig(lr=1e-3, moments="int8"), 0, 0.1)
        for update in range(1, 7):
            optimizer.step([gradients(3000, update).to(device)], 1e-3, update, 0.7)
        found[device] = (
            optimizer.weights[0].read().cpu(),
            *(state._codes.cpu() for state in optimizer.state[0].values()),
        )
    torch.testing.assert_close(found["cuda"][0], found["cpu"][0], rtol=1e-6, atol=1e-9)
    for ours, theirs in zip(found["cuda"][1:], found["cpu"][1:], strict=True):
        apart = (ours.int() - theirs.int()).abs()
        assert apart.max() <= 1 and apart.sum() <= 3

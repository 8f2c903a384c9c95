"""The Hopper forward on an H100 or H200, against the twin and against float64: `make test-gpu`."""

import pytest
import torch

from kernel_inputs import call_of
from on_gpu import poisoned_memory  # noqa: F401
from sagekernels.hopper import HOPPER
from sagekernels.reference import attention_reference, twin_forward
from sagekernels.testing import Shape, random_inputs, rel_l2

SERVED = torch.cuda.is_available() and HOPPER.serves(torch.cuda.get_device_capability())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SERVED, reason="needs an NVIDIA H100 or H200")]

SHAPES = [
    Shape(2, 1024, 1024, 4, 2, 64),
    Shape(2, 1024, 1024, 4, 2, 128, causal=False),
    Shape(1, 333, 777, 7, 1, 128),
    Shape(1, 333, 777, 7, 1, 64, causal=False),
    Shape(3, 200, 200, 2, 2, 128),
    Shape(1, 1, 129, 2, 1, 64),
    Shape(1, 1, 1, 1, 1, 128),
    Shape(1, 63, 63, 3, 3, 128),
    Shape(1, 5001, 5001, 8, 8, 128),
    Shape(1, 30, 40000, 2, 1, 128),
    Shape(2, 2500, 2500, 24, 24, 64),
    Shape(2, 4096, 4096, 8, 8, 64, causal=False),
    Shape(1, 2000, 2000, 2, 1, 64, documents=(1, 0, 63, 64, 65, 700, 1, 1, 1105, 0, 0)),
    Shape(1, 2000, 2000, 4, 4, 128, causal=False, documents=(500, 1, 499, 1000, 0, 0)),
    Shape(1, 100, 100, 2, 2, 128, documents=(1,) * 100),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_twin_and_with_float64(shape, dtype):
    q, k, v, _ = random_inputs(shape, sigma=1.5, k_mean=1.0, dtype=dtype, device="cuda")
    call = call_of(shape, q, k, v, "fine")
    assert HOPPER.takes(call)
    o, saved = HOPPER.forward(call)
    o_twin, saved_twin = twin_forward(call)
    exact = attention_reference(
        q.double(), k.double(), v.double(), causal=shape.causal, cu_seqlens=shape.cu_seqlens("cuda")
    )
    # P is rounded relative to another maximum than the twin's, which shows with a single query.
    assert rel_l2(o, exact) < 1.05 * rel_l2(o_twin, exact) + (1e-4 if o.numel() > 10000 else 2e-3)
    assert rel_l2(saved.lse, saved_twin.lse) < 1e-3
    for ours, twin in ((saved.q, saved_twin.q), (saved.k, saved_twin.k)):
        assert (ours.codes.int() - twin.codes.int()).abs().max() <= 1
        assert (ours.codes != twin.codes).float().mean() < 1e-3
        assert rel_l2(ours.scale, twin.scale) < 1e-6
    again, _ = HOPPER.forward(call)
    assert torch.equal(o, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("growth", [0.5, 3.0, 20.0, 100.0])
def test_scores_that_outgrow_the_old_maximum(growth, head_dim, causal, dtype):
    """Keys get larger towards the first one, which is visited last. Scores grow by up to 2^127 and more from tile to
    tile."""
    shape = Shape(1, 1500, 1500, 2, 2, head_dim, causal=causal)
    q, k, v, _ = random_inputs(shape, dtype=dtype, device="cuda")
    direction = torch.nn.functional.normalize(torch.randn(head_dim, device="cuda"), dim=0)
    ramp = torch.linspace(8 * growth, -8 * growth, 1500, device="cuda")[None, :, None, None]
    q, k = ((x.float() * 0.1 + y * direction).to(dtype) for x, y in ((q, 4), (k, ramp)))
    call = call_of(shape, q, k, v, "fine", scale=3 * head_dim**-0.5)
    o, saved = HOPPER.forward(call)
    o_twin, saved_twin = twin_forward(call)
    assert rel_l2(o, o_twin) < 1e-2
    assert rel_l2(saved.lse, saved_twin.lse) < 1e-3


def test_slices_of_one_projection():
    shape = Shape(2, 500, 500, 3, 3, 64)
    packed = torch.randn(2, 500, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    o, _ = HOPPER.forward(call_of(shape, q, k, v, "fine"))
    expected, _ = HOPPER.forward(call_of(shape, q.contiguous(), k.contiguous(), v.contiguous(), "fine"))
    assert torch.equal(o, expected)


def test_non_finite_values_propagate_and_zeros_do_not():
    shape = Shape(1, 300, 300, 1, 1, 128)
    q, k, v, _ = random_inputs(shape, device="cuda")
    q[0, 20], q[0, 30, 0, 5], q[0, 40, 0, 6] = 0, float("nan"), float("inf")
    o, saved = HOPPER.forward(call_of(shape, q, k, v, "fine"))
    assert o.isnan().any(-1).flatten().nonzero().flatten().tolist() == [30, 40]
    assert saved.lse.isnan().flatten().nonzero().flatten().tolist() == [30, 40]

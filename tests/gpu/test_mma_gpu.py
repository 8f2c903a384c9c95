"""The kernels by mma.sync on a GPU of sm_80 to sm_120 agree with the twin and with float64: `make test-gpu`."""

import pytest
import torch

from kernel_inputs import call_of
from sagekernels import mma
from sagekernels.mma import MMA, mma_backward, mma_forward
from sagekernels.reference import twin_backward, twin_forward
from sagekernels.testing import Shape, exact_results, random_inputs, rel_l2

SERVED = torch.cuda.is_available() and MMA.serves(torch.cuda.get_device_capability())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SERVED, reason="needs an NVIDIA GPU of sm_80 to sm_120")]

SHAPES = [
    Shape(2, 1024, 1024, 4, 2, 64),
    Shape(2, 1000, 1000, 2, 2, 128, causal=False),
    Shape(1, 333, 777, 7, 1, 128),
    Shape(1, 333, 777, 7, 1, 64, causal=False),
    Shape(3, 200, 200, 2, 2, 64),
    Shape(1, 1, 129, 2, 1, 64),
    Shape(1, 5001, 5001, 8, 8, 128),
    Shape(1, 30, 40000, 2, 1, 128),
    Shape(2, 4096, 4096, 8, 8, 64, causal=False),
    Shape(1, 2000, 2000, 2, 1, 64, documents=(1, 0, 63, 64, 65, 700, 1, 1, 1105, 0, 0)),
    Shape(1, 2000, 2000, 2, 2, 128, causal=False, documents=(500, 1, 499, 1000, 0, 0)),
    Shape(1, 700, 700, 2, 2, 128, documents=(7,) * 100),
]
NAMES = ("dq", "dk", "dv")


@pytest.fixture(params=[100, 164, 228], ids="{}_KB".format)
def memory(request, monkeypatch):
    """The shared memory of a GeForce card, an A100 or an H100 decides the schedule of the backward kernel."""
    if request.param << 10 > mma.shared_memory_of(torch.device("cuda", 0)):
        pytest.skip("this GPU has less shared memory")
    monkeypatch.setattr(mma, "shared_memory_of", lambda device: request.param << 10)


@pytest.mark.parametrize("half_sums", [False, True], ids=["", "half_sums"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_twin_and_with_float64(shape, dtype, half_sums, memory):
    q, k, v, do = random_inputs(shape, sigma=1.5, k_mean=1.0, do_scale=1e-2, dtype=dtype, device="cuda")
    call = call_of(shape, q, k, v, "fine")
    assert MMA.takes(call)
    o, saved = mma_forward(call, half_sums=half_sums)
    o_twin, saved_twin = twin_forward(call)
    assert rel_l2(saved.lse, saved_twin.lse) < 1e-3
    for ours, twin in ((saved.q, saved_twin.q), (saved.k, saved_twin.k)):
        assert (ours.codes.int() - twin.codes.int()).abs().max() <= 1
        assert (ours.codes != twin.codes).float().mean() < 1e-3
        assert rel_l2(ours.scale, twin.scale) < 1e-6
    backward = call.backward(do, o_twin, saved_twin)
    ours, twin = mma_backward(backward, half_sums=half_sums), twin_backward(backward)
    exact = exact_results(q, k, v, do, causal=shape.causal, cu_seqlens=shape.cu_seqlens("cuda"))
    for name, x, y in zip(("o", *NAMES), (o, *ours), (o_twin, *twin), strict=True):
        judge = getattr(exact, name)
        assert rel_l2(x, y) < 8e-3, name
        assert rel_l2(x, judge) < 1.05 * rel_l2(y, judge) + (1e-3 if x.numel() > 10000 else 2e-3), name


@pytest.mark.parametrize("do_scale", [1e-20, 1e-7, 1e4])
def test_gradients_of_any_size(do_scale):
    shape = Shape(1, 512, 512, 2, 2, 128)
    q, k, v, do = random_inputs(shape, do_scale=do_scale, device="cuda")
    call = call_of(shape, q, k, v, "fine")
    exact = exact_results(q, k, v, do)
    for half_sums in (False, True):
        ours = mma_backward(call.backward(do, *twin_forward(call)), half_sums=half_sums)
        assert all(rel_l2(x, getattr(exact, name)) < 0.025 for name, x in zip(NAMES, ours, strict=True))

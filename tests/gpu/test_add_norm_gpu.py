"""Addition and norm on a GPU: the kernels agree with float64, and casts with the largest magnitudes that they leave."""

import pytest
import torch

from kernel_inputs import add_norm_errors, random_norm
from on_gpu import needs_gpu, poison
from sagekernels.add_norm import add_norm_gradients_triton, add_norm_triton
from sagekernels.casts import NUMBERS, largest_twin, quantize_both

pytestmark = needs_gpu((8, 9))  # FP8 codes
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_within_one_rounding_of_float64(dtype: torch.dtype) -> None:
    """Sizes fill no tile, and memory of results held other values before."""
    magnitudes = (1.0, 1e-2, 0.1, 1.0, 1.0) if dtype == torch.float16 else (1.0, 1e-15, 1e15, 1.0, 1.0)
    shapes = (17001, 2048), (300, 5120), (37, 129), (1, 1), (65, 8192)
    for (rows, columns), magnitude in zip(shapes, magnitudes, strict=True):
        inputs = random_norm(rows, columns, magnitude, dtype, "cuda")
        wide = [part.repeat(1, 2 + place)[:, :columns] for place, part in enumerate(inputs[:4])]
        for x, y, of_stream, of_normed in (inputs[:4], wide):
            poison()
            made = add_norm_triton(x, y, inputs[4], 1e-6)
            poison()
            gradients = add_norm_gradients_triton(of_stream, of_normed, made[0], inputs[4], 1e-6)
            assert torch.equal(made[0], inputs[0] + inputs[1])
            assert max(add_norm_errors(inputs, 1e-6, made, gradients)) <= 1
            again = add_norm_gradients_triton(of_stream, of_normed, made[0], inputs[4], 1e-6)
            assert all(map(torch.equal, gradients, again))
            for part, largest in (made[1:], gradients[::2]):
                assert torch.equal(largest, largest_twin(part))
                for number in NUMBERS:
                    pairs = zip(quantize_both(part, number, largest), quantize_both(part, number), strict=True)
                    for ours, theirs in pairs:
                        assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
                        assert torch.equal(ours.scale, theirs.scale)

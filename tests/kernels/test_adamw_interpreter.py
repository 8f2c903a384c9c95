"""AdamW's update in one pass has the bits of its twin on Triton's interpreter.

test_sage_interpreter.py starts the process that interprets.
"""

import pytest
import torch

from interpreted import INSIDE, find, poisoned_memory  # noqa: F401

if INSIDE:
    from sagekernels import adamw
    from sagetrain.config.schema import OptimizerConfig
    from sagetrain.model.tensors import TensorSpec
    from sagetrain.optim.adamw import AdamW
    from sagetrain.optim.pieces import TensorPiece
    from updates import KINDS, assert_levels_are_the_nearest, assert_same_bits, gradients

    @pytest.mark.parametrize(("moments", "master"), KINDS)
    def test_an_update_has_the_bits_of_its_twin(moments, master):
        """Lengths are odd, blocks are cut and zero, and a tensor may have one value."""
        for count, dtype in ((1, torch.float32), (1500, torch.bfloat16)):
            assert_same_bits(count, moments, master, dtype)

    @pytest.mark.parametrize("scale", [1e-38, 1e-19, 1e18])
    def test_magnitudes_may_be_tiny_or_huge(scale):
        assert_same_bits(1100, "int8", "fp32", scale=scale)

    def test_mistakes_are_found(monkeypatch):
        find(monkeypatch, lambda: assert_same_bits(1100, "int8", "fp32"), adamw, [
            ("read_moment", "other=ZERO", "other=0"),
            ("_encode", "127 - near", "126 - near"),
            ("_encode", "+ 0.5", "+ 1.1"),
            ("_encode", "codes = tl.maximum(codes, (scaled > 0).to(tl.int32))", "pass"),
            ("_encode", "tl.where(largest < _TINY, 0.0, largest)", "largest * 1.0000002"),
            ("_adamw_kernel", "place < left", "place <= left"),
            ("_adamw_kernel", "inside, squares, False", "inside, squares, True"),
            ("_adamw_kernel", ") * clip", ")"),
        ])  # fmt: skip
        find(monkeypatch, lambda: assert_same_bits(301, "fp32", "bf16_chance"), adamw, [
            ("_mixed", "0x846CA68B", "0x846CA68D"), ("write_master", "at // width * columns", "at // width * width"),
        ])  # fmt: skip
        find(monkeypatch, assert_levels_are_the_nearest, adamw, [("_encode", "scaled > tl.load", "scaled >= tl.load")])

    def test_many_updates_are_near_those_of_torch():
        """The optimizer calls torch's AdamW on a CPU, which rounds products and sums together, in another order."""
        spec, optimizers = TensorSpec("weight", (1100,), None, None, "gain", 0), []
        for kernel in (True, False):
            piece = TensorPiece(spec, 0, 1, 0, 1100, torch.zeros(1100))
            optimizers.append(AdamW([piece], OptimizerConfig(lr=1e-3, moments="int8"), 0, 0.1))
            optimizers[-1]._in_one_pass = kernel
        for update in range(1, 6):
            for optimizer in optimizers:
                optimizer.step([gradients(1100, update)], 1e-3, update, 0.7)
        ours, theirs = ([optimizer.weights[0].read(), optimizer.state[0]] for optimizer in optimizers)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-9)
        for kind, state in ours[1].items():
            apart = (state._codes.int() - theirs[1][kind]._codes.int()).abs()
            assert apart.max() <= 1 and apart.sum() <= 3

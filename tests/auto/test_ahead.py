"""A start on Hopper begins to compile the CUDA kernels that its settings may take."""

from __future__ import annotations

import pytest
import torch

import tiny
from sagekernels import int8_matmul, nvrtc
from sagetrain.auto import ahead

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("sections", "rank", "sources"),
    [
        ({}, "0", ["hopper_backward", "hopper_forward", "hopper_int8", "quantize_keys"]),
        ({}, "1", []),  # One rank of a host compiles.
        ({"attention": {"backend": "sage", "recipe": "fine"}}, "0", ["hopper_int8"]),
        ({"attention": {"backend": "sdpa"}}, "0", ["hopper_int8"]),
        ({"linear": {"precision": "bf16"}}, "0", ["hopper_backward", "hopper_forward", "quantize_keys"]),
        ({"model": {"head_dim": 80}}, "0", ["hopper_int8"]),  # No kernels are for such heads.
        ({"model": {"head_dim": 1024}}, "0", ["hopper_int8"]),
    ],
)
def test_kernels_are_begun(monkeypatch: pytest.MonkeyPatch, sections: dict, rank: str, sources: list[str]) -> None:
    begun = []
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    monkeypatch.setattr(nvrtc, "begin", lambda source, defines, architecture: begun.append((source, defines)))
    for module in (ahead, int8_matmul):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(int8_matmul, "_by_cuda", lambda device: True)
    monkeypatch.setenv("LOCAL_RANK", rank)
    usual = {"model": {"head_dim": 64}, "attention": {"backend": "auto"}, "linear": {"precision": "auto"}}
    cfg = tiny.config(1, "bf16", **{name: {**usual.get(name, {}), **sections.get(name, {})} for name in usual})
    ahead.begin(cfg, False, torch.device("cpu"), torch.bfloat16)
    assert not begun
    ahead.begin(cfg, False, GPU, torch.bfloat16)
    assert sorted(source.partition(".")[0] for source, _ in begun) == sources
    assert all(defines["PACKED"] == cfg.data.document_attention for _, defines in begun if "PACKED" in defines)

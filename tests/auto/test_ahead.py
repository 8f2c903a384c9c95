"""A start on Hopper begins to compile the CUDA kernels that its settings may take."""

from __future__ import annotations

import pytest
import torch

import tiny
from sagekernels import int8_matmul, nvrtc
from sagetrain.auto import ahead
from sagetrain.model import initialization
from sagetrain.model.tensors import tensors
from sagetrain.parallel.topology import ParallelGroups

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
    how = {"compiled": False, "vocab_size": tiny.VOCAB, "dtype": torch.bfloat16}
    ahead.begin(cfg, ParallelGroups.single(), **how, device=torch.device("cpu"))
    assert not begun and not initialization._begun
    ahead.begin(cfg, ParallelGroups.single(), **how, device=GPU)
    assert sorted(source.partition(".")[0] for source, _ in begun) == sources
    assert all(defines["PACKED"] == cfg.data.document_attention for _, defines in begun if "PACKED" in defines)
    drawn = [spec.name for spec in tensors(cfg.model, cfg.attention, tiny.VOCAB) if spec.begins is None]
    assert [name for name, *_ in initialization._begun] == drawn
    initialization._begun.clear()

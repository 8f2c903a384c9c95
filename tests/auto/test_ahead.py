"""A start on Hopper begins to compile the CUDA kernels that its settings may take."""

import threading
from types import SimpleNamespace

import pytest
import torch

import tiny
from sagekernels import int8_matmul, nvrtc
from sagetrain.auto import ahead
from sagetrain.model import initialization
from sagetrain.model.tensors import tensors
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training import build_run

GPU = torch.device("cuda")


@pytest.mark.parametrize(("sections", "rank", "sources"), [
    ({}, "0", ["hopper_backward", "hopper_forward", "hopper_int8", "quantize_keys"]),
    ({}, "1", []),  # One rank of a host compiles.
    ({"attention": {"backend": "sage", "recipe": "fine"}}, "0", ["hopper_int8"]),
    ({"attention": {"backend": "sdpa"}}, "0", ["hopper_int8"]),
    ({"linear": {"precision": "bf16"}}, "0", ["hopper_backward", "hopper_forward", "quantize_keys"]),
    ({"model": {"head_dim": 80}}, "0", ["hopper_int8"]),  # No kernels are for such heads.
    ({"model": {"head_dim": 1024}}, "0", ["hopper_int8"]),
])  # fmt: skip
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
    ahead.begin(tiny.start(cfg))
    assert not begun and not initialization._begun
    ahead.begin(tiny.start(cfg, device=GPU))
    assert sorted(source.partition(".")[0] for source, _ in begun) == sources
    assert all(defines["PACKED"] == cfg.data.document_attention for _, defines in begun if "PACKED" in defines)
    drawn = [spec.name for spec in tensors(cfg.model, cfg.attention, tiny.VOCAB) if spec.begins is None]
    assert [name for name, *_ in initialization._begun] == drawn
    initialization._begun.clear()


def test_the_processes_that_compile_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    monkeypatch.setattr(initialization, "begin", lambda *_: None)
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: begun.append("the pool"))
    for compiled in (False, True):
        ahead.begin(tiny.start(tiny.config(1, "bf16"), compiled=compiled, device=GPU))
    assert begun == ["the pool"]


def test_a_start_that_fails_draws_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python waits at its end for all that threads have still to do."""
    cfg, go, drawn = tiny.config(1), threading.Event(), list[str]()
    monkeypatch.setattr(initialization, "_workers", lambda: 1)
    monkeypatch.setattr(initialization, "_slice", lambda spec, *_: go.wait(10) and drawn.append(spec.name))

    def fails(*_: object) -> None:
        specs = tensors(cfg.model, cfg.attention, tiny.VOCAB)
        initialization.begin(specs, cfg.model, ParallelGroups.single(), 1, torch.bfloat16, 1e9)
        begun.extend(initialization._begun.values())
        raise KeyError("a choice that fails")

    begun: list = []
    monkeypatch.setattr(
        build_run, "check_parts", lambda *_: SimpleNamespace(folder=SimpleNamespace(release=lambda: None))
    )
    monkeypatch.setattr(build_run, "meet", fails)
    with pytest.raises(KeyError):
        build_run.build(cfg)
    go.set()
    assert not initialization._begun and all(each.done() for each in begun[1:]) and len(drawn) <= 1

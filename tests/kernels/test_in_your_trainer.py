"""The programs of docs/in-your-trainer.md run in the trainers that are installed. Stand-ins of the other trainers call
the same functions."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runs import ROOT
from sagekernels import Linear8bit

PAGE = (ROOT / "docs/in-your-trainer.md").read_text()


def programs(section: str) -> list[str]:
    """Return the blocks of Python of a section of the page."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def run(section: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the programs of a section and return their names."""
    known = {"__name__": "recipe"} if known is None else known
    for program in programs(section):
        exec(program, known)
    return known


def test_plain_pytorch_and_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    known = run("Plain PyTorch")
    layers = [name for name, layer in known["model"].named_modules() if isinstance(layer, Linear8bit)]
    assert len(layers) == 8 and known["loss"] < 5.6
    run("Lightning", known)
    trained = known["trainer"].lightning_module
    assert known["trainer"].global_step == 3 and isinstance(trained.model.blocks[0].out, Linear8bit)
    assert known["trainer"].callback_metrics == {} and next(trained.parameters()).dtype == torch.float32


def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = run("transformers")["model"]
    assert model.config._attn_implementation == "sage"
    assert sum(isinstance(layer, Linear8bit) for layer in model.modules()) == 14


def stand_in(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Put modules with these names into the place of a trainer that is not installed."""
    for name, content in modules.items():
        dotted, module = name.replace("__", "."), ModuleType(name)
        vars(module).update(content)
        parts = dotted.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, dotted, module)
        setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)


def test_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper of attention gets [batch, heads, tokens, head_dim]. Methods of the layers stay."""

    class Linear(nn.Linear):
        def init_states(self) -> str:
            return "torchtitan's"

    class ColumnParallel(Linear):
        pass

    class Wrapper(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, enable_gqa: bool = False,
                    is_causal: bool = True) -> Tensor:  # fmt: skip
            return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa)

    stand_in(
        monkeypatch,
        torchtitan__models__common__attention={"ScaledDotProductAttentionWrapper": Wrapper},
        torchtitan__models__common__linear={"Linear": Linear},
    )
    inputs = torch.randn(2, 4, 24, 16), *torch.randn(2, 2, 2, 24, 16)
    expected = Wrapper()(*inputs, enable_gqa=True)
    known = run("torchtitan")
    found = Wrapper()(*inputs, enable_gqa=True)
    assert 0 < (found - expected).norm() / expected.norm() < 0.03
    layers = nn.ModuleDict({"0": nn.ModuleDict({"w1": Linear(32, 16), "w2": ColumnParallel(32, 16)})})
    model = nn.ModuleDict({"layers": layers})
    known["Sage8bit"]().convert(model)
    assert isinstance(layers["0"]["w1"], Linear8bit) and layers["0"]["w1"].init_states() == "torchtitan's"
    assert type(layers["0"]["w2"]) is ColumnParallel


def test_nanochat(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanochat has masters in fp32 and activations in bf16. A layer casts its weight."""

    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype))

    flash = SimpleNamespace(flash_attn_func=None, flash_attn_with_kvcache="theirs")
    stand_in(monkeypatch, nanochat__flash_attention={"flash_attn": flash}, nanochat__gpt={"Linear": Linear})
    known = run("nanochat")
    q, k, v = torch.randn(3, 2, 24, 4, 16)
    found = flash.flash_attn_func(q, k, v, causal=True, window_size=(24, 0))
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    assert 0 < (found.transpose(1, 2) - expected).norm() / expected.norm() < 0.03
    with pytest.raises(NotImplementedError, match=r"window_size \(12, 0\) over 24 keys"):
        flash.flash_attn_func(q, k, v, causal=True, window_size=(12, 0))
    assert flash.flash_attn_with_kvcache == "theirs"
    block = nn.ModuleDict({"c_q": Linear(32, 32, bias=False), "ve_gate": Linear(12, 4, bias=False)})
    model = nn.ModuleDict({"transformer": nn.ModuleDict({"h": nn.ModuleList([block])}), "lm_head": Linear(32, 48)})
    known["convert"](model)
    assert isinstance(block["c_q"], Linear8bit) and type(block["ve_gate"]) is type(model["lm_head"]) is Linear
    y = block["c_q"](torch.randn(5, 32, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and block["c_q"].weight.grad.dtype == torch.float32

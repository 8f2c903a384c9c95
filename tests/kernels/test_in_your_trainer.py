"""The programs of docs/in-your-trainer.md run in the trainers that are installed. Stand-ins of the other trainers call
the same functions."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runs import ROOT
from sagekernels import Linear8bit, attention_reference

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


def documents(*lengths: int) -> SimpleNamespace:
    """Return packed documents as torchtitan describes them."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return SimpleNamespace(cu_seq_q=ends, cu_seq_k=ends, max_q=max(lengths), max_k=max(lengths))


def test_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention gets [batch, tokens, heads, head_dim] and documents over the whole batch. Methods of layers stay."""

    class Linear(nn.Linear):
        def init_states(self) -> str:
            return "torchtitan's"

    class Varlen(nn.Module):
        window_size = -1, 0

    stand_in(
        monkeypatch,
        torchtitan__models__common__attention={"VarlenAttention": Varlen},
        torchtitan__models__common__linear={"Linear": Linear},
    )
    known = run("torchtitan")
    q, (k, v) = torch.randn(2, 24, 4, 16), torch.randn(2, 2, 24, 2, 16)
    found = Varlen()(q, k, v, attention_masks=documents(10, 14, 24), enable_gqa=True)
    parts = [(0, 0, 10), (0, 10, 24), (1, 0, 24)]
    expected = torch.empty_like(found)
    for row, start, end in parts:
        one = (x[row, start:end].transpose(0, 1) for x in (q, k, v))
        expected[row, start:end] = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True).transpose(0, 1)
    assert 0 < (found - expected).norm() / expected.norm() < 0.03
    Varlen.window_size = 8, 0
    windowed = Varlen()(q, k, v, attention_masks=documents(24, 24))
    exact = attention_reference(q, k, v, window=9)
    assert 0 < (windowed - exact).norm() / exact.norm() < 0.03
    with pytest.raises(NotImplementedError, match="no log-sum-exp"):
        Varlen()(q, k, v, attention_masks=documents(48), out_transform=lambda o, lse: o)
    model = nn.ModuleDict(
        {"layers": nn.ModuleDict({"0": nn.ModuleDict({"w1": Linear(32, 16)})}), "lm_head": Linear(32, 48)}
    )

    @dataclass
    class Spec:
        parallelize_fn: Callable[..., Any]

    spec = known["in_8_bits"](Spec(lambda model, **others: (model, others)))
    assert spec.parallelize_fn(model, dump_folder="x") == (model, {"dump_folder": "x"})
    layer = model["layers"]["0"]["w1"]
    assert isinstance(layer, Linear8bit) and layer.init_states() == "torchtitan's" and type(model["lm_head"]) is Linear


def test_torchtitan_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's debug model is built as torchtitan builds it, on no device first, and trains a step."""
    attention = pytest.importorskip(
        "torchtitan.models.common.attention",
        reason="torchtitan 0.3.0 is not installed: it needs datasets < 4.8, and SageTrain reads with datasets 5",
    )
    from torchtitan.models.llama3 import model_registry

    monkeypatch.setattr(attention.VarlenAttention, "forward", attention.VarlenAttention.forward)
    known = run("torchtitan")
    spec = replace(model_registry("debugmodel", attn_backend="varlen"), parallelize_fn=lambda model, **others: model)
    with torch.device("meta"):
        model = known["in_8_bits"](spec).parallelize_fn(spec.model.build())
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    model.init_states(buffer_device=torch.device("cpu"))
    layers = [name for name, layer in model.named_modules() if isinstance(layer, Linear8bit)]
    assert layers and all(name.startswith("layers.") for name in layers)
    ids, positions = torch.randint(0, 2048, (2, 64)), torch.arange(64).expand(2, -1) % 40
    logits = model(ids, positions=positions, attention_masks=model.get_attention_masks(positions=positions))
    F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    assert logits.isfinite().all() and all(each.grad is not None for each in model.parameters())


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
    found = flash.flash_attn_func(q, k, v, causal=True, window_size=(12, 0))
    expected = attention_reference(q, k, v, window=13)
    assert 0 < (found - expected).norm() / expected.norm() < 0.03
    assert flash.flash_attn_with_kvcache == "theirs"
    block = nn.ModuleDict({"c_q": Linear(32, 32, bias=False), "ve_gate": Linear(12, 4, bias=False)})
    model = nn.ModuleDict({"transformer": nn.ModuleDict({"h": nn.ModuleList([block])}), "lm_head": Linear(32, 48)})
    known["convert"](model)
    assert isinstance(block["c_q"], Linear8bit) and type(block["ve_gate"]) is type(model["lm_head"]) is Linear
    y = block["c_q"](torch.randn(5, 32, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and block["c_q"].weight.grad.dtype == torch.float32

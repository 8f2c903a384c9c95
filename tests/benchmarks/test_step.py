"""benchmarks/step.py runs every row at a tiny size, and compares the losses before it times anything."""

import dataclasses
import re
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from peer import PeerBlock, peer_attention
from runs import ROOT
from sagekernels import attention_reference

TINY = ["--shape", "tiny", "--seq-length", "64", "--tokens", "128", "--accumulation", "2", "--repeats", "2"]
TINY += ["--compile", "off"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The benchmark with a small vocabulary, and without torchao, whether that is installed or not."""
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    found = runpy.run_path(str(ROOT / "benchmarks/step.py"))
    monkeypatch.setitem(found["main"].__globals__, "VOCAB", 1008)
    return found


def test_every_row_is_timed_or_said_to_be_not_installed(program: dict, capsys: pytest.CaptureFixture) -> None:
    program["main"]([*TINY, "--ours", "sdpa,scores,scores+int8,sdpa+fp8:9000+fp8"])
    text = capsys.readouterr().out
    assert "2 micro-batches of 2 x 64 tokens, 2 key heads, whole sequences; attention of plain PyTorch: SDPA" in text
    timed = re.findall(r"^(.+?) +[\d.]+ ms +\d+ tokens/s  MFU -", text, re.MULTILINE)
    assert timed == [
        "sagetrain sdpa",
        "sagetrain scores",
        "sagetrain scores+int8",
        "sagetrain sdpa+fp8:9000+fp8",
        "plain",
    ]
    for recipe in ("tensorwise", "rowwise"):
        assert text.index(f"plain + torchao {recipe}: not installed") < text.index(" tokens/s  MFU")
    assert re.findall(r"^(sagetrain .+): [\d.]+ x plain, by rounds [\d.]+ [\d.]+$", text, re.MULTILINE) == timed[:-1]
    losses = re.findall(r"losses ([\d.]+) .* ([\d.]+)$", text, re.MULTILINE)
    assert len(losses) == len(timed) and all(float(last) < float(first) - 0.1 for first, last in losses)


def test_windows_of_both_sides_are_the_same(program: dict, capsys) -> None:
    program["main"]([*TINY, "--ours", "sdpa", "--peers", "bf16", "--window", "20"])
    text = capsys.readouterr().out
    assert "windows of 20 tokens in 3 of 4 layers" in text and re.findall(
        r"^sagetrain sdpa: [\d.]+ x plain, by rounds", text, re.M
    )
    q, k, v = torch.randn(3, 2, 64, 2, 16, dtype=torch.float64)
    expected = attention_reference(q, k, v, window=20)
    assert (peer_attention("SDPA", 20)(q, k, v) - expected).abs().max() < 1e-12


def test_attention_within_documents_is_timed_with_few_key_heads(program: dict, capsys) -> None:
    """Both kinds of attention see the documents: their losses agree, and differ from the losses of whole sequences."""
    first_losses = {}
    for documents in ("0", "20"):
        program["main"](
            [*TINY, "--ours", "reference,scores", "--peers", "", "--kv-heads", "4", "--documents", documents]
        )
        text = capsys.readouterr().out
        assert len(re.findall(r"tokens/s  MFU", text)) == 2
        first_losses[documents] = re.findall(r"losses (.+)", text)[0]
    assert int(re.findall(r"2 x 64 tokens, 4 key heads, (\d+) documents;", text)[0]) > 2
    assert first_losses["0"] != first_losses["20"]


@pytest.mark.parametrize(("option", "said"), [
    (["--documents", "20"], 'plain PyTorch takes whole sequences; add --peers ""'),
    (["--ours", "sdpa,foo"], "foo: 'foo' is no attention; there are sdpa, flash, sage, reference, fine, paper, scores"),
    (["--ours", "scores+fp4"], "linear layers, in fp8 or int8, and :WEIGHTS"),
    (["--ours", "scores+fp8:8M"], ":WEIGHTS, below which"),
    (["--ours", "scores+fp8+fp4"], "the output projection is in fp8 or int8"),
    (["--peers", "bf16,fp8"], "fp8: linear layers of plain PyTorch are bf16, tensorwise, rowwise"),
])  # fmt: skip
def test_unknown_names_are_told_before_anything_runs(option: list, said: str, program: dict, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        program["main"]([*TINY, *option])
    written = capsys.readouterr()
    assert said in written.err and not written.out


def test_a_peer_that_learns_otherwise_is_not_timed(program: dict, capsys: pytest.CaptureFixture) -> None:
    """The peer lacks the gradient through q, k and v. Its first loss is right, and its later losses differ."""
    rotate, attend = PeerBlock._rotate, F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PeerBlock, "_rotate", staticmethod(lambda x, cos, sin: rotate(x, cos, sin).detach() + 0 * x))
        patched.setattr(
            F, "scaled_dot_product_attention", lambda q, k, v, *mask, **how: attend(q, k, v.detach(), *mask, **how)
        )
        with pytest.raises(SystemExit, match=r"^plain: its losses are .* from those of sagetrain scores, more than"):
            program["main"]([*TINY, "--ours", "scores", "--peers", "bf16"])
    assert "tokens/s" not in capsys.readouterr().out


def test_rows_in_16_bits_have_a_tolerance_of_their_own(program: dict, monkeypatch) -> None:
    """A row in 16 bits is compared with a row in 8 bits by the tolerance of 8 bits, whichever is named first."""
    monkeypatch.setitem(program["TOLERANCE"], False, 1e-9)
    for ours in ("sdpa,sdpa+fp8", "sdpa+fp8,sdpa"):
        program["main"]([*TINY, "--ours", ours, "--peers", ""])
    with pytest.raises(SystemExit, match=r"more than 0\.0000"):
        program["main"]([*TINY, "--ours", "sdpa,scores", "--peers", ""])


def test_contenders_of_a_side_train_the_same_weights(program: dict) -> None:
    """A step of one contender is seen by the other, whose 8-bit weights are made again."""
    shape = program["SHAPES"]["tiny"].model_copy(update={"tie_embeddings": True})
    case = program["Case"](shape, 64, torch.device("cpu"), "SDPA")
    first, second, expected = (case.build(f"sagetrain sdpa{how}") for how in ("", "+int8", "+int8"))
    optimizer = program["MasterAdamW"](list(first.model.parameters()))
    for other in (second, expected):
        optimizer.lend(other.model)
    batch = program["Microbatch"].draw(2, 64, 0, case.device)
    steps = [program["make_step"](each, each.model, batch, 1, optimizer) for each in (first, second)]
    before = steps[1]().item()
    steps[0]()
    wanted = batch.loss(expected.model).item()
    assert steps[1]().item() == wanted < before - 0.01


def test_torchao_gets_all_linear_layers_but_the_head(program: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package has the names of torchao's documentation. Without a GPU it is asked to emulate FP8."""
    converted = []

    def convert(module: torch.nn.Module, *, module_filter_fn: Callable, config: SimpleNamespace) -> None:
        assert (config.name, config.emulate) == ("rowwise", True)
        linear = [(name, part) for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
        converted.extend(name for name, part in linear if module_filter_fn(part, name))

    kind = dataclasses.make_dataclass("Config", [("name", str), ("emulate", bool, False)])
    package = SimpleNamespace(
        Float8LinearConfig=SimpleNamespace(from_recipe_name=kind), convert_to_float8_training=convert
    )
    monkeypatch.setitem(sys.modules, "torchao.float8", package)
    case = program["Case"](program["SHAPES"]["tiny"], 64, torch.device("cpu"), "SDPA")
    case.build("plain + torchao rowwise")
    layers = ("qkv", "out", "gate_up", "down")
    assert converted == [f"blocks.{block}.{layer}" for block in range(2) for layer in layers]

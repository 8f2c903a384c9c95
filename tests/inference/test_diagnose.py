"""`sagetrain diagnose`: the papers' Table 2 of a checkpoint that was trained with 16-bit attention."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distributed import run_distributed
from kernel_inputs import cosine
from sagekernels.casts import quantize
from sagekernels.lowbit import LOW_BIT, LowBit
from sagekernels.matmul import linear as linear_of
from sagekernels.testing import exact_results, rel_l2
from sagetrain.__main__ import main
from sagetrain.auto.kept import Kept
from sagetrain.checkpoint.state import SettledLinear
from sagetrain.config import ConfigError
from sagetrain.config.load import load_config
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.inference import diagnose as diagnosis
from sagetrain.inference import load
from sagetrain.inference.diagnose import diagnose
from sagetrain.inference.load import load_run
from sagetrain.model.backends import Sage
from sagetrain.parallel.metrics import Metrics
from sagetrain.stability.linear_errors import Observed
from trained import make_trainer

HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def train(corpus: str, run_dir: str, **sections: object) -> None:
    data = {"valid": [{"path": f"{corpus}/valid"}], "micro_batch_size": 2, "seq_length": 64}
    sections |= {"tokens_per_step": {"tokens": 128}, "training": {"total_tokens": 4 * 128}}
    make_trainer(corpus, run_dir, 4, model=HEADS, data=data, **sections).train()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("diagnose") / "run"
    run_distributed(train, 1, str(corpus), str(folder))
    return folder


def test_the_numbers_are_those_of_the_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O, dQ, dK and dV of both layers are computed in float64, on the first two held-out sequences."""
    loaded = load_run(run, print)
    found = diagnose(loaded, ["paper", "scores"], report=print)
    assert (found.step, found.sequences, found.seq_length) == (4, 2, 64)
    assert list(found.recipes) == ["paper", "scores"]

    monkeypatch.setattr(Sage, "normalizes", False)  # q and k pass `attend` normalized then.
    again, seen = load_run(run, print), []
    data = again.cfg.data
    for block in again.model.blocks:

        def tapped(q, k, v, layout, attention=block.attention):
            for x in (q, k, v):
                x.retain_grad()
            o = Sage("paper")(q, k, v, layout)
            o.retain_grad()
            seen.append((q, k, v, o, layout.cu_seqlens))
            return o

        block.attention.function = Sage("paper")
        block.attention.attend = tapped
    stream = SampleStream(data, data.valid, 0, again.vocab_size, again.tokenizer.sha256)
    (batch,) = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=2, num_workers=0).eval_batches(2)
    again.model(**batch.inputs(again.device)).backward()
    assert len(seen) == 2
    for (q, k, v, o, cu_seqlens), layer in zip(seen, found.recipes["paper"], strict=True):
        row = [x.flatten(0, 1)[None] for x in (q, k, v, o.grad)]
        exact = exact_results(*row, cu_seqlens=cu_seqlens)
        for name, x, truth in zip(("O", "dQ", "dK", "dV"), (o, q.grad, k.grad, v.grad), exact, strict=True):
            x = x.flatten(0, 1)[None]
            assert layer[f"{name}/rel_l2"] == pytest.approx(rel_l2(x, truth), rel=1e-3)
            assert layer[f"{name}/cosine"] == pytest.approx(cosine(x, truth), rel=1e-4)
    for paper, scores in zip(*found.recipes.values(), strict=True):
        assert paper["dV/rel_l2"] > 2 * scores["dV/rel_l2"] > 0  # The error of scores comes from Q K^T alone.
        assert paper["S/largest"] == pytest.approx(scores["S/largest"], rel=2e-2)  # The layers below differ.
        assert "dS/zero_share_dQ" in paper and "dS/zero_share_dQ" not in scores
    assert not any(p.grad is not None for p in loaded.model.parameters())


def command(capsys, *words: object, code: int = 0) -> tuple[str, str]:
    """Run the command line in this process and return its output and its errors."""
    assert main([*map(str, words)]) == code
    return capsys.readouterr()


def test_the_command_prints_tables_and_writes_files(run, tmp_path, capsys) -> None:
    places = tmp_path / "errors.json", tmp_path / "errors.png"
    recipes = ["--recipe", "paper", "--recipe", "fine"]
    said, _ = command(capsys, "diagnose", run, *recipes, "--sequences", 3, "--json", places[0], "--plot", places[1])
    written = json.loads(places[0].read_text())
    assert written["sequences"] == 4  # The command takes whole micro-batches.
    assert list(written["recipes"]) == ["paper", "fine"]
    for recipe, layers in written["recipes"].items():
        assert f"Recipe {recipe}, step 4, 4 sequences of 64 tokens: cosine / relative L2 against float32" in said
        for layer in layers:
            assert f"{layer['dS/cosine']:.4f} / {layer['dS/rel_l2']:.4f}" in said
            assert f"{layer['dS/zero_share_dK']:.1%}" in said and f"{layer['S/largest']:.2f}" in said
    worst = max(layer["dS/rel_l2"] for layer in written["recipes"]["paper"])
    assert f"largest relative L2 of dS: layer {'01'[written['recipes']['paper'][1]['dS/rel_l2'] == worst]}" in said
    picture = places[1].read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def train_in_8_bits(corpus: str, run_dir: str) -> None:
    train(corpus, run_dir, linear={"precision": "fp8", "keep_last_fraction": 0.4}, checkpoint={"keep_last": 4})


def test_the_command_says_how_linear_layers_were_measured(corpus, tmp_path, capsys) -> None:
    run_distributed(train_in_8_bits, 1, str(corpus), str(tmp_path / "run"))
    capsys.readouterr()
    last = " as in the part of the run that has it, which this step is not in"
    for step, behind in ((2, ""), (4, last)):
        said, warned = command(capsys, "diagnose", tmp_path / "run", "--checkpoint", step)
        lines = [line for line in said.splitlines() if "inear layers" in line or "16 bits" in line]
        assert lines[0] == f"Linear layers, fp8{behind}: cosine / relative L2 against float32"
        assert len(lines) == 2 and lines[1].startswith("measured in a pass of their own, and in 16 bits above")
        assert not warned


def test_linear_layers_in_8_bits_are_measured(run: Path, monkeypatch) -> None:
    """Only these layers are measured. The numbers of INT8 attention are those without the measurement."""
    folder = next((run / "checkpoints").glob("step-*"))
    text = load_config(folder / "config.yaml")
    keys = {"keep_first_blocks": 1, "keep_layers_below": 64 * 64 + 1}
    auto = text.model_copy(update={"linear": text.linear.model_copy(update={"precision": "auto", **keys})})
    monkeypatch.setattr(load, "load_config", lambda path, passed_over: auto)
    fp8 = replace(Kept.by(folder), linear=SettledLinear("fp8"))
    monkeypatch.setattr(Kept, "by", lambda folder: fp8)
    said: list[str] = []
    loaded = load_run(run, said.append)
    assert said == ["linear layers, fp8 in training, are not in 8 bits here"]
    found = diagnose(loaded, ["fine"])
    assert list(found.linear) == ["1.attention.qkv", "1.mlp.gate_up"]  # out and down have 64 * 64 weights.
    for errors in found.linear.values():
        for x in ("Y", "dX", "dW"):
            assert 0.01 < errors[f"{x}/rel_l2"] < 0.06 and 0.998 < errors[f"{x}/cosine"] < 1
        assert 0 <= errors["dY/zero_share_dX"] < 0.2 and 0 <= errors["dY/zero_share_dW"] < 0.2
    monkeypatch.undo()
    plain = diagnose(load_run(run, print), ["fine"])
    assert plain.linear == {} and plain.recipes == found.recipes
    said = diagnosis.tables(found)[-1]
    assert said.title == "Linear layers, fp8: cosine / relative L2 against float32"
    assert [row[0] for row in said.rows] == list(found.linear)
    assert len(diagnosis.tables(plain)) == len(diagnosis.tables(found)) - 1


@pytest.mark.parametrize("name", LOW_BIT)
def test_errors_of_a_linear_layer_are_those_against_float64(name: tuple[str, str]) -> None:
    """The results stay the same, and gradients that vanish are counted: here 30 of 32 in every second row."""
    low, metrics = LOW_BIT[name], Metrics()
    draw = torch.Generator().manual_seed(1)
    x, dy = torch.randn(24, 48, generator=draw), torch.randn(24, 32, generator=draw)
    dy[::2, 2:] *= 2**-60
    dy[1::2, 16:] = 0  # These gradients are zero already, so none of them vanishes.
    weights = [torch.randn(16, 48, generator=draw, requires_grad=True) for _ in range(2)]
    ends = []
    for matmul in (low, Observed(low=low, tell=metrics.derive, tag="t")):
        own = x.clone().requires_grad_()
        y = torch.cat(linear_of(own, weights, matmul), 1)
        ends.append([y, *torch.autograd.grad(y, [own, *weights], dy)])
    assert all(a.equal(b) for a, b in zip(*ends, strict=True))
    numbers = metrics.reduce(torch.device("cpu"))
    w = torch.cat(weights).double()
    exact = {"Y": x.double() @ w.t(), "dX": dy.double() @ w, "dW": dy.double().t() @ x.double()}
    y, dx, *dw = ends[0]
    for tensor, result in {"Y": y, "dX": dx, "dW": torch.cat(dw)}.items():
        assert numbers[f"t.{tensor}/rel_l2"] == pytest.approx(rel_l2(result, exact[tensor]), rel=1e-3, abs=1e-6)
        assert numbers[f"t.{tensor}/cosine"] == pytest.approx(cosine(result, exact[tensor]), abs=1e-6)
    there, lost = 12 * 32 + 12 * 16, 12 * 30
    small = (dy != 0) & (dy.abs() > 2**-30) & (low_codes(low, dy) == 0)
    assert numbers["t.dY/zero_share_dX"] == pytest.approx((lost + small.sum().item()) / there)
    assert "t.dY/zero_share_dW" in numbers


def low_codes(low: LowBit, dy: torch.Tensor) -> torch.Tensor:
    return quantize(dy, low.gradient).codes.float()


def test_the_default_is_fine_for_a_run_with_16_bit_attention(run: Path) -> None:
    assert list(diagnose(load_run(run, print), [], report=print).recipes) == ["fine"]


def test_impossible_requests_are_refused_before_computing(run, tmp_path, capsys) -> None:
    with pytest.raises(ConfigError, match="--recipe fast: there is no such recipe; there are fine, paper, scores"):
        diagnose(load_run(run, print), ["fast"])
    with pytest.raises(ConfigError, match=r"--json .*none/x.json: there is no folder .*none; make it first"):
        diagnosis.check_outputs(tmp_path / "none/x.json", None)
    for name in ("x.txt", "x"):
        with pytest.raises(ConfigError, match=rf"--plot .*/{name}: a picture's name ends in .png"):
            diagnosis.check_outputs(None, tmp_path / name)
    assert "error: --plot" in command(capsys, "diagnose", run, "--plot", tmp_path / "x", code=2)[1]


def test_fewer_sequences_than_asked_for(run: Path, monkeypatch) -> None:
    monkeypatch.setattr(Loader, "eval_size", lambda self, asked: min(asked, 5))
    said: list[str] = []
    found = diagnose(load_run(run, print), ["scores"], 50, report=said.append)
    assert found.sequences == 4
    assert said == ["asked for 50 sequences, and the data has 4 in whole micro-batches of 2"]


def test_less_data_than_a_micro_batch_is_measured_once(run: Path, monkeypatch) -> None:
    monkeypatch.setattr(SampleStream, "num_windows", property(lambda self: 3))
    loaded = load_run(run, print)
    data = loaded.cfg.data.model_copy(update={"micro_batch_size": 8})
    loaded.cfg = loaded.cfg.model_copy(update={"data": data})
    said: list[str] = []
    assert diagnose(loaded, ["scores"], 5, report=said.append).sequences == 3
    assert said == ["asked for 5 sequences, and the data has 3 in whole micro-batches of 3"]


def test_int8_attention_that_cannot_run_here(run: Path) -> None:
    loaded = load_run(run, print)
    narrow = loaded.cfg.model.model_copy(update={"head_dim": 8})
    loaded.cfg = loaded.cfg.model_copy(update={"model": narrow})
    with pytest.raises(ConfigError, match=r"sage supports head_dim 16 to 256, not 8.*cannot be diagnosed here"):
        diagnose(loaded, ["fine"])

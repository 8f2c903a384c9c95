"""The benchmark of generation checks that both programs continue alike before it times them, and prints a table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import saved_runs
from sagetrain.inference.load import TrainedRun, load_run

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("benchmark_generate", ROOT / "benchmarks/generate.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a run with random weights and a context of 16 tokens."""
    folder = tmp_path_factory.mktemp("benchmark") / "run"
    saved_runs.save_runs([(str(folder), saved_runs.config(folder), 1)], model)
    return folder


def test_what_differs_is_not_timed(run: Path) -> None:
    own, other = benchmark.load(run, "sdpa")
    prompts = benchmark.prompts_of(own, 3, 8)
    lengths = [len(own.tokenizer.encode(prompt)) for prompt in prompts]
    assert len(set(lengths)) > 1 and max(lengths) <= 9
    benchmark.check(own, other, prompts, 7)
    assert {len(tokens) for tokens in benchmark.ours(own, prompts, 7)} == {7}
    with torch.no_grad():
        own.model.blocks[1].mlp.down.weight.neg_()
    with pytest.raises(SystemExit, match=r"in float32 prompt \d of 3 goes on otherwise from its token \d"):
        benchmark.check(own, other, prompts, 7)


def test_mistakes_are_one_line(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["generate.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"^there is no folder [^\n]*; name the folder of a run [^\n]*$"):
        benchmark.main()
    monkeypatch.setattr("sys.argv", ["generate.py", str(run), "--attention", "foo"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "argument --attention: invalid choice: 'foo' (choose from " in capsys.readouterr().err


def test_both_have_the_same_weights(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in bf16 has its weights rounded when it is loaded on a GPU. transformers gets the rounded weights too."""

    def on_a_gpu(*how: object, **options: object) -> TrainedRun:
        loaded = load_run(*how, **options)
        loaded.model.bfloat16()
        return loaded

    monkeypatch.setattr(benchmark, "load_run", on_a_gpu)
    own, other = benchmark.load(run, "sdpa")
    ours, theirs = own.model.blocks[1].mlp.down.weight, other.model.layers[1].mlp.down_proj.weight
    assert theirs.dtype == torch.float32 and torch.equal(ours.float(), theirs)


def test_a_tie_is_no_difference(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of float sums decides a tie. The texts differ after it and are not compared further."""
    own, other = benchmark.load(run, "sdpa")
    prompts = benchmark.prompts_of(own, 2, 8)
    right = benchmark.theirs(other, own, prompts, 5)
    chosen, twin = right[1][3], next(token for token in range(300) if token not in right[1])
    with torch.no_grad():
        other.lm_head.weight[twin] = other.lm_head.weight[chosen] * (1 + 1e-6)
    said = [right[0], [*right[1][:3], twin, 0]]
    monkeypatch.setattr(benchmark, "ours", lambda *_: said)
    monkeypatch.setattr(benchmark, "theirs", lambda *_: right)
    benchmark.check(own, other, prompts, 5)
    said[1][3] = twin + 1
    with pytest.raises(SystemExit, match="prompt 2 of 2 goes on otherwise from its token 4"):
        benchmark.check(own, other, prompts, 5)


def test_a_change_of_dtype_rounds_weights_alone(run: Path) -> None:
    """The frequencies of transformers' rotary embedding stay in float32. A rounding would not be undone, and the
    positions would be wrong."""
    own, other = benchmark.load(run, "sdpa")
    frequencies = other.model.rotary_emb.inv_freq.clone()
    for dtype in (torch.bfloat16, torch.float32):
        for model in (own.model, other):
            benchmark.convert(model, dtype)
            assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert torch.equal(other.model.rotary_emb.inv_freq, frequencies)
    benchmark.check(own, other, benchmark.prompts_of(own, 3, 8), 7)


def test_both_take_turns_and_the_first_round_does_not_count(monkeypatch) -> None:
    called, clock = [], iter(range(1000))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    found = benchmark.seconds({"a": lambda: called.append("a"), "b": lambda: [called.append("b"), next(clock)]})
    assert called == ["a", "b"] * (benchmark.ROUNDS + 1)
    assert found == {"a": 1, "b": 2}


def test_the_table_compares_speeds() -> None:
    lines = benchmark.table({1: {"ours": 50.0, "transformers": 40.0}, 8: {"ours": 2000.0, "transformers": 4000.0}})
    assert [line.split()[-3:] for line in lines.splitlines()[1:]] == [
        ["50.0", "40.0", "125.0%"],
        ["2,000.0", "4,000.0", "50.0%"],
    ]

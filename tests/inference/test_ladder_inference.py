"""Eval, generate and diagnose use every layer on the rung that the precision ladder had at the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from distributed import run_distributed
from sagetrain.__main__ import main
from sagetrain.config import RunConfig
from sagetrain.inference import diagnose as diagnosis
from sagetrain.inference.diagnose import diagnose
from sagetrain.inference.evaluate import evaluate
from sagetrain.inference.load import load_run
from sagetrain.model.backends import Sage, Sdpa
from sagetrain.stability import precision
from sagetrain.training.build_run import build
from sagetrain.training.trainer import Trainer

STEP = 128
SAID = "attention as at step 4: fine in layer 0; sdpa in layer 1"


def train(corpus: str, run_dir: str) -> float:
    """Train four steps whose first measurement moves layer 0 up from `paper`. The last layer is scheduled for sdpa."""
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    cfg = tiny.config(1, model=heads, attention={"backend": "sage", "recipe": "paper"}).model_dump()
    cfg["data"].update(train=[{"path": f"{corpus}/train"}], valid=[{"path": f"{corpus}/valid"}], micro_batch_size=2)
    cfg["data"].update(seq_length=64)
    cfg["tokens_per_step"].update(tokens=STEP)
    cfg["training"].update(run_dir=run_dir, total_tokens=4 * STEP)
    cfg["evaluation"].update(num_sequences=4)
    cfg["stability"]["monitor"] = {"every_steps": 1}
    cfg["stability"]["precision"] = {
        "rungs": ["fine", "sdpa"],
        "floors": [{"rung": "sdpa", "last_layers": 1}],
        "threshold": {"above": 1e-6, "cooldown_tokens": 100 * STEP},
    }
    Trainer(build(RunConfig.model_validate(cfg))).train()
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [row["valid/loss"] for row in rows if "valid/loss" in row][-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, float]:
    """The folder of a run, and the held-out loss at its end."""
    folder = tmp_path_factory.mktemp("ladder") / "run"
    return folder, run_distributed(train, 1, str(corpus), str(folder))[0]


def test_a_model_has_its_checkpoints_rungs_and_loss(run: tuple[Path, float]) -> None:
    said: list[str] = []
    loaded = load_run(run[0], said.append)
    assert said == [SAID]
    assert loaded.model.functions == [Sage("fine"), Sdpa()]
    assert evaluate(loaded, 4)[0].loss == pytest.approx(run[1], rel=1e-6)
    loaded.model.functions = [Sage("paper")] * 2  # A model without the ladder's state would have these functions.
    assert evaluate(loaded, 4)[0].loss != pytest.approx(run[1], rel=1e-6)


def test_an_attention_that_is_named_is_that_of_all_layers(run: tuple[Path, float]) -> None:
    said: list[str] = []
    assert load_run(run[0], said.append, attention="sdpa").model.functions == [Sdpa()] * 2
    assert load_run(run[0], said.append, attention="sage").model.functions == [Sage("paper")] * 2
    assert said == []


def test_a_rung_that_cannot_run_here_is_said(run: tuple[Path, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(*_: object, **__: object) -> None:
        raise ValueError("attention.backend sage needs training.dtype bf16 on a GPU")

    monkeypatch.setattr(precision, "resolve_backend", elsewhere)
    said: list[str] = []
    assert load_run(run[0], said.append).model.functions == [Sdpa()] * 2
    assert len(said) == 1 and said[0].startswith("stability.precision.rungs: paper cannot run here: attention.backend")
    assert said[0].endswith("; sdpa is used here")


def test_diagnose_measures_quantized_layers_on_their_rungs(run, tmp_path: Path) -> None:
    found = diagnose(load_run(run[0], print), [], report=print)
    assert found.attention == ["sage fine", "sdpa"]
    first, last = found.recipes["ladder"]
    fine = diagnose(load_run(run[0], print), ["fine"], report=print)
    # The report names the checkpoint's attention, whatever was measured.
    assert fine.attention == ["sage fine", "sdpa"]
    for name in ("S/largest", "O/rel_l2", "P/rel_l2"):
        assert first[name] == fine.recipes["fine"][0][name]  # No layer below can change these inputs.
    # A layer in 16 bits above changes the gradients.
    assert first["dO/scale_max"] != fine.recipes["fine"][0]["dO/scale_max"]
    assert last == {} and fine.recipes["fine"][1]["dS/rel_l2"] > 0
    errors, others = diagnosis.tables(found)
    assert errors.title.startswith("Each layer on its rung, step 4, ")
    assert [row[0] for row in errors.rows] == ["0 (sage fine)", "1 (sdpa)"]
    assert errors.rows[1][1:] == ["-"] * 8 and "-" not in errors.rows[0]
    assert set(others.rows[1][1:]) == {"-"}
    assert errors.caption == f"largest relative L2 of dS: layer 0, {first['dS/rel_l2']:.4f}"
    diagnosis.plot(found, tmp_path / "errors.png")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_the_commands_say_it_in_one_line(run: tuple[Path, float], capsys) -> None:
    for words in (["eval"], ["generate", "def", "--max-tokens", "1"], ["diagnose"]):
        assert main([words[0], str(run[0]), *words[1:]]) == 0
        assert capsys.readouterr().err == f"{SAID}\n"
    assert main(["eval", str(run[0]), "--attention", "sdpa"]) == 0
    assert capsys.readouterr().err == ""

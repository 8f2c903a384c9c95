"""attention.backend `auto` is settled once, recorded, and kept when the run continues. One rank settles both choices,
of attention and of linear layers, for all ranks."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from sagekernels.hopper import HOPPER
from sagekernels.testing import Shape
from sagetrain.auto import attention_choice, linear_choice
from sagetrain.auto import settled as settling
from sagetrain.auto.attention_choice import settle_attention
from sagetrain.auto.kept import Kept, kept_attention
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.state import SettledAttention, SettledLinear
from sagetrain.config.layer_specs import linear_layers
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.config.sections.model import WindowsConfig
from trained import make_trainer

SAGE_SCORES, SDPA = {"backend": "sage", "recipe": "scores"}, {"backend": "sdpa", "recipe": "fine"}


def settled(asked: dict, had: dict | None, device: str = "cuda") -> tuple[AttentionConfig, str, list]:
    """Settle attention where `fine` is the fastest. Return also the reason and what was heard: the settings to choose
    from, and the lines printed."""
    heard, cfg = [], tiny.config(1, "bf16", model={"head_dim": 64}, attention={"backend": "sage", **asked})
    before = Kept.of(tiny.run_state(attention=SettledAttention(**had)), {}) if had else None
    start = tiny.start(cfg, say=heard.append, device=torch.device(device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sagetrain.model.selection.find_flash", lambda device: None)
        patch.setattr(attention_choice, "decide", lambda *_, key, **__: heard.append(key[-1]) or "sage fine")
        found, why = settle_attention(start, before, list)
    return found, why, heard


@pytest.mark.parametrize("asked", [{"backend": "auto"}, {"backend": "sage"}, {"backend": "auto", "recipe": "fine"}])
def test_a_run_that_begins_chooses(asked: dict) -> None:
    found, why, chosen_from = settled(asked, None)
    assert (found.backend, found.recipe) == ("sage", "fine")
    assert why == "INT8 recipe fine: sagekernels; auto: the fastest"
    assert chosen_from == [AttentionConfig(**asked)]


def test_without_a_gpu_nothing_is_timed() -> None:
    for asked, expected in (({}, ("sage", "fine")), ({"backend": "auto"}, ("sdpa", "fine"))):
        found, _, chosen_from = settled(asked, None, "cpu")
        assert (found.backend, found.recipe) == expected and chosen_from == []


@pytest.mark.parametrize(("asked", "had", "expected"), [
    ({"backend": "auto"}, SAGE_SCORES, SAGE_SCORES),
    ({"backend": "sage"}, SAGE_SCORES, SAGE_SCORES),
    ({"backend": "auto"}, SDPA, SDPA),
    # A named backend or recipe replaces the recorded one.
    ({"backend": "sage", "recipe": "paper"}, SAGE_SCORES, {"backend": "sage", "recipe": "paper"}),
    ({"backend": "auto", "recipe": "paper"}, SAGE_SCORES, {"backend": "sage", "recipe": "paper"}),
    ({"backend": "sdpa"}, SAGE_SCORES, SDPA | {"recipe": "scores"}),
])  # fmt: skip
def test_a_run_that_continues_keeps_what_it_had(asked: dict, had: dict, expected: dict) -> None:
    found, why, heard = settled(asked, had)
    assert {"backend": found.backend, "recipe": found.recipe} == expected and heard == []
    assert ("as the run had it" in why) == ("auto" in asked.values() or "recipe" not in asked)


def test_sage_after_another_backend_has_its_recipe_chosen() -> None:
    found, _, chosen_from = settled({"backend": "sage"}, SDPA)
    assert chosen_from == [AttentionConfig()] and found.recipe == "fine"


def test_what_cannot_run_any_more_is_chosen_anew_and_said() -> None:
    found, _, heard = settled({"backend": "auto"}, {"backend": "flash", "recipe": "fine"})
    said, chosen_from = heard
    assert said.startswith("attention.backend: what auto was so far cannot run here (attention.backend flash: no flash")
    assert chosen_from == AttentionConfig(backend="auto") and found.backend == "sage"
    with pytest.raises(ValueError, match="no flash-attn package"):
        settled({"backend": "flash"}, SAGE_SCORES)


def test_another_flash_attn_is_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, cpu = tmp_path / "flash.py", torch.device("cpu")
    installed.touch()
    monkeypatch.setattr(attention_choice, "find_flash", lambda device: ("4", SimpleNamespace(__file__=str(installed))))
    flash = {"flash": AttentionConfig(backend="flash"), "sdpa": AttentionConfig(backend="sdpa")}
    before = attention_choice._flash_attn(flash, cpu)
    os.utime(installed, ns=(0, 1))
    assert before != attention_choice._flash_attn(flash, cpu) == "flash-attn 4, 1"
    assert attention_choice._flash_attn({"sdpa": flash["sdpa"]}, cpu) == ""


def train_and_continue(corpus: str, run_dir: str) -> None:
    """Start a run three times, as on a GPU. Only the first start may choose, and the last one names what it wants."""
    attention_choice.to_be_chosen = lambda asked, device: "auto" in (asked.backend, asked.recipe)
    linear_choice.why_sixteen_bits = lambda *_, **__: ""
    calls, low = [], "int8, layers of 3,072 weights and more"
    attention_choice.decide = lambda *_, **__: calls.append("attention") or "sage scores"
    linear_choice.decide = lambda *_, **__: calls.append("linear") or low
    for steps, recipe, precision in ((1, "auto", "auto"), (2, "auto", "auto"), (3, "fine", "bf16")):
        how = {"attention": {"backend": "sage", "recipe": recipe}, "linear": {"precision": precision}}
        trainer = make_trainer(corpus, run_dir, steps, data={"micro_batch_size": 2}, **how)
        trainer.train()
        block = trainer.engine.model.blocks[1]
        used, low = block.attention.function.recipe, steps < 3
        recorded = on_disk.read_state(on_disk.newest(Path(run_dir) / "checkpoints"))
        assert recorded.attention == SettledAttention("sage", used) and used == ("scores" if low else "fine")
        # gate_up has 3,072 weights and attention.out 1,024.
        assert bool(block.mlp.gate_up.kept) == low and block.attention.out.kept == ()
        assert recorded.linear == SettledLinear(*(("int8", 3072) if low else ("bf16", 0)))
    assert calls == ["attention", "linear"]


def test_a_run_has_one_arithmetic_until_it_is_told_otherwise(corpus: Path, tmp_path: Path, capfd) -> None:
    run_distributed(train_and_continue, 1, str(corpus), str(tmp_path / "run"))
    said = "".join(capfd.readouterr())
    assert (
        "attention sage (INT8 recipe scores: its torch twin, " in said and "exact but slow; auto: the fastest)" in said
    )
    layers = "layers of 3,072 weights and more (qkv, gate_up)"
    assert f"linear layers int8 in all blocks, {layers} (its torch twin" in said
    assert "); auto: the fastest" in said
    for key in ("attention.backend", "linear.precision"):
        assert f"as the run had it: auto decides once, naming {key} changes it" in said
    assert "attention.recipe: 'auto' -> 'fine'" in said and "linear.precision: 'auto' -> 'bf16'" in said


def test_a_loaded_run_keeps_the_attention_it_was_trained_with() -> None:
    assert kept_attention(AttentionConfig(), SettledAttention(**SAGE_SCORES)).recipe == "scores"
    assert kept_attention(AttentionConfig(), SettledAttention("sage", "gradients")).recipe == "auto"  # It is gone.


def test_layers_with_a_window_are_timed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times count by the layers of each kind. A window that hides nothing is none, and a function that leaves out the
    window is not used."""
    windows = WindowsConfig(tokens=9, pattern="WWWF")
    model = ModelConfig(num_layers=8, hidden_size=32, ffn_hidden_size=48, num_attention_heads=2, windows=windows)
    shape = Shape(2, 40, 40, 2, 2, 16)
    kinds = attention_choice._kinds(model, shape, 40)
    assert kinds == {shape._replace(window=9): 0.75, shape: 0.25}
    assert attention_choice._kinds(model, shape, 9) == {shape: 1.0}
    monkeypatch.setattr(attention_choice, "seconds_per_step", lambda attend, each, **_: 2.0 if each.window else 6.0)
    start = tiny.start(tiny.config(1), dtype=torch.float32)
    found = {name: AttentionConfig(backend=name, recipe="fine") for name in ("sage", "sdpa", "reference")}
    measured = attention_choice._measure(found, kinds, start)
    assert measured.times == {"attention": dict.fromkeys(found, 3.0)}
    layout = attention_choice.token_layout
    monkeypatch.setattr(attention_choice, "token_layout", lambda *how: layout(*how[:-1]))
    measured = attention_choice._measure(found, kinds, start)
    assert measured.times == {"attention": dict.fromkeys(found, math.inf)}


@pytest.mark.parametrize(("known", "admitted", "timed"), [
    ("scores", True, ["sage scores", "sdpa"]), ("scores", False, ["sage scores", "sage fine", "sdpa"]),
    (None, True, ["sage scores", "sage fine", "sdpa"]),
])  # fmt: skip
def test_a_recipe_known_to_be_faster_is_timed_alone(
    known: str | None, admitted: bool, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "serving", lambda *_: HOPPER._replace(fastest=known))
    verdict = attention_choice.Admission(admitted, "", {})
    monkeypatch.setattr(attention_choice, "admit", lambda *_, **__: verdict)
    monkeypatch.setattr(attention_choice, "seconds_per_step", lambda *_, **__: 1.0)
    recipes = {f"sage {recipe}": AttentionConfig(recipe=recipe) for recipe in ("scores", "fine")}
    start, found = tiny.start(tiny.config(1)), {**recipes, "sdpa": AttentionConfig(backend="sdpa")}
    measured = attention_choice._measure(found, {Shape(2, 40, 40, 2, 2, 16): 1.0}, start)
    assert list(measured.times["attention"]) == timed and len(measured.remarks) == 3


def test_heads_that_no_kernel_serves_are_timed_without_sage() -> None:
    start, found = tiny.start(tiny.config(1), dtype=torch.float32), {"sdpa": AttentionConfig(backend="sdpa")}
    assert attention_choice._measure(found, {Shape(1, 8, 8, 1, 1, 8): 1.0}, start).times["attention"].keys() == {"sdpa"}


class Stream:
    """A stream of data that is never read to its end."""

    def document_lengths(self, count: int) -> list[list[int]]:
        assert dist.get_rank() == 0  # The other ranks have no use for the lengths and do not read them.
        return [[10, 6]] * count


def chosen_on_a_rank(folder: str) -> list[tuple[list[str], list[tuple]]]:
    """Return the results of both choices on this rank, and what it was asked to decide, for two runs."""
    found = []
    attention_choice.to_be_chosen = lambda asked, device: True
    linear_choice.why_sixteen_bits = lambda *_, **__: ""
    for tp_size, cp_size, stage, on in ((2, 1, 1, True), (1, 2, 3, False)):
        groups, told = tiny.join(tp_size, cp_size), []

        def decide(what, start, measure, pick, *, file, key, told=told):
            told.append((what, file, key))
            return "sage fine" if what == "attention" else "int8"

        attention_choice.decide = linear_choice.decide = decide
        sections = {"parallel": {"tensor_parallel_overlap": "on" if on else "off"}, "attention": {"backend": "sage"}}
        sections |= {"data": {"document_attention": on, "micro_batch_size": 4}, "linear": {"precision": "auto"}}
        cfg = tiny.on(tiny.config(stage, "bf16", **sections), groups)
        settled = settling.settle(tiny.start(cfg, Path(folder), groups=groups, compiled=on), None, Stream())
        found.append(([settled.cfg.attention.recipe, settled.cfg.linear.precision], told))
    return found


def test_one_rank_chooses_for_all_from_one_ranks_calls(tmp_path: Path) -> None:
    """The choice sees the shape of the calls of one rank, the lengths of documents where attention heeds them, and how
    linear layers will run."""
    first, second = run_distributed(chosen_on_a_rank, 2, str(tmp_path))
    for tp_size, on, (taken, told), (theirs, nothing) in zip((2, 1), (True, False), first, second, strict=True):
        assert taken == theirs == ["fine", "int8"] and nothing == []
        (_, where, (problems, work, _, with_norm, *_)), (_, beside, (layers, tokens, joined, kept, compiled, *_)) = told
        assert (where, beside) == (tmp_path / "attention.json", tmp_path / "linear.json")
        heads = tiny.config(1).model.num_attention_heads // 2
        ((shape, share),) = problems
        assert shape.startswith("B{} N{} H{}/".format(*((1, 32) if on else (4, tiny.SEQ)), heads)) and share == 1.0
        assert with_norm == on  # Ranks that have parts of sequences compute it apart.
        assert work == (32 if on else 0)  # Four times the logarithm of the sum of squares of 10, 6, 10 and 6.
        assert (tokens, joined, kept, compiled) == (4 * tiny.SEQ // 2, on, on, on)
        assert layers == {n: each for n, each in linear_layers(tiny.config(1).model, tp_size).items() if not each.odd}

"""attention.backend `auto` is settled once, recorded, and kept when the run continues. One rank settles both choices,
of attention and of linear layers, for all ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from sagetrain.auto import attention_choice, linear_choice
from sagetrain.auto import settled as settling
from sagetrain.auto.attention_choice import settle_attention
from sagetrain.auto.calls import RankCalls
from sagetrain.auto.kept import kept_attention
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.state import SettledAttention
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config import RunConfig
from sagetrain.config.schema import AttentionConfig
from sagetrain.training.build_run import build
from sagetrain.training.trainer import Trainer

SAGE_SCORES, SDPA = {"backend": "sage", "recipe": "scores"}, {"backend": "sdpa", "recipe": "fine"}


def settled(asked: dict, had: dict | None, device: str = "cuda") -> tuple[AttentionConfig, str, list]:
    """Settle attention where `fine` is the fastest. Return also the reason and what was heard: the settings to choose
    from, and the lines printed."""
    heard = []

    def choose(open_settings: AttentionConfig) -> AttentionConfig:
        heard.append(open_settings)
        return open_settings.model_copy(update={"backend": "sage", "recipe": "fine"})

    found, why = settle_attention(
        AttentionConfig(**asked),
        tiny.config(1).model.model_copy(update={"head_dim": 64}),
        SettledAttention(**had) if had else None,
        device=torch.device(device),
        dtype=torch.bfloat16,
        choose=choose,
        say=heard.append,
    )
    return found, why, heard


@pytest.mark.parametrize("asked", [{"backend": "auto"}, {"backend": "sage"}, {"backend": "auto", "recipe": "fine"}])
def test_a_run_that_begins_chooses(asked: dict) -> None:
    found, why, chosen_from = settled(asked, None)
    assert (found.backend, found.recipe) == (
        "sage",
        "fine",
    ) and why == "INT8 recipe fine: the fastest that was admitted"
    assert chosen_from == [AttentionConfig(**asked)]


def test_without_a_gpu_nothing_is_timed() -> None:
    for asked, expected in (({}, ("sage", "fine")), ({"backend": "auto"}, ("sdpa", "fine"))):
        found, _, chosen_from = settled(asked, None, "cpu")
        assert (found.backend, found.recipe) == expected and chosen_from == []


@pytest.mark.parametrize(
    ("asked", "had", "expected"),
    [
        ({"backend": "auto"}, SAGE_SCORES, SAGE_SCORES),
        ({"backend": "sage"}, SAGE_SCORES, SAGE_SCORES),
        ({"backend": "auto"}, SDPA, SDPA),
        # A named backend or recipe replaces the recorded one.
        ({"backend": "sage", "recipe": "paper"}, SAGE_SCORES, {"backend": "sage", "recipe": "paper"}),
        ({"backend": "auto", "recipe": "paper"}, SAGE_SCORES, {"backend": "sage", "recipe": "paper"}),
        ({"backend": "sdpa"}, SAGE_SCORES, SDPA | {"recipe": "scores"}),
    ],
)
def test_a_run_that_continues_keeps_what_it_had(asked: dict, had: dict, expected: dict) -> None:
    found, why, heard = settled(asked, had)
    assert {"backend": found.backend, "recipe": found.recipe} == expected and heard == []
    assert ("as the run had it" in why) == ("auto" in asked.values() or "recipe" not in asked)


def test_sage_after_another_backend_has_its_recipe_chosen() -> None:
    found, _, chosen_from = settled({"backend": "sage"}, SDPA)
    assert chosen_from == [AttentionConfig()] and found.recipe == "fine"


def test_what_cannot_run_any_more_is_chosen_anew_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagetrain.model.selection.find_flash", lambda device: None)
    found, _, heard = settled({"backend": "auto"}, {"backend": "flash", "recipe": "fine"})
    said, chosen_from = heard
    assert said.startswith("attention.backend flash, which auto was so far, cannot run here") and "anew" in said
    assert chosen_from == AttentionConfig(backend="auto") and found.backend == "sage"
    with pytest.raises(ValueError, match="no flash-attn package"):
        settled({"backend": "flash"}, SAGE_SCORES)


def train_and_continue(corpus: str, run_dir: str) -> None:
    """Start a run three times, as on a GPU. Only the first start may choose."""
    attention_choice.to_be_chosen = lambda asked, device: "auto" in (asked.backend, asked.recipe)
    calls = []

    def choose(asked: AttentionConfig, *_: object, **__: object) -> AttentionConfig:
        calls.append(asked)
        return asked.model_copy(update=SAGE_SCORES)

    settling.choose_attention = choose
    cfg = tiny.config(1).model_dump()
    cfg["attention"] = {"backend": "sage"}
    cfg["data"].update(train=[{"path": f"{corpus}/train"}], micro_batch_size=2)
    for steps, recipe in ((1, "auto"), (2, "auto"), (3, "fine")):
        cfg["training"].update(run_dir=run_dir, total_tokens=steps * 4 * tiny.SEQ)
        cfg["attention"]["recipe"] = recipe
        trainer = Trainer(build(RunConfig.model_validate(cfg)))
        trainer.train()
        used = trainer.engine.model.blocks[0].attention.function.recipe
        recorded = on_disk.read_state(on_disk.newest(Path(run_dir) / "checkpoints")).attention
        assert recorded == SettledAttention("sage", used) and used == ("fine" if steps == 3 else "scores")
    assert len(calls) == 1


def test_a_run_has_one_arithmetic_until_it_is_told_otherwise(corpus: Path, tmp_path: Path, capfd) -> None:
    run_distributed(train_and_continue, 1, str(corpus), str(tmp_path / "run"))
    said = "".join(capfd.readouterr())
    assert "attention sage (INT8 recipe scores: the fastest that was admitted)" in said
    assert "as the run had it: auto decides once" in said
    assert "changed since that checkpoint: attention.recipe: 'auto' -> 'fine'" in said


def test_a_loaded_run_keeps_the_attention_it_was_trained_with() -> None:
    assert kept_attention(AttentionConfig(), SettledAttention(**SAGE_SCORES)).recipe == "scores"


class Stream:
    """A stream of data that is never read to its end."""

    def document_lengths(self, count: int) -> list[list[int]]:
        assert dist.get_rank() == 0  # The other ranks have no use for the lengths and do not read them.
        return [[10, 6]] * count


def chosen_on_a_rank(folder: str) -> list[tuple[list[str], list[tuple[RankCalls, dict]]]]:
    """Return the results of both choices on this rank, and the arguments that they were called with, for two runs."""
    found = []
    attention_choice.to_be_chosen = lambda asked, device: True
    linear_choice.why_sixteen_bits = lambda *_, **__: ""
    for tp_size, cp_size, stage, on in ((2, 1, 1, True), (1, 2, 3, False)):
        groups, told = tiny.join(tp_size, cp_size), []
        rank = dist.get_rank()

        def choose(asked, model, calls, told=told, rank=rank, **how):
            told.append((calls, {name: what for name, what in how.items() if name != "say"}))
            return asked.model_copy(update={"recipe": f"of rank {rank}"})

        settling.choose_attention = settling.choose_linear = choose
        sections = {"parallel": {"tensor_parallel_overlap": "on" if on else "off"}, "attention": {"backend": "sage"}}
        sections |= {"data": {"document_attention": on, "micro_batch_size": 4}, "linear": {"precision": "auto"}}
        settled = settling.settle(
            tiny.config(stage, "bf16", **sections),
            None,
            Stream(),
            groups,
            compiled=on,
            layers_of_tp=None,
            vocab_size=tiny.VOCAB,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            folder=RunFolder(Path(folder)),
            say=print,
        )
        found.append(([settled.cfg.attention.recipe, settled.cfg.linear.recipe], told))
    return found


def test_one_rank_chooses_for_all_from_one_ranks_calls(tmp_path: Path) -> None:
    """The choice sees the shape of the calls of one rank, the lengths of documents where attention heeds them, and how
    linear layers will run."""
    first, second = run_distributed(chosen_on_a_rank, 2, str(tmp_path))
    for tp_size, on, (taken, told), (theirs, nothing) in zip((2, 1), (True, False), first, second, strict=True):
        assert taken == theirs == ["of rank 0"] * 2 and nothing == []
        calls = RankCalls(tp_size, 3 - tp_size, on, 4, tiny.SEQ, torch.device("cpu"), torch.bfloat16)
        documents = [[10, 6]] * 64 if on else ()
        assert told == [
            (calls, {"documents": documents, "cache": tmp_path / "attention.json"}),
            (calls, {"kept": on, "compiled": on, "cache": tmp_path / "linear.json"}),
        ]

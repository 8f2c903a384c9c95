"""The first and last parts of runs are in 16 bits, the rest in 8 (linear.keep_first_fraction, keep_last_fraction)."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import tiny
from distributed import run_distributed
from runs import finish, rows_of, write_config
from sagekernels.lowbit import HEADS, LOW_BIT
from sagetrain.config.arithmetic import low_bit_linear
from sagetrain.config.schema import SIXTEEN_BITS, LinearConfig
from sagetrain.engines.build_engine import build_engine
from sagetrain.inference.load import load_run
from sagetrain.inference.ranks import Ranks
from sagetrain.model.backends import Sage, Sdpa
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.stability.controller import Taken
from sagetrain.stability.linear_schedule import LinearSchedule

FP8 = LinearConfig(precision="fp8", keep_last_fraction=0.4)


def test_when_is_a_function_of_the_tokens_seen() -> None:
    assert [low_bit_linear(FP8, tokens, 1000) for tokens in (0, 599, 600, 1000)] == [True, True, False, False]
    for percent in range(1, 100):  # The move comes at the token that the run names.
        part = LinearConfig(precision="fp8", keep_last_fraction=percent / 100)
        begin = 10 * (100 - percent)
        assert [low_bit_linear(part, tokens, 1000) for tokens in (begin - 1, begin)] == [True, False]
    assert low_bit_linear(LinearConfig(precision="fp8"), 1000, 1000)
    assert not low_bit_linear(LinearConfig(keep_last_fraction=0.4), 0, 1000)
    both = LinearConfig(precision="int8", keep_first_fraction=0.1, keep_last_fraction=0.4)
    assert [tokens for tokens in (0, 99, 100, 599, 600) if low_bit_linear(both, tokens, 1000)] == [100, 599]
    for percent in range(1, 100):
        part = LinearConfig(precision="int8", keep_first_fraction=percent / 100)
        assert [low_bit_linear(part, tokens, 1000) for tokens in (10 * percent - 1, 10 * percent)] == [False, True]
    assert not low_bit_linear(LinearConfig(precision="int8", keep_first_fraction=1e-9), 0, 1000)
    assert both.phases == [SIXTEEN_BITS, LinearConfig(precision="int8"), SIXTEEN_BITS]
    assert FP8.phases == [LinearConfig(precision="fp8"), SIXTEEN_BITS]
    for throughout in (LinearConfig(precision="fp8"), SIXTEEN_BITS, LinearConfig(keep_last_fraction=0.4)):
        assert throughout.phases == [throughout]


Steps = tuple[list[tuple[float, float]], list[int], list[str]]


def moving_runs(tp_size: int, stage: int, runs: list[tuple[str | None, dict]]) -> list[Steps]:
    """Take the steps of several runs one after the other."""
    groups = tiny.join(tp_size)
    return [moving_steps(groups, stage, *run) for run in runs]


def moving_steps(groups: ParallelGroups, stage: int, backend: str | None, linear: dict) -> Steps:
    """Return the (loss, gradient norm) pairs of five steps, the last two of them in 16 bits, the number of graphs after
    each step, and the messages."""
    tp_size = groups.tp_size
    parallel = {"sequence_parallel": tp_size > 1, "engine": "deepspeed"}  # FSDP2 renews 8-bit weights when it enters.
    shape = {"hidden_size": 64, "ffn_hidden_size": 96}
    cfg = tiny.config(stage, model=shape, parallel=parallel, linear={"precision": "fp8", **linear})
    model = tiny.model(cfg, groups)
    if backend:
        tiny.compile_first_rank(model, backend)
    engine = build_engine(tiny.on(cfg, groups), model)
    first, last = cfg.linear.keep_first_fraction or 0, cfg.linear.keep_last_fraction or 0
    now = lambda tokens: LinearSchedule(cfg.linear, model, engine.weights_changed, 500, tokens)  # noqa: E731
    schedules = [now(0)] if first or last else []
    found, graphs, said = [], [], [schedule.summary() for schedule in schedules]
    for step in range(1, 6):
        result = tiny.global_step(engine, step, sequences=2 // tp_size)
        found.append((result.loss, result.grad_norm))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        for schedule in schedules:
            said.extend(event.text for event in schedule.after_step(Taken(step, 100 * step, 100, {})))
            # This is the state of a checkpoint that the run goes back to. The tokens that were seen stay seen.
            schedule.restore({})
        low = cfg.linear.low_bit and 5 * first <= min(step, 4) < 5 - 5 * last
        assert model.matmuls == [dict.fromkeys(NAMES, LOW_BIT["fp8"]) if low else {}] * 2 + [{}]
        for layer in layers_of(model):
            fresh = layer.matmul.keep(layer.weights)
            assert bool(layer.kept) == low and all(map(torch.equal, layer.kept, fresh))
        assert bool(model.blocks[0].mlp_norm.reader) == (low and tp_size > 1)
    return found, graphs, [*said, *(now(400).summary() for _ in schedules)]


NAMES = ("qkv", "out", "gate_up", "down")
ATTENTION = Sage("paper"), Sdpa()


def layers_of(model: Transformer) -> list[torch.nn.Module]:
    return [module for module in model.blocks.modules() if hasattr(module, "kept")]


def test_the_output_projection_moves_with_the_blocks() -> None:
    linear = {"precision": "fp8", "head": "int8", "keep_first_fraction": 0.2, "keep_last_fraction": 0.4}
    cfg, head = tiny.config(1, linear=linear), HEADS["int8"]
    model = tiny.model(cfg, ParallelGroups.single())
    model.keep_weights()
    schedule = LinearSchedule(cfg.linear, model, model.keep_weights, 500, 0)
    for tokens, low in ((0, False), (100, True), (200, True), (300, False)):
        schedule.after_step(Taken(1, tokens, 100, {}))
        kept = head.keep(model.head.weights) if low else ()
        assert model.head.matmuls == ({"head": head} if low else {}) and len(model.head.kept) == len(kept)
        assert all(map(torch.equal, model.head.kept, kept))


@pytest.mark.parametrize(("world", "tp_size", "stage"), [(2, 2, 1), (2, 1, 2)])
def test_layers_move_at_any_layout(world: int, tp_size: int, stage: int) -> None:
    """The ranks of the second layout have whole layers, and need no other moves to show that each micro-step of ZeRO 2
    has the layers of its step."""
    last = {"keep_last_fraction": 0.4}
    kept = {"keep_first_fraction": 0.4}, {"keep_first_fraction": 0.2, "keep_last_fraction": 0.2}
    runs = [*((None, linear) for linear in (last, {}, {"precision": "bf16"}, *kept)), ("eager", last)]
    first, *others = run_distributed(moving_runs, world, tp_size, stage, runs if tp_size > 1 else runs[:3])
    for other in others:  # The first rank alone compiles.
        assert [(steps, said) for steps, _, said in other[:5]] == [(steps, said) for steps, _, said in first[:5]]
        assert torch.allclose(torch.tensor(other[-1][0]), torch.tensor(first[-1][0]), rtol=1e-4)
    (moved, _, said), (eight, *_), (sixteen, *_), *rest = first
    assert moved[:3] == eight[:3]  # The move comes after the third step.
    assert moved[3] != eight[3] and moved[3][0] == pytest.approx(eight[3][0], abs=2e-3)
    assert moved[3] != sixteen[3]
    assert said == [
        "fp8 up to 300 of 500 tokens",
        "linear layers from fp8 to 16 bits: linear.keep_last_fraction 0.4",
        "16 bits since 300 of 500 tokens",
    ]
    if not rest:
        return
    (began, _, said), (between, _, told), (compiled, graphs, _) = rest
    assert began[:2] == sixteen[:2]
    assert began[2] != sixteen[2] and began[2][0] == pytest.approx(sixteen[2][0], abs=5e-3)
    assert said == [
        "16 bits up to 200 of 500 tokens",
        "linear layers from 16 bits to fp8: linear.keep_first_fraction 0.4",
        "fp8 since 200 of 500 tokens",
    ]
    assert between[0] == sixteen[0] and between[1:] != sixteen[1:]
    assert [line.rpartition(": ")[2] for line in told] == [
        "16 bits up to 100 of 500 tokens",
        "linear.keep_first_fraction 0.2",
        "linear.keep_last_fraction 0.2",
        "16 bits since 400 of 500 tokens",
    ]
    assert torch.allclose(torch.tensor(compiled), torch.tensor(moved), rtol=2e-3)
    new = [after - before for before, after in pairwise(graphs)]
    assert new[0] == new[1] == new[3] == 0 and new[2] > 0, "compiled anew at the move, once"


def graphs_of_functions() -> list[int]:
    """Return the number of graphs after each attention function, which trains; the first one evaluates too. Linear
    layers are in 8 bits in all blocks but the first and the last, and then in 16 bits everywhere."""
    groups = tiny.join(2)
    shape = {"num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 96}
    linear = {"precision": "fp8", "keep_first_blocks": 1, "keep_last_blocks": 1}
    cfg = tiny.config(1, model=shape, parallel={"sequence_parallel": True}, linear=linear)
    model = tiny.model(cfg, groups, partition=None)
    model.functions = ATTENTION[:1] * 3
    torch._dynamo.reset()
    tiny.compile_first_rank(model, "eager")
    tokens, graphs = torch.arange(2 * tiny.SEQ).view(2, tiny.SEQ) % tiny.VOCAB, []
    for _ in range(2):
        for function in ATTENTION:
            model.functions = [function] * 3
            model.keep_weights()
            loss = model(tokens, tokens)
            loss.backward()
            if function is ATTENTION[0]:
                with torch.no_grad():
                    assert model(tokens, tokens).item() == pytest.approx(loss.item(), rel=1e-5)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        model.use_16_bits()
    return graphs


def test_every_function_in_8_and_16_bits_is_compiled() -> None:
    """torch by default ends a run that makes more than 8 graphs of one function. A block's graph depends on its own
    layers and on the next block's, whose input it gathers. There are three kinds in 8 bits, and each is compiled for
    training by both functions and for evaluation by one, which makes 9 graphs. All of them are in 16 bits at last."""
    graphs = run_distributed(graphs_of_functions, 2)[0]
    assert [after - before for before, after in pairwise(graphs)] == [3, 0, 0]


def test_what_was_in_16_bits_is_as_it_was_built() -> None:
    cfg, groups = tiny.config(1, linear={"precision": "fp8"}), ParallelGroups(Topology(2, 2), rank=0)
    moved, built = tiny.model(cfg, groups), tiny.model(tiny.config(1), groups)
    moved.use_16_bits()
    assert [layer.matmul for layer in layers_of(moved)] == [layer.matmul for layer in layers_of(built)]


def losses(run: Path) -> dict[int, tuple[float, float]]:
    rows = [row for row in rows_of(run) if "train/loss" in row]
    return {row["tokens"]: (row["train/loss"], row["train/grad_norm"]) for row in rows}


def test_a_run_ends_in_16_bits_and_resumes_on_either_side(tmp_path: Path, corpus: Path) -> None:
    sections = {
        "training": {"total_tokens": 10 * 256},
        "linear": {"precision": "fp8", "keep_last_fraction": 0.4},
        "checkpoint": {"every_tokens": 2 * 256, "keep_last": 10},
        "stability": {"monitor": {"every_steps": 1}},
    }

    def go(name: str, steps: int | None = None, **linear: object) -> tuple[Path, str]:
        """Run the configuration, from a checkpoint of the first run if steps are given. Return the folder and the
        output."""
        run = tmp_path / name
        if steps is not None:
            shutil.copytree(tmp_path / "whole/checkpoints", run / "checkpoints")
            for folder in (run / "checkpoints").glob("step-*"):
                if int(folder.name.removeprefix("step-")) > steps:
                    shutil.rmtree(folder)
        changed = {"linear": linear} if linear else {}
        path = write_config(tmp_path / f"{name}.yaml", corpus, run, **{**sections, **changed})
        finish("sagetrain", path)
        return run, path.with_suffix(".log").read_text()

    run, said = go("whole")
    assert "linear.precision: fp8 up to 1,536 of 2,560 tokens" in said
    moves = [event for event in rows_of(run, "events") if event["kind"] == "precision"]
    assert [(move["tokens"], move["from"], move["to"]) for move in moves] == [(1536, "fp8", "16 bits")]
    measured = {row["tokens"] for row in rows_of(run) if "quant/0/qkv.dW/rel_l2" in row}
    assert measured == {256 * step for step in range(1, 7)}

    whole = losses(run)
    for name, steps, begins in (("before", 4, "fp8 up to"), ("behind", 8, "16 bits since")):
        again, said = go(name, steps)
        assert f"linear.precision: {begins} 1,536 of 2,560 tokens" in said
        assert losses(again) == {tokens: loss for tokens, loss in whole.items() if tokens > 256 * steps}
    by_hand, _ = go("by-hand", 6, precision="bf16")
    assert losses(by_hand) == {tokens: loss for tokens, loss in whole.items() if tokens > 256 * 6}

    for step, told in ((4, ["linear layers, fp8 in training, are not in 8 bits here"]), (10, [])):
        heard: list[str] = []
        load_run(run, heard.append, step=step)
        assert heard == told


def low_on_two_ranks(run: str) -> list[str]:
    return [*load_run(Path(run), print, linear="fp8", ranks=Ranks.join()).model.matmuls[0]]


def test_evaluation_in_8_bits_uses_the_layers_of_training(tmp_path: Path, corpus: Path) -> None:
    """linear.keep_layers_below counts the weights of a rank, and sides may be multiples of 16 on fewer ranks only."""
    sections = {
        "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 2},
        "attention": {"backend": "sdpa"},
        "linear": {"precision": "fp8", "keep_layers_below": 6000},
        "training": {"total_tokens": 5 * 256, "dtype": "fp32"},
    }
    path = write_config(tmp_path / "two.yaml", corpus, tmp_path / "run", tp_size=2, **sections)
    finish("ranks", path)
    said: list[str] = []
    assert [*load_run(tmp_path / "run", said.append, linear="fp8").model.matmuls[0]] == ["qkv", "gate_up"]
    assert (
        "6,000 weights and more (qkv, gate_up), by the sizes at tensor_parallel_size 2 in training and 1 here ("
        in said[0]
    )
    sections["model"]["ffn_hidden_size"], sections["linear"] = 80, {"precision": "fp8"}
    finish("sagetrain", write_config(tmp_path / "one.yaml", corpus, tmp_path / "other", **sections))
    assert run_distributed(low_on_two_ranks, 2, str(tmp_path / "other")) == [["qkv", "out"]] * 2

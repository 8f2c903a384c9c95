"""Linear layers in 8 bits inside the model: the layers that have them at every layout, and the distance between
layouts."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiny
from distributed import of_first_rank, run_distributed
from runs import finish, rows_of, sagetrain, write_config
from sagekernels.lowbit import LOW_BIT, LowBit
from sagetrain.config import ConfigError
from sagetrain.config.load import load_config
from sagetrain.config.schema import SIXTEEN_BITS, AttentionConfig, LinearConfig, ModelConfig
from sagetrain.data.batch import Batch
from sagetrain.engines.step import Engine
from sagetrain.inference.evaluate import evaluate, together
from sagetrain.inference.load import load_run
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel import layers
from sagetrain.parallel.layers import shard
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.training import build_run as building
from sagetrain.training.build_run import build
from sagetrain.training.trainer import Trainer
from spoiled import spoiled

VOCAB, SEQUENCES, LENGTH = 128, 4, 16
SHAPE = ModelConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, num_key_value_heads=4, head_dim=16
)
SINGLE = ParallelGroups.single()


def linear_of(name: str, **keys: int | str) -> LinearConfig:
    return LinearConfig(precision=name, **keys)


def model(
    linear: LinearConfig, groups: ParallelGroups = SINGLE, shape: ModelConfig = SHAPE, **arguments: object
) -> Transformer:
    place = {"tensor_parallel_size": groups.tp_size, "device": torch.device("cpu"), "dtype": torch.float32}
    matmuls, _ = matmuls_of(linear, shape, **place)
    attention = AttentionConfig(backend="sdpa")
    network = tiny.transformer(shape, attention, vocab_size=VOCAB, groups=groups, matmuls=matmuls, **arguments)
    return tiny.enlarged(network, groups)


def batch() -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def results(network: Transformer, groups: ParallelGroups = SINGLE) -> list[Tensor]:
    """Return the loss and the gradients of this rank's shards, averaged over slices of the sequences."""
    own = slice(groups.cp_rank * LENGTH // groups.cp_size, (groups.cp_rank + 1) * LENGTH // groups.cp_size)
    tokens, labels = (x[:, own].contiguous() for x in batch())
    loss = network(tokens, labels)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in network.parameters())]
    if groups.cp_size > 1:
        for x in found:
            dist.all_reduce(x, group=groups.cp_group)
            x /= groups.cp_size
    return found


every_precision = pytest.mark.parametrize("name", LOW_BIT)


# -- which layers, and how -----------------------------------------------------------------------------------------


@every_precision
def test_only_linear_layers_of_the_named_blocks_are_in_8_bits(name: str) -> None:
    deep = SHAPE.model_copy(update={"num_layers": 5})
    network = model(linear_of(name, keep_first_blocks=1, keep_last_blocks=2), shape=deep)
    low = {path for path, layer in network.named_modules() if isinstance(getattr(layer, "matmul", None), LowBit)}
    layers = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    assert low == {f"blocks.{block}.{layer}" for block in (1, 2) for layer in layers}
    assert all(network.get_submodule(path).matmul == LOW_BIT[name] for path in low)


def test_small_layers_stay_in_16_bits() -> None:
    """The size is the number of weights that read one x on a rank."""
    sizes = {"attention.qkv": 64 * 256, "mlp.gate_up": 64 * 192, "attention.out": 128 * 64, "mlp.down": 96 * 64}
    for below, number in ((0, 4), (6145, 3), (8192, 3), (8193, 2), (12289, 1), (16385, 0)):
        network = model(linear_of("fp8", keep_layers_below=below))
        low = {path for path, size in sizes.items() if size >= below}
        assert len(low) == number
        for path in sizes:
            matmul = network.get_submodule(f"blocks.0.{path}").matmul
            assert isinstance(matmul, LowBit) == (path in low)
    half = ParallelGroups(Topology(2, 2), rank=0)
    spread = model(linear_of("fp8", keep_layers_below=8192), half, sequence_parallel=True)
    block = spread.blocks[0]
    assert isinstance(block.attention.qkv.matmul, LowBit) and not isinstance(block.mlp.gate_up.matmul, LowBit)
    assert block.attention_norm.reader is block.attention.qkv.matmul
    assert block.mlp_norm.reader is None


@pytest.mark.parametrize(
    ("change", "odd"),
    [({"ffn_hidden_size": 72}, {"gate_up", "down"}), ({"head_dim": 8, "num_key_value_heads": 1}, {"qkv"})],
)
def test_layers_with_odd_sides_stay_in_16_bits(change: dict, odd: set) -> None:
    """All other layers are in 8 bits. If the precision is named instead of auto, such layers are an error before this
    point."""
    shape, linear = SHAPE.model_copy(update=change), linear_of("fp8")
    low = {path for path, layer in model(linear, shape=shape).blocks[0].named_modules()
           if isinstance(getattr(layer, "matmul", None), LowBit)}  # fmt: skip
    assert {path.partition(".")[2] for path in low} == {"qkv", "out", "gate_up", "down"} - odd


def test_the_choice_is_said() -> None:
    def said(here: int | None = None, **keys: object) -> str:
        shape = SHAPE.model_copy(update={"ffn_hidden_size": keys.pop("ffn_hidden_size", 96)})
        place = {"tensor_parallel_size": 2, "device": torch.device("cpu"), "dtype": torch.float32}
        return matmuls_of(LinearConfig(**keys), shape, here=here, **place)[1]

    assert said() == "in training.dtype"
    assert said(precision="fp8") == "fp8 in all blocks (its torch twin, since there is no GPU)"
    assert said(precision="int8", keep_last_blocks=1).startswith("int8 in 1 of 2 blocks")
    assert "in all blocks, layers of 9,000 weights and more (none) (" in said(precision="fp8", keep_layers_below=9000)
    assert "layers of 6,000 weights and more (qkv, gate_up) (" in said(precision="fp8", keep_layers_below=6000)
    odd = said(precision="fp8", ffn_hidden_size=72)
    assert "in all blocks, but for sides that are no multiples of 16 (gate_up 36, down 36) (" in odd
    fewer = said(precision="fp8", ffn_hidden_size=72, here=1)
    assert "(gate_up 36, down 36), by the sizes at tensor_parallel_size 2 in training and 1 here (" in fewer


@pytest.mark.parametrize(("capability", "precision", "dtype", "says"), [
    ((9, 0), "fp8", torch.bfloat16, None),
    ((8, 9), "fp8", torch.bfloat16, None),
    ((8, 0), "fp8", torch.bfloat16, "needs a GPU of compute capability 8.9 or more, A card has 8.0; use bf16, or int8"),
    ((7, 0), "fp8", torch.bfloat16, "use bf16$"),
    ((8, 0), "int8", torch.bfloat16, None),
    ((7, 5), "int8", torch.bfloat16, "needs a GPU of compute capability 8.0"),
    ((8, 6), "fp8", torch.bfloat16, "A card has 8.6; use bf16, or int8"),
    ((10, 3), "int8", torch.bfloat16, "linear.precision int8: INT8 products of compute capability 10.3"),
    ((9, 0), "fp8", torch.float32, "linear.precision fp8 needs training.dtype bf16 on a GPU"),
    ((7, 0), "bf16", torch.float32, None),
])  # fmt: skip
def test_a_gpu_that_cannot_is_an_error(monkeypatch, capability, precision, dtype, says) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    where = {"tensor_parallel_size": 1, "device": torch.device("cuda"), "dtype": dtype}
    if says is None:
        # The card is a GeForce.
        monkeypatch.setattr("sagetrain.model.selection.half_sums", lambda device: capability == (8, 9))
        matmuls, how = matmuls_of(LinearConfig(precision=precision), SHAPE, **where)
        assert len(matmuls) == SHAPE.num_layers + 1
        assert ("half rate: use linear.precision int8, twice as fast, or auto" in how) == (capability == (8, 9))
    else:
        with pytest.raises(ValueError, match=says):
            matmuls_of(LinearConfig(precision=precision), SHAPE, **where)


def test_a_run_ends_there_before_ranks_meet(monkeypatch, tmp_path, corpus) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    monkeypatch.setattr(building, "init_distributed", lambda *_: pytest.fail("ranks were waited for"))
    sections = {"attention": {"backend": "sdpa"}, "linear": {"precision": "fp8"}, "training": {"dtype": "bf16"}}
    cfg = load_config(write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", **sections))
    with pytest.raises(ConfigError, match=r"linear\.precision fp8 needs a GPU of compute capability 8\.9 or more"):
        build(cfg)


@every_precision
def test_eight_bits_show_and_do_little_harm(name: str) -> None:
    """The test compares one step's gradients. Whether the losses of training stay together is measured in
    results/step."""
    exact, low = results(model(SIXTEEN_BITS)), results(model(linear_of(name)))
    error = (
        sum((x - y).square().sum() for x, y in zip(low[1:], exact[1:], strict=True)).sqrt() / _norm(exact[1:])
    ).item()
    assert 2e-3 < error < 0.2, error
    assert abs(low[0] - exact[0]) < 0.02 * exact[0]


def _norm(tensors: list[Tensor]) -> Tensor:
    return sum(x.square().sum() for x in tensors).sqrt()


# -- layouts ---------------------------------------------------------------------------------------------------------


def check_layouts(tp_size: int, cp_size: int) -> None:
    """Compare a layout with one rank in the same precision. The distance of this rank's gradients is divided by the
    effect of rounding."""
    torch.set_num_threads(1)
    groups = ParallelGroups.create(Topology(dist.get_world_size(), tp_size, cp_size))
    shape = SHAPE.model_copy(update={"value_embeddings": cp_size == 1})
    again = ({"activation_checkpointing": how} for how in ("full", "selective"))
    ways = [{"sequence_parallel": True}, {"overlap": False}, *again]
    exact = of_first_rank(lambda: results(model(SIXTEEN_BITS, shape=shape)))
    if cp_size > 1:  # Each precision goes its ways, which do not depend on the slices of sequences.
        each = {"fp8": ways[1:3], "int8": [ways[0], ways[3]]}
    else:
        each = {"fp8": ways[:2], "int8": ways[::2] + ways[3:]}
    for name in LOW_BIT:
        linear = linear_of(name, head=name)
        dense = of_first_rank(lambda linear=linear: results(model(linear, shape=shape)))
        for how in each[name] if tp_size > 1 else [{}]:
            spread = model(linear, groups, shape, **how)
            if how == ways[0] and cp_size == 1 and name == "fp8":
                tiny.compile_first_rank(spread)
            spread.keep_weights()
            found = results(spread, groups)
            dims = [None, *(spec.dim for spec in spread.specs.values())]
            rounding = _norm([shard(x - y, dim, groups) for x, y, dim in zip(dense, exact, dims, strict=True)][1:])
            away = [x - shard(y, dim, groups) for x, y, dim in zip(found, dense, dims, strict=True)]
            case = (
                f"{name} at tp {tp_size}, cp {cp_size}, {how}: loss {away[0]}, gradients {_norm(away[1:]) / rounding}"
            )
            most_loss, most_gradients = (1e-4, 0.2) if name == "fp8" else (5e-3, 1.2)
            assert away[0].abs() < most_loss, case
            assert _norm(away[1:]) < most_gradients * rounding, case
            if cp_size > 1:  # Blocks are not compiled again here.
                spread.zero_grad()
                spread.use_16_bits()
                wide = results(model(SIXTEEN_BITS, groups, shape, **how), groups)
                assert all(map(torch.equal, results(spread, groups), wide)), case


def narrow_gradients() -> list[list[Tensor]]:
    """Return the loss and gradients without and with sequence parallelism."""
    groups = ParallelGroups.create(Topology(dist.get_world_size(), 2))
    shape = SHAPE.model_copy(update={"hidden_size": 16})
    ways = ({"sequence_parallel": sequence_parallel, "dtype": torch.bfloat16} for sequence_parallel in (False, True))
    return [results(model(linear_of("fp8"), groups, shape, **how), groups) for how in ways]


def test_gradients_of_16_columns_in_16_bits_travel_unpacked() -> None:
    """Packed, they would have as many bytes in the same shape."""
    whole, split = run_distributed(narrow_gradients, 2)[0]
    assert all(found.isfinite().all() for found in split)
    assert _norm([x - y for x, y in zip(split, whole, strict=True)]) < 0.1 * _norm(whole)


@pytest.mark.parametrize(("tp_size", "cp_size"), [(2, 1), (1, 2), (2, 2)])
def test_layouts_agree_as_closely_as_their_scales_allow(tp_size: int, cp_size: int) -> None:
    """Layouts differ, because each shard has scales of its own.

    FP8: scales are powers of two, so a value has the same code, shifted, in every shard, unless it is among the
    smallest of its row. Now and then a value lies so near the middle of two codes that another order of a sum moves it.
    Gradients differ by at most a tenth of the effect of rounding to 8 bits, and mostly by a millionth.

    INT8: another shard has another largest magnitude and therefore another grid, which is as good as the first.
    Gradients differ by about the effect of rounding.
    """
    run_distributed(check_layouts, tp_size * cp_size, tp_size, cp_size)


def losses_of(layouts: list[tuple[int, int, int]], linear: dict) -> dict[tuple, list[float]]:
    """Return the losses of 8 steps of two micro-batches at each (tp, cp, ZeRO stage)."""
    found = {}
    for tp_size, cp_size, stage in layouts:
        cfg = tiny.config(stage, linear=linear, optimizer={"eps": 1e-6}, model={"ffn_hidden_size": 64})
        engine = tiny.engine(cfg, tiny.join(tp_size, cp_size))
        found[tp_size, cp_size, stage] = [tiny.global_step(engine, step).loss for step in range(8)]
    return found


def test_training_in_fp8_does_not_depend_on_the_layout() -> None:
    """The losses do not depend on ZeRO's stage either. Weights are rounded once a step or, at stage 3, whenever they
    are gathered."""
    linear = {"precision": "fp8", "head": "fp8"}
    rows = {(1, 1, 0): run_distributed(losses_of, 1, [(1, 1, 0)], linear)[0][1, 1, 0]}
    layouts = [*((1, 1, stage) for stage in (0, 2, 3)), (2, 1, 1), (1, 2, 2)]
    for rank, found in enumerate(run_distributed(losses_of, 2, layouts, linear)):
        rows |= {(rank, *layout): losses for layout, losses in found.items()}
    (_, reference), *others = rows.items()
    assert reference[-1] < reference[0] - 0.3
    for layout, losses in others:
        assert losses == pytest.approx(reference, abs=5e-3), layout
        assert losses[:2] == pytest.approx(reference[:2], abs=2e-4), layout


# -- one graph for each kind of block ------------------------------------------------------------------------------


def test_blocks_of_one_precision_share_a_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    deep = SHAPE.model_copy(update={"num_layers": 10})
    network = model(linear_of("fp8", keep_first_blocks=2, keep_last_blocks=1), shape=deep)
    network.keep_weights()
    eager = results(network)
    network.zero_grad()
    compile_blocks(network, backend="aot_eager")
    compiled = results(network)
    torch.testing.assert_close(compiled, eager)
    # The graphs are those of blocks in 16 bits, of blocks in 8, and of the first norm.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


# -- weights that are kept -----------------------------------------------------------------------------------------


def check_kept(engine: Engine, when: str) -> None:
    """Check that the kept tensors of each layer agree with its present weights."""
    layers = [layer for layer in engine.model.modules() if isinstance(getattr(layer, "matmul", None), LowBit)]
    assert len(layers) == 9
    for layer in layers:
        fresh = layer.matmul.keep(layer.weights)
        assert len(layer.kept) == len(fresh)
        assert all(torch.equal(x.float(), y.float()) for x, y in zip(layer.kept, fresh, strict=True)), when


def keep_through_a_run(root: str, stage: int, dtype: str) -> None:
    by_deepspeed = {"parallel": {"engine": "deepspeed"}}
    linear = {"precision": "fp8", "head": "fp8"}
    engine = tiny.engine(tiny.config(stage, dtype, linear=linear, **by_deepspeed), tiny.join(1))
    check_kept(engine, "at first")
    tiny.global_step(engine, 0)
    check_kept(engine, "after a step")
    tiny.save(Path(root), engine.groups, tiny.run_state(1, 64), engine.owned())
    losses = [tiny.global_step(engine, step, sequences=8).loss for step in (1, 2)]
    tokens = torch.arange(tiny.SEQ + 1)[None] % tiny.VOCAB
    batch = Batch(tokens[:, :-1], tokens[:, 1:], positions=None, cu_seqlens=None, max_seqlen=None, sample_ids=[])
    held_out = engine.evaluate([batch])
    check_kept(engine, "after an evaluation")
    tiny.global_step(engine, 3)
    assert engine.evaluate([batch]) != held_out
    check_kept(engine, "after a step that follows one")
    tiny.load(engine, Path(root))
    check_kept(engine, "after a checkpoint was loaded")
    assert [tiny.global_step(engine, step, sequences=8).loss for step in (1, 2)] == losses
    assert engine.evaluate([batch]) == held_out
    with torch.no_grad():
        for part in engine.owned():
            for values in (part.weight, *part.copies):
                values.mul_(0.5)
    engine.weights_changed()
    check_kept(engine, "after weights were set")


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "bf16")])
def test_kept_weights_are_never_stale(tmp_path, stage: int, dtype: str) -> None:
    """DeepSpeed writes weights past autograd's version counters, so only the engine can tell that they changed."""
    run_distributed(keep_through_a_run, 2, str(tmp_path), stage, dtype)


class Fresh:
    """A stand-in for `linear`. It checks that no 8-bit copy differs from the present weights."""

    def __init__(self) -> None:
        self._linear, self.calls = layers.linear, 0
        layers.linear = self

    def __call__(self, x, weights, matmul, back=None, group=None, kept=()) -> tuple[Tensor, ...]:
        if isinstance(matmul, LowBit):
            now = matmul.keep(list(weights))
            assert len(kept) == 4 and all(torch.equal(x.float(), y.float()) for x, y in zip(kept, now, strict=True))
            self.calls += 1
        return self._linear(x, weights, matmul, back, group, kept)


def train_through_all_that_writes_weights(corpus: str, root: str) -> None:
    """Run everything that writes weights: steps, evaluations, probes, skipped steps, going back,
    dropped steps, a resume at another layout, and another run's weights."""
    fresh = Fresh()
    stability = {"quant_noise": {"every_steps": 4}, "monitor": {"every_steps": 4}}
    constant = "tokens_per_step={schedule: constant, tokens: 256}"
    for name, policy, tp_size, steps, keys in (
        ("first", "skip", 1, 16, {}),
        ("first", "rewind", 2, 20, {}),
        ("second", "stop", 1, 4, {"init_from": f"{root}/first", "init_moments": True, "drop_steps": [2]}),
    ):
        spikes = {"spikes": {"window": 16, "grace_steps": 6, "policy": policy}}
        sections = {"stability": {**stability, **spikes}, "checkpoint": {"every_tokens": 1280, "keep_last": 4}}
        sections |= {"attention": {"qk_norm": "before_rope"}, "linear": {"precision": "fp8", "head": "fp8"}}
        sections |= {
            "evaluation": {"every_tokens": 1024},
            "training": {"total_tokens": steps * 256, "dtype": "bf16", **keys},
        }
        file = Path(root) / f"{dist.get_rank()}.yaml"
        cfg = load_config(write_config(file, Path(corpus), Path(root) / name, tp_size, **sections), [constant])
        calls, run = fresh.calls, Trainer(build(cfg))
        run.train()
        assert run.state.step == steps and fresh.calls > calls
    rows = rows_of(f"{root}/first", "events")
    events = [(row["step"], row["action"]) for row in rows if row["kind"] == "spike"]
    assert events == [(15, "skip"), (18, "rewind")]


def test_no_product_of_a_run_reads_a_stale_copy(tmp_path, corpus) -> None:
    wrong = [sample for step in (15, 18) for sample in range(8 * (step - 1), 8 * step)]
    bad = spoiled(corpus, tmp_path / "bad", wrong)
    run_distributed(train_through_all_that_writes_weights, 2, str(bad), str(tmp_path))


# -- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_switches_precision_at_a_resume_and_says_so(tmp_path, corpus) -> None:
    """A checkpoint holds nothing of the precision, so the run continues with the weights as they are."""
    shorter = {"training": {"total_tokens": 10 * 256}, "linear": {"precision": "bf16"}}
    first = write_config(tmp_path / "first.yaml", corpus, tmp_path / "run", **shorter)
    finish("sagetrain", first)
    assert "linear layers in training.dtype" in first.with_suffix(".log").read_text()
    longer = {"training": {"total_tokens": 20 * 256}, "linear": {"precision": "fp8", "keep_last_blocks": 1}}
    second = write_config(tmp_path / "second.yaml", corpus, tmp_path / "run", **longer)
    finish("sagetrain", second)
    said = second.with_suffix(".log").read_text()
    assert "changed since that checkpoint: linear.precision: 'bf16' -> 'fp8'" in said
    (resumed,) = (row for row in rows_of(tmp_path / "run", "events") if row["kind"] == "resume")
    assert "linear.precision: 'bf16' -> 'fp8'" in resumed["changed"]
    assert resumed["text"].startswith("resumed at 2,560 tokens with 1 rank; changed: ")
    assert "linear layers fp8 in 1 of 2 blocks (its torch twin, since there is no GPU)" in said
    check_eval_in_8_bits(tmp_path / "run")


def check_eval_in_8_bits(run: Path) -> None:
    """Check that the precision of training gives the loss that training measured. Other precisions give other
    losses."""
    trained = [row["valid/loss"] for row in rows_of(run) if "valid/loss" in row][-1]
    said: list[str] = []

    def loss(linear: str | None) -> float:
        return together(evaluate(load_run(run, said.append, linear=linear), 8)).loss

    losses = {linear: loss(linear) for linear in (None, "bf16", "fp8", "int8")}
    # If a precision was asked for, the layers that have it are named.
    found = [
        f"linear layers {name} in 1 of 2 blocks (its torch twin, since there is no GPU)" for name in ("fp8", "int8")
    ]
    assert said == ["linear layers, fp8 in training, are not in 8 bits here", *found]
    assert losses["fp8"] == pytest.approx(trained, abs=1e-6)
    assert losses[None] == losses["bf16"]
    assert len({round(value, 8) for value in losses.values()}) == 3
    assert max(losses.values()) - min(losses.values()) < 0.02
    shown = sagetrain("eval", run, "--linear", "int8", "--num-sequences", 8)
    assert f"{losses['int8']:.4f}" in shown.stdout and shown.stderr == f"{found[1]}\n"

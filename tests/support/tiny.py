"""A tiny run for tests: configuration, engine and global batches that do not depend on the layout."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch._dynamo.guards
import torch.distributed as dist

from distributed import of_first_rank
from sagetrain.auto.timed_choice import StartOfRun
from sagetrain.checkpoint import reading
from sagetrain.checkpoint.on_disk import folder_name
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.saving import Saver
from sagetrain.checkpoint.state import Identity, RunState, Texts
from sagetrain.checkpoint.stateful import Owned
from sagetrain.cluster.join import init_distributed
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config import RunConfig
from sagetrain.config.schema import AttentionConfig, CheckpointConfig, ModelConfig
from sagetrain.costs.accounting import overlaps
from sagetrain.costs.stages import chunks_of_stage
from sagetrain.data.batch import Batch
from sagetrain.engines import fsdp
from sagetrain.engines.build_engine import build_engine, partitioner
from sagetrain.engines.deepspeed import deepspeed_engine
from sagetrain.engines.protocol import Observers, StepResult
from sagetrain.engines.step import Engine
from sagetrain.inference.load import in_training
from sagetrain.model.activation_offload import ActivationOffload, HostCopies
from sagetrain.model.backends import AttentionFunction
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions, matmuls_of
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.optim.pieces import TensorPiece, clip_gradients
from sagetrain.optim.states import Fp32
from sagetrain.parallel.layers import shard
from sagetrain.parallel.rng import rng_state
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.stability.spikes import Verdict
from sagetrain.storage.url_path import Location

VOCAB, SEQ = 128, 16

# torch times the guards of each graph for its logs, and empties the caches of the processor before: a tenth of the time
# in which a small block is compiled.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def config(stage: int, dtype: str = "fp32", **sections: dict) -> RunConfig:
    """Build a two-layer model's configuration without data files; `sections` update those of the tree."""
    tree = {
        "model": {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 2},
        "attention": {"backend": "sdpa"},
        "data": {"train": [{"path": "none"}], "seq_length": SEQ, "micro_batch_size": 1},
        "tokens_per_step": {"schedule": "constant", "tokens": 4 * SEQ},
        "optimizer": {"lr": 1e-2},
        "training": {"run_dir": "none", "total_tokens": 1000, "dtype": dtype},
        "parallel": {"zero_stage": stage},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return RunConfig.model_validate(tree)


def start(
    cfg: RunConfig, folder: Path = Path("none"), say: Callable[[str], None] = print, **others: Any
) -> StartOfRun:  # fmt: skip
    """Build the start of a run on a single rank without a GPU; other arguments replace what it is made of."""
    how = {"groups": ParallelGroups.single(), "vocab_size": VOCAB, "device": torch.device("cpu")}
    how |= {"dtype": torch.bfloat16, "compiled": False}
    return StartOfRun(cfg, folder=RunFolder(folder), say=say, **{**how, **others})


def join(tp_size: int, cp_size: int = 1, pp_size: int = 1, ep_size: int = 1, gather: int = 1) -> ParallelGroups:
    """Join the process groups of this rank, through DeepSpeed as in a real run."""
    torch.set_num_threads(1)
    init_distributed(timeout_minutes=10)
    world = torch.distributed.get_world_size()
    return ParallelGroups.create(Topology(world, tp_size, cp_size, pp_size, ep_size, gather))


def on(cfg: RunConfig, groups: ParallelGroups) -> RunConfig:
    """Return the configuration on the axes of these groups."""
    sizes = {"tensor": groups.tp_size, "context": groups.cp_size, "pipeline": groups.pp_size}
    update = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
    return cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update=update)})


def transformer(
    model: ModelConfig,
    attention: AttentionConfig,
    *,
    functions: Sequence[AttentionFunction] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **how: Any,
) -> Transformer:
    """Build a Transformer whose layers have the attention that its section names, unless told otherwise."""
    place = {"dtype": dtype, "device": torch.device(device)}
    functions = functions or attention_functions(attention, model, **place)
    return Transformer(model, attention, functions=functions, **place, **how)


def enlarged(network: Transformer, groups: ParallelGroups, by: float = 0.1) -> Transformer:
    """Make the weights of a model larger, and gains different from 1. They are the same in every layout."""
    with torch.no_grad():
        for i, (spec, parameter) in enumerate(zip(network.specs.values(), network.parameters(), strict=True)):
            noise = torch.randn(spec.shape, generator=torch.Generator().manual_seed(i))
            parameter.copy_(shard(1 + 0.3 * noise if noise.ndim == 1 else by * noise, spec.dim, groups))
    return network


def check_slices(
    dense: Transformer,
    truth: Callable[[], torch.Tensor],
    sliced: Transformer,
    inputs: dict[str, Any],
    limits: tuple[float, float],
    case: object,
) -> None:
    """Check that a model on slices of sequences has the mean loss and, averaged over replicas, the gradients of one
    rank.

    Args:
        truth: returns the loss of `dense`.
        inputs: the arguments of `sliced` on this rank.
        limits: the largest errors of the loss and of a gradient.
    """

    def by_one() -> list[torch.Tensor]:
        loss = truth()
        loss.backward()
        return [loss, *(parameter.grad for parameter in dense.parameters())]

    expected, *grads = of_first_rank(by_one)
    loss, groups = sliced(**inputs), sliced.groups
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    error = (mean / dist.get_world_size() - expected).abs()
    assert error < limits[0], f"{case}: loss off by {error}"
    for name, whole, part in zip(dense.specs, grads, sliced.parameters(), strict=True):
        dist.all_reduce(part.grad, group=groups.replica_group)
        error = (part.grad / groups.num_replicas - shard(whole, dense.specs[name].dim, groups)).norm() / whole.norm()
        assert error < limits[1], f"{case}: gradient of {name} off by {error}"


def model(cfg: RunConfig, groups: ParallelGroups, seed: int = 3, **others: Any) -> Transformer:
    """Build a fresh Transformer, partitioned as the engine wants it, or whole where there is no process group and so no
    engine. Other arguments replace those of the configuration."""
    dtype = torch.bfloat16 if cfg.training.dtype == "bf16" else torch.float32
    place = {"vocab_size": VOCAB, "groups": groups, "dtype": dtype}
    place["partition"] = partitioner(on(cfg, groups), groups) if groups.replica_group is not None else None
    place["sequence_parallel"], place["overlap"] = cfg.parallel.sequence_parallel, overlaps(cfg)
    place["activation_checkpointing"] = cfg.training.activation_checkpointing
    place["device"] = groups.device
    how = {"tensor_parallel_size": groups.tp_size, "device": groups.device, "dtype": dtype}
    place["chunks"] = chunks_of_stage(cfg, VOCAB, groups.pp_rank)
    place["matmuls"], _ = matmuls_of(cfg.linear, cfg.model, **how)
    made = transformer(cfg.model, cfg.attention, seed=seed, **{**place, **others})
    if cfg.training.activation_offload:
        gpu = made.groups.device if made.groups.device.type == "cuda" else None
        made.offload = ActivationOffload(HostCopies(gpu), 0)
    return made


def engine(cfg: RunConfig, groups: ParallelGroups, seed: int = 3) -> Engine:
    """Build an Engine over a fresh Transformer."""
    return build_engine(on(cfg, groups), model(cfg, groups, seed))


def alone(cfg: RunConfig, device: torch.device, vocab_size: int) -> Engine:
    """Return the engine of a run of one process, whose blocks are compiled on a GPU, as in `sagetrain train`."""
    groups = ParallelGroups.create(Topology(1, 1))
    whole = model(cfg, groups, device=device, vocab_size=vocab_size)
    if device.type == "cuda":
        compile_blocks(whole, hooks=True)
    return build_engine(cfg, whole)


def compile_first_rank(model: Transformer, backend: str = "aot_eager", ranks: int = 1, **how: Any) -> bool:
    """Compile the blocks on the first rank of the world alone, or on so many ranks; return whether this is one of them.

    The other ranks call the same collectives from Python, so the compiled code is still part of the world's numbers.
    Ranks of a test share a CPU, and torch.compile is most of the time of a test that compiles on all of them. Where
    tensor parallel blocks are recomputed, the ranks of a tensor parallel group have to compile alike: Python stops a
    recomputation early, before the last collectives, and a graph does not. FSDP2, which has taken the parameters
    away, needs hooks.
    """
    first = torch.distributed.get_rank() < ranks
    if first:
        compile_blocks(model, backend, hooks=hasattr(next(model.parameters()), "shard"), **how)
    return first


def global_step(engine: Engine, step: int, sequences: int = 4, observers: Observers | None = None) -> StepResult:
    """Take one optimizer step on `sequences` random sequences that depend on the step alone."""
    draw = torch.Generator().manual_seed(step % 5)
    batches = batches_of(torch.randint(0, VOCAB, (sequences, SEQ + 1), generator=draw), engine.groups)
    return taken(engine, batches, 1e-2, observers or Observers())


def taken(engine: Engine, batches: Sequence[Batch], lr: float, *how: Any) -> StepResult:
    """Take a step, and take it again if rows of experts had no room."""
    room = 0.0
    while (result := engine.step(batches, len(batches), lr, *how)).room:
        assert result.room > room, "a larger room is not used"
        room = result.room
    return result


def crowd(engine: Engine, experts: int) -> None:
    """Let all tokens choose among the first experts of each layer, so that one rank may get all rows. 0: among all."""
    for kept in engine.owned(lambda spec: spec.name.endswith("router.bias")):
        numbers = torch.arange(kept.start, kept.stop, device=kept.weight.device)
        kept.write("weight", 2.0 * (numbers < experts))  # Scores are at most 1.
    engine.state_changed()


def batches_of(tokens: torch.Tensor, groups: ParallelGroups) -> list[Batch]:
    """Return this rank's share of sequences, each as a micro-batch."""
    return [
        Batch(row[None, :-1], row[None, 1:], positions=None, cu_seqlens=None, max_seqlen=None, sample_ids=[])
        for row in tokens[groups.dp_rank :: groups.dp_size]
    ]


class SGD:
    """An optimizer without state: weights move by lr times their gradients."""

    def __init__(self, pieces: Sequence[TensorPiece]) -> None:
        self._weights, self.state = [piece.weight for piece in pieces], [{} for _ in pieces]
        self.weights = [Fp32(piece.weight) for piece in pieces]

    @classmethod
    def use(cls) -> None:
        """Have every engine of this process use it."""
        deepspeed_engine.build_optimizer = fsdp.build_optimizer = lambda run, group, pieces, ranks: cls(pieces)

    def step(self, gradients: Sequence[torch.Tensor], lr: float, update: int, clip: float = 1.0) -> None:
        clip_gradients(gradients, clip)
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.sub_(gradient, alpha=lr)


def spec(size: int, name: str = "weight") -> TensorSpec:
    """Describe a vector that every rank holds."""
    return TensorSpec(name, (size,), None, None, "matrix", "head")


def evaluation(engine: Engine, sources: list[str]) -> dict[str, float]:
    """Return the losses of seven sequences by source. The sequences are the steps' own, come from each source in turn,
    and are dealt out in micro-batches of two."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (8, SEQ + 1), generator=draw)
    batches = []
    for first in range(2 * engine.groups.dp_rank, 8, 2 * engine.groups.dp_size):
        rows, which = tokens[first : first + 2], [first % len(sources), (first + 1) % len(sources)]
        batches.append(Batch(rows[:, :-1], rows[:, 1:], None, None, None, [], which, min(2, 7 - first)))
    return engine.evaluate(batches, sources)


def generates_the_same(cfg: RunConfig, engine: Engine) -> bool:
    """Return whether the model that writes samples while training computes what the engine computes."""
    tokens = torch.arange(SEQ)[None]
    run = in_training(cfg, engine, cast(Any, SimpleNamespace(vocab_size=VOCAB)), Texts([], [], SEQ))
    return torch.equal(run.model(tokens), engine.logits(Batch(tokens, tokens, None, None, None, sample_ids=[])))


def going_on(engine: Engine, sequences: int = 4) -> list[float]:
    """Return the loss of a step, which shows the weights that an engine begins with, and that of an evaluation behind
    it, which shows the moments as well."""
    return [global_step(engine, 1, sequences).loss, evaluation(engine, ["web"])["valid/loss"]]


def state_of(engine: Engine) -> list[torch.Tensor]:
    """Return a copy of what this rank keeps: masters and moments."""
    return [owned.read(kind).clone() for owned in engine.owned() for kind in owned.kinds]


def saved_and_continued(
    root: Path, names: Sequence[str], engine: Callable[[str, int], Engine], again: Callable[[str], bool]
) -> tuple[dict[str, list[float]], dict[tuple[str, str], list[float]]]:
    """Save a checkpoint behind the first step of each layout, and have one step refused, which changes nothing.

    Args:
        engine: returns the engine of a layout, whose weights begin with a seed.
        again: says whether a layout reads its own checkpoint as well.

    Returns:
        What `going_on` does after that, by layout; and after the checkpoint was read, by the layout that wrote it and
        the one that read it: the same, and the next one.
    """
    later, resumed = {}, {}
    for name in names:
        first = engine(name, 3)
        global_step(first, 0)
        save(root / name, first.groups, run_state(1), first.owned())
        before = state_of(first)
        global_step(first, 4, observers=Observers(judge=lambda metrics: Verdict(apply=False)))
        assert all(map(torch.equal, before, state_of(first))), f"{name}: a refused step has changed something"
        later[name] = going_on(first)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        for other in (name, following) if again(name) else (following,):
            second = engine(other, 11)
            load(second, root / name)
            resumed[name, other] = going_on(second)
    return later, resumed


def owned(name: str, tensors: dict[str, torch.Tensor]) -> Owned:
    """Describe a tensor that one rank has all of, with its moments."""
    size = len(tensors["weight"])
    return Owned(spec(size, name), 0, size, tensors["weight"], moments(tensors))


def moments(tensors: dict[str, torch.Tensor]) -> dict[str, Fp32]:
    """State of these values."""
    return {kind: Fp32(values.float().clone()) for kind, values in tensors.items() if kind != "weight"}


def saver(root: Location, groups: ParallelGroups, keep_last: int = 100, seconds: float = 60.0) -> Saver:
    """Build a Saver that keeps everything and waits `seconds` for another rank."""
    return Saver(folder_of(root), groups, CheckpointConfig(keep_last=keep_last), timedelta(seconds=seconds))


def folder_of(checkpoints: Location) -> RunFolder:
    """Return the folder of a run whose checkpoints are there."""
    folder = RunFolder(Path("none"))
    folder.checkpoints = checkpoints
    return folder


def save(root: Path, groups: ParallelGroups, state: RunState, pieces: Sequence[Owned]) -> Path:
    """Save a checkpoint, and return its folder when it is there."""
    writer = saver(root, groups)
    writer.start(state, "{}", pieces, rng_state())
    writer.wait()
    return root / folder_name(state.step)


def load(engine: Engine, root: Path, step: int = 1) -> None:
    """Load the checkpoint of a step that `save` has saved."""
    reading.load_engine(Reader(root / folder_name(step)), engine, step)


def run_state(step: int = 0, tokens: int = 0, **more) -> RunState:
    """Build the state of a run of the tiny model, as a checkpoint has it."""
    identity = Identity(model={}, qk_norm="before_rope", vocab_size=VOCAB, seed=0, seq_length=SEQ)
    return RunState(**{"step": step, "tokens": tokens, "sequences": tokens // SEQ, "identity": identity, **more})

"""Make run folders with a checkpoint of random weights, as training at some layout would leave them, but in no time."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.state import Identity
from sagetrain.checkpoint.stateful import Owned
from sagetrain.config import RunConfig
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.load import dump_config
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.model.transformer import Transformer
from sagetrain.optim.states import Fp32
from sagetrain.parallel.layers import shard
from sagetrain.parallel.rng import named_generator, rng_state
from sagetrain.parallel.topology import ParallelGroups, Topology

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 500.0}


def config(run_dir: Path, qk_norm: str = "before_rope", dtype: str = "fp32", **model: object) -> RunConfig:
    """Build a configuration with grouped-query heads that have a width of their own."""
    training = {"run_dir": str(run_dir)}
    return tiny.config(1, dtype, model={**SHAPE, **model}, attention={"qk_norm": qk_norm}, training=training)


def randomize(model: Transformer) -> None:
    """Give every tensor its own weights or gains, whatever the layout is. Initial gains are all 1 and would hide
    mistakes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spec = model.specs[name]
            if spec.kind == "state":
                continue  # Routers that choose with a bias are not exported.
            full = torch.randn(spec.shape, generator=named_generator(7, name))
            full = 1 + full / 4 if spec.kind == "gain" else full / 8
            parameter.copy_(shard(full, spec.dim, model.groups).view_as(parameter))


def save_runs(runs: list[tuple[str, RunConfig, int]], tokenizer: Path) -> None:
    """Save every run, (folder, configuration, tensor-parallel size), on each rank of a world or in one process."""
    loaded = Tokenizer.load(tokenizer)
    for folder, cfg, tp_size in runs:
        groups = ParallelGroups.single()
        if dist.is_initialized():
            groups = ParallelGroups.create(Topology(dist.get_world_size(), tp_size, 1))
        model = tiny.transformer(
            cfg.model, cfg.attention, vocab_size=padded_vocab_size(loaded.vocab_size), groups=groups, seed=0
        )
        randomize(model)
        shards = []
        # Parameters are split over the data-parallel ranks, as ZeRO does.
        for name, parameter in model.named_parameters():
            size = parameter.numel()
            start, stop = (size * rank // groups.dp_size for rank in (groups.dp_rank, groups.dp_rank + 1))
            values = parameter.detach().flatten()[start:stop]
            moments = {kind: Fp32(torch.zeros_like(values)) for kind in KINDS[1:]}
            shards.append(Owned(model.specs[name], start, stop, values, moments))
        writer = tiny.saver(Path(folder) / "checkpoints", groups)
        identity = Identity(
            model=cfg.model.model_dump(),
            qk_norm=cfg.attention.qk_norm,
            vocab_size=loaded.vocab_size,
            seed=0,
            seq_length=cfg.data.seq_length,
            tokenizer_sha256=loaded.sha256,
        )
        sequences = 192 // cfg.data.seq_length
        state = tiny.run_state(3, 192, sequences=sequences, optimizer_steps=3, identity=identity)
        writer.start(state, dump_config(cfg), shards, rng_state())
        writer.wait()
        shutil.copyfile(tokenizer, Path(folder) / "tokenizer.model")


def make(runs: list[tuple[Path, RunConfig, int]], tokenizer: Path) -> None:
    """Save runs from two ranks."""
    run_distributed(save_runs, 2, [(str(folder), cfg, tp_size) for folder, cfg, tp_size in runs], tokenizer)

"""Count the bytes that torch keeps for the backward pass, for a table of configurations."""

import gc
import itertools
from contextlib import suppress

import torch
from torch.utils.weak import TensorWeakRef

import tiny
from sagetrain.config import RunConfig
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.costs.accounting import last_block, rank_of
from sagetrain.costs.memory import kept_bytes
from sagetrain.model.block import Block
from sagetrain.model.selection import matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

VOCAB = 384


def run_config(**sections: dict) -> RunConfig:
    model = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 4}
    tree = {
        "model": model,
        "data": {"train": [{"path": "x"}], "seq_length": 256, "micro_batch_size": 2},
        "tokens_per_step": {"schedule": "constant", "tokens": 4096},
        "optimizer": {"lr": 1e-3},
        "training": {"run_dir": "x", "total_tokens": 10**6},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return RunConfig.model_validate(tree)


def block_activation_bytes(cfg: RunConfig) -> int:
    """Return the bytes per token that `plan` counts for what autograd saves of the last block."""
    return kept_bytes(last_block(cfg, rank_of(cfg)))


def transformer(model: ModelConfig, attention: AttentionConfig, **kwargs) -> Transformer:
    kwargs = {"groups": ParallelGroups.single(), "device": torch.device("cpu"), **kwargs}
    return tiny.transformer(model, attention, vocab_size=VOCAB, **kwargs)


class Watched(torch.nn.Module):
    """A block that records the tensors that autograd saves of it.

    `beside` also records what activation checkpointing keeps outside of autograd when nothing is compiled. These are
    the tensors that are still alive when the block is done (`left`). The block's result is not one of them, because it
    counts for the next block. Some tensors are alive only because gloo's threads still hold them, so `left` holds weak
    references.
    """

    def __init__(self, block: Block, beside: bool):
        super().__init__()
        self.block, self.attention_norm, self.saved, self.beside = block, block.attention_norm, {}, beside
        self.left: dict[int, TensorWeakRef] = {}

    @property
    def measures(self) -> bool:
        return self.block.measures

    def forward(self, *inputs):
        before = live_tensors() if self.beside else {}
        with torch.autograd.graph.saved_tensors_hooks(self.save, lambda tensor: tensor):
            results = self.block(*inputs)
        if self.beside:
            here = before.keys() | {result.untyped_storage().data_ptr() for result in results}
            self.left = {place: TensorWeakRef(x) for place, x in live_tensors().items() if place not in here}
        return results

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


def saved_bytes_per_token(
    cfg: RunConfig, compiled: bool, groups: ParallelGroups | None = None, number: int = 1
) -> float:
    """Return the bytes that autograd keeps of the block with this number, without parameters, rotary tables and other
    small tensors."""
    groups, sharded = groups or ParallelGroups.single(), cfg.parallel.sequence_parallel
    how = {"sequence_parallel": sharded, "activation_checkpointing": cfg.training.activation_checkpointing}
    place = {"tensor_parallel_size": groups.tp_size, "device": torch.device("cpu"), "dtype": torch.bfloat16}
    how["matmuls"], _ = matmuls_of(cfg.linear, cfg.model, **place)
    network = transformer(cfg.model, cfg.attention, dtype=torch.bfloat16, groups=groups, **how)
    network.keep_weights()
    torch._dynamo.reset()
    # inductor's partition of forward and backward decides what is saved. This backend uses it and needs no compiler.
    if compiled:
        whole = network.functions[number].traceable
        network.blocks[number].compile(fullgraph=whole, backend="aot_eager_decomp_partition")
    tokens = torch.zeros(cfg.data.micro_batch_size, cfg.data.seq_length // groups.cp_size, dtype=torch.long)
    layouts = network._layouts(tokens, None, None, None)
    network._layouts = lambda *_: layouts
    if cfg.training.compile == "on":  # A rank that compiles nothing calls the collectives as well.
        network(tokens)
    selective = cfg.training.activation_checkpointing in ("selective", "attention")
    watched = network.blocks[number] = Watched(network.blocks[number], selective and not compiled)
    logits = network(tokens)
    assert logits.requires_grad  # Logits that require a gradient keep the graph and its saved tensors alive.
    if watched.beside:
        gc.collect()
        watched.saved |= {place: tensor for place, x in watched.left.items() if (tensor := x()) is not None}
    shared = ((layout.cos, layout.sin, layout.tokens) for layout in itertools.chain(*layouts.values()))
    tables = (table for table in itertools.chain(*shared) if table is not None)
    weights = (tensor for module in network.modules() for tensor in getattr(module, "kept", ()))
    known = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *weights, *tables)}
    # The smallest tensor that counts has one number for each token of half a micro-batch, in shards.
    least = tokens.numel() // groups.tp_size**2
    large = [x for place, x in watched.saved.items() if place not in known and x.numel() >= least]
    return sum(x.untyped_storage().nbytes() for x in large) / tokens.numel()


def live_tensors() -> dict[int, torch.Tensor]:
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.layout == torch.strided]
    # A gradient may have no Python object of its own.
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    found = {}
    for tensor in tensors:
        with suppress(RuntimeError):  # Tensors that torch.compile traced with have no memory.
            found[tensor.untyped_storage().data_ptr()] = tensor
    return found

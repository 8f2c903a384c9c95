"""Train the model of a configuration with torchtitan (FSDP2) on random tokens, and write metrics.jsonl as a run does.

    torchrun --nproc-per-node 4 results/8b/titan.py --config configs/8b.yaml parallel.zero_stage=3 \\
        attention.qk_norm=none linear.precision=fp8 linear.recipe=tensorwise data.document_attention=false \\
        data.document_positions=false

The model is torchtitan's own Llama 3 of
the same shape, with torch.compile, torch's attention (cuDNN first) and torch's fused AdamW. ZeRO 3 stands for FSDP2
that gathers the weights of a block in forward and again in backward, ZeRO 2 for FSDP2 that keeps them in between.
Linear layers in FP8 are torchao's, without the output projection: tensorwise with all-gathers in FP8, or rowwise.
`selective` is torchtitan's choice of operations (`op`). A setting that torchtitan cannot follow is refused. Both sides
count the same FLOPs for MFU.

This script is frozen. It runs with the library as it was at commit e55ef519, where it was benchmarks/titan.py, and
benchmarks/layouts.py started it for layouts whose name has the part `titan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import ConfigError
from sagetrain.config.layout import Layout
from sagetrain.config.load import load_config
from sagetrain.config.schema import LinearConfig, RunConfig
from sagetrain.config.tokens_per_step import tokens_per_step
from sagetrain.costs.accounting import flops_per_token
from sagetrain.training.writers import RowFile, memory_gib, peak_flops

NAME = "sagetrain"
"""The name under which torchtitan finds the model."""
MemoryStats = namedtuple("MemoryStats", ["max_reserved_gib", "max_reserved_pct"])


def refusals(cfg: RunConfig, world_size: int) -> list[str]:
    """Return a line for each setting that torchtitan cannot follow."""
    parallel, linear, model = cfg.parallel, cfg.linear, cfg.model
    replicas = Layout.of(cfg, world_size).data
    low_bit = linear == LinearConfig(precision="fp8", recipe=linear.recipe) and linear.recipe != "rowwise_bf16_wgrad"
    wanted = {
        "model.vocab_size": (model.vocab_size, model.vocab_size is not None, "a number"),
        "model.head_dim": (
            model.head_dim,
            model.head_dim == model.hidden_size // model.num_attention_heads,
            "the rest",
        ),
        "model.tie_embeddings": (model.tie_embeddings, not model.tie_embeddings, "false"),
        "model.rope_scaling": (model.rope_scaling, model.rope_scaling is None, "null"),
        **{
            f"model.{key}": (getattr(model, key), getattr(model, key) == field.default, str(field.default))
            for key, field in type(model).model_fields.items()
            if key in ("norms", "qkv_bias", "windows", "activation", "conventions", "query_scale")
        },
        "attention.qk_norm": (cfg.attention.qk_norm, cfg.attention.qk_norm == "none", "none"),
        "linear.precision": (linear.precision, linear.precision == "bf16" or low_bit, "bf16, or fp8 in all blocks"),
        "parallel.zero_stage": (parallel.zero_stage, parallel.zero_stage in (2, 3), "2 or 3"),
        "parallel.context_parallel_size": (parallel.context_parallel_size, parallel.context_parallel_size == 1, "1"),
        "parallel.sequence_parallel": (
            parallel.sequence_parallel,
            parallel.sequence_parallel or parallel.tensor_parallel_size == 1,
            "true under tensor parallelism",
        ),
        "data-parallel ranks": (replicas, replicas > 1, "2 or more, because FSDP2 is what casts weights to bf16"),
        "data.document_attention": (cfg.data.document_attention, not cfg.data.document_attention, "false"),
        "training.dtype": (cfg.training.dtype, cfg.training.dtype == "bf16", "bf16"),
    }
    return [f"{key} = {value}: torchtitan needs {rule}" for key, (value, right, rule) in wanted.items() if not right]


def job_settings(cfg: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the settings of torchtitan's job, by dotted name."""
    optimizer, linear = cfg.optimizer, cfg.linear
    settings = {
        "job.dump_folder": cfg.training.run_dir,
        "model.name": NAME,
        "model.flavor": NAME,
        "metrics.log_freq": 1,
        "optimizer.lr": optimizer.lr,
        "optimizer.beta1": optimizer.betas[0],
        "optimizer.beta2": optimizer.betas[1],
        "optimizer.eps": optimizer.eps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "training.local_batch_size": cfg.data.micro_batch_size,
        "training.seq_len": cfg.data.seq_length,
        "training.max_norm": optimizer.clip_grad,
        "training.steps": 1_000_000,
        "parallelism.tensor_parallel_degree": cfg.parallel.tensor_parallel_size,
        "parallelism.data_parallel_shard_degree": Layout.of(cfg, world_size).data,
        "parallelism.fsdp_reshard_after_forward": "default" if cfg.parallel.zero_stage == 3 else "never",
        "activation_checkpoint.mode": cfg.training.activation_checkpointing,
        "activation_checkpoint.selective_ac_option": "op",
        "compile.enable": cfg.training.compile == "on"
        or (cfg.training.compile == "auto" and torch.cuda.is_available()),
        "debug.seed": cfg.training.seed,
    }
    if linear.precision == "fp8":
        settings["model.converters"] = ["quantize.linear.float8"]
        settings["quantize.linear.float8.filter_fqns"] = ["output"]
        if linear.recipe == "rowwise":
            settings["quantize.linear.float8.recipe_name"] = "rowwise"
        else:
            settings["quantize.linear.float8.enable_fsdp_float8_all_gather"] = True
            settings["quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"] = True
    return settings


class RandomTokens:
    """Micro-batches of random tokens and the tokens that follow them, of one data-parallel rank."""

    def __init__(self, cfg: RunConfig, rank: int) -> None:
        self._shape = cfg.data.micro_batch_size, cfg.data.seq_length + 1
        self._vocab_size = cfg.model.vocab_size
        self._generator = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(self._vocab_size, self._shape, generator=self._generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a measurement is not resumed")


class Rows:
    """The object that torchtitan gives its figures to. Rank 0 writes a row of metrics.jsonl for each step."""

    class color:
        """torchtitan's lines are not coloured."""

        blue = red = reset = ""

    def __init__(self, cfg: RunConfig) -> None:
        index = int(os.environ["LOCAL_RANK"])
        self._device = device = torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")
        self._replicas = Layout.of(cfg, dist.get_world_size()).data
        vocab = padded_vocab_size(cfg.model.vocab_size)
        self._flops = flops_per_token(cfg.model, vocab, cfg.data.seq_length)
        self.tokens = 0
        self.device_memory_monitor = self
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.data_loading_times: list[float] = []
        self.ntokens_since_last_log = 0
        self._since = time.perf_counter()
        self._file = RowFile(Path(cfg.training.run_dir, "metrics.jsonl")) if dist.get_rank() == 0 else None

    def get_peak_stats(self) -> MemoryStats:
        return MemoryStats(memory_gib(self._device), 0.0)

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, largest: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        now, tokens = time.perf_counter(), self.ntokens_since_last_log * self._replicas
        self.tokens += tokens
        rate, peak = tokens / (now - self._since), peak_flops(self._device)
        mfu = rate * self._flops / (peak * dist.get_world_size()) if peak else None
        row = {
            "step": step,
            "tokens": self.tokens,
            "wall_time": round(time.time(), 3),
            "train/loss": float(loss),
            "train/grad_norm": float(norm),
            "train/tokens_per_step": tokens,
            "perf/tokens_per_second": rate,
            "perf/mfu": mfu,
            "perf/mfu_full_attention": mfu,
            "perf/memory_gib": memory_gib(self._device),
        }
        if self._file:
            self._file.write(json.dumps(row).encode() + b"\n")
        self.ntokens_since_last_log, self._since = 0, time.perf_counter()
        self.data_loading_times.clear()

    def close(self) -> None:
        pass


def train(cfg: RunConfig) -> None:
    """Train until somebody ends the process. The launcher's environment says which rank this is."""
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3 import get_train_spec as llama3
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    model = cfg.model
    args = TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        vocab_size=model.vocab_size,
        # torchtitan rounds a multiple of the width up to one of multiple_of: half of the inner width, to all of it.
        multiple_of=model.ffn_hidden_size,
        ffn_dim_multiplier=model.ffn_hidden_size / (2 * 8 * model.hidden_size / 3),
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
    )
    spec = dataclasses.replace(
        llama3(),
        model_args={NAME: args},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda dp_rank, **_: RandomTokens(cfg, dp_rank),
        build_metrics_processor_fn=lambda *_: Rows(cfg),
    )
    register_train_spec(NAME, spec)
    job = JobConfig()
    for name, value in job_settings(cfg, int(os.environ["WORLD_SIZE"])).items():
        *sections, key = name.split(".")
        section = job
        for part in sections:
            section = getattr(section, part)
        getattr(section, key)  # This raises an error for a setting that this torchtitan lacks.
        setattr(section, key, value)

    class Run(Trainer):
        """torchtitan's loop, with the configured tokens per step."""

        def train_step(self, batches: Iterator[Any]) -> None:
            size = tokens_per_step(cfg.tokens_per_step, self.metrics_processor.tokens)
            self.gradient_accumulation_steps = size // Layout.of(cfg, dist.get_world_size()).micro_step
            super().train_step(batches)

    init_logger()
    Run(job).train()


def main() -> None:
    """Read the configuration and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher gives it.
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    arguments = parser.parse_intermixed_args()
    try:
        cfg = load_config(arguments.config, arguments.overrides)
        if refused := refusals(cfg, int(os.environ["WORLD_SIZE"])):
            raise ConfigError("\n".join(refused))
    except ConfigError as error:
        sys.exit(str(error))
    train(cfg)


if __name__ == "__main__":
    main()

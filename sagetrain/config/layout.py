"""The layout of a run as one value: its ranks along the axes, and when its engine moves weights and gradients.

Engines, prices, rules, the start line and `plan` read its fields. No other module works them out from a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from sagetrain.config.layer_specs import layers
from sagetrain.config.schema import RunConfig


class Refusal(NamedTuple):
    """The reason why a setting does not go with another one, and what to do."""

    key: str
    value: object
    why: str
    fix: str


@dataclass(frozen=True)
class Layout:
    """The layout of a run on a number of ranks. `Layout.of` makes it from a configuration.

    The axes are those of parallel/topology.py. The ranks of a pipeline stage that have the same tensor-parallel slice
    are replicas: data- and context-parallel ranks.
    """

    world_size: int
    tensor: int
    """The ranks that cut a model between them: the tensor-parallel size."""
    context: int
    """The ranks that share each sequence: the context-parallel size."""
    gather: int
    """The context-parallel ranks that gather keys and values from each other: 1 unless there are more context-parallel
    ranks than query heads. The others exchange heads (Ulysses)."""
    copies_of_keys: int
    """The context-parallel ranks that have the same key/value heads in attention: 1 unless they are more than these."""
    stages: int
    """The stages of the pipeline."""
    chunks: int
    """The chunks of blocks that each stage has."""
    engine: Literal["deepspeed", "fsdp"]
    """The engine that runs. `auto` is torch's FSDP2, except where a key asks for what only DeepSpeed has. A run that
    continues keeps the engine that it had (auto/kept.py)."""
    zero_stage: int
    """The ZeRO stage that really runs: under DeepSpeed bf16 at stage 0 runs as stage 1. Stage 3 is an error there, and
    a plan of it counts stage 2."""
    shards: int
    """The neighbouring replicas that shard weights and optimizer state between them. Other replicas have copies of the
    shards."""
    experts: int
    """The ranks that have the experts of a layer between them: the expert-parallel size."""
    expert_shards: int
    """The ranks that shard the same experts between them, if ranks have experts between them: as many of those that
    shard everything else, and of their tensor-parallel ranks, as have the same experts."""
    micro_step: int
    """The tokens of one micro-step over all ranks. Tokens per step are a whole number of micro-steps."""
    hooks: Literal["never", "every micro-step"]
    """The micro-steps that the engine's hooks run in. FSDP2's engine does without them where it keeps whole weights, or
    fetches those of blocks itself, and sums and reduces gradients itself."""
    reduced: Literal["never", "once a step", "in every micro-step"]
    """The times at which gradients leave the rank, for other replicas or for the host's memory."""
    whole_between_passes: bool
    """Whether a rank holds whole weights between passes. At ZeRO 3 it may hold only a part, except in groups of one
    rank."""
    not_recorded: Refusal | None
    """The reason why micro-steps cannot be CUDA graphs (training.cuda_graphs), or None."""
    recorded: bool
    """Whether micro-steps become CUDA graphs on a GPU, if they fit into its memory."""

    @classmethod
    def of(cls, cfg: RunConfig, world_size: int | None = None) -> Layout:
        """Resolve the layout of a configuration.

        Args:
            world_size: number of ranks. None: the fewest that the configuration runs on, for what does not depend on
                it.
        """
        parallel, engine = cfg.parallel, _engine(cfg)
        tensor, context = parallel.tensor_parallel_size, parallel.context_parallel_size
        stages, stage, by_deepspeed = parallel.pipeline_parallel_size, parallel.zero_stage, engine == "deepspeed"
        if by_deepspeed:
            stage = min(max(stage, int(cfg.training.dtype == "bf16")), 2)
        world_size = world_size or tensor * context * stages
        attention = layers(cfg.model)[0].attention
        gather = attention.gather_of(tensor, context)
        replicas = world_size // (tensor * stages)
        experts, moe = parallel.expert_parallel_size, cfg.model.experts is not None
        # A single replica at ZeRO 3 has nothing to fetch, and rows in 16 bits only take memory, unless it is asked for
        # recordings.
        lone = stage == 3 and replicas == 1 and cfg.training.cuda_graphs != "on"
        refusal = _not_recorded(cfg, lone)
        # At ZeRO 2 and 3 the passes of FSDP2 go through its hooks in pipelines, with state in the host's memory, and
        # with copies of shards or of experts, which are reduced once a step. At ZeRO 3 they also do with any experts.
        plain = parallel.offload == "none" and parallel.shard_size is None and stages == 1
        unhooked = plain and (experts == 1 if stage == 2 else not moe and not lone)
        rests = not by_deepspeed and (stage < 2 or unhooked)
        # A single replica has nothing to reduce, but for experts of which its tensor-parallel ranks have copies.
        alone = rests and replicas == 1 and parallel.offload == "none" and experts in (1, tensor)
        shards = 1 if stage == 0 else parallel.shard_size or replicas
        neighbours = tensor * shards
        return cls(
            world_size=world_size,
            tensor=tensor,
            context=context,
            gather=gather,
            copies_of_keys=attention.copies_of_keys(tensor * context // gather),
            stages=stages,
            chunks=parallel.pipeline_chunks,
            engine=engine,
            zero_stage=stage,
            shards=shards,
            experts=experts,
            expert_shards=neighbours // experts if stage > 0 and neighbours % experts == 0 else 1,
            micro_step=cfg.data.micro_batch_size * cfg.data.seq_length * (replicas // context),
            hooks="never" if rests else "every micro-step",
            reduced="never" if alone else "once a step" if stage < 2 else "in every micro-step",
            whole_between_passes=stage < 3 or parallel.shard_size == 1,
            not_recorded=refusal,
            recorded=cfg.training.cuda_graphs != "off" and refusal is None,
        )

    @property
    def replicas(self) -> int:
        """The ranks that hold the same part of the model before ZeRO: data- and context-parallel ranks."""
        return self.world_size // (self.tensor * self.stages)

    @property
    def ulysses(self) -> int:
        """The context-parallel ranks that exchange heads with each other."""
        return self.context // self.gather

    @property
    def data(self) -> int:
        """The model replicas with sequences of their own. Each is a group of tensor-, context- and pipeline-parallel
        ranks."""
        return self.replicas // self.context

    @property
    def copies(self) -> int:
        """The replicas that have the same shard."""
        return self.replicas // self.shards

    @property
    def expert_copies(self) -> int:
        """The ranks that have the same shard of the same experts, if ranks have experts between them."""
        return self.replicas * self.tensor // (self.experts * self.expert_shards)

    @property
    def calls_experts(self) -> bool:
        """Whether hooks of experts gather their weights in every pass, apart from the block that they are in."""
        return self.experts > 1 and self.zero_stage == 3

    @property
    def gathered(self) -> Literal["never", "once a step", "in every pass"]:
        """The times at which a rank gathers the weights of other shards."""
        return ("never", "once a step", "once a step", "in every pass")[self.zero_stage]

    @property
    def sharing(self) -> str:
        """Context parallelism as text, for the place behind another axis: ` x context parallel 4`. Empty if no ranks
        share sequences."""
        how = [f"Ulysses {self.ulysses} x gather {self.gather}"] if self.gather > 1 else []
        how += [f"each key head {self.copies_of_keys} times"] if self.copies_of_keys > 1 else []
        return f" x context parallel {self.context}" + f" ({', '.join(how)})" * bool(how) if self.context > 1 else ""

    @property
    def even(self) -> bool:
        """Whether the sizes of the axes divide the number of ranks."""
        return self.world_size % (self.tensor * self.context * self.stages) == 0

    @property
    def sharding(self) -> str:
        """The ZeRO stage and the engine as text: `ZeRO 1 by DeepSpeed`, `ZeRO 3 by FSDP2 over 8 of 64 replicas`."""
        if self.engine == "deepspeed":
            return f"ZeRO {self.zero_stage} by DeepSpeed"
        over = f" over {self.shards} of {self.replicas} replicas" if 1 < self.shards < self.replicas else ""
        return f"ZeRO {self.zero_stage} by FSDP2{over}"


def by_rows(ranks: int, per_token: int) -> bool:
    """Return whether tokens go to the ranks of their experts alone, each row by itself, where so many ranks have the
    experts of a layer between them. Up to as many ranks as a token has experts, hardly a token misses a rank, so all
    tokens are gathered."""
    return ranks > per_token


def _engine(cfg: RunConfig) -> Literal["deepspeed", "fsdp"]:
    if cfg.parallel.engine != "auto":
        return cfg.parallel.engine
    return "deepspeed" if cfg.parallel.gradient_reduction == "bf16" else "fsdp"


def _not_recorded(cfg: RunConfig, lone: bool) -> Refusal | None:
    parallel, stage = cfg.parallel, cfg.parallel.zero_stage
    stages, ranks = parallel.pipeline_parallel_size, parallel.expert_parallel_size
    every = (
        (_engine(cfg) == "deepspeed", "parallel.engine", "deepspeed", "hooks of DeepSpeed run in every micro-step",
         "use fsdp"),
        (stage > 1 and parallel.shard_size is not None, "parallel.shard_size", parallel.shard_size,
         f"copies of shards would be reduced in every micro-step at zero_stage {stage}", "use null, or zero_stage 1"),
        (stage > 1 and ranks > 1, "parallel.expert_parallel_size", ranks,
         f"copies of experts would be reduced in every micro-step at zero_stage {stage}", "use 1, or zero_stage 1"),
        (stage > 2 and cfg.model.experts is not None, "parallel.zero_stage", stage,
         "hooks gather the experts of a block in every micro-step", "use 0 to 2"),
        (parallel.offload != "none", "parallel.offload", parallel.offload, "gradients leave the GPU", "use none"),
        (cfg.training.activation_offload, "training.activation_offload", True, "activations leave the GPU",
         "use false"),
        (stage > 1 and stages > 1, "parallel.pipeline_parallel_size", stages,
         f"hooks of FSDP2 run in every pass at zero_stage {stage}", "use 1, or zero_stage 1"),
        (lone, "parallel.zero_stage", stage,
         "a single replica has its weights once, and recordings need them in 16 bits too", "use 0 to 2"),
    )  # fmt: skip
    return next((Refusal(*rest) for refused, *rest in every if refused), None)

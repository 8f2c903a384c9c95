"""Changes that turn one configuration into another, and the overrides that say them."""

from __future__ import annotations

from collections.abc import Mapping

from sagetrain.config.layout import Layout
from sagetrain.config.run_parts import lengths_of
from sagetrain.config.schema import NoiseAwareTokens, RampTokens, RunConfig, StagedTokens


def way(cfg: RunConfig, parallel: Mapping[str, object], micro: int) -> RunConfig:
    """Return the configuration with this layout, no recomputation and micro-batches of `micro` sequences. Where
    activations are in the host's memory, what is recomputed stays as it is."""
    training: dict[str, object] = {} if cfg.training.activation_offload else {"activation_checkpointing": "none"}
    data: dict[str, object] = {"micro_batch_size": micro}
    return cfg.changed({"parallel": parallel, "training": training, "data": data})


def with_enough_tokens(cfg: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration with every value of tokens_per_step rounded up to whole micro-steps, and to its
    `multiple` where it has one."""
    multiple = Layout.of(cfg, world_size).micro_step
    if isinstance(cfg.tokens_per_step, RampTokens | NoiseAwareTokens) and cfg.tokens_per_step.multiple:
        multiple *= -(-cfg.tokens_per_step.multiple // multiple)
    schedule = cfg.tokens_per_step
    tree = schedule.model_dump()
    for key, tokens in schedule.named_tokens.items():
        _, *parents, last = key.split(".")
        place = tree
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        place[last] = -(-tokens // multiple) * multiple
    raised = type(schedule).model_validate(tree)
    if isinstance(schedule, StagedTokens) and isinstance(raised, StagedTokens) and schedule.is_part:
        raised = raised.part(schedule.own)
    return cfg.model_copy(update={"tokens_per_step": raised})


def raise_of(cfg: RunConfig, raised: RunConfig) -> float:
    """Return the largest factor between the tokens per step of two configurations."""
    old, new = (each.tokens_per_step.named_tokens for each in (cfg, raised))
    return max(new[key] / tokens for key, tokens in old.items())


def overrides_to(cfg: RunConfig, chosen: RunConfig) -> list[str]:
    """Return the overrides that turn `cfg` into `chosen`."""
    pairs = {}
    # An engine that `auto` comes to need not be named.
    as_asked = chosen.changed({"parallel": {"engine": cfg.parallel.engine}})
    if Layout.of(as_asked).engine == Layout.of(chosen).engine:
        chosen = as_asked
    for section, name in (
        ("parallel", "tensor_parallel_size"),
        ("parallel", "context_parallel_size"),
        ("parallel", "pipeline_parallel_size"),
        ("parallel", "pipeline_chunks"),
        ("parallel", "pipeline_blocks"),
        ("parallel", "sequence_parallel"),
        ("parallel", "engine"),
        ("parallel", "zero_stage"),
        ("parallel", "offload"),
        ("optimizer", "moments"),
        ("optimizer", "master"),
        ("training", "activation_checkpointing"),
        ("data", "micro_batch_size"),
    ):
        old, new = (getattr(getattr(c, section), name) for c in (cfg, chosen))
        if old != new:
            pairs[f"{section}.{name}"] = str(new).lower()
    if (stages := lengths_of(cfg)) and (micro := pairs.get("data.micro_batch_size")):
        if stages.own[0]:  # The run's own is that of its first stage.
            del pairs["data.micro_batch_size"]
        pairs.update({f"tokens_per_step.stages.{i}.micro_batch_size": micro for i in stages.own})
    old, new = cfg.tokens_per_step.named_tokens, chosen.tokens_per_step.named_tokens
    pairs.update({key: str(value) for key, value in new.items() if value != old[key]})
    return [f"{key}={value}" for key, value in pairs.items()]

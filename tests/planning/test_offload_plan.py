"""`plan` says what parallel.offload takes of GPU and host, what it costs in time, and what does not go with it."""

import dataclasses

import pytest

from checked_config import only, run_config
from planned import CONFIGS, VOCAB, config
from sagetrain.config.errors import ConfigError
from sagetrain.config.rules import fit
from sagetrain.costs.accounting import parameters_per_rank
from sagetrain.costs.hardware import HARDWARE, cluster_of
from sagetrain.costs.host_memory import host_memory_per_rank
from sagetrain.costs.memory import memory_per_rank
from sagetrain.planning import priced
from sagetrain.planning.evidence import evidence
from sagetrain.planning.performance import predict
from sagetrain.planning.plan import make_plan
from sagetrain.planning.priced import Target
from sagetrain.planning.result import Plan
from sagetrain.training import build_run

H100 = HARDWARE["h100"]
OPTIMIZER = "parallel.engine=fsdp", "parallel.offload=optimizer"
ALL = "parallel.engine=fsdp", "parallel.offload=all", "parallel.zero_stage=3"


def plan(*overrides: str, gpu: str = "h100", host: float | None = None, world_size: int = 2) -> Plan:
    how = ["attention.backend=sdpa", "data.document_attention=false", "data.document_positions=false", *overrides]
    return make_plan(CONFIGS / "1b.yaml", how, world_size, cluster_of(gpu, 8, 400, host))


@pytest.mark.parametrize(("sections", "key", "message", "fix"), [
    ({"parallel": {"engine": "deepspeed"}}, "parallel.offload", "engine is deepspeed", "set parallel.engine: fsdp"),
    ({"parallel": {"zero_stage": 3}}, "parallel.offload", "are the master weights", "use all, or zero_stage 1 or 2"),
    ({"parallel": {"zero_stage": 0}}, "parallel.offload", "every rank would keep", "use zero_stage 1"),
    ({"parallel": {"offload": "all"}}, "parallel.offload", "weights stay on the GPU", "use zero_stage 3, or optimizer"),
    ({"optimizer": {"name": "muon"}}, "optimizer.name", "too slow", "use adamw, or offload: none"),
    ({"optimizer": {"moments": "int8"}}, "optimizer.moments", "none of the GPU's", "use fp32, or offload: none"),
    ({"optimizer": {"master": "bf16_kahan"}}, "optimizer.master", "none of the GPU's", "use fp32, or offload: none"),
    ({"parallel": {"pipeline_parallel_size": 2}}, "parallel.pipeline_parallel_size", "never tried", "use 1, or"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_refused(sections, key, message, fix):
    parallel = {"offload": "optimizer", **sections.get("parallel", {})}
    found = fit(run_config(**{**sections, "parallel": parallel}), 2)
    finding = only(
        [each for each in found if each.rule in ("offload_of_deepspeed", "offload_at_zero_stage", "not_offloaded")]
    )
    assert (finding.level, finding.key) == ("error", key)
    assert message in finding.message and fix in finding.fix


def test_the_gpu_has_the_rest_and_the_host_has_the_state():
    here, away, every = (config("1b", "parallel.engine=fsdp", *more) for more in ([], OPTIMIZER, ALL))
    on_gpu = [{item.name: item.bytes for item in memory_per_rank(cfg, 2, VOCAB)} for cfg in (here, away, every)]
    values = parameters_per_rank(here.model, here.attention, VOCAB, 1) // 2
    assert on_gpu[0]["optimizer"] == pytest.approx(12 * values, rel=1e-3)
    for memory in on_gpu[1:]:
        assert "optimizer" not in memory and memory["offload"] < 12 * values / 10
    assert on_gpu[1]["weights"] == on_gpu[0]["weights"] and "gradients" not in on_gpu[2]
    host = {item.name: item.bytes for item in host_memory_per_rank(away, 2, VOCAB)}
    assert host["moments"] == pytest.approx(8 * values, rel=1e-3)
    assert host["checkpoint"] == pytest.approx(12 * values, rel=1e-3)
    # Pinned memory comes in powers of two.
    assert 4 * values < host["masters"] == host["gradients"] < 8 * values
    assert host_memory_per_rank(here, 2, VOCAB) == []


def test_the_share_of_the_host_shrinks_with_steps():
    def step(tokens: int, *more: str):
        cfg = config("1b", f"tokens_per_step={{schedule: constant, tokens: {tokens}}}", *more)
        return cfg, predict(cfg, 2, VOCAB, H100)

    (_, plain), (cfg, few), (_, many) = step(2**17), step(2**17, *OPTIMIZER), step(2**20, *OPTIMIZER)
    assert few.seconds > plain.seconds and few.offload > 0 == plain.offload
    assert many.offload / many.seconds < few.offload / few.seconds / 4
    assert step(2**17, *ALL)[1].offload > few.offload  # Gradients are added up on the CPU there.
    assert {evidence(cfg, few, card).margin for card in (H100, HARDWARE["h200"])} == {0.1}
    slow = dataclasses.replace(H100, host_copy_bandwidth=5e9)
    assert predict(cfg, 2, VOCAB, slow).offload > few.offload


def test_activations_on_the_host_leave_two_blocks():
    """The host has all that leaves. Copies take time only if they take longer than the blocks."""
    away = "training.activation_checkpointing=full", "training.activation_offload=true"
    keeping = "attention.backend=sage", "training.activation_checkpointing=attention", away[1]
    here, inputs, results = (config("1b", "parallel.engine=fsdp", *more) for more in (away[:1], away, keeping))
    memory = [{item.name: item.bytes for item in memory_per_rank(cfg, 2, VOCAB)} for cfg in (here, inputs, results)]
    blocks, whole = here.model.num_layers, memory[0]["activations"]
    assert memory[1]["activations"] == pytest.approx(whole * 2 / blocks, rel=1e-6)
    on_host = [{item.name: item.bytes for item in host_memory_per_rank(cfg, 2, VOCAB)} for cfg in (inputs, results)]
    assert on_host[0]["activations"] == whole < on_host[1]["activations"] and not host_memory_per_rank(here, 2, VOCAB)
    assert memory[2]["activations"] == pytest.approx(on_host[1]["activations"] * 2 / blocks, rel=0.02)
    assert predict(inputs, 2, VOCAB, H100).offload == predict(here, 2, VOCAB, H100).offload == 0
    slow = dataclasses.replace(H100, host_copy_bandwidth=1e9)
    step, plain = predict(inputs, 2, VOCAB, slow), predict(here, 2, VOCAB, slow)
    assert step.seconds - plain.seconds == pytest.approx(step.offload) and step.offload > 0
    assert predict(results, 2, VOCAB, H100).attention < predict(here, 2, VOCAB, H100).attention
    finding = Target(2, VOCAB, cluster_of("h100", 8, 400, 8)).host_finding(results)
    assert finding and finding.key == "training.activation_offload" and "activation_checkpointing full" in finding.fix


@pytest.mark.parametrize(("sections", "key", "fix"), [
    ({"training": {"activation_checkpointing": "none"}}, "training.activation_checkpointing", "use full or attention"),
    ({"training": {"activation_checkpointing": "attention", "compile": "off"}}, "training.compile", "use auto or on"),
    ({"parallel": {"pipeline_parallel_size": 2}}, "parallel.pipeline_parallel_size", "activation_offload: false"),
    ({"parallel": {"offload": "optimizer"}}, "parallel.offload", "use none, or activation_offload: false"),
    ({"training": {"cuda_graphs": "on"}}, "training.cuda_graphs", "use false, or set cuda_graphs: auto"),
])  # fmt: skip
def test_what_does_not_go_with_offloaded_activations(sections, key, fix):
    training = {"activation_checkpointing": "full", "activation_offload": True, **sections.get("training", {})}
    found = fit(run_config(**{**sections, "training": training}), 2)
    finding = only([each for each in found if each.rule in ("activations_not_offloaded", "cuda_graphs_off")])
    assert (finding.level, finding.key) == ("error", key) and fix in finding.fix


def test_a_host_without_room_is_refused(monkeypatch):
    """A host's memory rules out whole kinds of layouts at once. None of them is looked at alone."""
    looked_at, fit = [], priced.fit
    monkeypatch.setattr(priced, "fit", lambda *how: (looked_at.append(how), fit(*how))[1])
    plans = {16: plan(*OPTIMIZER, host=16)}
    assert len(looked_at) < 5000  # The search goes through 110,000, for up to 2,048 GPUs.
    plans |= {host: plan(*OPTIMIZER, host=host) for host in (64, None)}
    found = {host: [each for each in made.findings if each.rule == "host_memory"] for host, made in plans.items()}
    assert found[64] == found[None] == [] and plans[None].host_memory and not plan().host_memory
    finding = only(found[16])
    assert finding.key == "parallel.offload" and "--host-memory" in finding.fix
    assert "for 2 ranks, more than the 15.2 GiB that a host leaves" in finding.message
    many = Target(8, VOCAB, cluster_of("rtx4090", 8, 400, 64)).host_finding(config("1b", *OPTIMIZER))
    assert many and "for 8 ranks" in many.message
    assumed = Target(2, VOCAB, cluster_of("rtx4090", 8, 400, None)).host_finding(
        config("1b", "model.num_layers=200", *ALL)
    )
    assert assumed and "a host (assumed: 64 GiB a GPU)" in assumed.message


def test_a_start_on_a_host_without_room_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(build_run, "memory_of_host", lambda: 2**33)
    build_run.check_host_memory(config("1b"), VOCAB)
    with pytest.raises(
        ConfigError, match=r"takes .* GiB of host memory for 2 ranks, more than the 7\.6 GiB that host "
    ):
        build_run.check_host_memory(config("1b", *OPTIMIZER), VOCAB)

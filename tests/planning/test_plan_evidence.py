"""`plan` states what its figures rest on, for which GPU they are, and which choice would be faster."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from sagetrain import api
from sagetrain.config import ConfigError, load_config
from sagetrain.config.schema import AttentionConfig
from sagetrain.costs import which_gpu
from sagetrain.costs.accounting import num_parameters
from sagetrain.costs.hardware import HARDWARE, cluster_of
from sagetrain.planning.evidence import evidence, tuned
from sagetrain.planning.plan import ASSUMED_VOCAB_SIZE, make_plan
from sagetrain.planning.result import Plan
from sagetrain.planning.show import show_plan

CONFIGS = Path(__file__).parents[2] / "configs"


def printed(world_size: int, *overrides: str) -> str:
    out = io.StringIO()
    assert show_plan(CONFIGS / "1b.yaml", overrides, world_size, Console(file=out, width=400)) == 0
    return out.getvalue()


def test_a_faster_backend_than_the_named_one_is_a_finding():
    def found(*overrides: str, gpu: str = "h100") -> list:
        made = make_plan(CONFIGS / "1b.yaml", overrides, 1, HARDWARE[gpu])
        return [finding for finding in made.findings if finding.rule == "faster_attention"]

    (finding,) = found("attention.backend=sage", "attention.recipe=fine")
    assert finding.level == "info" and finding.fix.endswith("or backend sage with recipe scores")
    (elsewhere,) = found("attention.backend=sage", "attention.recipe=scores", "optimizer.moments=int8", gpu="rtx4090")
    assert elsewhere.fix.endswith("or backend sage with recipe fine") and elsewhere.message.endswith(" in layout 1")
    assert not found("attention.backend=sage", "attention.recipe=scores") and not found("attention.backend=flash")
    assert not found()


def test_the_faster_engine_is_proposed():
    """FSDP2 is faster than DeepSpeed in recorded runs of both at ZeRO 1. ZeRO 3 is by FSDP2 alone."""

    def made(*overrides: str) -> Plan:
        how = ["attention.backend=sdpa", "data.document_attention=false", "data.document_positions=false"]
        return make_plan(CONFIGS / "1b.yaml", [*how, *overrides], 4, HARDWARE["h100"])

    def found(*overrides: str) -> list:
        return [finding for finding in made(*overrides).findings if finding.rule == "faster_engine"]

    (finding,) = found("parallel.zero_stage=1", "parallel.engine=deepspeed")
    assert (finding.level, finding.key) == ("info", "parallel.engine") and finding.fix == "set parallel.engine: fsdp"
    assert not found("parallel.zero_stage=1", "parallel.engine=fsdp")
    engines = [{item.layout.engine for item in made(*how).proposed if item.cfg.parallel.zero_stage == 3}
               for how in ((), ["parallel.engine=deepspeed"], ["parallel.gradient_reduction=bf16"])]  # fmt: skip
    assert engines == [{"fsdp"}, {"fsdp"}, set()]


def test_figures_say_what_they_rest_on():
    """A figure has the margin of recorded runs, or a mark and the property that no recorded run had. GPU-hours and a
    checkpoint's size on disk follow."""
    text = printed(4, "linear.precision=int8", "parallel.engine=deepspeed", "optimizer.lr_of.embedding=0.004")
    assert "peak 0.0003 (embedding 0.004), warm-up" in text
    assert "recorded runs of this kind on NVIDIA H200 were within 10% of the prediction" in text and "~" not in text
    days, hours = re.search(r"([\d.]+) days at the predicted [\d,]+ tokens/s, ([\d,]+) GPU-hours", text).groups()
    assert 24 * 4 * float(days) == pytest.approx(float(hours.replace(",", "")), rel=0.02)
    size = num_parameters(load_config(CONFIGS / "1b.yaml").model, AttentionConfig(), ASSUMED_VOCAB_SIZE)
    assert f"{12 * size / 2**30:.2f} GiB on disk each" in text
    assert "nothing at this size and length; nearest: the rate alone, at 325M parameters and 13M tokens (" in text
    cfg = load_config(CONFIGS / "325m.yaml", ["training.total_tokens=20_000_000"])
    assert tuned(cfg, 45_000_000).startswith("rate, warm-up and the embedding's rate, at 43M parameters")
    assert "This run has 4 times the parameters and 1.5 times the tokens" in tuned(cfg, 1_300_000_000)
    quick = make_plan(CONFIGS / "quickstart.yaml", [], 1, HARDWARE["h200"])
    said = tuned(quick.cfg, 43_000_000)
    assert said.startswith("nothing at this length") and "has 1 times the parameters and 0.014 times" in said
    small = evidence(quick.cfg, quick.chosen.prediction, quick.hardware)
    assert small.missing == ("model.hidden_size below 1024", "training.dtype fp32")
    out = io.StringIO()
    show_plan(CONFIGS / "quickstart.yaml", [], 1, Console(file=out, width=400), brief=True)
    assert "~: no recorded run on NVIDIA H200 stands behind this: model.hidden_size" in out.getvalue()
    mixture = make_plan(CONFIGS / "olmoe-1b-7b.yaml", ["parallel.expert_parallel_size=16"], 16, HARDWARE["h200"])
    assert evidence(mixture.cfg, mixture.chosen.prediction, mixture.hardware).missing[0] == "rows of experts over ranks"
    spread = ["parallel.expert_parallel_size=8", "data.micro_batch_size=6", "tokens_per_step.tokens=393216"]
    spread = make_plan(CONFIGS / "olmoe-1b-7b.yaml", spread, 8, HARDWARE["h200"])
    (room,) = (finding for finding in spread.findings if finding.rule == "room_of_experts")
    assert "is doubled if rows of experts do not fit on some rank. With 3 a rank is estimated to take" in room.message
    text = printed(16)
    assert (
        re.search(r": ~[\d,]+ tokens/s", text) and "no recorded run on NVIDIA H200 stands behind this: 2 hosts" in text
    )


@pytest.mark.parametrize(("name", "key", "said"), [
    (None, "h200", "This host has no NVIDIA GPU: speeds and memory are predicted for NVIDIA H200; --gpu names another"),
    ("NVIDIA H100 80GB HBM3", "h100", "predicted for this host's NVIDIA H100 80GB HBM3"),
    ("Quadro K600", "h200", "No rates are known for Quadro K600"),
    ("NVIDIA H100 PCIe", "h100", "No rates are known for NVIDIA H100 PCIe: speeds and memory are those of NVIDIA H100"),
    ("NVIDIA A100-SXM4-40GB", "a100", "No rates are known for NVIDIA A100-SXM4-40GB: speeds and memory are those of"),
    ("NVIDIA GB200", "b200", "No rates are known for NVIDIA GB200"),
])  # fmt: skip
def test_the_gpu_that_is_priced_is_named(name, key, said, monkeypatch):
    monkeypatch.setattr(which_gpu, "gpu_here", lambda: name)
    found, sentence = which_gpu.planned_gpu(None)
    assert found == key and said in sentence and which_gpu.planned_gpu("a100") == ("a100", "")


def test_a_gpu_is_known_by_a_part_of_its_name() -> None:
    assert [which_gpu.known_gpu(name) for name in ("4090", "RTX 4090", "rtx4090")] == ["rtx4090"] * 3
    for name, said in (
        ("h3", "gpu 'h3' is not known: give one of h200, h100, "),
        ("rtx4080", "did you mean rtx4090"),
        ("100", r"did you mean h100 or a100\? Known are h200, "),
    ):
        with pytest.raises(ConfigError, match=said):
            which_gpu.known_gpu(name)


def test_arithmetic_and_rates_that_a_gpu_does_not_have_are_said() -> None:
    """A GeForce card adds FP8 products at half rate. An A100 and a B200 do not run Hopper's attention kernels."""
    fp8 = ["linear.precision=fp8", "attention.backend=sage"]
    for gpu, expected in (
        ("rtx4090", {"linear_fp8_half_rate"}),
        ("l40s", set()),
        ("h200", set()),
        ("b200", {"int8_attention_rate"}),
    ):
        plan = make_plan(CONFIGS / "325m.yaml", fp8, 1, HARDWARE[gpu])
        rules = {"linear_fp8_half_rate", "int8_attention_rate"}
        found = [finding for finding in plan.findings if finding.rule in rules]
        assert {finding.rule for finding in found} == expected
        assert all(finding.level == "warning" and "auto" in finding.fix for finding in found)
        missing = evidence(plan.cfg, plan.chosen.prediction, HARDWARE[gpu]).missing
        assert ("INT8 attention by the rate of Hopper's kernels" in missing) == ("int8_attention_rate" in expected)
    assert "mma.sync" in found[0].message and found[0].fix.startswith("use attention.backend flash or sdpa")


@pytest.mark.parametrize("key", ["attention.backend=sage", "linear.precision=int8", "linear.precision=fp8"])
def test_what_no_gpu_takes_is_an_error_for_a_named_gpu(key: str) -> None:
    """The torch twins run in fp32 without a GPU, so a plan that names none has no error."""
    overrides = ["attention.backend=sdpa", "linear.precision=bf16", "training.dtype=fp32", "model.vocab_size=512", key]
    for named in (False, True):
        plan = make_plan(CONFIGS / "minimal.yaml", overrides, 1, cluster_of("h200", 8, 400, named=named))
        errors = {each.key for each in plan.findings if each.level == "error"}
        assert plan.errors == named and errors == ({"training.dtype"} if named else set())
    assert api.plan(CONFIGS / "minimal.yaml", overrides, gpu="h200").errors == 1

"""Spikes and steps that are not finite: their definition, and a left-out step leaves no trace in the run's state."""

import math
import random

import pytest
import torch

import tiny
from distributed import run_distributed
from sagetrain.config.rules import fit
from sagetrain.config.schema import SpikesConfig
from sagetrain.engines.protocol import Observers, StepResult
from sagetrain.stability.controller import Event, Taken
from sagetrain.stability.spikes import Spikes, Verdict

TOKENS = 1024


def numbers(loss: float, norm: float) -> dict[str, float]:
    return {"train/loss": loss, "train/grad_norm": norm}


def after(steps: int, tokens: int = TOKENS, **settings: object) -> Spikes:
    """Return a detector that has seen so many ordinary steps: losses about 3 ± 0.1, norms about 0.5 ± 0.05."""
    spikes, draw = Spikes(SpikesConfig(**{"window": 64, "grace_steps": 32, **settings})), random.Random(1)
    for step in range(1, steps + 1):
        taken = numbers(draw.gauss(3, 0.1), draw.gauss(0.5, 0.05))
        assert spikes.after_step(Taken(step, step * tokens, tokens, taken)) == []
    return spikes


def test_what_is_a_spike() -> None:
    spikes = after(100)
    for ordinary in (numbers(3.4, 0.6), numbers(0.1, 0.01), numbers(3.0, 0.7)):
        assert spikes.judge(ordinary, TOKENS) == Verdict()
    limits = spikes.limits(TOKENS)
    assert limits["loss"] == pytest.approx(3.8, abs=0.35) and limits["gradient norm"] == pytest.approx(0.9, abs=0.15)
    verdict = spikes.judge(numbers(3.0, 5.0), TOKENS)
    assert verdict.apply  # Policy stop applies the step and reports it.
    assert verdict.event.text == f"gradient norm 5, above {limits['gradient norm']:.5g}"
    assert verdict.event.fields["finite"] and verdict.event.fields["grad_norm"] == 5.0
    assert "loss 9, above" in spikes.judge(numbers(9.0, 0.5), TOKENS).event.text


def test_values_that_never_differ_have_a_spread_of_one_percent() -> None:
    spikes = Spikes(SpikesConfig(window=16, grace_steps=8, threshold=5))
    for step in range(8):
        spikes.after_step(Taken(step + 1, 0, TOKENS, numbers(2.0, 1.0)))
    assert spikes.judge(numbers(2.09, 1.04), TOKENS).event is None
    assert spikes.judge(numbers(2.11, 1.0), TOKENS).event is not None


def test_steps_in_which_no_token_counts_are_in_no_window() -> None:
    spikes = after(40)
    limits = spikes.limits(TOKENS)
    for step in range(64):
        spikes.after_step(Taken(41 + step, 0, TOKENS, numbers(0.0, 0.0) | {"train/counted_share": 0.0}))
    assert spikes.limits(TOKENS) == limits


def test_a_spike_among_the_window_hardly_moves_the_limit() -> None:
    spikes = after(64)
    before = spikes.limits(TOKENS)["loss"]
    spikes.after_step(Taken(65, 0, TOKENS, numbers(1e6, 1e6)))
    assert spikes.limits(TOKENS)["loss"] == pytest.approx(before, abs=0.05)


def test_not_finite_is_never_applied_spikes_wait_for_grace() -> None:
    for known in (0, 100):
        for bad in (numbers(math.nan, 1.0), numbers(1.0, math.inf)):
            verdict = after(known).judge(bad, TOKENS)
            assert not verdict.apply and not verdict.event.fields["finite"]
    assert after(31).judge(numbers(99.0, 99.0), TOKENS) == Verdict()
    assert after(32).judge(numbers(99.0, 99.0), TOKENS).event is not None


def test_norms_scale_with_the_root_of_tokens_per_step() -> None:
    spikes = after(64, tokens=16 * TOKENS)
    norms = spikes.limits(16 * TOKENS)["gradient norm"], spikes.limits(TOKENS)["gradient norm"]
    assert norms[1] == pytest.approx(4 * norms[0])
    assert spikes.limits(64 * TOKENS) == spikes.limits(16 * TOKENS)


def test_policies_leave_out_only_a_few_steps_in_a_window() -> None:
    spikes = after(64, policy="skip", max_events=2)
    assert not spikes.judge(numbers(9.0, 0.5), TOKENS).apply
    for step in (70, 80):
        assert spikes.may_act(step)
        spikes.act(step, step)
    assert not spikes.may_act(81)
    again = after(0, policy="skip", max_events=2)
    again.restore(spikes.state())
    assert again.state() == spikes.state() and again.limits(TOKENS) == spikes.limits(TOKENS)
    assert not again.may_act(133) and again.may_act(134)  # Step 70 is 64 steps ago.


def test_a_second_rewind_goes_further_back() -> None:
    spikes = after(64, policy="rewind")
    spikes.act(step=100, weights_of=90)
    assert [step for step in (80, 90, 95, 100, 110) if spikes.may_go_back(120, step)] == [80, 110]
    spikes.restore({})  # The state is that of an earlier checkpoint. The run itself has not forgotten.
    assert not spikes.may_go_back(120, 90)
    assert spikes.may_go_back(164, 90)


@pytest.mark.parametrize(("spikes", "keep_last", "level", "words"), [
    ({"grace_steps": 200}, 3, "error", "stability.spikes.grace_steps = 200: is more than stability.spikes.window 128"),
    ({"max_events": 9}, 3, "warning", "stability.spikes.max_events = 9: has no effect with policy stop"),
    ({"policy": "rewind"}, 2, "warning", "checkpoint.keep_last = 2: leaves stability.spikes.policy rewind nothing"),
    ({"policy": "rewind", "max_events": 1}, 2, None, ""),
    ({"policy": "skip"}, 1, None, ""),
])  # fmt: skip
def test_settings_that_cannot_work_are_named(spikes, keep_last, level, words) -> None:
    cfg = tiny.config(1, stability={"spikes": spikes}, checkpoint={"keep_last": keep_last})
    found = [finding for finding in fit(cfg, 1) if "spikes" in str(finding)]
    assert [finding.level for finding in found] == ([level] if level else [])
    assert not level or words in str(found[0])


# -- the update that is not made --------------------------------------------------------------------------------------


def tensors(engine) -> dict[str, torch.Tensor]:
    """Return everything that an update changes: masters, moments, the weights that the model computes with, also in 8
    bits, and Adam's step counts."""
    engine.gathered()  # FSDP2 renews 8-bit weights when it enters a block.
    found = {f"{s.name}|{k}": s.read(k).clone() for s in engine.owned() for k in s.kinds}
    found |= {f"{s.name}|{i}": t.clone() for s in engine.owned() for i, t in enumerate(s.copies) if len(t)}
    found["updates"] = torch.tensor(engine.optimizer_steps)
    for name, layer in engine.model.named_modules():
        found |= {f"{name}|kept {i}": t.view(torch.uint8).clone() for i, t in enumerate(getattr(layer, "kept", ()))}
    return found


def take_step(engine, number: int, observers: Observers | None = None) -> StepResult:
    """Take a step of two micro-batches, whatever the layout of two ranks."""
    return tiny.global_step(engine, number, 2 * engine.groups.dp_size, observers)


def step(engine, number: int, verdict: Verdict, factor: float = 1.0) -> StepResult:
    """Take a step whose loss is multiplied by `factor`, and whose verdict is fixed."""
    forward = engine.forward
    engine.forward = lambda *how: forward(*how) * factor
    try:
        return take_step(engine, number, Observers(judge=lambda metrics: verdict))
    finally:
        engine.forward = forward


def left_out(layouts: list[tuple[int, int, str, str]]) -> list[list]:
    """Return three results for each (tp_size, stage, dtype, linear.precision): the tensors that differ after refused
    steps, whether the run goes on as one without those steps, and the norms of refused steps and an applied step beside
    the norm of the layers together."""
    results = []
    for tp_size, stage, dtype, precision in layouts:
        sections = {"optimizer": {"clip_grad": 0.5}, "linear": {"precision": precision}}
        cfg, groups = tiny.config(stage, dtype, **sections), tiny.join(tp_size)
        ours, theirs = tiny.engine(cfg, groups), tiny.engine(cfg, groups)
        take_step(ours, 0), take_step(theirs, 0)
        before, wrong = tensors(ours), Event("spike", "test")
        refused = [step(ours, 2, Verdict(False, wrong), factor) for factor in (1.0, 1e3, math.nan, math.inf)]
        assert all(not result.applied and result.event is wrong for result in refused)
        after = tensors(ours)
        # ZeRO 3 may have released small parameters, which it gathers in the next step.
        changed = [name for name in before if not before[name].equal(after.get(name, before[name]))]
        assert stage == 3 or before.keys() == after.keys()
        same = all(take_step(ours, n).metrics == take_step(theirs, n).metrics for n in (2, 3))
        applied = step(ours, 4, Verdict(True, wrong))
        assert applied.applied
        norms = [
            (r.grad_norm, math.hypot(*r.layer_norms.values()), len(r.layer_norms)) for r in (*refused[:2], applied)
        ]
        results.append([changed, same, norms])
    return results


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_step_left_out_changes_nothing_at_any_stage(tp_size: int) -> None:
    """test_fsdp.py leaves a step out with more of the state in host memory, and where ranks share it in pairs."""
    wide = [(0, "fp32"), (2, "bf16"), (3, "bf16")] if tp_size == 1 else []
    layouts = [(tp_size, stage, dtype, "bf16") for stage, dtype in wide]
    layouts += [(tp_size, stage, "bf16", "fp8") for stage in ((1,) if tp_size == 1 else (1, 3))]
    every = run_distributed(left_out, 2, layouts)
    for found in every:
        for layout, (changed, same, norms) in zip(layouts, found, strict=True):
            assert changed == [] and same, layout
            for whole, layers, count in norms:
                assert layers == pytest.approx(whole, rel=1e-4 if layout[2] == "fp32" else 1e-2), layout
                assert count == 4  # They are the embedding, two blocks and the head.

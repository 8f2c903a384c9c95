"""The tables of `sagetrain plan` about speed: the parts of a step, its collectives, and the layouts side by side."""

from __future__ import annotations

from sagetrain.planning.evidence import evidence, unrecorded
from sagetrain.planning.layouts import MORE_TOKENS
from sagetrain.planning.prediction import StepPrediction
from sagetrain.planning.priced import PricedLayout
from sagetrain.planning.result import Plan
from sagetrain.planning.tables import Table, facts, milliseconds, size


def step_table(plan: Plan, layout: PricedLayout) -> Table:
    """Return a table of the parts of a layout's step that take time."""
    prediction, documents, hardware = layout.prediction, layout.cfg.data.document_attention, plan.hardware
    hosts = -(-prediction.world_size // hardware.gpus_per_host)
    title = f"Step time, predicted: {plan.name} on {prediction.world_size} x {hardware.name}"
    title += (f" in {hosts} hosts" if hosts > 1 else "") + ("" if hardware.measured else ", scaled from the H200's")
    title += ", calibrated" if hardware.compute_scale != 1 else ""
    lengths = "the lengths of English text" if plan.span is None else "the lengths in data.train"
    spans = f"packed documents, of {lengths}" if documents else "whole sequences"
    elementwise = "norms, rotary embedding, SwiGLU, residual stream, softmax of the loss"
    parts = (
        ("compute", prediction.matmul, "matmuls of the blocks and of the head"),
        ("attention", prediction.attention, f"{prediction.attention_backend}, forward and backward; {spans}"),
        ("elementwise", prediction.elementwise, elementwise),
        ("TP exposed", prediction.exposed("tensor"), "tensor-parallel communication that nothing hides"),
        ("CP exposed", prediction.exposed("context"), "all-to-alls around attention"),
        ("DP exposed", prediction.exposed("data"), "gradients and weights between data-parallel ranks, the same"),
        ("PP exposed", prediction.exposed("pipeline"), "messages between pipeline stages"),
        ("optimizer", prediction.optimizer, "passes over gradients, the update, new weights"),
        ("orthogonalizing", prediction.orthogonalizing, "Muon's matmuls and passes for the matrices that a rank owns"),
        ("offload", prediction.offload, "copies that nothing hides, and the update on the CPU"),
        ("overhead", prediction.overhead, "fixed costs of micro-steps and steps"),
        ("pipeline", prediction.idle, "stages wait while the pipeline fills and drains"),
        ("launching", prediction.launching, "kernels wait for the host: a larger data.micro_batch_size helps"),
    )
    rows = [
        (name, milliseconds(part), f"{part / prediction.seconds:.0%}", what) for name, part, what in parts if part > 0
    ]
    behind = evidence(layout.cfg, prediction, hardware)
    tokens = f"{prediction.tokens_per_step:,} tokens in {prediction.accumulation:,} micro-steps"
    per_gpu = f"{prediction.tokens_per_second / prediction.world_size:,.0f} per GPU"
    rate = f"{behind.mark}{prediction.tokens_per_second:,.0f} tokens/s, {per_gpu}, {_mfu(layout)}"
    return Table(
        title,
        ("part", "time", "share", "what"),
        [*rows, ("total", milliseconds(prediction.seconds), "", f"{tokens}: {rate}")],
        numbers=("time", "share"),
        caption=behind.explained(hardware.name),
        total=True,
    )


def _mfu(layout: PricedLayout) -> str:
    """Return the MFU in words, and the figures of perf/mfu and perf/mfu_full_attention where those differ."""
    prediction, others = layout.prediction, []
    mixed = prediction.peak_of_precisions != prediction.peak_flops
    if mixed:
        others.append(f"perf/mfu, by the 16-bit peak: {prediction.mfu_16_bit:.3f}")
    if layout.cfg.data.document_attention:
        others.append(f"perf/mfu_full_attention: {prediction.mfu_full_attention:.3f}")
    peak = "the peaks of its precisions" if mixed else "the 16-bit peak"
    above = "; above 1 where products in 8 bits pass the 16-bit peak" if prediction.mfu_full_attention > 1 else ""
    return f"MFU {prediction.mfu:.3f} of {peak}" + (f" ({'; '.join(others)}{above})" if others else "")


def communication_table(prediction: StepPrediction, name: str) -> Table:
    """Return a table of the collectives of a layout's step."""
    title, numbers = f"Communication per step and rank: {name}", ("calls", "payload", "sent", "time", "exposed")
    rows = [
        (c.axis, c.purpose, c.kind, f"{c.count:,}", size(c.payload), size(c.wire_bytes))
        + (milliseconds(c.seconds), milliseconds(c.exposed))
        for c in prediction.collectives
    ]
    if not rows:
        return facts(title, [("none", "one rank")])
    caption = "payload: of one call; sent: in all of them; exposed: the time that nothing hides."
    return Table(title, ("axis", "what", "collective", *numbers), rows, numbers=numbers, caption=caption)


def proposal_table(plan: Plan, proposed: list[PricedLayout]) -> Table:
    """Return a table of the best layouts, with the configured one among them or below."""
    columns = ("TP", "CP", "PP", "SP", "ZeRO", "recompute", "micro batch", "engine", "linear", "tokens/s", "MFU")
    numbers = (*columns, "memory")
    named = [(str(place), item) for place, item in enumerate(proposed, 1)]
    if plan.chosen and plan.chosen.key not in [item.key for item in proposed]:
        named.append(("now", plan.chosen))
    usable, rows, captions = plan.target.usable, [], []
    unmeasured: dict[str, None] = {}
    for place, item in named:
        split, context, pipeline, chunks, sharded, *rest = item.key
        stages = f"{pipeline}x{chunks}" if chunks > 1 else f"{pipeline}"
        behind = evidence(item.cfg, item.prediction, plan.hardware)
        unmeasured |= dict.fromkeys(behind.missing)
        speed = f"{behind.mark}{item.prediction.tokens_per_second:,.0f}", f"{item.prediction.mfu:.3f}"
        memory = size(item.memory) + (" (!)" if item.memory > usable else "")
        how = "yes" if sharded else "no", *map(str, rest), item.cfg.linear.precision
        rows.append((place, f"{split}", f"{context}", stages, *how, *speed, memory))
    if not proposed:
        rows.append(("none", *["-"] * len(numbers)))
    elif proposed[0].cfg.tokens_per_step != plan.asked.tokens_per_step:
        captions.append(
            "No layout divides tokens_per_step over these ranks and fits: these raise it, to at most "
            f"{MORE_TOKENS:g} times the fewest that would do."
        )
    captions += plan.larger
    if any(item.cfg.parallel.pipeline_chunks > 1 for _, item in named):
        captions.append("PP 4x2: 4 stages of 2 chunks each.")
    if any(item.memory > usable for _, item in named):
        captions.append("(!): more than the GPU has.")
    if unmeasured:
        captions.append(f"{unrecorded(plan.hardware.name, tuple(unmeasured))}.")
    title = f"Layouts proposed for {plan.hardware.name}, fastest first"
    return Table(title, ("layout", *numbers), rows, numbers=numbers, caption=" ".join(captions))

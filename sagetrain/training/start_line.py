"""The first lines of a run, which show how its settings were resolved."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sagetrain import __version__
from sagetrain.auto.settled import Settled
from sagetrain.config.errors import many
from sagetrain.config.layout import Layout
from sagetrain.config.schema import NoiseAwareTokens
from sagetrain.config.tokens_per_step import stages
from sagetrain.costs.accounting import num_parameters
from sagetrain.costs.stages import blocks_of_chunks
from sagetrain.engines.step import Engine
from sagetrain.parallel import copies
from sagetrain.training.run import Run


def start_lines(settled: Settled, engine: Engine) -> list[str]:
    """Return the lines that say what runs and where: the run, its attention and its linear layers with the reasons for
    both, and under tensor parallelism that for halves of micro-batches. On a GPU the last line says who launches
    micro-steps."""
    cfg, vocab_size, reasons = settled.cfg, settled.start.vocab_size, settled.reasons
    groups, model, ranks = engine.groups, engine.model, dist.get_world_size()
    size, how = num_parameters(cfg.model, cfg.attention, vocab_size), ""
    if groups.tp_group is not None and groups.tp_size > 1:
        how = " by copies" if groups.tp_group.group_name in copies.connected else ""
        how += " in halves" if model.overlap else ""
    pipeline = ""
    if groups.pp_size > 1:
        chunks = " and ".join(", ".join(map(str, blocks_of_chunks(cfg, vocab_size))).rsplit(", ", 1))
        pipeline = f" x pipeline parallel {groups.pp_size} (blocks in chunks: {chunks})"
    layout, device = Layout.of(cfg, ranks), engine.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}"
    lines = [
        f"sagetrain {__version__}: {size:,} parameters, {many(ranks, 'rank')} on {where} (tensor parallel "
        f"{groups.tp_size}{how}{layout.sharing}{pipeline} x data parallel {groups.dp_size}), {layout.sharding}, "
        f"{cfg.training.dtype}, torch.compile {'on' if settled.start.compiled else 'off'}",
        f"  attention {cfg.attention.backend} ({reasons.attention})",
        f"  linear layers {reasons.linear}",
    ]
    if groups.tp_size > 1 and reasons.overlap:
        lines.append(f"  tensor_parallel_overlap {'on' if model.overlap else 'off'} ({reasons.overlap})")
    if device.type == "cuda":
        by_deepspeed = "launched by the host: parallel.engine deepspeed"
        lines.append(f"  micro-steps {engine.settings.get('micro_steps', by_deepspeed)}")
    return lines


def say_differences(run: Run) -> None:
    """Say where whole steps and the existing data differ from what the settings ask for."""
    cfg, asked, state = run.cfg, run.cfg.training.total_tokens, run.resumed.state
    last = stages(cfg.tokens_per_step, asked, run.layout.micro_step)[-1]
    end = last.from_tokens + last.steps * last.tokens_per_step
    if state.step == 0 and end != asked and not isinstance(cfg.tokens_per_step, NoiseAwareTokens):
        run.met.reporter.keep(f"training.total_tokens {asked:,}: whole steps end at {end:,} tokens")
    wanted = cfg.evaluation.num_sequences
    if run.valid and (held := run.valid.eval_size(wanted)) < wanted:
        less = f"data.valid holds {held:,}; evaluations take all of them"
        run.met.reporter.keep(f"evaluation.num_sequences {wanted:,}: {less}")
    late = {step for step in cfg.training.drop_steps if step <= state.step} - set(state.ledger.dropped)
    if late:
        steps = ", ".join(map(str, sorted(late)))
        run.met.reporter.say(f"training.drop_steps: {steps} came before this checkpoint: trained, and in its weights")

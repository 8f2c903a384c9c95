"""Time `sagetrain generate` beside transformers' generate on the same weights, in one run.

    python results/generation/generate.py runs/quickstart
    python results/generation/generate.py runs/325m --batch-sizes 1 8 32 --prompt-tokens 512 --json generate.json

The run is exported, and transformers loads the export. Both continue the same prompts, of different lengths, with the
most likely tokens. Each prompt gets the same number of tokens, whatever ends a document. The cache of keys and values
is on, and reading the prompts counts. The first pass is in float32: if the tokens differ, and not by a tie, nothing is
timed. The second is in the dtype that the run computes in here (bfloat16 on a GPU). Both take turns; a figure is the
median over rounds.

This script is frozen. It runs with the library as it was at commit 6c48af22.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sagetrain.cli.options import AttentionName
from sagetrain.config.errors import CheckpointError, ConfigError
from sagetrain.inference.generate import Sampling, generate
from sagetrain.inference.load import TrainedRun, load_run
from sagetrain.interop.exporting import export

ROUNDS = 5


def prompts_of(run: TrainedRun, count: int, longest: int) -> list[str]:
    """Return parts of this file as prompts: the first has `longest` tokens, and the others have fewer, down to half."""
    tokens = run.tokenizer.encode(Path(__file__).read_text() * (1 + longest * count // 1000))
    sizes = [longest - longest * index // (2 * count) for index in range(count)]
    return [run.tokenizer.decode(tokens[97 * index : 97 * index + size]) for index, size in enumerate(sizes)]


def ours(run: TrainedRun, prompts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """Return the tokens that follow each prompt, by SageTrain."""
    grown = generate(run, prompts, Sampling(new_tokens, temperature=0), batch_size=len(prompts))
    finished = {done.number: done.tokens for done, _ in grown if done.finish}
    return [finished[number] for number in range(len(prompts))]


@torch.no_grad()
def theirs(model: Any, run: TrainedRun, prompts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """Return the tokens that follow each prompt, by transformers: one batch, padded on the left."""
    encoded = [[*run.text_prefix, *run.tokenizer.encode(prompt)] for prompt in prompts]
    longest = max(map(len, encoded))
    ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in encoded], device=run.device)
    mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in encoded], device=run.device)
    made = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    return made[:, longest:].tolist()


def check(run: TrainedRun, model: Any, prompts: Sequence[str], new_tokens: int) -> None:
    """Exit with a message if the tokens differ, unless two tokens were equally likely. After such a tie nothing is
    compared."""
    pairs = zip(ours(run, prompts, new_tokens), theirs(model, run, prompts, new_tokens), strict=True)
    for number, (own, other) in enumerate(pairs):
        place = next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)
        if place is not None and not _tie(model, run, prompts[number], own[:place], (own[place], other[place])):
            sys.exit(
                f"in float32 prompt {number + 1} of {len(prompts)} goes on otherwise from its token {place + 1}: "
                f"ours {own[place : place + 5]}, transformers' {other[place : place + 5]}; nothing is timed"
            )


@torch.no_grad()
def _tie(model: Any, run: TrainedRun, prompt: str, grown: Sequence[int], candidates: tuple[int, int]) -> bool:
    """Whether the logits of two candidates for the next token differ by at most ten times the rounding of float32."""
    ids = torch.tensor([[*run.text_prefix, *run.tokenizer.encode(prompt), *grown]], device=run.device)
    logits = model(ids).logits[0, -1]
    return abs(logits[candidates[0]] - logits[candidates[1]]).item() < 1e-4 * logits.std().item()


@torch.no_grad()
def convert(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights to a dtype. Buffers stay as they are, because frequencies that were once rounded would not
    come back."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def seconds(actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each action over rounds in which they take turns. A first round does not count."""
    spent: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(ROUNDS + 1):
        for name, action in actions.items():
            begin = time.perf_counter()
            # The action ends with tokens on the host, so there is nothing to wait for.
            action()
            if number:
                spent[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in spent.items()}


def table(rows: dict[int, dict[str, float]]) -> str:
    """Return one line per batch size: tokens per second, and ours divided by transformers'."""
    lines = [f"{'prompts':>8}{'ours, tokens/s':>18}{'transformers':>16}{'share':>9}"]
    for size, row in rows.items():
        share = row["ours"] / row["transformers"]
        lines.append(f"{size:8}{row['ours']:18,.1f}{row['transformers']:16,.1f}{share:9.1%}")
    return "\n".join(lines)


def load(run_dir: Path, attention: str) -> tuple[TrainedRun, Any]:
    """Return the run as SageTrain loads it and, with the same weights in float32, as transformers loads it. Neither
    ends at an end-of-document token."""
    from transformers import AutoModelForCausalLM

    run = load_run(run_dir, print, attention=attention)
    with tempfile.TemporaryDirectory() as folder:
        export(run_dir, Path(folder) / "exported", dtype="float32", report=print)
        # On a GPU a run's weights may be in bf16, and then those of transformers are as well.
        rounded = run.model.head.weight.dtype
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "exported", dtype=rounded).float()
    model.generation_config.eos_token_id = None
    if run.tokenizer is None:
        sys.exit(f"{run_dir} has no tokenizer, so there is no text to continue")
    run.tokenizer.eos_id, run.end_tokens = -1, ()
    return run, model.to(run.device).eval()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8], help="prompts (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the longest (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="for each prompt (default: %(default)s)")
    kinds = [kind.name for kind in AttentionName]
    parser.add_argument("--attention", default="sdpa", choices=kinds, help="ours (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        run, model = load(args.run, args.attention)
    except (ConfigError, CheckpointError) as error:
        sys.exit(str(error))
    dtype, context = run.model.head.weight.dtype, run.cfg.data.seq_length
    where = torch.cuda.get_device_name() if run.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows: dict[int, dict[str, float]] = {}
    for size in args.batch_sizes:
        prompts = prompts_of(run, size, args.prompt_tokens)
        longest = len(run.text_prefix) + max(len(run.tokenizer.encode(prompt)) for prompt in prompts)
        if longest + args.new_tokens > context:
            sys.exit(
                f"{longest} and {args.new_tokens} tokens are more than the context of {context} (data.seq_length): "
                "choose fewer --prompt-tokens or --new-tokens"
            )
        convert(run.model, torch.float32), convert(model, torch.float32)
        check(run, model, prompts, args.new_tokens)
        convert(run.model, dtype), convert(model, dtype)
        actions = {
            "ours": lambda prompts=prompts: ours(run, prompts, args.new_tokens),
            "transformers": lambda prompts=prompts: theirs(model, run, prompts, args.new_tokens),
        }
        spent = seconds(actions)
        rows[size] = {name: size * args.new_tokens / each for name, each in spent.items()}
    print(f"{where}, {dtype}, prompts of up to {args.prompt_tokens} tokens, {args.new_tokens} new ones\n{table(rows)}")
    if args.json:
        about = {"where": where, "torch": torch.__version__, "dtype": str(dtype), "tokens_per_second": rows}
        args.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()

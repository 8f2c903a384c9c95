"""Generation on a real GPU: batches, the CPU's tokens, transformers' tokens: `make test-gpu`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import saved_runs
from on_gpu import needs_gpu
from prepare_inputs import TEXTS
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.inference.cache import CachedModel
from sagetrain.inference.generate import Sampling, generate
from sagetrain.inference.load import TrainedRun, load_run
from sagetrain.inference.ranks import Ranks
from sagetrain.interop.exporting import export
from sagetrain.parallel.topology import ParallelGroups

pytestmark = needs_gpu()

PROMPTS = ["a", "the quick brown fox", "", "b c d e f", "the quick"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model file of 350 tokens, as the one of the conftest, which `make test-gpu` leaves out."""
    path = tmp_path_factory.mktemp("tokenizer") / "my.model"
    path.write_bytes(train_tokenizer(TEXTS, 350))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of two runs with random weights and a context of 16 tokens, `fp32` and `bf16`."""
    root = tmp_path_factory.mktemp("generate")
    runs = [(str(root / dtype), saved_runs.config(root / dtype, dtype=dtype), 1) for dtype in ("fp32", "bf16")]
    saved_runs.save_runs(runs, model)
    return root


def tokens_of(run: TrainedRun, prompts: list[str], how: Sampling, batch_size: int) -> list[list[int]]:
    found = {done.number: done.tokens for done, _ in generate(run, prompts, how, batch_size)}
    return [found[number] for number in range(len(prompts))]


@pytest.mark.parametrize("how", [Sampling(20, temperature=0), Sampling(20, temperature=1.0, top_p=0.9, seed=3)])
def test_tokens_are_those_of_the_cpu_whatever_the_batch(runs: Path, how: Sampling) -> None:
    cpu = Ranks(ParallelGroups.single(), torch.device("cpu"))
    expected = tokens_of(load_run(runs / "fp32", print, attention="sdpa", ranks=cpu), PROMPTS, how, 1)
    run = load_run(runs / "fp32", print, attention="sdpa")
    assert run.device.type == "cuda"
    for batch_size in (1, 3):
        assert tokens_of(run, PROMPTS, how, batch_size) == expected


@torch.no_grad()
def test_a_recorded_step_is_the_step(runs: Path) -> None:
    """The second step and later ones are replayed from a recording, and give the same bits. Rows may end on the way."""
    model = load_run(runs / "bf16", print, attention="sdpa").model
    recorded, plain = CachedModel(model, 2, 16), CachedModel(model, 2, 16)
    assert recorded.records
    plain.records = False
    for cached in (recorded, plain):
        for row in (0, 1):
            cached.read(row, [5, 6, 7, 8][row:])
    for token in range(9, 19):
        if token == 14:
            recorded.drop(0)
            plain.drop(0)
        new = [token] * len(plain.lengths)
        assert torch.equal(recorded(new), plain(new))


def test_transformers_goes_on_alike(runs: Path, tmp_path: Path) -> None:
    run = load_run(runs / "fp32", print, attention="sdpa")
    run.tokenizer.eos_id, run.texts = -1, replace(run.texts, end_tokens=[])
    export(runs / "fp32", tmp_path / "exported", dtype="float32", report=print)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    model.to(run.device).eval()
    model.generation_config.eos_token_id = None
    for prompt in ("a", "the quick", "b c d e f"):
        ids = torch.tensor([[*run.texts.prefix, *run.tokenizer.encode(prompt)]], device=run.device)
        theirs = model.generate(ids, do_sample=False, max_new_tokens=7, pad_token_id=0)[0, ids.shape[1] :].tolist()
        assert tokens_of(run, [prompt], Sampling(7, temperature=0), 1) == [theirs]

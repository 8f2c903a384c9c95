"""FP4 attention in `sagetrain eval` and `generate` computes every token, and it is refused in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import saved_runs
from runs import write_config
from sagekernels import fp4_attention
from sagekernels.testing import Shape, random_inputs
from sagetrain.config import ConfigError, load_config
from sagetrain.inference.cache import CachedModel
from sagetrain.inference.load import load_run
from sagetrain.model.backends import Fp4, token_layout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a run with random weights and a context of 16 tokens."""
    folder = tmp_path_factory.mktemp("fp4") / "run"
    saved_runs.save_runs([(str(folder), saved_runs.config(folder), 1)], model)
    return folder


def test_documents_are_kept_apart() -> None:
    shape = Shape(1, 96, 96, 4, 2, 16, documents=(20, 28, 48))
    q, k, v, _ = random_inputs(shape, k_mean=1.0)
    two = [x.view(2, 48, *x.shape[2:]) for x in (q, k, v)]
    layout = token_layout({"bounds"}, 2, 96, None, None, shape.cu_seqlens(), None)
    expected = fp4_attention(q, k, v, bounds=shape.bounds())
    assert torch.equal(Fp4()(*two, layout).view_as(expected), expected)


@torch.no_grad()
def test_the_model_computes_with_fp4_attention(run: Path) -> None:
    exact, fp4 = (load_run(run, print, attention=name) for name in (None, "fp4"))
    tokens = torch.randint(0, 350, (2, 16), generator=torch.Generator().manual_seed(0))
    expected, found = exact.model(tokens), fp4.model(tokens)
    assert {block.attention.function for block in fp4.model.blocks} == {Fp4()}
    error = (found - expected).norm() / expected.norm()
    assert 0.01 < error < 0.4, "the rounding of FP4, and no more"


@torch.no_grad()
def test_later_tokens_use_fp4_attention_too(run: Path) -> None:
    """A single query is not smoothed, because it would be its own mean."""
    fp4 = load_run(run, print, attention="fp4")
    cached, calls = CachedModel(fp4.model, 2, 16), []

    class Noted(Fp4):
        def __call__(self, q, k, v, layout):
            o = super().__call__(q, k, v, layout)
            calls.append((q, k, v, o))
            return o

    for function in cached._functions:
        function.whole = Noted()
    cached.read(0, [5, 6, 7])
    cached.read(1, [8] * 9)
    calls.clear()
    cached([1, 2])
    assert [(q.shape[1], k.shape[1]) for q, k, _, _ in calls] == [(1, 4), (1, 10)] * 2
    for q, k, v, o in calls:
        assert torch.equal(o, fp4_attention(q, k, v, smooth_q=False))
        assert not torch.equal(o, fp4_attention(q, k, v))


def test_gradients_and_training_are_refused(run: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"fp4_attention is forward only .* train with sage_attention"):
        load_run(run, print, attention="fp4").model(torch.zeros(1, 8, dtype=torch.int64))
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"attention\.backend = .fp4.: must be one of .*; FP4 attention is for inference"
    ):
        load_config(config, ["attention.backend=fp4"])


def test_what_cannot_run_here_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"--attention flash: attention\.backend flash needs a GPU"):
        load_run(run, print, attention="flash")

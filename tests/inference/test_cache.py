"""Logits with cached keys and values are those of the whole context."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import tiny
from sagetrain.config.schema import AttentionConfig, ModelConfig, RopeScaling
from sagetrain.inference import cache
from sagetrain.inference.cache import CachedModel
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

SHAPE = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}
YARN = RopeScaling(type="yarn", factor=4.0, original_seq_length=8)


def model(qk_norm: str = "before_rope", **shape: object) -> Transformer:
    config = ModelConfig.model_validate({**SHAPE, "init_std": 0.1, **shape})
    attention = AttentionConfig(backend="sdpa", qk_norm=qk_norm)
    return tiny.transformer(config, attention, vocab_size=64, groups=ParallelGroups.single(), seed=3).eval()


def texts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 64, (length,), generator=draw).tolist() for length in lengths]


def check(logits: torch.Tensor, whole: Transformer, text: list[int]) -> None:
    torch.testing.assert_close(logits, whole(torch.tensor([text]))[0, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("qk_norm", ["none", "before_rope", "after_rope"])
@pytest.mark.parametrize("scaling", [None, YARN])
@torch.no_grad()
def test_logits_are_those_of_the_whole_context(heads: int, qk_norm: str, scaling: RopeScaling | None) -> None:
    """Two rows have the same length. A third row of another length joins them later."""
    whole = model(qk_norm, num_key_value_heads=heads, rope_scaling=scaling)
    rows, cached = texts(20, 20, 20), CachedModel(whole, 3, 20)
    starts = [12, 12, 3]
    for step in range(6):
        for row in (0, 1) if step == 0 else (2,) if step == 3 else ():
            check(cached.read(row, rows[row][: starts[row]]), whole, rows[row][: starts[row]])
        ends = [start + 1 for start in cached.lengths]
        logits = cached([text[end - 1] for text, end in zip(rows, ends, strict=False)])
        assert len(logits) == (2 if step < 3 else 3)
        for got, text, end in zip(logits, rows, ends, strict=False):
            check(got, whole, text[:end])


@torch.no_grad()
def test_attention_may_lay_out_what_it_returns_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the heads are the innermost dim but one, so a head's queries are not next to each other."""
    whole, (text,) = model(num_key_value_heads=2), texts(9)

    class OnGpu:
        @staticmethod
        def scaled_dot_product_attention(*args: torch.Tensor, **how: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*args, **how).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(cache, "F", OnGpu)
    cached = CachedModel(whole, 2, 20)
    for row in (0, 1):
        cached.read(row, text[:8])
    for logits in cached([text[8]] * 2):
        check(logits, whole, text)


@torch.no_grad()
def test_a_text_costs_the_logits_of_its_last_token_alone() -> None:
    whole, made = model(), []
    whole.head.register_forward_hook(lambda module, inputs, logits: made.append(logits.shape))
    (text,) = texts(12)
    cached = CachedModel(whole, 2, 20)
    read = [cached.read(row, text[: 12 - row]) for row in (0, 1)]
    assert made == [(1, 64)] * 2
    for row, logits in enumerate(read):
        check(logits, whole, text[: 12 - row])


class Traced:
    """A stand-in for Recorded without a GPU: operators that were recorded once and know nothing of the host's
    variables."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self.calls, self._graph = 0, make_fx(function)(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self._graph(x)


@torch.no_grad()
def test_a_recorded_step_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step of a shape and later ones are replayed from a recording. Rows grow, pass the end of a stretch of
    places, and end."""
    made: list[Traced] = []
    monkeypatch.setattr(cache, "Recorded", lambda *how: made.append(Traced(*how)) or made[-1])
    monkeypatch.setattr(cache, "_STRETCH", 8)
    whole = model(num_key_value_heads=2)
    rows, cached = texts(20, 20), CachedModel(whole, 2, 20)
    assert not cached.records
    cached.records = True
    for row, start in enumerate((5, 3)):
        cached.read(row, rows[row][:start])
    for _ in range(7):
        ends = [start + 1 for start in cached.lengths]
        logits = cached([text[end - 1] for text, end in zip(rows, ends, strict=True)])
        for got, text, end in zip(logits, rows, ends, strict=True):
            check(got, whole, text[:end])
    cached.drop(0)
    for end in range(11, 15):
        check(cached([rows[1][end - 1]])[0], whole, rows[1][:end])
    # The recordings are those with 8 places, with 16, and for one row.
    assert [each.calls for each in made] == [2, 3, 3]


@torch.no_grad()
def test_a_recording_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: object, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.ones(1, 64)

    monkeypatch.setattr(cache, "Recorded", wrong)
    whole, (text,) = model(), texts(12)
    cached = CachedModel(whole, 1, 12)
    cached.records = True
    cached.read(0, text[:4])
    for end in range(5, 13):
        check(cached([text[end - 1]])[0], whole, text[:end])
    assert not cached.records


@torch.no_grad()
def test_rows_are_read_anew_and_dropped() -> None:
    whole = model()
    first, second, third = texts(9, 5, 7)
    cached = CachedModel(whole, 3, 12)
    for row, text in enumerate((first, second, third)):
        cached.read(row, text)
    cached.read(1, first[:2])
    cached.drop(0)
    assert cached.lengths == [7, 2]
    logits = cached([1, 2])
    check(logits[0], whole, [*third, 1])
    check(logits[1], whole, [*first[:2], 2])


@torch.no_grad()
def test_the_model_itself_stays_as_it_is() -> None:
    whole = model()
    (text,) = texts(12)
    before, cached = whole(torch.tensor([text])), CachedModel(whole, 1, 12)
    read = cached.read(0, text)
    assert torch.equal(whole(torch.tensor([text])), before)
    with pytest.raises(ValueError, match="13 tokens are more than the context of 12"):
        cached([1])
    with pytest.raises(ValueError, match="13 tokens are more than the context of 12"):
        cached.read(0, [*text, 1])
    assert torch.equal(cached.read(0, text), read)

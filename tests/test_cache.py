"""Kept keys and values: logits are those of the whole context."""

from __future__ import annotations

import pytest
import torch

from sagetrain.config.schema import AttentionConfig, ModelConfig, RopeScaling
from sagetrain.inference.cache import CachedModel
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

SHAPE = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}
YARN = RopeScaling(type="yarn", factor=4.0, original_seq_length=8)


def model(qk_norm: str = "before_rope", **shape: object) -> Transformer:
    config = ModelConfig.model_validate({**SHAPE, "init_std": 0.1, **shape})
    attention = AttentionConfig(backend="sdpa", qk_norm=qk_norm)
    return Transformer(config, attention, vocab_size=64, groups=ParallelGroups.single(), seed=3).eval()


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("qk_norm", ["none", "before_rope", "after_rope"])
@pytest.mark.parametrize("scaling", [None, YARN])
@torch.no_grad()
def test_logits_are_those_of_the_whole_context(heads: int, qk_norm: str, scaling: RopeScaling | None) -> None:
    """Of a prompt, then several tokens together, then one at a time, for two sequences."""
    whole = model(qk_norm, num_key_value_heads=heads, rope_scaling=scaling)
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    cached = CachedModel(whole, 20)
    pieces = [cached(piece) for piece in tokens.split([7, 5, *[1] * 8], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole(tokens), rtol=0, atol=1e-5)
    assert cached.room == 0


@torch.no_grad()
def test_the_model_itself_stays_as_it_is() -> None:
    whole = model()
    tokens = torch.arange(12).view(1, -1)
    before, cached = whole(tokens), CachedModel(whole, 12)
    cached(tokens)
    assert torch.equal(whole(tokens), before)
    with pytest.raises(ValueError, match="13 tokens are more than the context of 12"):
        cached(tokens[:, :1])
    cached.forget()
    assert torch.equal(cached(tokens), before)

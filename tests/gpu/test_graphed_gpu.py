"""Other trainers' models have the bits of the host when CUDA graphs replay them."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from on_gpu import needs_gpu
from sagekernels import convert, graphed
from sagekernels.huggingface import register

pytestmark = needs_gpu()
CASES = {
    # The columns are: attention, whether layers are in INT8, whether they are compiled, gradient checkpointing.
    "torch": ("plain", False, False, False),
    "sage, compiled": ("sage", False, True, False),
    "sage, INT8, recomputed": ("sage", True, False, True),
    "sage, INT8, compiled": ("sage", True, True, False),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Give the following tests this process as they expect it."""
    stream = torch.cuda.current_stream()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_stream(stream)
    torch._dynamo.reset()


def _plain(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **how: Any) -> tuple[Tensor, None]:
    """Attend by torch alone. transformers hands its own implementations other masks inside of a recording, or masks
    that copy from the host there."""
    with sdpa_kernel(SDPBackend.MATH):
        o = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=how["scaling"], enable_gqa=True)
    return o.transpose(1, 2), None


def _steps(model: Any, short: int) -> tuple[list[float], Tensor]:
    """Take four steps of three micro-steps under autocast, the last of which has the length `short`."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), list[float]()
    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        for micro in range(3):
            ids = torch.randint(512, (1, short if (step, micro) == (3, 2) else 384), generator=draw).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            (loss / 3).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, torch.cat([each.detach().flatten().cpu() for each in model.parameters()])


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.long] * (low_bit and compiled))
    for name, (_, low_bit, compiled, _) in CASES.items()
])  # fmt: skip
def test_models_of_transformers_have_the_bits_of_the_host(name: str) -> None:
    register()
    AttentionInterface.register("plain", _plain)
    AttentionMaskInterface.register("plain", lambda *_, **__: None)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    attention, low_bit, compiled, again = CASES[name]
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).cuda()
    model.set_attn_implementation(attention)
    if low_bit:
        convert(model)
    if again:
        model.gradient_checkpointing_enable({"preserve_rng_state": False, "use_reentrant": False})
    both = []
    for each in (copy.deepcopy(model), graphed(model)):
        if compiled:  # Both models have one length, and the graphs of one layer.
            for layer in each.model.layers:
                layer.compile(dynamic=False)
        both.append(_steps(each, short=384 if compiled else 256))
    (losses, weights), (others, again) = both
    assert not each.forward.refusal and each.forward.turn == 9 + compiled
    assert losses == others and torch.equal(weights, again)

"""The parts of sagekernels that other trainers use, on a GPU: Linear8bit computes as on the CPU, compiled and under
autocast, and attention in transformers takes padding and packed documents."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from on_gpu import needs_gpu
from sagekernels import convert, flash_attn_func, scaled_dot_product_attention
from sagekernels.huggingface import register
from sagekernels.lowbit import LOW_BIT

pytestmark = needs_gpu((8, 9))  # FP8 matmuls


def apart(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def passes(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the output of a layer, and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), grad.to(y.dtype))


@pytest.mark.parametrize("precision", LOW_BIT)
@pytest.mark.parametrize("masters", [torch.bfloat16, torch.float32], ids=str)
def test_a_converted_layer_is_that_of_the_cpu(precision: str, masters: torch.dtype) -> None:
    """The results agree within the rounding of bfloat16, compiled and not, for a number of tokens that fills no tile.

    torch.compile fuses the cast to bfloat16 with the rounding to 8 bits and leaves the first one out, which moves
    three codes in a hundred. So the compiled layer gets numbers that bfloat16 holds.
    """
    torch._dynamo.reset()  # The four kinds of one layer are more than torch.compile keeps.
    torch.manual_seed(0)
    layer = convert(nn.Linear(512, 336, dtype=masters), lambda *_: True, precision=precision)
    x, grad = torch.randn(3, 101, 512), torch.randn(3, 101, 336)
    names = "y", "dx", *(name for name, _ in layer.named_parameters())
    for how in ("eager", "compiled"):
        if how == "compiled":
            x = x.bfloat16().float()
            for parameter in layer.parameters():
                parameter.data = parameter.bfloat16().to(masters)
        with torch.autocast("cpu", torch.bfloat16):
            expected = passes(layer, x, grad)
        module = copy.deepcopy(layer).cuda()
        if how == "compiled":
            module = torch.compile(module, fullgraph=True)
        with torch.autocast("cuda", torch.bfloat16):
            found = passes(module, x.cuda(), grad.cuda())
        far = {name: apart(a.cpu(), b) for name, a, b in zip(names, found, expected, strict=True)}
        assert max(far.values()) < 0.01, (how, far)


def test_attention_has_the_signatures_of_others() -> None:
    q, k, v = (torch.randn(2, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    by_rows = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    assert apart(found, expected) < 0.02 and torch.equal(by_rows, found.transpose(1, 2))


@pytest.mark.parametrize("name", ["whole", "padded left", "packed"])
def test_transformers_with_sage_is_near_sdpa(name: str) -> None:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    ids = torch.randint(1, 512, (3, 700), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :300] = 0
    positions = torch.arange(700, device="cuda").expand(3, -1) % 233
    given: dict[str, Any] = {"padded left": {"attention_mask": mask}, "packed": {"position_ids": positions}}.get(
        name, {}
    )
    found = {}
    for how in ("sage", "sdpa"):
        model.set_attn_implementation(how)
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False, **given).logits[mask.bool() if name == "padded left" else ...]
        logits.float().logsumexp(-1).mean().backward()
        found[how] = logits.detach(), torch.cat([each.grad.flatten().float() for each in model.parameters()])
    assert apart(found["sage"][0], found["sdpa"][0]) < 0.03 and apart(found["sage"][1], found["sdpa"][1]) < 0.06

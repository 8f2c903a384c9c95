"""Record the operations that torch.compile puts into a backward pass, before it generates code."""

from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V


def backward_calls(function: Callable[[Tensor], Tensor]) -> list[str]:
    """Return the names of the operations in the backward pass of a function of bf16 [32, 64]."""
    calls: list[str] = []

    def inspect(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(graph, is_inference=False)
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=inspect,
        decompositions=select_decomp_table(),
    )
    call = torch.compile(function, fullgraph=True, backend=backend)
    call(torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    with torch.no_grad():
        call(torch.randn(32, 64, dtype=torch.bfloat16))
    return calls

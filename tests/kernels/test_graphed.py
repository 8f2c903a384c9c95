"""A graphed model trains as before, bit for bit. The recordings are those of fake_graph.py, on a CPU."""

import copy
import itertools
import warnings
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fake_graph import Counted, FakeGraph
from sagekernels import convert, document_bounds, graphed
from sagekernels.graphed import _graph
from sagekernels.graphs import Pool
from sagekernels.huggingface import bounds_of


def copied(x: Tensor) -> Tensor:
    """Normalize x, but not inside of a recording."""
    if is_in_torch_dispatch_mode():
        raise RuntimeError("no copy")
    return F.layer_norm(x, x.shape[-1:])


RAISED = copied.__code__.co_firstlineno + 3
"""The line of this file that `copied` raises in."""


class Model(nn.Module):
    """It returns its loss and its logits. One of its layers is used twice, one is never used, and one is in fp32 also
    under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.unused = nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Linear(32, 32)])

    def forward(self, tokens: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Any:
        x = self.embedding(tokens)
        for _ in range(2):
            x = x + self.blocks[0](self.norm(x)) * scale
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(x.float(), self.embedding.weight)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), "logits": logits}


def pair(model: nn.Module, kept: int = 4) -> tuple[nn.Module, nn.Module, Counted]:
    """Return a model, and a copy of it that is graphed."""
    counted, twin = Counted(), copy.deepcopy(model)
    _graph(twin, counted, kept)
    return model, twin, counted


def inputs(draw: int, rows: int = 2) -> dict[str, Tensor]:
    tokens = torch.randint(64, (rows, 9), generator=torch.Generator().manual_seed(draw))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def trained(model: nn.Module, none: bool, autocast: bool, steps: int = 5) -> tuple[list[float], list[Tensor]]:
    """Take steps of three micro-steps; return losses and weights. One micro-step has another shape."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for step in range(steps):
        for micro in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(**inputs(10 * step + micro, rows=3 if (step, micro) == (3, 1) else 2))
            (out["loss"] / 3).backward()
            losses.append(out["loss"].item() + out["logits"].sum().item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        model.eval()
        with torch.no_grad():
            losses.append(model(**inputs(0))["loss"].item())
        model.train()
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "none", "autocast"), [("plain", True, False), ("plain", False, True), ("8 bits", True, True)]
)
def test_it_trains_as_before(kind: str, none: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    model = convert(Model()) if kind == "8 bits" else Model()
    plain, twin, counted = pair(model)
    (losses, weights), (others, again) = (trained(each, none, autocast) for each in (plain, twin))
    assert losses == others and all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    # Two calls come first, and one is of another shape. Each call replays a forward and a backward pass.
    assert (counted.recorded, counted.replayed) == (2, 2 * (15 - 2 - 1))
    assert twin.unused.weight.grad is None


def test_shapes_are_recorded_apart_and_the_oldest_goes() -> None:
    _, twin, counted = pair(Model(), kept=2)
    for rows, times in ((1, 3), (2, 3), (1, 1), (3, 3), (1, 1), (2, 1)):
        for draw in range(times):
            twin(**inputs(draw, rows))["loss"].backward()
    assert (counted.recorded, counted.replayed) == (2 * 3, 2 * (1 + 1 + 1 + 1 + 1))
    for scale in (1.0, 0.5):  # A number is a part of a recording.
        twin(**inputs(0, 1), scale=scale)["loss"].backward()
    assert counted.replayed == 10


def test_a_hook_of_transformers_that_launches_nothing_may_stay() -> None:
    def make_inputs_require_grads(module, inputs, output) -> None:
        output.requires_grad_(True)

    plain, twin, counted = pair(Model())
    for each in (plain, twin):
        each.blocks[0].register_forward_hook(make_inputs_require_grads)
    for draw in range(4):
        for each in (plain, twin):
            each(**inputs(draw))["loss"].backward()
    assert counted.replayed == 4
    both = zip(plain.parameters(), twin.parameters(), strict=True)
    assert all(a.grad is None or torch.equal(a.grad, b.grad) for a, b in both)


def test_a_second_call_before_backward_is_an_error() -> None:
    _, twin, _ = pair(Model())
    for draw in range(3):
        twin(**inputs(draw))["loss"].backward()
    first, second = twin(**inputs(3))["loss"], twin(**inputs(4))["loss"]
    second.backward()
    for loss in (first, second):
        with pytest.raises(RuntimeError, match="called again before this backward pass"):
            loss.backward()


@pytest.mark.parametrize(("how", "words"), [
    ("reads", "HostRead"),
    ("copies", f'RuntimeError: no copy (test_graphed.py:{RAISED}: raise RuntimeError("no copy"))'),
    ("module", "blocks.0 has forward hooks, which would run in no replay"),
    ("gradient", "norm.weight has hooks of its gradient, which would run in no replay"),
    ("no loss", "the model must return one loss, a scalar, and returned 0"),
])  # fmt: skip
def test_what_cannot_be_recorded_goes_on_by_the_host(how: str, words: str) -> None:
    model = Model()
    if how == "reads":
        model.norm.forward = lambda x: x if x.sum().item() > 1e9 else F.layer_norm(x, x.shape[-1:])
    if how == "copies":
        model.norm.forward = copied
    plain, twin, counted = pair(model)
    for each in (plain, twin):
        if how == "module":
            each.blocks[0].register_forward_hook(lambda *_: None)
        if how == "gradient":
            each.norm.weight.register_hook(lambda grad: 2 * grad)
    given = {"tokens": inputs(0)["tokens"]} if how == "no loss" else inputs(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            for each in (plain, twin):
                out = each(**given)
                (out.sum() if how == "no loss" else out["loss"]).backward()
    (warning,) = [str(each.message) for each in said if "graphed" in str(each.message)]
    assert words in warning and counted.replayed == 0
    for a, b in zip(plain.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_no_number_comes_from_the_host() -> None:
    """A capture refuses copies from the host, as those of `x[-1] = 5` are on a GPU."""
    starts = torch.rand(2, 9) > 0.5
    for call in (lambda: bounds_of(starts, 4), lambda: document_bounds(None, 9, 4)):
        assert FakeGraph.of(call).constants == []


def test_calls_before_a_recording_take_its_branches() -> None:
    """transformers makes other masks inside of a recording, for which a compiled layer is another graph."""
    model, asked, capturing = Model(), [], torch.cuda.is_current_stream_capturing
    model.norm.forward = lambda x: (asked.append(torch.cuda.is_current_stream_capturing()), F.layer_norm(x, (32,)))[1]
    _graph(model, Counted(), 4)
    for draw in range(2):
        model(**inputs(draw))["loss"].backward()
    assert asked == [True] * 4 and torch.cuda.is_current_stream_capturing is capturing


def test_models_that_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="must be on one GPU, and they are on cpu"):
        graphed(Model())
    _, twin, _ = pair(Model())
    with pytest.raises(ValueError, match="graphed already"):
        _graph(twin, Counted(), 4)
    with pytest.raises(ValueError, match="DataParallel reduces gradients by hooks"):
        _graph(nn.DataParallel(Model()), Counted(), 4)


def test_a_pool_records_again_when_its_graphs_are_gone(monkeypatch):
    """The allocator of pinned memory (torch 2.11) ends a pool with its last graph, and cannot begin it again."""
    users: Counter[int] = Counter()

    class Graph:
        def capture_begin(self, pool: int, capture_error_mode: str) -> None:
            assert pool not in users or users[pool] > 0, "use_count > 0 INTERNAL ASSERT FAILED"
            users[pool] += 1
            weakref.finalize(self, users.subtract, [pool])

        def capture_end(self) -> None:
            pass

        reset = capture_end

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    pool = Pool()
    first, second = pool.record(int), pool.record(int)
    del first, second
    again = pool.record(int)
    assert [users[number] for number in range(3)] == [0, 1, 0]
    pool.forget()
    pool.record(int)
    assert again and users[1] == 1

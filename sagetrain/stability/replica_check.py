"""Find silent corruption: a micro-batch is computed a second time by another replica, and hashes of the two
computations are compared before the update.

Every replica hashes its last micro-batch as the step computes it: the output of each block, the loss, and the gradient
of each tensor. Then it computes the last micro-batch of its neighbour with the same weights, and hashes that. The host
launches both, while a GPU still replays the micro-batches before as CUDA graphs. One number of each computation travels
with the step's reduction, so nothing else is sent while they agree. A single replica computes its own micro-batch
again.

A step whose hashes differ is refused. The weights are renewed from the masters, and the step is taken once more. The
neighbour is another one then if there are three replicas. `ReplicaTry` says what differed and who was wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor

from sagetrain.config.errors import some
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.digest import digest, mixed, word_sum
from sagetrain.stability.controller import Event

KIND = "corruption"
"""The kind of the events."""
METRIC = "replay"
"""The name of the vector in the step's reduction."""
_SHORT = 1 << 48  # fp64 has whole numbers up to 2^53

Hashes = dict[str, Tensor]


@contextlib.contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Run kernels that give equal bits each time. Those of a CPU do anyway."""
    if device.type != "cuda":
        yield
        return
    of_torch: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), of_torch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    of_torch.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        of_torch.fill_uninitialized_memory = before[1]


@dataclass(frozen=True)
class ReplicaTry:
    """The findings of all replicas in one try of a step. An owner trains on a micro-batch, and a checker is the replica
    that computed it again."""

    pairs: list[tuple[int, int]]
    """The owner and the checker of each micro-batch whose bits differ."""
    own: list[float]
    """For each replica, the hash of the micro-batch that it trains on."""
    weights: Tensor | None = None
    """int64 [replicas, tensors]: the hashes of the weights, if any pair differs or has differed before."""
    first: str = ""
    """The first result of the first pair that differs: a block's output, the loss or a tensor's gradient."""

    def suspects(self, again: ReplicaTry) -> list[int]:
        """Return the replicas that may have been wrong in this try, in view of the next one."""
        if not again.pairs:
            assert self.weights is not None and again.weights is not None, "a pair has differed"
            # The weights were renewed between the tries.
            if renewed := (self.weights != again.weights).any(1).nonzero().flatten().tolist():
                return renewed
        both = set.intersection(*(set(pair) for pair in (*self.pairs, *again.pairs)))
        owner, checker = self.pairs[0]
        if len(both) > 1 and not again.pairs:
            return [owner if self.own[owner] != again.own[owner] else checker]
        return sorted(both)


class ReplicaCheck:
    """The computation of micro-batches by two replicas, and its comparison.

    Args:
        leaves: the tensors that receive gradients, by name. All replicas have the same values.
        places: the host and the device of each replica, in words.
    """

    def __init__(self, model: Transformer, leaves: Mapping[str, Tensor], places: Sequence[str], rank: int) -> None:
        self._model, self._places, self._rank = model, places, rank
        self.leaves = leaves
        """The tensors that receive gradients, by name."""
        self._device = next(iter(leaves.values())).device
        self._results = [f"output of block {block}" for block in model.numbers] + ["loss"]
        self._results += [f"gradient of {name}" for name in reversed(list(leaves))]
        """The results of a computation that are hashed, in the order in which passes compute it."""
        self._own: Hashes = {}
        self._again: Hashes = {}
        self._before: ReplicaTry | None = None
        self._last: Callable[[int], Any] | None = None

    def begin(self, last: Callable[[int], Any], before: ReplicaTry | None) -> ReplicaCheck:
        """Begin a try of a step. `last` returns the last micro-batch of a replica in it, and `before` was a try that
        was refused."""
        self._last, self._before, self._own, self._again = last, before, {}, {}
        return self

    def _owner(self, checker: int) -> int:
        """Return the replica whose micro-batch a replica computes again."""
        number = len(self._places)
        return (checker + min(number - 1, 2 if self._before else 1)) % number

    def others_batch(self) -> Any:
        """Return the micro-batch of another replica that this one computes."""
        assert self._last is not None, "a step has begun"
        return self._last(self._owner(self._rank))

    # -- hashes --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hashing(self, again: bool = False) -> Iterator[Hashes]:
        """Hash the outputs of blocks and the gradients of a micro-batch's passes inside. The bits of these hashes are
        not mixed yet. The caller adds that of the loss.

        Args:
            again: the micro-batch is another replica's. Its gradients are freed as soon as they are hashed.
        """
        found, watch = Hashes(), self._model.watch_blocks

        def output(block: int, stream: Tensor) -> None:
            found[f"output of block {block}"] = word_sum(stream)
            if watch:
                watch(block, stream)

        def gradient(name: str) -> Callable[[Tensor], Tensor | None]:
            def hook(values: Tensor) -> Tensor | None:
                found[f"gradient of {name}"] = word_sum(values)
                return values.new_zeros(()).expand_as(values) if again else None

            return hook

        hooks = [leaf.register_hook(gradient(name)) for name, leaf in self.leaves.items()]
        self._model.watch_blocks = output
        try:
            with _deterministic(self._device):
                yield found
        finally:
            self._model.watch_blocks = watch
            for each in hooks:
                each.remove()
        if again:
            self._again = found
        else:
            self._own = found

    def _hashes(self) -> list[Tensor]:
        """Return the hashes of this replica's own computation, of that for another replica, and of the weights."""
        computed = [mixed(torch.stack([found[name] for name in self._results])) for found in (self._own, self._again)]
        return [*computed, self._weights()]

    def vector(self) -> Tensor:
        """Return this replica's part of the vector that the step's reduction sums up: for each replica, the hash of its
        own micro-batch, that of the one that it computed for another replica, and that of its weights."""
        vector = torch.zeros(3, len(self._places), dtype=torch.float64, device=self._device)
        for row, hashes in zip(vector, self._hashes(), strict=True):
            row[self._rank] = torch.remainder(digest(hashes), _SHORT)
        return vector

    def _weights(self) -> Tensor:
        return mixed(torch.stack([word_sum(leaf) for leaf in self.leaves.values()]))

    def _of_all(self, hashes: Tensor) -> Tensor:
        """Return the hashes of all replicas, [replicas, hashes] on the CPU; collective."""
        every = hashes.new_empty(len(self._places) * len(hashes))
        dist.all_gather_into_tensor(every, hashes)
        return every.view(len(self._places), -1).cpu()

    # -- the comparison ------------------------------------------------------------------------------------------

    def compare(self, vector: Tensor) -> ReplicaTry:
        """Compare the computations of all replicas, over which `vector` was summed; collective if any differ or have
        differed in the try before."""
        own, again, weights = vector.view(3, -1).tolist()
        found = ((self._owner(checker), checker) for checker in range(len(own)))
        pairs = [(o, c) for o, c in found if own[o] != again[c] or weights[o] != weights[c]]
        if not pairs and self._before is None:
            return ReplicaTry(pairs, own)
        hashes = self._hashes()
        of_own, of_again, of_weights = self._of_all(torch.cat(hashes)).split([len(each) for each in hashes], dim=1)
        if not pairs:
            return ReplicaTry(pairs, own, of_weights)
        owner, checker = pairs[0]
        different = zip(self._results, of_own[owner] != of_again[checker], strict=True)
        # The compared micro-batches need not depend on every weight.
        first = next((result for result, differs in different if differs), "weights")
        return ReplicaTry(pairs, own, of_weights, first)

    def refusal(self, found: ReplicaTry) -> Event:
        """Return the event that says that replicas differ."""
        owner, checker = found.pairs[0]
        assert found.weights is not None, "a pair differs"
        weights = [n for n, d in zip(self.leaves, found.weights[owner] != found.weights[checker], strict=True) if d]
        if owner == checker:
            who = f"{self._said([owner])} computed one micro-batch twice"
        else:
            who = f"{self._said([owner])} and {self._said([checker])} computed one micro-batch"
        text = f"{who}, and the bits differ first in the {found.first}" + _listed("; their weights differ in ", weights)
        fields = {"ranks": [owner, checker], "first": found.first, "pairs": found.pairs, "weights": weights}
        return Event(KIND, text, fields)

    def verdict(self, before: ReplicaTry, now: ReplicaTry) -> Event:
        """Return the event that says which replica was wrong, after a step was taken for the second time."""
        suspects = before.suspects(now)
        how = "agree at the second try" if not now.pairs else "differ a second time"
        text = f"the computations of the replicas {how}; wrong was {self._said(suspects)}"
        return Event(KIND, text, {"suspects": suspects, "agree": not now.pairs})

    def different_weights(self) -> Event | None:
        """Compare the weights of all replicas. Return an event if any differ; collective."""
        if len(self._places) == 1:
            return None
        weights = self._of_all(self._weights())
        wrong = weights != weights.mode(0).values
        if not wrong.any():
            return None
        names = [name for name, differs in zip(self.leaves, wrong.any(0), strict=True) if differs]
        ranks = wrong.any(1).nonzero().flatten().tolist()
        ranks = ranks if len(self._places) > 2 else [0, 1]
        text = f"the weights of the replicas differ at {self._said(ranks)}" + _listed(": ", names)
        return Event(KIND, text, {"suspects": ranks, "weights": names})

    def _said(self, ranks: Sequence[int]) -> str:
        return " or ".join(f"rank {rank} ({self._places[rank]})" for rank in ranks) or "more than one rank"


def _listed(before: str, names: Sequence[str]) -> str:
    """Return names as a part of a sentence, shortened. Without a name there is no such part."""
    return before + some(names, 3) if names else ""

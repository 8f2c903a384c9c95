"""Muon on matrices that lie in pieces on several ranks: tensor-parallel slices, and ranges of those.

Each matrix is orthogonalized whole, by one rank that owns it for that moment. Every rank makes the update's direction
from the momentum of its pieces, and sends it to the owners in bf16. The owners orthogonalize, and send the pieces back.
The result does not depend on the layout, to the bit, because all arithmetic is either value by value or on whole
matrices. Owners share the work: every rank has about as many operations to do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sagekernels.graphs import Pool, Record, Recording
from sagekernels.muon import add_update_twin, add_updates, direction_twin, directions, orthogonalize
from sagetrain.config.schema import OptimizerConfig
from sagetrain.optim.owners import MUON_ROUND, owners
from sagetrain.optim.pieces import TensorPiece, clip_gradients
from sagetrain.optim.states import state_of
from sagetrain.optim.weights import weights_of

KINDS = ("momentum",)
"""The kinds of Muon's state: the running average of gradients."""


class _Matrix(NamedTuple):
    """A matrix of a tensor, which may have several, and what this rank keeps of it."""

    piece: TensorPiece
    """The range of the matrix, as if it were a tensor of its own."""
    of: int
    """The number of the tensor's piece."""
    first: int
    """The place in that piece where the range begins."""


class _Range(NamedTuple):
    """The part of a matrix that a rank keeps: a range of one of its flattened slices."""

    slice: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class _Held(NamedTuple):
    """The part of a matrix that this rank keeps in a round."""

    number: int
    """The number of the matrix."""
    of: int
    """The number of its tensor's piece."""
    first: int
    """The range in that piece."""
    stop: int
    place: int
    """The place in what ranks exchange in the round."""


class Muon:
    """An optimizer (pieces.Optimizer) of matrices. Making one is collective.

    Args:
        pieces: the pieces of the same matrices, in the same order, on every rank of `group`.
        seed: the seed of the run.
        group: the ranks that hold each matrix between them; None: this rank holds all of them.
        lr_factor: the learning rate as a multiple of the schedule's.
    """

    def __init__(
        self,
        pieces: Sequence[TensorPiece],
        cfg: OptimizerConfig,
        seed: int,
        group: dist.ProcessGroup | None,
        weight_decay: float,
        lr_factor: float = 1.0,
    ) -> None:
        self._cfg, self._weight_decay, self._group = cfg.muon, weight_decay, group
        self._matrices = [matrix for number, piece in enumerate(pieces) for matrix in _matrices(number, piece)]
        self._pieces = [matrix.piece for matrix in self._matrices]
        self._lr_factor = lr_factor
        ranks = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self.weights = [weights_of(cfg.master, piece, seed) for piece in pieces]
        self.state = [{kind: state_of(cfg.moments, piece.weight) for kind in KINDS} for piece in pieces]
        self._ranges = self._everybodys(ranks)
        owner = owners([piece.spec.shape for piece in self._pieces], ranks, cfg.muon.steps)
        owned = [[n for n, o in enumerate(owner) if o == rank] for rank in range(ranks)]
        self._rounds = list(_rounds(owned, self._pieces))
        # A GPU takes all matrices of a round by one kernel.
        self._together = any(piece.weight.is_cuda for piece in pieces)
        self._record: Record | None = None
        self._recordings: dict[torch.Size, tuple[Tensor, Recording]] = {}
        # The host needs a millisecond to launch what orthogonalizes a batch, and a GPU less, if matrices are few and
        # small.
        own = sum(self._pieces[number].spec.size for number in owned[self._rank])
        if self._together and own <= MUON_ROUND:
            self._record = Pool().record_aside

    def _everybodys(self, ranks: int) -> list[list[_Range]]:
        """Return the range that each rank keeps of each matrix."""
        own = [(piece.slice, piece.start, piece.stop) for piece in self._pieces]
        if self._group is None:
            return [[_Range(*each) for each in own]]
        sent = torch.tensor(own, dtype=torch.int64, device=self._pieces[0].weight.device)
        received = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(received, sent, group=self._group)
        return [[_Range(*each) for each in tensor.tolist()] for tensor in received]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float, update: int, clip: float = 1.0) -> None:
        """Update weights and momentum: see pieces.Optimizer."""
        if not self._together:
            clip_gradients(gradients, clip)
        for matrices in self._rounds:
            mine, every = matrices[self._rank], list(itertools.chain.from_iterable(matrices))
            sent = [sum(self._ranges[self._rank][n].size for n in owned) for owned in matrices]
            kept = [sum(each[n].size for n in mine) for each in self._ranges]
            updates = self._orthogonal(mine, self._exchanged(self._directions(every, gradients, clip), sent, kept))
            self._apply(every, self._exchanged(updates, kept, sent), lr * self._lr_factor, update)
            del updates

    def _held(self, matrices: Sequence[int]) -> list[_Held]:
        """Return what this rank keeps of matrices. Those that it keeps nothing of are left out."""
        held, place = list[_Held](), 0
        for number in matrices:
            _, of, first = self._matrices[number]
            if size := self._ranges[self._rank][number].size:
                held.append(_Held(number, of, first, first + size, place))
                place += size
        return held

    def _directions(self, matrices: Sequence[int], gradients: Sequence[Tensor], clip: float) -> Tensor:
        """Take gradients into the momentum. Return the directions of the updates, before they are orthogonalized, one
        after the other in bf16. On a CPU the gradients are clipped already."""
        held, cfg, states = self._held(matrices), self._cfg, [state["momentum"] for state in self.state]
        size = sum(part.stop - part.first for part in held)
        found = torch.empty(size, dtype=torch.bfloat16, device=self._pieces[0].weight.device)
        own = [gradients[part.of][part.first : part.stop] for part in held]
        if self._together:
            momenta = [states[part.of].moment(part.first, part.stop) for part in held]
            directions(momenta, own, found, cfg.momentum, cfg.nesterov, clip)
            return found
        for part, gradient in zip(held, own, strict=True):
            momentum, place = states[part.of].read(part.first, part.stop), found[part.place :][: len(gradient)]
            direction_twin(momentum, gradient, place, cfg.momentum, cfg.nesterov)
            states[part.of].write(momentum, part.first)
        return found

    def _exchanged(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send consecutive parts of `values`, of the lengths `sent`, to the ranks. Return the parts that they sent, of
        the lengths `received`."""
        if self._group is None:
            return values
        result = values.new_empty(sum(received))
        dist.all_to_all_single(result, values, list(received), list(sent), group=self._group)
        return result

    def _orthogonal(self, mine: Sequence[int], parts: Tensor) -> Tensor:
        """Return the orthogonalized parts of this rank's matrices, in the order in which they came: by rank, then by
        matrix. The matrices have one shape, and are cut along the same side. `parts` is overwritten."""
        if not mine:
            return parts
        piece = self._pieces[mine[0]]
        if self._group is None:
            return self._orthogonalized(parts.view(len(mine), *piece.spec.shape)).reshape(-1)
        flat = parts.new_empty(len(mine), piece.slices, piece.spec.size // piece.slices)
        places = [
            flat[place, of, start:stop]
            for ranges in self._ranges
            for place, (of, start, stop) in enumerate(ranges[number] for number in mine)
        ]
        torch._foreach_copy_(places, parts.split([len(place) for place in places]))
        flat.copy_(_slices(self._orthogonalized(_whole(flat, piece)), piece))
        return torch.cat(places)

    def _orthogonalized(self, matrices: Tensor) -> Tensor:
        """Orthogonalize a batch, which is overwritten: by a CUDA graph from the second batch of its shape on, where
        that is faster. The result lies in the memory of the graph until the next batch of the shape."""
        steps = self._cfg.steps
        if self._record is None:
            return orthogonalize(matrices, steps)
        if matrices.shape not in self._recordings:
            # Triton compiles its kernels now, which it cannot while a graph is captured.
            memory = torch.empty_like(matrices)

            def again() -> None:
                memory.copy_(orthogonalize(memory, steps))

            found = orthogonalize(matrices, steps)
            self._recordings[matrices.shape] = memory, self._record(again)
            return found
        memory, graph = self._recordings[matrices.shape]
        memory.copy_(matrices)
        graph.replay()
        return memory

    def _apply(self, matrices: Sequence[int], updates: Tensor, lr: float, update: int) -> None:
        """Decay this rank's pieces, and add their updates."""
        keep, kinds = 1 - lr * self._weight_decay, dict[_Kind, list[_Held]]()
        # Owners may have matrices of another kind in the same round.
        for part in self._held(matrices):
            kinds.setdefault(_kind(self._pieces[part.number]), []).append(part)
        for kind, held in kinds.items():
            scale = -lr * self._factor(*kind.shape)
            if self._together:
                masters = [self.weights[part.of].master(update, part.first, part.stop) for part in held]
                add_updates(masters, updates, [part.place for part in held], keep, scale)
                continue
            for part in held:
                weight = self.weights[part.of].read(part.first, part.stop)
                add_update_twin(weight, updates[part.place :][: len(weight)], keep, scale)
                self.weights[part.of].write(weight, part.first, update)

    def _factor(self, rows: int, columns: int) -> float:
        """Return the factor of a matrix's learning rate (optimizer.muon.adjust_lr)."""
        if self._cfg.adjust_lr == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _matrices(number: int, piece: TensorPiece) -> list[_Matrix]:
    """Return the matrices of the tensor of a piece. Those of a tensor that has several stand one above the other, and
    none of them is cut."""
    count = piece.spec.matrices
    if count == 1:
        return [_Matrix(piece, number, 0)]
    assert piece.slices == 1, f"{piece.spec.name} is cut"
    size, columns, found = piece.spec.size // count, piece.spec.shape[-1], []
    for place in range(count):
        begin = place * size
        start, stop = (min(max(edge, begin), begin + size) for edge in (piece.start, piece.stop))
        spec = replace(piece.spec, name=f"{piece.spec.name}.{place}", shape=(size // columns, columns), matrices=1)
        first = min(max(begin - piece.start, 0), len(piece.weight))
        own = piece.weight[first : first + stop - start]
        found.append(_Matrix(TensorPiece(spec, 0, 1, start - begin, stop - begin, own), number, first))
    return found


def _whole(slices: Tensor, piece: TensorPiece) -> Tensor:
    """Return the matrices, [batch, rows, columns], whose flattened slices are given: [batch, slices, values]."""
    rows, columns = piece.spec.shape
    if piece.spec.dim != 1 or piece.slices == 1:
        return slices.view(-1, rows, columns)
    return slices.view(len(slices), piece.slices, rows, -1).transpose(1, 2).reshape(-1, rows, columns)


def _slices(whole: Tensor, piece: TensorPiece) -> Tensor:
    """Return the flattened slices of matrices, which is what `_whole` made of them."""
    rows = piece.spec.shape[0]
    if piece.spec.dim != 1 or piece.slices == 1:
        return whole.reshape(len(whole), piece.slices, -1)
    return whole.reshape(len(whole), rows, piece.slices, -1).transpose(1, 2).reshape(len(whole), piece.slices, -1)


class _Kind(NamedTuple):
    """Matrices of one kind are orthogonalized together. Slices of rows and slices of columns are put together in
    another way: q and out may have the same shape. So may gate of an expert, which no rank cuts, and gate of the shared
    experts."""

    shape: tuple[int, ...]
    dim: int
    slices: int


def _kind(piece: TensorPiece) -> _Kind:
    return _Kind(piece.spec.shape, (piece.spec.dim or 0) if piece.slices > 1 else 0, piece.slices)


def _rounds(owned: Sequence[Sequence[int]], pieces: Sequence[TensorPiece]) -> list[list[list[int]]]:
    """Cut the matrices of each owner into rounds of about MUON_ROUND values of one shape. Every owner has a list in
    every round."""

    kinds = [_kind(piece) for piece in pieces]
    cut: list[list[list[int]]] = []
    for matrices in owned:
        rounds: list[list[int]] = []
        # The largest matrices come first on every owner, so that owners work at the same time.
        for number in sorted(matrices, key=lambda n: (-pieces[n].spec.size, kinds[n], n)):
            size, before = pieces[number].spec.size, rounds[-1] if rounds else []
            if before and kinds[before[0]] == kinds[number] and (len(before) + 1) * size <= MUON_ROUND:
                rounds[-1].append(number)
            else:
                rounds.append([number])
        cut.append(rounds)
    return [[rounds[i] if i < len(rounds) else [] for rounds in cut] for i in range(max(map(len, cut)))]

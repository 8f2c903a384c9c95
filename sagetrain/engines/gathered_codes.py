"""The weights of linear layers that ranks gather in 8 bits at ZeRO 3 (parallel.gather_8_bits).

Each rank rounds its rows once after an update, along rows for the output and along columns for the gradient of x. The
scale of a column belongs to the rows of all ranks, so one all-reduce of largest magnitudes comes before, and one
all-gather of the scales of rows behind. A forward pass gathers the codes of rows, a backward pass the codes of columns,
and both of them if it recomputes the block. The products read what was gathered (Matmul.keep), so no micro-step rounds
weights. The codes are those of the whole weights.

FSDP calls `fsdp_pre_all_gather` of a shard for what it sends, and `fsdp_post_all_gather` with what has come. It takes
both from plain tensors, too. The first weight of a block sends the bytes of all of them, because each call costs the
host. The weight that autograd gives a gradient to has the shape and the dtype of the whole weight, but no memory. A
pass that multiplies in another way (a probe, or a part of the run in 16 bits) gathers the whole weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sagekernels.casts import largest_of, quantize_both
from sagekernels.lowbit import LowBit
from sagetrain.model import walks
from sagetrain.model.block import Block
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.layers import LinearLayer


class GatheredCodes:
    """The codes of all linear layers in 8 bits of a model's blocks, to whose blocks fully_shard was applied.

    Args:
        ranks: the ranks that have the shards of the weights between them. Each has as many rows.
        dtype: the dtype of the whole weights.
    """

    def __init__(self, model: Transformer, ranks: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.whole = False
        """If set, the whole weights are gathered."""
        self.model, self.ranks, self.dtype, self._stale = model, ranks, dtype, True
        self._layers: list[_Layer] = []
        for number, block in zip(model.numbers, model.blocks, strict=True):
            every = cast(Block, block).linear_layers.values()
            if layers := [_Layer(layer, ranks.size(), dtype) for layer in every if isinstance(layer.matmul, LowBit)]:
                self._layers += layers
                _Block(layers, self, number)

    def written(self) -> None:
        """Note that masters were written: the next gather renews all codes."""
        self._stale = True

    @torch.no_grad()
    def renew(self) -> None:
        """Round this rank's rows of all layers, if masters were written; collective."""
        if not self._stale:
            return
        layers = self._layers
        largest = [largest_of(layer.own()) for layer in layers]
        of_columns = torch.cat([each[-layer.columns :] for each, layer in zip(largest, layers, strict=True)])
        if self.ranks.size() > 1:
            dist.all_reduce(of_columns, dist.ReduceOp.MAX, group=self.ranks)
        parts = of_columns.split([layer.columns for layer in layers])
        scales = [
            layer.renew(own[: -layer.columns], columns)
            for layer, own, columns in zip(layers, largest, parts, strict=True)
        ]
        self._spread(torch.cat(scales).view(-1))
        self._stale = False

    def _spread(self, scales: Tensor) -> None:
        """Give all ranks the scales of this rank's rows of all layers, one behind the other."""
        every = scales.new_empty(self.ranks.size(), len(scales))
        dist.all_gather_into_tensor(every.view(-1), scales, group=self.ranks)
        parts = [part for layer in self._layers for part in layer.scales]
        if parts:
            torch._foreach_copy_(parts, every.split([part.shape[1] for part in parts], 1))


class _Layer:
    """The codes of a layer, as its products read them."""

    def __init__(self, layer: LinearLayer[Any], shards: int, dtype: torch.dtype) -> None:
        # FSDP asks this very tensor, and `to_local` returns a view of it.
        self.masters: list[Tensor] = [cast(Any, weight)._local_tensor for weight in layer.weights]
        self.layer, self.matmul, self._dtype = layer, cast(LowBit, layer.matmul), dtype
        self.rows, self.columns = [len(master) for master in self.masters], self.masters[0].shape[1]
        whole, device, self._per_row = shards * sum(self.rows), self.masters[0].device, self.matmul.per_row

        def rounded(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            codes = torch.empty(rows, columns, dtype=self.matmul.number, device=device)
            return codes, torch.empty(rows if self._per_row else 1, 1, dtype=torch.float32, device=device)

        self.kept = *rounded(whole, self.columns), *rounded(self.columns, whole)
        """The tensors that Matmul.keep returns for the whole weights. Codes have memory while they are needed."""
        self.codes = self.kept[0], self.kept[2]
        give_back(*self.codes)
        # Autograd does not notice what is written to `data`.
        of_weights = self.kept[1].data.split([shards * rows for rows in self.rows]) if self._per_row else ()
        self.scales = [part.view(shards, -1) for part in of_weights]
        """The scales of each weight's rows, [ranks, rows of a rank]. Empty if rows have no scales of their own."""
        self.sent: list[Tensor] = []
        """The words that this rank sends: codes of rows for each weight, then codes of columns for each."""

    def own(self) -> Tensor:
        """Return this rank's rows of all weights as the model reads them."""
        own = [master.to(self._dtype) for master in self.masters]
        return own[0] if len(own) == 1 else torch.cat(own)

    def renew(self, of_rows: Tensor, of_columns: Tensor) -> Tensor:
        """Round this rank's rows, and return their scales, or nothing if rows have no scales of their own.

        Args:
            of_rows, of_columns: the bits of the largest magnitudes of these rows, and of the columns of all ranks.
        """
        if not self._per_row:
            of_rows, of_columns = (of_columns.max().expand_as(each) for each in (of_rows, of_columns))
        largest = torch.cat((of_rows, of_columns))
        (codes, scale), (turned, turned_scale) = quantize_both(self.own(), self.matmul.number, True, largest)
        self.kept[3].data.copy_(turned_scale[: len(self.kept[3])])
        if not self._per_row:
            self.kept[1].data.copy_(scale[:1])
        # Turned codes have zeros behind the last row.
        parts = *codes.split(self.rows), *turned[:, : len(codes)].split(self.rows, 1)
        torch._foreach_copy_(self.sent, [part.view(torch.uint8).view(self.sent[0].dtype) for part in parts])
        return scale if self._per_row else scale[:0]


class _Block:
    """What travels for a block. FSDP asks each of its weights, and the first one answers for all of them."""

    def __init__(self, layers: Sequence[_Layer], codes: GatheredCodes, number: int) -> None:
        self._layers, self._codes, self._number, self._shards = layers, codes, number, codes.ranks.size()
        self._masters = masters = [master for layer in layers for master in layer.masters]
        device, sizes = masters[0].device, [master.numel() for master in masters]
        # The codes of rows, and those of columns. What one pass sends is as long as what the other sends.
        self._sent = torch.empty(2, sum(sizes), dtype=torch.uint8, device=device)
        # A GPU takes as long to copy a byte as to copy eight.
        self._word = torch.int64 if all(n % 8 == 0 for master in masters for n in master.shape) else torch.uint8
        of_rows, of_columns = (iter(half.split(sizes)) for half in self._sent)
        for layer in layers:
            rows = [next(of_rows).view(-1, layer.columns) for _ in layer.rows]
            columns = [next(of_columns).view(layer.columns, -1) for _ in layer.rows]
            layer.sent = [part.view(self._word) for part in (*rows, *columns)]
        shapes = [(self._shards * len(master), *master.shape[1:]) for master in masters]
        self._whole = [torch.empty(shape, dtype=codes.dtype, device=device) for shape in shapes]
        give_back(*self._whole)
        self._held: list[Tensor] = []
        """The tensors that have memory in this pass. FSDP has this very list, and gives them back behind the pass."""
        self._copies: dict[_What, tuple[list[Tensor], list[Tensor]]] = {}
        """The places of all weights, and what has come for them."""
        self._received: Tensor | None = None
        self._stream: Any = None
        self._first: Tensor | None = None
        for master, whole in zip(masters, self._whole, strict=True):
            self._answer(master, whole)

    def _answer(self, master: Any, whole: Tensor) -> None:
        """Let a weight's master answer FSDP."""
        # FSDP wants a tensor of each weight where a single rank has all of them.
        nothing = () if self._shards > 1 else (self._sent.new_empty(0),)

        def send(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor, ...], Any]:
            self._first = master if self._first is None else self._first
            if master is not self._first:
                return nothing, None
            sent, what = self._send()
            return (sent,), what

        def receive(
            received: Sequence[Tensor], what: Any, dtype: torch.dtype, *, out: Tensor | None = None
        ) -> tuple[Tensor, list[Tensor]] | None:
            if master is self._first:
                self._receive(*received, what, whole=out is None)
            return (whole, self._held if master is self._first else []) if out is None else None

        # FSDP reads the signature before each gather, which takes the host longer than all else of it.
        cast(Any, send).__signature__ = inspect.signature(send)
        master.fsdp_pre_all_gather, master.fsdp_post_all_gather = send, receive

    def _send(self) -> tuple[Tensor, _What]:
        """Return the bytes that this rank sends, and what they are."""
        codes, layers, backward = self._codes, self._layers, in_backward()
        # A backward pass reads what its forward pass has read.
        narrow = all(bool(each.layer.kept) if backward else each.layer.matmul is each.matmul for each in layers)
        if codes.whole or not narrow:
            what = _What(False, False)
            sent = torch.cat([master.to(codes.dtype).view(-1) for master in self._masters]).view(torch.uint8)
        else:
            codes.renew()
            what = _What(not backward or _again(codes.model, self._number), backward)
            sent = self._sent[1 - what.rows : 1 + what.columns].view(-1)
        self._held.clear()
        self._fit(self._shards * len(sent))
        return sent, what

    def _fit(self, size: int) -> None:
        """Let FSDP receive so many bytes. It takes it that a weight always has the same number of them."""
        if self._received is None or len(self._received) == size:
            return
        if self._stream is None:
            self._received.resize_(size)
            return
        with torch.cuda.stream(self._stream):  # The memory is used there.
            self._received.resize_(size)

    def _receive(self, got: Tensor, what: _What, whole: bool) -> None:
        """Take the bytes of all ranks.

        Args:
            whole: give whole weights their memory in any case. FSDP makes its own views of them.
        """
        received = got if got._base is None else got._base
        if self._received is not received:
            self._received = received
            self._copies.clear()
        self._stream = torch.cuda.current_stream() if got.is_cuda else None
        narrow = any(what)
        for layer in self._layers:
            layer.layer.kept = layer.kept if narrow else ()
            self._held += [codes for codes, needed in zip(layer.codes, what, strict=True) if needed]
        if whole or not narrow:
            self._held += self._whole
        take_back(*self._held)
        if what not in self._copies:
            places = list(self._places(what))
            come = got.view(self._word).view(self._shards, -1)
            parts = come.split([place.numel() // self._shards for place in places], 1)
            self._copies[what] = places, [part.view(at.shape) for at, part in zip(places, parts, strict=True)]
        torch._foreach_copy_(*self._copies[what])
        give_back(received)

    def _places(self, what: _What) -> Iterator[Tensor]:
        """Yield the places of all weights in the order in which they travel, the ranks' parts along the first dim."""
        wholes = [] if any(what) else self._whole
        rows = [(layer.codes[0], layer.rows) for layer in self._layers if what.rows]
        columns = [(layer.codes[1], layer.rows) for layer in self._layers if what.columns]
        for codes, counts in [*((each, [len(each) // self._shards]) for each in wholes), *rows]:
            for part in codes.data.split([self._shards * count for count in counts]):
                yield part.view(torch.uint8).view(self._word).view(self._shards, -1)
        for codes, counts in columns:
            for part in codes.data.split([self._shards * count for count in counts], 1):
                words = part.view(torch.uint8).view(self._word)
                yield words.unflatten(1, (self._shards, -1)).transpose(0, 1)


class _What(NamedTuple):
    """What a block's gather carries: codes of rows, codes of columns, or the whole weights if it is neither."""

    rows: bool
    columns: bool


def _again(model: Transformer, number: int) -> bool:
    """Return whether a backward pass recomputes the block with this number, or a part of it."""
    return number < model.recomputed_blocks or model.activation_checkpointing in walks.DEAR


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def give_back(*tensors: Tensor) -> None:
    """Give the memory of tensors back."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def take_back(*tensors: Tensor) -> None:
    """Make the memory of tensors anew, where it is not there."""
    for tensor in tensors:
        if not tensor.untyped_storage().size():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

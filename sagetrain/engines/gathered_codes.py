"""The weights of linear layers that ranks gather in 8 bits at ZeRO 3 (parallel.gather_8_bits).

Each rank rounds its rows once after an update, along rows for the output and along columns for the gradient of x. The
scale of a column belongs to the rows of all ranks, so one all-reduce of largest magnitudes comes before. A forward pass
gathers the codes and scales of rows, a backward pass the codes of columns, and both of them if it recomputes the block.
The products read what was gathered (Matmul.keep), so no micro-step rounds weights. The codes are those of the whole
weights.

FSDP calls `fsdp_pre_all_gather` of a shard for what it sends, and `fsdp_post_all_gather` with what has come. It takes
both from plain tensors, too. The weight that autograd gives a gradient to has the shape and the dtype of the whole
weight, but no memory. A pass that multiplies in another way (a probe, or a part of the run in 16 bits) gathers the
whole weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

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
        self._ranks, self._layers, self._stale = ranks, list[_Layer](), True
        for number, block in zip(model.numbers, model.blocks, strict=True):
            for layer in cast(Block, block).linear_layers.values():
                if isinstance(layer.matmul, LowBit):
                    self._layers.append(_Layer(layer, self, ranks.size(), dtype, partial(_again, model, number)))

    def written(self) -> None:
        """Note that masters were written: the next gather renews all codes."""
        self._stale = True

    @torch.no_grad()
    def renew(self) -> None:
        """Round this rank's rows of all layers, if masters were written; collective."""
        if not self._stale:
            return
        largest = [largest_of(layer.own()) for layer in self._layers]
        of_columns = torch.cat([each[-layer.columns :] for each, layer in zip(largest, self._layers, strict=True)])
        if self._ranks.size() > 1:
            dist.all_reduce(of_columns, dist.ReduceOp.MAX, group=self._ranks)
        parts = of_columns.split([layer.columns for layer in self._layers])
        for layer, own, columns in zip(self._layers, largest, parts, strict=True):
            layer.renew(own[: -layer.columns], columns)
        self._stale = False


class _Layer:
    """The codes of a layer: this rank's rows of them, and what was gathered."""

    def __init__(
        self, layer: LinearLayer[Any], codes: GatheredCodes, shards: int, dtype: torch.dtype, again: Callable[[], bool]
    ) -> None:
        # FSDP asks this very tensor, and `to_local` returns a view of it.
        self.masters: list[Tensor] = [cast(Any, weight)._local_tensor for weight in layer.weights]
        self.matmul = matmul = layer.matmul
        self.layer, self.codes, self.shards, self.dtype, self.again = layer, codes, shards, dtype, again
        assert isinstance(matmul, LowBit)
        self.rows, self.columns = [len(master) for master in self.masters], self.masters[0].shape[1]
        self.per_row, whole, device = matmul.per_row, shards * sum(self.rows), self.masters[0].device

        def rounded(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            codes = torch.empty(rows, columns, dtype=matmul.number, device=device)
            return codes, torch.empty(rows if self.per_row else 1, 1, dtype=torch.float32, device=device)

        self.kept = *rounded(whole, self.columns), *rounded(self.columns, whole)
        """The tensors that Matmul.keep returns for the whole weights. Codes, and the scales of rows, have memory while
        they are needed."""
        self.along_rows = self.kept[: 1 + self.per_row]
        self.along_columns = self.kept[2:3]
        give_back(*self.along_rows, *self.along_columns)
        starts = [shards * sum(self.rows[:place]) for place in range(len(self.rows))]
        self.parts = [_Part(self, *each) for each in zip(self.masters, starts, strict=True)]

    def own(self) -> Tensor:
        """Return this rank's rows of all weights as the model reads them."""
        return torch.cat([master.to(self.dtype) for master in self.masters])

    def renew(self, of_rows: Tensor, of_columns: Tensor) -> None:
        """Round this rank's rows.

        Args:
            of_rows, of_columns: the bits of the largest magnitudes of these rows, and of the columns of all ranks.
        """
        if not self.per_row:
            of_rows, of_columns = (of_columns.max().expand_as(each) for each in (of_rows, of_columns))
        largest = torch.cat((of_rows, of_columns))
        (codes, scale), (turned, turned_scale) = quantize_both(self.own(), self.kept[0].dtype, True, largest)
        self.kept[3].data.copy_(turned_scale[: len(self.kept[3])])
        if not self.per_row:
            self.kept[1].data.copy_(scale[:1])
        turned = turned[:, : len(codes)]
        every = codes.split(self.rows), scale.split(self.rows), turned.split(self.rows, 1)
        for part, *own in zip(self.parts, *every, strict=True):
            part.write(*own)


class _Part:
    """A weight of a layer. FSDP asks its master for what travels."""

    def __init__(self, layer: _Layer, master: Any, start: int) -> None:
        self._layer, self._master, self._start = layer, master, start
        rows, columns = master.shape
        self._codes, self._scales = rows * columns, 4 * rows * layer.per_row
        # The scales of rows lie between both codes, so what one pass sends is as long as what the other sends.
        self._sent = torch.empty(2 * self._codes + self._scales, dtype=torch.uint8, device=master.device)
        self._word = torch.int64 if rows % 8 == 0 else torch.uint8
        """The words in which codes are copied to their places. A GPU takes as long for a byte as for eight."""
        self._whole: Tensor | None = None
        self._received: Tensor | None = None
        self._stream: Any = None
        # FSDP reads the signature before each gather, which takes the host longer than all else of it.
        send: Any = partial(self._send)
        send.__signature__ = inspect.signature(self._send)
        master.fsdp_pre_all_gather, master.fsdp_post_all_gather = send, self._receive

    def write(self, codes: Tensor, scale: Tensor, turned: Tensor) -> None:
        """Keep the codes of this rank's rows, and their scales, for gathers."""
        parts = self._sent.split([self._codes, self._scales, self._codes])
        for part, values in zip(parts, (codes, scale, turned), strict=True):
            if part.numel():
                part.copy_(values.contiguous().view(torch.uint8).view(-1))

    def _send(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], Any]:
        """Return the bytes that this rank sends, and what they are."""
        layer, codes, backward = self._layer, self._codes, in_backward()
        # A backward pass reads what its forward pass has read.
        narrow = bool(layer.layer.kept) if backward else layer.layer.matmul is layer.matmul
        if layer.codes.whole or not narrow:
            what, sent = (False, False), self._master.to(layer.dtype).view(-1).view(torch.uint8)
        else:
            layer.codes.renew()
            what = not backward or layer.again(), backward
            sent = self._sent[0 if what[0] else codes : len(self._sent) if what[1] else codes + self._scales]
        self._fit(layer.shards * len(sent))
        return (sent,), what

    def _fit(self, size: int) -> None:
        """Let FSDP receive so many bytes. It takes it that a weight always has the same number of them."""
        if self._received is None or len(self._received) == size:
            return
        if self._stream is None:
            self._received.resize_(size)
            return
        with torch.cuda.stream(self._stream):  # The memory is used there.
            self._received.resize_(size)

    def _receive(
        self, received: Sequence[Tensor], what: tuple[bool, bool], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Take the bytes of all ranks. FSDP gives the memory of the tensors that the first call returns back when a
        pass has ended, and makes it anew before it calls this function again."""
        layer, (got,), shards = self._layer, received, self._layer.shards
        if self._whole is None or self._received is None:
            self._received = got if got._base is None else got._base
            self._whole = torch.empty(shards * len(self._master), layer.columns, dtype=dtype, device=got.device)
        self._stream = torch.cuda.current_stream() if got.is_cuda else None
        rows, columns = what
        if rows or columns:
            layer.layer.kept = layer.kept
            self._place(got.view(self._word).view(shards, -1), rows, columns)
            give_back(*(() if rows else layer.along_rows), *(() if columns else layer.along_columns))
            if out is not None:
                give_back(self._whole)
        else:
            layer.layer.kept = ()
            self._whole.data.view(-1).view(torch.uint8).copy_(got)
            give_back(*layer.along_rows, *layer.along_columns)
        give_back(self._received)
        of_layer = *layer.along_rows, *layer.along_columns
        return None if out is not None else (self._whole, [self._whole, *(of_layer if layer.parts[0] is self else ())])

    def _place(self, received: Tensor, rows: bool, columns: bool) -> None:
        """Write the codes of all ranks, [ranks, words], where the layer reads them. Autograd does not notice it."""
        layer, start, word = self._layer, self._start, self._word
        stop = start + layer.shards * len(self._master)
        codes, scale, turned, _ = layer.kept
        own, scales = self._codes // word.itemsize, self._scales // word.itemsize
        if rows:
            take_back(*layer.along_rows)
            codes.data[start:stop].view(word).view(len(received), -1).copy_(received[:, :own])
            if layer.per_row:
                sent = received[:, own : own + scales]
                scale.data[start:stop].view(-1).view(word).view(len(received), -1).copy_(sent)
        if columns:
            take_back(*layer.along_columns)
            sent = received[:, -own:].unflatten(1, (layer.columns, -1)).transpose(0, 1)
            turned.data[:, start:stop].view(word).unflatten(1, (len(received), -1)).copy_(sent)


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

"""The layouts of attention on ranks that gather keys: queries are chunks of sequences, keys all up to their ends."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from sagetrain.model.backends import Documents, TokenLayout


def with_chunks(layout: TokenLayout, wanted: Collection[Documents], length: int, rank: int, gather: int) -> TokenLayout:
    """Add the layouts of the chunks of one of `gather` ranks that gather the keys of sequences of `length` tokens. The
    rank has the chunks `rank` and 2 gather - 1 - rank of as many of equal size. One rank alone has no chunks."""
    if gather == 1:
        return layout
    size = length // (2 * gather)
    first, last = (_chunk(layout, wanted, length, number * size, size) for number in (rank, 2 * gather - 1 - rank))
    return layout._replace(chunks=(first, last))


def _chunk(layout: TokenLayout, wanted: Collection[Documents], length: int, first: int, size: int) -> TokenLayout:
    """Return the layout in which the queries are `size` tokens of each sequence from `first` on, and the keys are those
    up to the last of them."""
    sequences, end, device = layout.num_sequences, first + size, layout.cos.device
    cu_seqlens, mask, bounds = layout.cu_seqlens, layout.mask, None
    if cu_seqlens is None:
        cu_seqlens = length * torch.arange(sequences + 1, dtype=torch.int32, device=device)
    elif layout.bounds is not None:
        bounds = _chunk_bounds(layout.bounds, sequences, first, size)
    if "mask" in wanted:
        whole = torch.ones(1, 1, length, end, dtype=torch.bool, device=device).tril() if mask is None else mask
        mask = whole[:, :, first:end, :end]
    row, place = cu_seqlens // length, cu_seqlens % length
    varlen = row * size + (place - first).clamp(0, size), row * end + place.clamp(max=end)
    return layout._replace(cu_seqlens=None, bounds=bounds, mask=mask, varlen=varlen)


def _chunk_bounds(bounds: Tensor, sequences: int, first: int, size: int) -> Tensor:
    """Return the bounds, int32 [2, B * size + B * (first + size)], of the queries from `first` on and of the keys up to
    the last of them, from those of all B * S tokens. Causality is in them too."""
    end = first + size
    length = bounds.shape[1] // sequences
    rows = torch.arange(sequences, dtype=torch.int32, device=bounds.device).unsqueeze(1)
    tokens = torch.arange(length, dtype=torch.int32, device=bounds.device)
    starts, ends = (bounds.view(2, sequences, length) - length * rows).unbind()  # in the sequence of each token
    of_queries = [end * rows + x[..., first:end] for x in (starts, (tokens + 1).expand_as(starts))]
    seen = tokens[:end].expand(sequences, -1), ends[:, :end]
    of_keys = [size * rows + (x - first).clamp(0, size) for x in seen]
    return torch.stack([torch.cat((a.flatten(), b.flatten())) for a, b in zip(of_queries, of_keys, strict=True)])

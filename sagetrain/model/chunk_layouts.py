"""The layouts of attention on ranks that gather keys: queries are chunks of sequences, keys all up to their ends."""

from __future__ import annotations

from collections.abc import Collection

import torch

from sagekernels.reference import chunk_bounds
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
        bounds = chunk_bounds(layout.bounds, sequences, first, size)
    if "mask" in wanted:
        whole = torch.ones(1, 1, length, end, dtype=torch.bool, device=device).tril() if mask is None else mask
        mask = whole[:, :, first:end, :end]
    row, place = cu_seqlens // length, cu_seqlens % length
    varlen = row * size + (place - first).clamp(0, size), row * end + place.clamp(max=end)
    return layout._replace(cu_seqlens=None, bounds=bounds, mask=mask, varlen=varlen)

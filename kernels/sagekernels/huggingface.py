"""INT8 attention in transformers: after `register()` a model takes attn_implementation="sage".

transformers describes the mask of a batch by a function, and an attention implementation decides what to make of it.
Here padding, packed documents and windows become the bounds that sage_attention takes: a run of padding is a document
of its own. The bounds are made once for each forward pass and kind of layer. All that sage_attention cannot compute is
refused, with its name.

This module needs transformers 5, and nothing else in sagekernels does.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import and_masks, bidirectional_mask_function, causal_mask_function

from .autograd import document_bounds, sage_attention
from .call import RECIPES, RecipeName
from .reference import chunk_bounds, windowed
from .refusals import one_of

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""A mask as transformers describes it: (batch, head, query, key) -> whether the query sees the key."""

IGNORED = frozenset({"position_ids", "use_cache", "cache_position", "max_length_q", "max_length_k", "seq_idx",
                     "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict"})  # fmt: skip
"""Arguments that models hand to an attention implementation and that do not change what it computes, beyond the
documents that are read from position_ids and cu_seq_lens_q."""


def register(name: str = "sage", *, recipe: RecipeName | None = None) -> None:
    """Make attn_implementation=name known to transformers, in from_pretrained, from_config and set_attn_implementation.

    Args:
        name: the name of the implementation.
        recipe: the recipe of sage_attention. None: the default of the device.

    Raises:
        ValueError: there is no such recipe.
    """
    if recipe is not None and recipe not in RECIPES:
        raise one_of("register: recipe", recipe, RECIPES)
    AttentionInterface.register(name, functools.partial(attention, recipe=recipe))
    AttentionMaskInterface.register(name, document_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    recipe: RecipeName | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks it of an implementation: query [B, H, N_q, D], key and value [B, H_kv, N_k, D].

    Args:
        attention_mask: the bounds that `document_mask` returned.
        sliding_window: the tokens that a query of this layer sees, its own included.
        s_aux: the sinks of the heads, [H].
        cu_seq_lens_q: the boundaries of packed documents in a batch of one. They replace position_ids.

    Returns:
        o [B, N_q, H, D], and None in the place of the attention weights.

    Raises:
        NotImplementedError: the model asks for what sage_attention does not compute.
    """
    if dropout:
        raise _refused(f"attention dropout {dropout}", "set attention_dropout (attn_pdrop) of the config to 0")
    for name, given in others.items():
        if given is not None and given is not False and name not in IGNORED:
            raise _refused(f"the argument {name}", "leave it out")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    (batch, n_q), n_k = q.shape[:2], k.shape[1]
    window = sliding_window if sliding_window is not None and sliding_window < n_k else None
    if window is not None and not causal:
        raise _refused(f"a sliding window of {window} on both sides", "take shorter sequences")
    if attention_mask is not None and attention_mask.dim() > 3:
        raise _refused("a mask of your own (4 dimensions)", "give a mask [batch, tokens] of padding, or position_ids")
    bounds, shared, cu_seqlens = attention_mask, None, None
    if bounds is not None and bounds.dim() == 3:
        if window is None:
            raise _refused("a window that the layer does not name", "hand sliding_window to the attention function")
        shared, bounds = bounds[:, 0], None
    if bounds is None and cu_seq_lens_q is not None:
        if cu_seq_lens_k is not None and cu_seq_lens_k.shape != cu_seq_lens_q.shape:
            raise _refused("other documents of keys than of queries", "give one cu_seq_lens")
        cu_seqlens = cu_seq_lens_q.to(torch.int32)
    elif bounds is None and 1 < n_q == n_k:
        # Where there is a cache, transformers does not look for packed documents, so position_ids are read here. Layers
        # of some families say use_cache=False whatever the model was told.
        bounds = _bounds_of_positions(others.get("position_ids"), batch, n_q, window)
    how: dict[str, Any] = {"causal": causal, "scale": scaling, "sinks": s_aux, "recipe": recipe}
    if bounds is None and cu_seqlens is None and shared is not None:
        how["causal"] = n_q == n_k  # Bounds of a chunk of queries have it in them.
        return sage_attention(q, k, v, bounds=shared, **how), None
    if bounds is None:
        return sage_attention(q, k, v, cu_seqlens=cu_seqlens, window=window, **how), None
    if n_q != n_k:
        raise _refused("padding or documents where there are other keys than queries", _GENERATE)
    q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    o = sage_attention(q, k, v, bounds=bounds, **how)
    return o.squeeze(0).unflatten(0, (batch, n_q)), None


_GENERATE = 'generate with model.set_attn_implementation("sdpa")'


def _refused(what: str, fix: str) -> NotImplementedError:
    return NotImplementedError(
        f'attn_implementation="sage" does not compute {what}; {fix}, or use attn_implementation="sdpa"'
    )


def document_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """Return the bounds of documents of a batch, int32 [2, batch * tokens], from the description of transformers.
    Bounds of a window without documents are [2, 1, tokens], because all rows share them. Behind the tokens of a cache
    they are those of the queries, and then those of the keys.

    Args:
        mask_function: the mask without padding: causal or bidirectional, inside of packed documents if there are any.
        attention_mask: bool [batch, kv_length], False at padding.
        local_size: the tokens of a sliding window or a chunk.
        use_vmap: whether the mask was changed by a function of the model.
        config: the configuration of the model.

    Returns:
        None where every token sees the whole row, or all of it up to itself.

    Raises:
        NotImplementedError: the mask is another one, or the model takes eager attention alone.
        ValueError: padding lies between tokens of a row.
    """
    if not _asks(type(config)):
        raise NotImplementedError(
            f"{type(config).__name__}: the class of this model in transformers takes eager attention alone (neither "
            "_supports_sdpa nor _supports_attention_backend), and its own attention would lack a mask: leave "
            "attn_implementation out"
        )
    if use_vmap or mask_function not in (causal_mask_function, bidirectional_mask_function):
        if use_vmap or getattr(mask_function, "__code__", None) is not _INTERSECTION:
            raise _refused("this model's mask", "take a model with causal or bidirectional attention")
    window = None
    if local_size is not None and local_size < kv_length:
        window = _window_of(config, local_size, kv_length, mask_function, device)
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise _refused("attention over a cache of fixed length", _GENERATE)
    starts = None
    if mask_function not in (causal_mask_function, bidirectional_mask_function) and q_length == kv_length > 1:
        starts = _packed_starts(mask_function, batch_size, q_length, device)
    if attention_mask is not None:
        if attention_mask.shape[-1] != kv_length:
            raise _refused("a mask shorter than the keys", _GENERATE)
        padded = _padding_starts(attention_mask)
        crossed = any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention"))
        if padded is not None and crossed and mask_function is not causal_mask_function:
            # The mask may be of an encoder's tokens for the queries of a decoder, which are as many by chance.
            raise _refused("padding of an encoder whose tokens a decoder attends to", "take batches of one length")
        starts = padded if starts is None else starts if padded is None else starts | padded
    if starts is None:
        if window is None:
            return None
        bounds = document_bounds(None, kv_length, window, device)
        if q_length != kv_length:
            bounds = chunk_bounds(bounds, 1, kv_length - q_length, q_length)
        return bounds.unsqueeze(1)
    if q_length != kv_length:
        raise _refused("padding where there are other keys than queries (a cache, cross-attention)", _GENERATE)
    return bounds_of(starts, window)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asks(config: type) -> bool:
    """Return whether models of a class of configurations say that they ask for an attention implementation. Most others
    add the mask to their own scores, where no mask means that a token sees all. Unknown models are taken to ask."""
    return _known_to_ask(config)


@functools.cache
def _known_to_ask(config: type) -> bool:
    classes: list[type[PreTrainedModel]] = [PreTrainedModel]
    for each in classes:
        classes += each.__subclasses__()
    models = [each for each in classes if each.config_class is config]
    return not models or any(each._supports_attention_backend or each._supports_sdpa for each in models)


def _window_of(
    config: Any, local_size: int, length: int, mask_function: MaskFunction, device: torch.device | None
) -> int:
    """Return local_size if it is a window, and refuse chunks and windows on both sides. Masks of windows and of chunks
    have the same form, so the configuration tells them apart."""
    chunks = getattr(config, "attention_chunk_size", None) is not None
    if chunks or getattr(config, "sliding_window", None) != local_size:
        raise _refused(f"chunks of {local_size} over {length} tokens", "take shorter sequences")
    token = torch.arange(length - 1, device=device)[None, :]
    if not _recorded(token):
        if mask_function(torch.zeros_like(token), torch.zeros_like(token), token, token + 1).any():
            raise _refused(f"a sliding window of {local_size} on both sides", "take shorter sequences")
    return local_size


_INTERSECTION = and_masks(causal_mask_function).__code__
"""The code of masks that are intersections of others, as those of packed documents and of windows are."""


def _packed_starts(mask_function: MaskFunction, batch: int, length: int, device: torch.device | None) -> Tensor | None:
    """Return where documents begin, bool [batch, length]: where a token does not see the one before it."""
    rows = torch.arange(batch, device=device)[:, None]
    tokens = torch.arange(1, length, device=device)[None, :]
    sees = mask_function(rows, torch.zeros_like(rows), tokens, tokens - 1)
    return _unless_empty(~sees.expand(batch, -1))


def _padding_starts(attention_mask: Tensor) -> Tensor | None:
    """Return where padding or tokens begin, bool [batch, length]. The tokens of a row have to lie together, because
    attention does not reach over a gap."""
    keep = attention_mask.bool()
    changes = keep[:, 1:] != keep[:, :-1]
    runs = keep[:, 0].int() + (changes & keep[:, 1:]).sum(1)
    message = "attention_mask: the tokens of a row must lie together, with padding before or after them alone"
    if torch.compiler.is_compiling():
        torch._assert_async((runs <= 1).all(), message)
    elif (runs > 1).any():
        raise ValueError(message)
    return _unless_empty(changes)


def _bounds_of_positions(position_ids: Any, batch: int, length: int, window: int | None) -> Tensor | None:
    """Return the bounds of the documents that begin where position_ids do not rise by one, and of the window. None:
    there is one document in each row."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != length:
        return None
    if torch.compiler.is_compiling() or position_ids.is_inference():
        return _found_bounds(position_ids, batch, window)
    return _remembered(position_ids, batch, window)


def _found_bounds(position_ids: Tensor, batch: int, window: int | None) -> Tensor | None:
    starts = _unless_empty((position_ids.diff() != 1).expand(batch, -1))
    return None if starts is None else bounds_of(starts, window)


class _Last(threading.local):
    """The documents of the last position_ids of a thread. All layers of a model get the same tensor, and the host waits
    for it once. nn.DataParallel runs its replicas in threads."""

    found: tuple[weakref.ref[Tensor], tuple[int, int], dict[int | None, Tensor | None]] | None = None
    """The position_ids, their version and the batch, and the bounds for each window."""


_LAST = _Last()


def _remembered(position_ids: Tensor, batch: int, window: int | None) -> Tensor | None:
    kind, last = (position_ids._version, batch), _LAST.found
    if last is None or last[0]() is not position_ids or last[1] != kind:
        last = _LAST.found = weakref.ref(position_ids), kind, {}
    if window not in last[2]:
        last[2][window] = _found_bounds(position_ids, batch, window)
    return last[2][window]


def _recorded(x: Tensor) -> bool:
    """Return whether the host must not wait for the value of a tensor."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _unless_empty(changes: Tensor) -> Tensor | None:
    """Return starts [batch, length] from those of all tokens but the first of each row. None: there are none, which is
    found out only where the host may wait for the device."""
    if not _recorded(changes) and not changes.any():
        return None
    return torch.cat((torch.ones_like(changes[:, :1]), changes), 1)


def bounds_of(starts: Tensor, window: int | None = None) -> Tensor:
    """Return the bounds that sage_attention takes, int32 [2, batch * length], from where documents begin, bool [batch,
    length], and the window. The first token of each row begins a document."""
    flat = starts.flatten()
    index = torch.arange(len(flat), device=flat.device)
    first = torch.where(flat, index, 0).cummax(0).values
    # One past the last token of a document is the next start, which is looked for from the end.
    later = torch.where(flat, index, len(flat)).roll(-1)
    later[-1].fill_(len(flat))  # `later[-1] = n` copies n from the host, which no CUDA graph records.
    end = later.flip(0).cummin(0).values.flip(0)
    bounds = torch.stack((first, end)).to(torch.int32)
    return bounds if window is None else windowed(bounds, window)

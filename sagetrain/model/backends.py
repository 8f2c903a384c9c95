"""Attention functions: softmax(q k^T) v by INT8 kernels, torch, flash-attn or plain matmuls. Each is a value,
and selection.py says which one runs.

Shape letters: B sequences, S tokens of a sequence, T tokens of this rank (B * S, or a slice of every sequence under
context parallelism), N query heads and M key/value heads, K head dim.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagekernels import attention_reference, document_bounds, normed_attention, sage_attention
from sagekernels.call import RECIPES, RecipeName
from sagetrain.config.schema import AttentionConfig

Documents = Literal["cu_seqlens", "bounds", "mask", "delta_chunks"]
"""The field of TokenLayout that an attention function reads where attention stays within documents."""

Product = Literal["Q K^T", "P V", "Q K^T again", "P^T dO", "dO V^T", "dS K", "dS^T Q"]
"""The seven matrix products of attention: two of the forward pass, five of the backward pass, in their order."""


class TokenLayout(NamedTuple):
    """The division of the flat tokens into sequences and documents. There is one for each forward pass, shared by all
    blocks with the same window and rotary embedding."""

    num_sequences: int
    cos: Tensor
    """The cosines of the rotation angles, fp32 [T, 1, K / 2]."""
    sin: Tensor
    """The sines of the rotation angles, fp32 [T, 1, K / 2]."""
    cu_seqlens: Tensor | None
    """The boundaries of documents, int32 [documents + 1] over all B * S tokens. None: attention within each sequence,
    whatever the documents. With a window they are always there."""
    max_seqlen: int | None
    """The most tokens that a document may have. None: not known."""
    mask: Tensor | None
    """The mask of documents, bool [B, 1, S, S], True where a query sees a key. None: no layer's function wants it."""
    bounds: Tensor | None
    """The result of `document_bounds`, int32 [2, B * S]. None: no layer's function wants it."""
    delta_chunks: Tensor | None = None
    """The result of `document_chunks`, int32 [chunks, 2]. None: no layer's function wants it."""
    window: int | None = None
    """Tokens that a query sees, its own included. None: all before it. Mask and bounds have the window already."""
    varlen: tuple[Tensor, Tensor] | None = None
    """The boundaries of the queries and of the keys of each document, int32 [documents + 1] each, where the queries are
    a chunk of each sequence and the keys are those up to its end. Then cu_seqlens is None, and bounds are those that
    sage_attention takes for queries and keys that are different tokens."""
    tokens: Tensor | None = None
    """The tokens themselves, int64 [T]. None: no layer adds embeddings of them to values."""
    chunks: tuple[TokenLayout, TokenLayout] | None = None
    """The layouts of this rank's two chunks of queries, where it gathers keys."""

    @property
    def packed(self) -> bool:
        """Whether the rows of q, k and v are put behind each other, as sagekernels takes documents."""
        return self.cu_seqlens is not None or (self.varlen is not None and self.bounds is not None)


def token_layout(
    wanted: Collection[Documents],
    num_sequences: int,
    num_tokens: int,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    window: int | None = None,
) -> TokenLayout:
    """Build the layout of whole sequences of `num_tokens` tokens in all, with the wanted forms of the documents."""
    length = num_tokens // num_sequences
    if window is not None and window >= length:
        window = None
    if window is not None and cu_seqlens is None:  # One form is enough: every sequence is a document.
        cu_seqlens = length * torch.arange(num_sequences + 1, dtype=torch.int32, device=cos.device)
    mask = bounds = chunks = None
    if cu_seqlens is not None:
        mask = document_mask(cu_seqlens, num_sequences, num_tokens, window) if "mask" in wanted else None
        bounds = document_bounds(cu_seqlens, num_tokens, window) if "bounds" in wanted else None
        chunks = document_chunks(cu_seqlens, num_tokens) if "delta_chunks" in wanted else None
    return TokenLayout(num_sequences, cos, sin, cu_seqlens, max_seqlen, mask, bounds, chunks, window)


def document_mask(cu_seqlens: Tensor, num_sequences: int, num_tokens: int, window: int | None = None) -> Tensor:
    """Return the mask bool [B, 1, S, S] of causal attention within documents, and within a window. Documents must not
    span sequences."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    document_BS = torch.searchsorted(cu_seqlens, tokens.to(cu_seqlens.dtype), right=True).view(num_sequences, -1)
    same = (document_BS.unsqueeze(-1) == document_BS.unsqueeze(-2)).tril()
    return (same if window is None else same.triu(1 - window)).unsqueeze(1)


def document_chunks(cu_seqlens: Tensor, num_tokens: int, size: int = 64) -> Tensor:
    """Return the document of each chunk of `size` tokens and the number of the chunk in it, int32 [chunks, 2].

    There are as many chunks as these documents could have with other lengths, so that the host need not read any. The
    chunks left over are behind the end of the last document, where the kernels of fla write nothing.
    """
    counts = (cu_seqlens.diff() + (size - 1)) // size
    firsts = F.pad(counts.cumsum(0), (1, 0))
    places = torch.arange(num_tokens // size + len(counts), device=cu_seqlens.device)
    documents = (torch.searchsorted(firsts, places, right=True) - 1).clamp(max=len(counts) - 1)
    return torch.stack((documents, places - firsts[documents]), 1).to(cu_seqlens.dtype)


class Projected(NamedTuple):
    """q, k and v as their projection made them, and the rest of what QK-norm needs."""

    q: Tensor
    """[T, N * K]."""
    k: Tensor
    """[T, M * K]."""
    v: Tensor
    """[T, M * K]."""
    q_gain: Tensor
    k_gain: Tensor
    eps: float


class AttentionFunction:
    """Causal attention as a value: (q [B, S, N, K], k [B, S, M, K], v [B, S, M, K], layout) -> o [B, S, N, K].

    Every layer has an attention function. Functions of one kind with the same settings are equal, and torch.compile
    does not tell them apart. Layers may have different functions, and get others while training; each function has one
    graph.
    """

    name: ClassVar[str]
    """The name of the function in attention.backend."""
    documents: ClassVar[Documents] = "cu_seqlens"
    """The field of TokenLayout that the function reads."""
    traceable: ClassVar[bool] = True
    """Whether torch.compile can trace the function. Otherwise it compiles the pieces of the block around the
    function."""
    normalizes: ClassVar[bool] = False
    """Whether the function can apply QK-norm and then the rotary embedding itself (`normed`)."""

    def wants(self, window: bool) -> Documents:
        """Return the field of TokenLayout that the function reads, in layers with a window or in others."""
        return self.documents

    @property
    def quantized(self) -> frozenset[Product]:
        """The products that are computed in INT8."""
        return frozenset()

    @property
    def reference(self) -> AttentionFunction:
        """The function in the precision of its inputs, against which the error of quantization is measured."""
        return Reference()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        return self.with_sinks(q, k, v, layout, None)

    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, sinks: Tensor | None) -> Tensor:
        """Run the function with a sink for each head of q, [N]. The functions of WITH_SINKS have them."""
        raise NotImplementedError(f"attention.backend {self.name} has no sinks")

    def normed(self, projected: Projected, layout: TokenLayout) -> Tensor:
        """Run the function on what QK-norm and the rotary embedding make of q and k, and return o [B, S, N, K]. It is
        there where `normalizes` is set."""
        raise NotImplementedError


FIXED_RECIPE: RecipeName = "fine"
"""The recipe that `auto` becomes where nothing is timed: without a GPU, and in a model that belongs to no run."""


def attention_function(backend: str, attention: AttentionConfig, device: torch.device) -> AttentionFunction:
    """Return the attention function of a backend name that selection.py returned. Raises ValueError if the name is
    unknown."""
    on_gpu = torch.device(device).type == "cuda"
    match backend:
        case "sage":
            recipe = FIXED_RECIPE if attention.recipe == "auto" else attention.recipe
            return Sage(recipe, attention.smooth_k)
        case "sdpa":
            varlen_attn = find_varlen_attn() if on_gpu else None
            return VarlenSdpa.of(varlen_attn) if varlen_attn else Sdpa()
        case "flash":
            flash = find_flash(torch.device(device))
            assert flash is not None, "resolve_backend has looked"
            return Flash(flash[1])
        case "reference":
            return Reference()
    raise ValueError(f"unknown attention backend {backend!r}")


# -- sage and reference ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sage(AttentionFunction):
    """Trainable INT8 attention by sagekernels."""

    name = "sage"
    documents = "bounds"
    normalizes = True
    recipe: RecipeName = "fine"
    smooth_k: bool = True

    @property
    def quantized(self) -> frozenset[Product]:
        recipe = RECIPES[self.recipe]
        products: set[Product] = {"Q K^T", "Q K^T again"}
        products |= {"P V"} if recipe.int8_pv else set()
        products |= {"P^T dO", "dS K", "dS^T Q"} if recipe.int8_gradients else set()
        return frozenset(products)

    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, sinks: Tensor | None) -> Tensor:
        q, k, v = as_rows(q, layout), as_rows(k, layout), as_rows(v, layout)
        o = sage_attention(
            q,
            k,
            v,
            causal=layout.varlen is None or not layout.packed,
            bounds=layout.bounds,
            sinks=sinks,
            recipe=self.recipe,
            smooth_k=self.smooth_k,
        )
        return as_sequences(o, layout)

    def normed(self, projected: Projected, layout: TokenLayout) -> Tensor:
        q, k, v, q_gain, k_gain, eps = projected
        o = normed_attention(
            q,
            k,
            v,
            q_gain,
            k_gain,
            layout.cos,
            layout.sin,
            eps,
            batch=layout.num_sequences if layout.cu_seqlens is None else 1,
            causal=True,
            bounds=layout.bounds,
            recipe=self.recipe,
            smooth_k=self.smooth_k,
        )
        return as_sequences(o, layout)


@dataclass(frozen=True)
class Reference(AttentionFunction):
    """Attention by plain matmuls."""

    name = "reference"

    def wants(self, window: bool) -> Documents:
        return "bounds" if window else "cu_seqlens"

    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, sinks: Tensor | None) -> Tensor:
        q, k, v = as_rows(q, layout), as_rows(k, layout), as_rows(v, layout)
        bounds = None if layout.window is None and layout.varlen is None else layout.bounds
        causal = layout.varlen is None or not layout.packed
        o = attention_reference(q, k, v, causal=causal, cu_seqlens=layout.cu_seqlens, bounds=bounds, sinks=sinks)
        return as_sequences(o, layout)


def as_rows(x: Tensor, layout: TokenLayout) -> Tensor:
    """Put packed documents into a batch of one, as sagekernels takes them: [B, S, ...] -> [1, T, ...]. Return x itself
    without documents."""
    return x.flatten(0, 1).unsqueeze(0) if layout.packed else x


def as_sequences(x: Tensor, layout: TokenLayout) -> Tensor:
    """Undo `as_rows`."""
    return x.squeeze(0).unflatten(0, (layout.num_sequences, -1)) if layout.packed else x


# -- torch -------------------------------------------------------------------------------------------------------

_SDPA_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Sdpa(AttentionFunction):
    """Attention by torch's scaled_dot_product_attention, with a mask for documents."""

    name = "sdpa"
    documents: ClassVar[Documents] = "mask"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # torch.compile may take the numbers of heads as unknown, if a model with others was compiled before. A branch
        # makes a constant of the comparison, which has to be a bool.
        mask, gqa = layout.mask, False
        if q.shape[1] != k.shape[1]:
            gqa = True
        with sdpa_kernel(_SDPA_PRIORITY, set_priority=True):
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
        return o.transpose(1, 2)


@dataclass(frozen=True)
class VarlenSdpa(Sdpa):
    """Attention by torch's kernels for packed documents, and by scaled_dot_product_attention without documents."""

    documents: ClassVar[Documents] = "cu_seqlens"
    varlen_attn: Callable[..., Tensor]
    takes_window: bool
    """Whether causality is given by a window, as since torch 2.11, and not by a flag."""
    takes_groups: bool
    """Whether k and v may have fewer heads than q."""

    @classmethod
    def of(cls, varlen_attn: Callable[..., Tensor]) -> VarlenSdpa:
        """Build the function from the parameters that varlen_attn takes in this torch."""
        parameters = inspect.signature(varlen_attn).parameters
        return cls(varlen_attn, "window_size" in parameters, "enable_gqa" in parameters)

    def wants(self, window: bool) -> Documents:
        return "mask" if window and not self.takes_window else "cu_seqlens"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        ends_q, ends_k = layout.varlen or (layout.cu_seqlens, layout.cu_seqlens)
        if ends_q is None or (layout.window is not None and not self.takes_window):
            return super().__call__(q, k, v, layout)
        back = -1 if layout.window is None else layout.window - 1
        options: dict[str, Any] = {"window_size": (back, 0)} if self.takes_window else {"is_causal": True}
        if self.takes_groups:
            options["enable_gqa"] = True
        elif q.shape[2] != k.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        longest = [layout.max_seqlen or x.shape[1] for x in (q, k)]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        o = self.varlen_attn(*flat, ends_q, ends_k, *longest, **options)
        return o.view(q.shape)


def find_varlen_attn() -> Callable[..., Tensor] | None:
    """Return torch's attention over packed documents, or None where torch has none."""
    try:
        found: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:  # torch is older than 2.10
        return None
    return found


# -- flash-attn --------------------------------------------------------------------------------------------------

_FLASH_PACKAGES = (("4", "flash_attn.cute", 9), ("3", "flash_attn_interface", 9), ("2", "flash_attn", 8))
"""The version, module and least major compute capability of each flash-attn package, the fastest first."""


def find_flash(device: torch.device) -> tuple[str, ModuleType] | None:
    """Return version and module of the fastest flash-attn that is installed and runs on this GPU. None: there is
    none."""
    major, _ = torch.cuda.get_device_capability(device)
    for version, name, least_major in _FLASH_PACKAGES:
        if major < least_major:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        # An installation of flash-attn 4 alone makes `flash_attn` an empty package.
        if hasattr(module, "flash_attn_varlen_func"):
            return version, module
    return None


@dataclass(frozen=True)
class Flash(AttentionFunction):
    """Attention by an installed flash-attn 2, 3 or 4."""

    name = "flash"
    traceable = False  # torch.compile cannot trace every version
    package: ModuleType

    # torch.compiler.disable would import the compiler at once, which takes a second.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        ends_q, ends_k = layout.varlen or (layout.cu_seqlens, layout.cu_seqlens)
        if ends_q is None:
            o = self.package.flash_attn_func(q, k, v, causal=True)
        else:
            longest = [layout.max_seqlen or x.shape[1] for x in (q, k)]
            window = {} if layout.window is None else {"window_size": (layout.window - 1, 0)}
            o = self.package.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (q, k, v)),
                cu_seqlens_q=ends_q,
                cu_seqlens_k=ends_k,
                max_seqlen_q=longest[0],
                max_seqlen_k=longest[1],
                causal=True,
                **window,
            )
        # Version 4 and some releases of version 3 return the log-sum-exp too.
        o = o[0] if isinstance(o, tuple) else o
        viewed: Tensor = o.view(q.shape)
        return viewed

"""Attention functions: softmax(q k^T) v by INT8 kernels, torch, flash-attn or plain matmuls, each one a value; and
which of them a backend's name stands for here.

Shape letters: B sequences, S tokens of a sequence, T tokens of this rank (B * S, or a slice of every sequence under
context parallelism), N query heads and M key/value heads, K head dim.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagekernels import attention_reference, document_bounds, sage_attention
from sagekernels.admission import LIMITS, choose
from sagekernels.hopper_backward import KEYS
from sagekernels.launch import is_hopper
from sagekernels.reference import RECIPES
from sagekernels.testing import Shape
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.accounting import attention_calls

Documents = Literal["cu_seqlens", "bounds", "mask"]
"""What an attention function reads of TokenLayout where attention stays within documents."""

Product = Literal["Q K^T", "P V", "Q K^T again", "P^T dO", "dO V^T", "dS K", "dS^T Q"]
"""The seven matrix products of attention: two of the forward pass, five of the backward pass, in their order."""


class TokenLayout(NamedTuple):
    """How the flat tokens fall into sequences and documents; one per forward pass, shared by all blocks."""

    num_sequences: int
    cos: Tensor
    """fp32 [T, 1, K / 2]."""
    sin: Tensor
    """fp32 [T, 1, K / 2]."""
    cu_seqlens: Tensor | None
    """int32 [documents + 1] over all B * S tokens; None: attention within each sequence, whatever the documents."""
    max_seqlen: int | None
    """No document has more tokens."""
    mask: Tensor | None
    """bool [B, 1, S, S], True where a query sees a key; None where no layer's function wants it."""
    bounds: Tensor | None
    """int32 [2, B * S], of sagekernels.document_bounds; None where no layer's function wants them."""


def token_layout(
    wanted: Collection[Documents],
    num_sequences: int,
    num_tokens: int,
    cos: Tensor | None,
    sin: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> TokenLayout:
    """The layout of whole sequences of so many tokens together, with what is wanted to be known of documents."""
    known = cu_seqlens is not None
    mask = document_mask(cu_seqlens, num_sequences, num_tokens) if known and "mask" in wanted else None
    bounds = document_bounds(cu_seqlens, num_tokens) if known and "bounds" in wanted else None
    return TokenLayout(num_sequences, cos, sin, cu_seqlens, max_seqlen, mask, bounds)


def document_mask(cu_seqlens: Tensor, num_sequences: int, num_tokens: int) -> Tensor:
    """bool [B, 1, S, S]: causal, and within one document. Documents must not span sequences."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    document_BS = torch.searchsorted(cu_seqlens, tokens.to(cu_seqlens.dtype), right=True).view(num_sequences, -1)
    same = document_BS.unsqueeze(-1) == document_BS.unsqueeze(-2)
    return same.tril().unsqueeze(1)


class AttentionFunction:
    """Causal attention as a value: (q [B, S, N, K], k [B, S, M, K], v [B, S, M, K], layout) -> o [B, S, N, K].

    Every layer has one. Functions of one kind with the same settings are equal, and torch.compile makes no difference
    between them: layers may have different ones, and get others while training, and there is one graph for each.
    """

    name: ClassVar[str]
    """As attention.backend names it."""
    documents: ClassVar[Documents] = "cu_seqlens"
    """What it reads of TokenLayout."""
    traceable: ClassVar[bool] = True
    """Whether torch.compile can look into it; otherwise it compiles the block in two halves around it."""

    @property
    def quantized(self) -> frozenset[Product]:
        """The products that are computed in INT8."""
        return frozenset()

    @property
    def reference(self) -> AttentionFunction:
        """The same in the precision of its inputs, as a measure of what quantization costs."""
        return Reference()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        raise NotImplementedError


def attention_function(backend: str, attention: AttentionConfig, device: torch.device) -> AttentionFunction:
    """The function behind a name that resolve_backend or choose_backend returned."""
    on_gpu = torch.device(device).type == "cuda"
    match backend:
        case "sage":
            return Sage(attention.recipe, attention.smooth_k, attention.smooth_q)
        case "sdpa":
            varlen_attn = _find_varlen_attn() if on_gpu else None
            return VarlenSdpa.of(varlen_attn) if varlen_attn else Sdpa()
        case "flash":
            return Flash(_find_flash(torch.device(device))[1])
        case "reference":
            return Reference()
    raise ValueError(f"unknown attention backend {backend!r}")


# -- sage and reference ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sage(AttentionFunction):
    """Trainable INT8 attention: sagekernels."""

    name = "sage"
    documents = "bounds"
    recipe: str = "fine"
    smooth_k: bool = True
    smooth_q: bool = False

    @property
    def quantized(self) -> frozenset[Product]:
        recipe = RECIPES[self.recipe]
        products = {"Q K^T", "Q K^T again"}
        products |= {"P V"} if recipe.int8_pv else set()
        products |= {"P^T dO", "dS K", "dS^T Q"} if recipe.int8_gradients else set()
        return frozenset(products)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        q, k, v = _as_rows(q, layout), _as_rows(k, layout), _as_rows(v, layout)
        how = {"recipe": self.recipe, "smooth_k": self.smooth_k, "smooth_q": self.smooth_q}
        return _as_sequences(sage_attention(q, k, v, causal=True, bounds=layout.bounds, **how), layout)


@dataclass(frozen=True)
class Reference(AttentionFunction):
    """Plain matmuls."""

    name = "reference"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        q, k, v = _as_rows(q, layout), _as_rows(k, layout), _as_rows(v, layout)
        return _as_sequences(attention_reference(q, k, v, causal=True, cu_seqlens=layout.cu_seqlens), layout)


def _as_rows(x: Tensor, layout: TokenLayout) -> Tensor:
    """sagekernels takes packed documents in a batch of one: [B, S, ...] -> [1, T, ...]; without documents x itself."""
    return x if layout.cu_seqlens is None else x.flatten(0, 1).unsqueeze(0)


def _as_sequences(x: Tensor, layout: TokenLayout) -> Tensor:
    return x if layout.cu_seqlens is None else x.squeeze(0).unflatten(0, (layout.num_sequences, -1))


# -- torch -------------------------------------------------------------------------------------------------------

_SDPA_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Sdpa(AttentionFunction):
    """torch's scaled_dot_product_attention, documents by a mask."""

    name = "sdpa"
    documents = "mask"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask, gqa = layout.mask, q.shape[1] != k.shape[1]
        with sdpa_kernel(_SDPA_PRIORITY, set_priority=True):
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
        return o.transpose(1, 2)


@dataclass(frozen=True)
class VarlenSdpa(Sdpa):
    """The same, with torch's kernels for packed documents."""

    documents = "cu_seqlens"
    varlen_attn: Callable[..., Tensor]
    takes_window: bool
    """Causality by a window, as of torch 2.11, not by a flag."""
    takes_groups: bool
    """Fewer heads of k and v than of q."""

    @classmethod
    def of(cls, varlen_attn: Callable[..., Tensor]) -> VarlenSdpa:
        """By what its signature knows."""
        parameters = inspect.signature(varlen_attn).parameters
        return cls(varlen_attn, "window_size" in parameters, "enable_gqa" in parameters)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        if layout.cu_seqlens is None:
            return super().__call__(q, k, v, layout)
        options = {"window_size": (-1, 0)} if self.takes_window else {"is_causal": True}
        if self.takes_groups:
            options["enable_gqa"] = True
        elif q.shape[2] != k.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        longest = layout.max_seqlen or q.shape[1]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        o = self.varlen_attn(*flat, layout.cu_seqlens, layout.cu_seqlens, longest, longest, **options)
        return o.view(q.shape)


def _find_varlen_attn() -> Callable[..., Tensor] | None:
    """torch's attention over packed documents."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn


# -- flash-attn --------------------------------------------------------------------------------------------------

_FLASH_PACKAGES = (("4", "flash_attn.cute", 9), ("3", "flash_attn_interface", 9), ("2", "flash_attn", 8))
"""Version, module, least major compute capability; the fastest first."""


def _find_flash(device: torch.device) -> tuple[str, ModuleType] | None:
    """Version and module of the fastest flash-attn that is installed and runs on this GPU."""
    major, _ = torch.cuda.get_device_capability(device)
    for version, name, least_major in _FLASH_PACKAGES:
        if major < least_major:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "flash_attn_varlen_func"):  # flash-attn 4 alone makes `flash_attn` an empty package
            return version, module
    return None


@dataclass(frozen=True)
class Flash(AttentionFunction):
    """An installed flash-attn, 2, 3 or 4."""

    name = "flash"
    traceable = False  # not in every version
    package: ModuleType

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        cu_seqlens = layout.cu_seqlens
        if cu_seqlens is None:
            o = self.package.flash_attn_func(q, k, v, causal=True)
        else:
            longest = layout.max_seqlen or q.shape[1]
            o = self.package.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (q, k, v)),
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                causal=True,
            )
        o = o[0] if isinstance(o, tuple) else o  # 4 and some releases of 3 return the log-sum-exp too
        return o.view(q.shape)


# -- which one runs ----------------------------------------------------------------------------------------------


def resolve_backend(
    attention: AttentionConfig, model: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """The backend that will run, one of sage, sdpa, flash and reference, and one line that says why or how.

    Raises:
        ValueError: the backend cannot run on this device or in this dtype, or its package is not installed.
    """
    on_gpu = torch.device(device).type == "cuda"
    sixteen_bit = dtype in (torch.bfloat16, torch.float16)
    match attention.backend:
        case "sage" if not 16 <= model.head_dim <= 256:
            raise ValueError(f"attention.backend sage supports head_dim 16 to 256, not {model.head_dim}; use sdpa")
        case "sage" if not on_gpu:
            return "sage", f"INT8 recipe {attention.recipe}: its torch twin, since there is no GPU; exact but slow"
        case "sage" if not sixteen_bit:
            raise ValueError("attention.backend sage needs training.dtype bf16 on a GPU; use bf16, or backend sdpa")
        case "sage":
            faster = ""
            tuned = model.head_dim in KEYS and torch.cuda.is_available() and is_hopper(device)
            if tuned and attention.recipe != "scores":
                faster = "; on this GPU recipe scores is much faster (README.md)"
            return "sage", f"INT8 recipe {attention.recipe}: sagekernels{faster}"
        case "flash":
            if not (on_gpu and sixteen_bit):
                raise ValueError("attention.backend flash needs a GPU and training.dtype bf16; use backend sdpa")
            flash = _find_flash(torch.device(device))
            if flash is None:
                raise ValueError(
                    "attention.backend flash: no flash-attn package for this GPU; install flash-attn-4, or use sdpa"
                )
            return "flash", f"flash-attn {flash[0]}"
        case "sdpa" if on_gpu:
            documents = "varlen_attn" if _find_varlen_attn() else "a mask (varlen_attn needs torch 2.10)"
            return "sdpa", f"torch's SDPA, cuDNN first, then flash; documents through {documents}"
        case "sdpa":
            return "sdpa", "torch's SDPA; documents through a mask"
        case "reference":
            return "reference", "plain matmuls"
        case "auto" if on_gpu and sixteen_bit:
            return "auto", "to be chosen by choose_backend"
        case "auto":
            return "sdpa", "auto: nothing to choose from without a GPU and bf16"


def choose_backend(
    attention: AttentionConfig,
    model: ModelConfig,
    *,
    tensor_parallel_size: int,
    context_parallel_size: int,
    overlap: bool,
    num_sequences: int,
    seq_length: int,
    documents: Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype,
    cache: Path,
    say: Callable[[str], None],
) -> str:
    """What backend `auto` stands for: the fastest of sage, flash and sdpa, forward and backward together, at the shape
    of one rank's calls, among those whose output and gradients pass sagekernels' admission test on this device.

    The table goes to `say`; the choice is kept in the file `cache`, so that a run which continues keeps its backend.

    Args:
        documents: of some sequences of the data, the lengths of the documents in each. Timed are those whose attention
            costs about the median. Empty: attention crosses documents.

    Raises:
        RuntimeError: none is admitted; the message holds every candidate's reason.
    """
    heads_split, candidates = tensor_parallel_size * context_parallel_size, {}
    own_tokens = num_sequences * seq_length // context_parallel_size
    num_sequences //= attention_calls(num_sequences, own_tokens, tensor_parallel_size, overlap)
    for name in ("sage", "flash", "sdpa"):
        named = attention.model_copy(update={"backend": name})
        try:
            resolve_backend(named, model, device=device, dtype=dtype)
        except ValueError:  # not installed here
            continue
        candidates[name] = _plain(attention_function(name, named, device))
    packed = _typical(documents, num_sequences)
    row = num_sequences * seq_length if packed else seq_length
    shape = Shape(
        batch=1 if packed else num_sequences,
        n_q=row,
        n_k=row,
        heads=model.num_attention_heads // heads_split,
        kv_heads=model.num_key_value_heads // heads_split,
        head_dim=model.head_dim,
        documents=packed,
    )
    limits, options = LIMITS[attention.recipe], repr(attention.model_copy(update={"backend": "sage"}))
    return choose(candidates, shape, dtype=dtype, device=device, cache=cache, limits=limits, options=options, say=say)


def _typical(documents: Sequence[Sequence[int]], num_sequences: int) -> tuple[int, ...]:
    """Lengths of the documents of so many of these sequences, from the middle when they are ordered by their work."""
    ordered = sorted(documents, key=lambda lengths: sum(n * n for n in lengths))
    first = max(0, len(ordered) - num_sequences) // 2
    return tuple(n for lengths in islice(cycle(ordered), first, first + num_sequences) for n in lengths)


def _plain(function: AttentionFunction) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """A function as sagekernels' admission calls it: one row, documents by cu_seqlens alone."""

    @functools.cache  # a problem has one tensor of them, and waiting for the GPU would be timed
    def longest(cu_seqlens: Tensor) -> int:
        return int(cu_seqlens.diff().max())

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        num_sequences, num_tokens = q.shape[0], q.shape[0] * q.shape[1]
        max_seqlen = None if cu_seqlens is None else longest(cu_seqlens)
        wanted = {function.documents}
        return function(q, k, v, token_layout(wanted, num_sequences, num_tokens, None, None, cu_seqlens, max_seqlen))

    return call

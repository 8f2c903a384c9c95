"""Self-attention: projections, QK-norm, rotary embedding, and the backends that compute softmax(q k^T) v.

Shape letters: B sequences of the micro-batch, S tokens of a sequence, T tokens of this rank (B * S, or a slice of every
sequence under context parallelism), D hidden size, N query heads and M key/value heads on this rank, K head dim.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagekernels import attention_reference, document_bounds, sage_attention
from sagekernels.admission import LIMITS, choose
from sagekernels.hopper_backward import KEYS
from sagekernels.launch import is_hopper
from sagekernels.testing import Shape
from sagetrain.config.schema import AttentionConfig, ModelConfig
from sagetrain.model.accounting import attention_calls
from sagetrain.model.norm import RMSNorm
from sagetrain.model.rotary import apply_rotary
from sagetrain.parallel.collectives import Pending, gather_heads, scatter_heads
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear
from sagetrain.parallel.topology import ParallelGroups


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
    """bool [B, 1, S, S], True where a query sees a key; only for a backend that takes no cu_seqlens."""
    bounds: Tensor | None
    """int32 [2, B * S], of sagekernels.document_bounds; only for sage, which takes them instead of cu_seqlens."""


def document_mask(cu_seqlens: Tensor, num_sequences: int, num_tokens: int) -> Tensor:
    """bool [B, 1, S, S]: causal, and within one document. Documents must not span sequences."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    document_BS = torch.searchsorted(cu_seqlens, tokens.to(cu_seqlens.dtype), right=True).view(num_sequences, -1)
    same = document_BS.unsqueeze(-1) == document_BS.unsqueeze(-2)
    return same.tril().unsqueeze(1)


AttentionFunction = Callable[[Tensor, Tensor, Tensor, TokenLayout], Tensor]
"""Causal attention: (q [B, S, N, K], k [B, S, M, K], v [B, S, M, K], layout) -> [B, S, N, K]."""


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
            documents = "varlen_attn" if _varlen_attn() else "a mask (varlen_attn needs torch 2.10)"
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
    packed: bool,
    device: torch.device,
    dtype: torch.dtype,
    cache: Path,
    say: Callable[[str], None],
) -> str:
    """What backend `auto` stands for: the fastest of sage, flash and sdpa, forward and backward together, at the shape
    of one rank's calls, among those whose output and gradients pass sagekernels' admission test on this device.

    The table goes to `say`; the choice is kept in the file `cache`, so that a run which continues keeps its backend.

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
        candidates[name] = _plain(name, attention_function(name, named, device))
    shape = Shape(
        batch=1 if packed else num_sequences,
        n_q=num_sequences * seq_length if packed else seq_length,
        n_k=num_sequences * seq_length if packed else seq_length,
        heads=model.num_attention_heads // heads_split,
        kv_heads=model.num_key_value_heads // heads_split,
        head_dim=model.head_dim,
        documents=(seq_length,) * num_sequences if packed else (),
    )
    limits, options = LIMITS[attention.recipe], repr(attention.model_copy(update={"backend": "sage"}))
    return choose(candidates, shape, dtype=dtype, device=device, cache=cache, limits=limits, options=options, say=say)


def _plain(backend: str, attend: AttentionFunction) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """A backend as sagekernels' admission calls it: documents by cu_seqlens alone."""

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        num_sequences, seq_length = q.shape[:2]
        what = backend, num_sequences, num_sequences * seq_length, None, None, cu_seqlens, seq_length
        return attend(q, k, v, token_layout(*what, masked=takes_mask(attend)))

    return call


def attention_function(backend: str, attention: AttentionConfig, device: torch.device) -> AttentionFunction:
    """The function behind a name that resolve_backend returned."""
    on_gpu = torch.device(device).type == "cuda"
    match backend:
        case "sage":
            return _sage_function(attention)
        case "sdpa":
            varlen_attn = _varlen_attn() if on_gpu else None
            return _varlen_sdpa_function(varlen_attn) if varlen_attn else _sdpa
        case "flash":
            return _flash_function(_find_flash(torch.device(device))[1])
        case "reference":
            return _reference
    raise ValueError(f"unknown attention backend {backend!r}")


def token_layout(
    backend: str,
    num_sequences: int,
    num_tokens: int,
    cos: Tensor | None,
    sin: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    *,
    masked: bool,
) -> TokenLayout:
    """The layout of whole sequences of so many tokens together, with what the backend wants to know of documents.

    masked: what takes_mask says.
    """
    known = cu_seqlens is not None
    mask = document_mask(cu_seqlens, num_sequences, num_tokens) if known and masked else None
    bounds = document_bounds(cu_seqlens, num_tokens) if known and backend == "sage" else None
    return TokenLayout(num_sequences, cos, sin, cu_seqlens, max_seqlen, mask, bounds)


def takes_mask(attend: AttentionFunction) -> bool:
    """Whether the backend wants TokenLayout.mask for documents, instead of cu_seqlens."""
    return attend is _sdpa


# -- sage and reference ------------------------------------------------------------------------------------------


def _sage_function(attention: AttentionConfig) -> AttentionFunction:
    options = {"recipe": attention.recipe, "smooth_k": attention.smooth_k, "smooth_q": attention.smooth_q}

    def sage(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        q, k, v = _as_rows(q, layout), _as_rows(k, layout), _as_rows(v, layout)
        return _as_sequences(sage_attention(q, k, v, causal=True, bounds=layout.bounds, **options), layout)

    return sage


def _reference(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
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


def _sdpa(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask, gqa = layout.mask, q.shape[1] != k.shape[1]
    with sdpa_kernel(_SDPA_PRIORITY, set_priority=True):
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
    return o.transpose(1, 2)


def _varlen_attn() -> Callable | None:
    """torch's attention over packed documents."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn


def _varlen_sdpa_function(varlen_attn: Callable) -> AttentionFunction:
    parameters = inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    takes_groups = "enable_gqa" in parameters
    if takes_groups:
        options["enable_gqa"] = True

    def varlen_sdpa(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        if layout.cu_seqlens is None:
            return _sdpa(q, k, v, layout)
        if not takes_groups and q.shape[2] != k.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        longest = layout.max_seqlen or q.shape[1]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        o = varlen_attn(*flat, layout.cu_seqlens, layout.cu_seqlens, longest, longest, **options)
        return o.view(q.shape)

    return varlen_sdpa


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


def _flash_function(package: ModuleType) -> AttentionFunction:

    # Not every version can be traced by torch.compile: the blocks are compiled in two halves around it.
    @torch.compiler.disable
    def flash(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        cu_seqlens = layout.cu_seqlens
        if cu_seqlens is None:
            o = package.flash_attn_func(q, k, v, causal=True)
        else:
            longest = layout.max_seqlen or q.shape[1]
            o = package.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (q, k, v)),
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                causal=True,
            )
        o = o[0] if isinstance(o, tuple) else o  # 4 and some releases of 3 return the log-sum-exp too
        return o.view(q.shape)

    return flash


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads, spread over the tensor-parallel group, and over the
    context-parallel group while the sequences are whole: K-smoothing, masks and backends see nothing of it.

    Called, it is attention proper; the block calls `project` before and `out` after it: see transformer.Block.
    """

    def __init__(
        self,
        model: ModelConfig,
        qk_norm: str,
        attend: AttentionFunction,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        for heads in (model.num_attention_heads, model.num_key_value_heads):
            if heads % (groups.tp_size * groups.cp_size):
                raise ValueError(
                    f"{heads} heads are not a multiple of tensor_parallel_size ({groups.tp_size}) x "
                    f"context_parallel_size ({groups.cp_size})"
                )
        self.attend = attend
        self.groups = groups
        self.head_dim = model.head_dim
        self.qk_norm = qk_norm
        hidden = model.hidden_size
        query_size = model.num_attention_heads * model.head_dim
        key_value_size = model.num_key_value_heads * model.head_dim
        layer = {"sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        sizes = {"q": query_size, "k": key_value_size, "v": key_value_size}
        self.qkv = ColumnParallelLinear(hidden, sizes, groups, **layer)
        self.out = RowParallelLinear(query_size, hidden, groups, **layer)
        self.q_norm = self.k_norm = None
        if self.qk_norm != "none":
            norm = {"split_input": True, "dtype": dtype, "device": device}
            self.q_norm = RMSNorm(model.head_dim, model.norm_eps, groups, **norm)
            self.k_norm = RMSNorm(model.head_dim, model.norm_eps, groups, **norm)

    def project(
        self, x_TD: Tensor | Pending, cos: Tensor, sin: Tensor, gains: dict[RMSNorm, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, normalized and rotated: [T, hidden], of start_enter -> [T, heads / tp, head_dim] each."""
        q_TNK, k_TMK, v_TMK = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(x_TD))
        if self.qk_norm == "before_rope":
            q_TNK, k_TMK = self._normalize(q_TNK, k_TMK, gains)
        q_TNK, k_TMK = apply_rotary(q_TNK, cos, sin), apply_rotary(k_TMK, cos, sin)
        if self.qk_norm == "after_rope":
            q_TNK, k_TMK = self._normalize(q_TNK, k_TMK, gains)
        return q_TNK, k_TMK, v_TMK

    def _normalize(self, q_TNK: Tensor, k_TMK: Tensor, gains: dict[RMSNorm, Tensor]) -> tuple[Tensor, Tensor]:
        return self.q_norm(q_TNK, gains.get(self.q_norm)), self.k_norm(k_TMK, gains.get(self.k_norm))

    def forward(self, q_TNK: Tensor, k_TMK: Tensor, v_TMK: Tensor, layout: TokenLayout) -> Tensor:
        """Of all tokens -> [T, heads / tp * head_dim]."""
        heads = scatter_heads((q_TNK, k_TMK, v_TMK), layout.num_sequences, self.groups)
        return gather_heads(self.attend(*heads, layout), self.groups).flatten(1)

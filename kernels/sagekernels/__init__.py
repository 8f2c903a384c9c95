"""Kernels that train in 8 bits, for any trainer: attention after SageBwd, linear layers, QK-norm with the rotary
embedding, SwiGLU, mixtures of experts. See kernels/README.md."""

from .autograd import document_bounds, sage_attention
from .backends import default_recipe
from .drop_in import flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention
from .graphed import graphed
from .grouped import plan_rows
from .grouped_matmul import grouped_gated, grouped_matmul
from .linear8bit import Linear8bit, convert
from .normed import normed_attention
from .qk_norm_rope import qk_norm_rope
from .reference import attention_reference
from .swiglu import swiglu

__all__ = [
    "Linear8bit",
    "attention_reference",
    "convert",
    "default_recipe",
    "document_bounds",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "graphed",
    "grouped_gated",
    "grouped_matmul",
    "normed_attention",
    "plan_rows",
    "qk_norm_rope",
    "sage_attention",
    "scaled_dot_product_attention",
    "swiglu",
]

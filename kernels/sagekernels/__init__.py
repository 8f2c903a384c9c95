"""SageBwd attention: INT8 in both directions, trainable, in the place of flash_attn_func. See kernels/README.md."""

from .autograd import document_bounds, sage_attention
from .backends import default_recipe
from .fp4 import fp4_attention
from .reference import attention_reference

__all__ = ["attention_reference", "default_recipe", "document_bounds", "fp4_attention", "sage_attention"]

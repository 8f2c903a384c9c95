"""FP4 attention for inference, to measure its quality. Its kernel compiles for tensor cores that take FP4, but it has
not yet run on a GPU that has them."""

from .attention import fp4_attention

__all__ = ["fp4_attention"]

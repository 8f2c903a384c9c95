"""FP4 attention for inference, to measure its quality. Its kernel for tensor cores that take FP4 compiles for them and
has run on no GPU that has any."""

from .attention import fp4_attention

__all__ = ["fp4_attention"]

"""SageTrain: pretrain Llama-like models with trainable INT8 attention on GPU clusters."""

__version__ = "0.1.0"

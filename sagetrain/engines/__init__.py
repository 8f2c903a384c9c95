"""The engine of a run: the protocol of an optimizer step, and the implementation with DeepSpeed."""

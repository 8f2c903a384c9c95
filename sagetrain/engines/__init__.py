"""The engine of a run: the protocol of an optimizer step, and its implementations with FSDP2 and with DeepSpeed."""

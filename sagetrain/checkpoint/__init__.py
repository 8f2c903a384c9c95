"""Checkpoints on disk: their layout, how they are written and read, and which samples a run has consumed."""

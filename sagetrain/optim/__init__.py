"""The optimizer, and the groups of parameters that it updates."""

"""Runs against runs that share initialization and samples: what they differ by, and whether chance does as much."""

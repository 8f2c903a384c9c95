"""Comparisons of runs that share initialization and samples: by how much they differ, and whether chance alone does as
much."""

"""The prediction of a run before it starts: step time, layouts, `sagetrain plan`. No torch, no GPU."""

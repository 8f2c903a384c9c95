"""What a run will be, before it is one: step time, layouts, `sagetrain plan`. No torch, no GPU."""

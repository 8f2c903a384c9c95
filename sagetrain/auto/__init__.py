"""The choices that `auto` stands for: attention, linear layers, and halves of micro-batches. Each is timed once, then
kept."""

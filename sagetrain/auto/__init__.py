"""What `auto` stands for: attention, linear layers, halves of micro-batches; timed once, then kept."""

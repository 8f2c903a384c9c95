"""What INT8 attention costs while training, measured, and the decisions that follow the measurement."""

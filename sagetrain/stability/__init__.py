"""The error of INT8 while training, measured, and the decisions that follow from the measurement."""

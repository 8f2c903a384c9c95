"""The costs of a run as numbers, without torch: operations, memory, stages of a pipeline, what GPUs and links reach.

Models, parallel layers and optimizers do not ask what they cost."""

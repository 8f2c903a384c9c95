"""The uses of a trained run: held-out loss, generated text, diagnosis and replay."""

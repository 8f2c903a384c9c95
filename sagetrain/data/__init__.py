"""The room of what a run reads: tokenizers, token files, and the batches that are made of them."""

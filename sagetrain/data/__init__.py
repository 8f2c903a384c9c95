"""From text to training batches: tokenizer, token files, preparation, loader."""

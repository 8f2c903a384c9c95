"""The way from text to training batches: tokenizer, token files, preparation, loader."""

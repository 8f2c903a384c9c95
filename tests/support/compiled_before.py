"""A block is compiled, and forgotten: what torch makes ready for its first one, in half a second, a fork has then."""

import torch

import tiny
from sagetrain.model.compile import compile_blocks
from sagetrain.parallel.topology import ParallelGroups

threads = torch.get_num_threads()
torch.set_num_threads(1)  # others would be missing in what is forked
cfg = tiny.config(1)
model = tiny.transformer(cfg.model, cfg.attention, vocab_size=tiny.VOCAB, groups=ParallelGroups.single())
compile_blocks(model, "aot_eager")
tokens = torch.arange(tiny.SEQ)[None]
model(tokens, tokens)
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
torch.set_num_threads(threads)

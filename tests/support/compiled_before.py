"""Compile a block and forget it. torch takes half a second to get ready for its first one; forked processes have that
done. The same goes for what DeepSpeed learns of the host by starting `numactl`."""

import functools

import torch
from deepspeed.utils import numa

import tiny
from sagetrain.model.compile import compile_blocks
from sagetrain.parallel.topology import ParallelGroups

numa.get_numa_cores = functools.cache(numa.get_numa_cores)
numa.get_numa_cores()
threads = torch.get_num_threads()
torch.set_num_threads(1)  # A forked process would lack the other threads.
cfg = tiny.config(1)
model = tiny.transformer(cfg.model, cfg.attention, vocab_size=tiny.VOCAB, groups=ParallelGroups.single())
compile_blocks(model, "aot_eager")
tokens = torch.arange(tiny.SEQ)[None]
model(tokens, tokens)
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
torch.set_num_threads(threads)

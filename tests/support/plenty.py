"""Give the host of a test plenty of memory. A run asks how much is available, which other processes may take meanwhile:
ranks with state in host memory, or copies of it, would be refused on a host that has 8 GiB left."""

from sagetrain.training import build_run

build_run.memory_of_host = lambda: 1 << 40

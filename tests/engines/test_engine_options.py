"""Every option of the engines takes the plain layout's steps, with copies to the host that are made late. On GPUs every
two options that go together do (tests/gpu/test_engine_options_gpu.py)."""

import engine_options
from distributed import run_distributed


def test_every_option_takes_the_plain_steps() -> None:
    rows = engine_options.Table(ranks=2, pairs=False).rows
    for taken in run_distributed(engine_options.take, 2, rows, (1, 3)):
        engine_options.check(taken)

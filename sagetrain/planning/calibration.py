"""Scale the rates of a GPU to a measured speed."""

from __future__ import annotations

import dataclasses

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import RunConfig
from sagetrain.costs.hardware import Hardware
from sagetrain.planning.performance import predict


def calibrate(
    cfg: RunConfig, vocab_size: int, hardware: Hardware, tokens_per_second: float, span: float | None = None
) -> Hardware:
    """Return `hardware` with everything that runs on the GPU scaled, so that one data-parallel rank reaches
    `tokens_per_second`.

    Raises:
        ConfigError: fixed costs, launching and communication alone take longer.
    """
    parallel = cfg.parallel
    gpus = parallel.tensor_parallel_size * parallel.context_parallel_size * parallel.pipeline_parallel_size

    def rate(exponent: float) -> float:
        scaled = dataclasses.replace(hardware, compute_scale=10**exponent)
        return predict(cfg, gpus, vocab_size, scaled, span).tokens_per_second

    # The time that hosts and links take depends on the scale too, so the scale is searched for. A faster GPU hides less
    # of its communication and may even be slower overall, so the lowest scale that reaches the figure is meant.
    exponents = [n / 4 for n in range(-36, 13)]
    high = next((n for n in exponents if rate(n) >= tokens_per_second), None)
    if high is None:
        raise ConfigError(
            f"--measured-tokens-per-second {tokens_per_second:,.0f}: fixed costs and links alone allow "
            f"{max(map(rate, exponents)):,.0f}; give the figure of {gpus} GPU(s)"
        )
    low = high - 1 / 4
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if rate(middle) >= tokens_per_second else (middle, high)
    return dataclasses.replace(hardware, compute_scale=10**high)

"""Load shipped configurations for the tests of `plan`."""

from pathlib import Path

from sagetrain.config import RunConfig, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
VOCAB = 32_000


def config(name: str = "325m", *overrides: str) -> RunConfig:
    """Load a shipped configuration. Documents are not packed unless an override packs them."""
    return load_config(
        CONFIGS / f"{name}.yaml", ["attention.backend=sdpa", "data.document_attention=false", *overrides]
    )


def layout_of(tensor: int = 1, stage: int = 1, sequence: bool = False) -> tuple[str, ...]:
    return (
        f"parallel.tensor_parallel_size={tensor}",
        f"parallel.zero_stage={stage}",
        f"parallel.sequence_parallel={str(sequence).lower()}",
        f"parallel.tensor_parallel_overlap={'on' if tensor > 1 else 'auto'}",
    )


NOISE_AWARE = "{schedule: noise_aware, start: 262144, floor: 131072, ceiling: 1048576, hold_tokens: 50000000}"

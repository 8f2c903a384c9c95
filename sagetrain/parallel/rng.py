"""Named seeding, and the state of every random number generator as plain values.

Weights are drawn from a generator named after the parameter, so that they depend on neither the order in which
parameters are made nor the layout of the ranks.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def named_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends on (seed, name) alone. Different names give unrelated streams."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def seed_everything(seed: int, name: str) -> None:
    """Seed Python's, NumPy's and torch's default generators (on all devices) from (seed, name)."""
    value = named_generator(seed, name).initial_seed()
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - libraries draw from the global generator
    torch.manual_seed(value)


def rng_state() -> dict[str, Any]:
    """Return the state of the default generators as tensors, numbers, strings and lists, as
    torch.load(weights_only=True) allows.

    It covers the current CUDA device if there is one.
    """
    version, internal, gauss_next = random.getstate()
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached_gaussian)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that rng_state returned. CUDA's generator is left alone where the state or the machine has
    none."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached_gaussian = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

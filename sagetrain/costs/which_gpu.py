"""Find the GPU that is meant: by a user's words, by the driver's name, or on this host."""

from __future__ import annotations

import difflib
import re

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.costs.hardware import HARDWARE, Hardware, model_of
from sagetrain.parallel.host import nvidia_smi


def of_device(name: str) -> Hardware | None:
    """Return the entry for the name that a driver gives ("NVIDIA H100 80GB HBM3"). Return None for other forms of the
    same card, or if the memory differs."""
    known, size = HARDWARE.get(_key(model_of(name))), re.search(r"(\d+)GB\b", name)
    if known and size and abs(int(size[1]) * 2**30 / known.memory - 1) > 0.2:
        return None
    return known


def _key(model: str) -> str:
    return model.lower().replace(" ", "")


def known_gpu(text: str) -> str:
    """Return the key in HARDWARE that a text names, whole or by a part of it ("4090", "NVIDIA H100 80GB HBM3"). Raises
    ConfigError if it names none, or several."""
    key = _key(model_of(text))
    found = [key] if key in HARDWARE else [name for name in HARDWARE if key and key in name]
    if len(found) == 1:
        return found[0]
    near = found or difflib.get_close_matches(key, HARDWARE)
    meant = f"did you mean {' or '.join(near)}? Known are" if near else "give one of"
    raise ConfigError(f"gpu {text!r} is not known: {meant} {', '.join(HARDWARE)}")


def gpu_here() -> str | None:
    """Return the name that the driver gives this host's first GPU, or None if there is no NVIDIA GPU or driver."""
    return next(iter(nvidia_smi("--query-gpu=name", "--format=csv,noheader")), None)


def planned_gpu(asked: str | None) -> tuple[str, str]:
    """Return the key in HARDWARE of the GPU to predict for, and a sentence for the reader if it was not named.

    Args:
        asked: a name that known_gpu knows. None: take this host's GPU, or the nearest known one, or an H200.
    """
    if asked:
        return known_gpu(asked), ""
    found = gpu_here()
    known = found and of_device(found)
    key = _key(model_of(found or ""))
    while key not in HARDWARE:  # For h100pcie or gb200, the nearest known card is used.
        key = key[1:] if key.startswith("g") else key[:-1] or "h200"
    others = f"{spelled('gpu')} names another ({', '.join(HARDWARE)})"
    if found is None:
        return key, f"This host has no NVIDIA GPU: speeds and memory are predicted for {HARDWARE[key].name}; {others}."
    if known is None:
        return key, f"No rates are known for {found}: speeds and memory are those of {HARDWARE[key].name}; {others}."
    return key, f"Speeds and memory are predicted for this host's {found}; {others}."

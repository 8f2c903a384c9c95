"""SageTrain: pretrain Llama-like models with trainable INT8 attention on GPU clusters.

The library's names (`sagetrain.load_config`, `sagetrain.train`, ...) are those of sagetrain/api.py. It is loaded when
one of them is used: importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sagetrain.api import *  # noqa: F403


def __getattr__(name: str) -> object:
    if not name.startswith("_") and name in (api := import_module("sagetrain.api")).__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'sagetrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *import_module("sagetrain.api").__all__]

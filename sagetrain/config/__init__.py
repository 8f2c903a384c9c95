"""Configuration: the schema, loading and checks. This package imports no torch."""

from sagetrain.config.errors import ConfigError, Finding
from sagetrain.config.load import dump_config, load_config
from sagetrain.config.schema import RunConfig

__all__ = ["ConfigError", "Finding", "RunConfig", "dump_config", "load_config"]

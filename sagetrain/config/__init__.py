"""Configuration: schema, loading, checks. No torch in here."""

from sagetrain.config.errors import ConfigError, Finding
from sagetrain.config.load import dump_config, load_config
from sagetrain.config.schema import RunConfig

__all__ = ["ConfigError", "Finding", "RunConfig", "dump_config", "load_config"]

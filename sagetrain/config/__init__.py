"""Configuration: schema, loading, checks. No torch in here."""

from sagetrain.config.schema import RunConfig

__all__ = ["RunConfig", "ConfigError"]


class ConfigError(ValueError):
    """A mistake in the user's configuration; the message names file, key, value, rule and fix."""

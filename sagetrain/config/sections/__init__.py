"""The sections of the configuration, one module a subject; config/schema.py puts them together."""

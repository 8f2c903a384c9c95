"""The HTML page about runs that `sagetrain report` writes."""

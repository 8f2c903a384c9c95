"""One HTML page about runs: what `sagetrain report` writes."""

"""Which optimizer updates which parameter."""

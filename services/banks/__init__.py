"""Bank builder and its commands."""

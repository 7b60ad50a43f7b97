"""Staging: pulling banks, and single records, from the Station's bank service to a node."""

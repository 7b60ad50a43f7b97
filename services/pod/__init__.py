"""A pod on one host: its files, its processes, and how the operator's tools reach it."""

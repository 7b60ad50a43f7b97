"""Other people's kernels, fetched or imported when a benchmark asks for them, never shipped."""

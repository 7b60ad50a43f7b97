"""Arithmetic on expert records: number formats, and kernels that compute rows."""

"""Every bound of the endpoint in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """What one client may cost. Sizes in bytes, times in seconds."""

    body_bytes_max: int = 10 * 1024 * 1024
    drain_bytes_max: int = 16 * 1024 * 1024  # of a refused body, so that our answer is read
    body_s: float = 30.0
    messages_max: int = 4096
    stops_max: int = 4
    stop_chars_max: int = 1024
    concurrent_max: int = 64
    event_s: float = 600.0  # between two token events; a long prompt is all before the first
    send_s: float = 30.0  # a client that reads slower than this is cut off

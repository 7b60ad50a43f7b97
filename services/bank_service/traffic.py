"""How much went to whom since the last look: what STATUS= says.

Pure: elapsed time is passed in.
"""

from __future__ import annotations

from collections import Counter


class Traffic:
    """Bytes per node since the last `summary`. Mutable."""

    def __init__(self) -> None:
        """Nothing went out yet."""
        self._sent_bytes: Counter[str] = Counter()

    def add(self, node: str, sent_bytes: int) -> None:
        """Bytes that went to a node."""
        self._sent_bytes[node] += sent_bytes

    def summary(self, elapsed_us: int) -> str:
        """One line for an operator; counting starts anew."""
        nodes, total = len(self._sent_bytes), self._sent_bytes.total()
        self._sent_bytes.clear()
        if not nodes:
            return "no node pulls"
        rate = total / max(elapsed_us, 1)  # bytes per microsecond are MB/s
        return f"{nodes} {'node pulls' if nodes == 1 else 'nodes pull'} at {rate:.1f} MB/s"

"""Prometheus text format, and the counters that belong to the endpoint itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from station.backend import Metric, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpCounters:
    """Counters of one endpoint. Mutable on purpose; only the event loop's thread touches it."""

    def __init__(self) -> None:
        self.active = 0
        self._answered: Counter[int] = Counter()
        self._cancelled: Counter[str] = Counter({"disconnect": 0, "slow_reader": 0, "shutdown": 0})

    def answered(self, status: int) -> None:
        """A chat request got its whole answer, or a stream ended, under this status."""
        self._answered[status] += 1

    def cancelled(self, reason: str) -> None:
        """A chat request was given up before its end."""
        self._cancelled[reason] += 1

    def metrics(self) -> list[Metric]:
        """The counters as metric families."""
        return [
            Metric(
                "k3_http_requests_total",
                "counter",
                "Chat requests answered, by status.",
                [Sample({"status": str(s)}, n) for s, n in sorted(self._answered.items())],
            ),
            Metric(
                "k3_http_cancelled_total",
                "counter",
                "Chat requests given up before their end, by reason.",
                [Sample({"reason": r}, n) for r, n in sorted(self._cancelled.items())],
            ),
            Metric(
                "k3_http_active_requests",
                "gauge",
                "Chat requests being served now.",
                [Sample({}, self.active)],
            ),
        ]


def prometheus_text(metrics: Iterable[Metric]) -> str:
    """`metrics` in Prometheus's text exposition format 0.0.4."""
    lines: list[str] = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for sample in metric.samples:
            labels = ",".join(
                f'{key}="{_escape(value, quotes=True)}"' for key, value in sample.labels.items()
            )
            braces = f"{{{labels}}}" if labels else ""
            lines.append(f"{metric.name}{braces} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped


def _number(value: float) -> str:
    """A sample value as Prometheus reads it: `NaN`, `+Inf`, integers without a point."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))

"""The shape that every `k3 bench NAME` reports in: one object, one table. Pure.

A figure that could not be taken is absent and named under `skipped` with the reason, never a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from rich.table import Table

Facts: TypeAlias = Mapping[str, str | int | float]


class Figure(msgspec.Struct, frozen=True):
    """One measured value; without a target there is nothing to miss and `ok` is None."""

    name: str
    value: float
    unit: str
    target: float | None = None
    ok: bool | None = None


def at_least(name: str, value: float, unit: str, target: float) -> Figure:
    """A figure whose target is a lower bound."""
    return Figure(name, value, unit, target, value >= target)


def at_most(name: str, value: float, unit: str, target: float) -> Figure:
    """A figure whose target is an upper bound."""
    return Figure(name, value, unit, target, value <= target)


class Report(msgspec.Struct, frozen=True):
    """What one benchmark found on one machine."""

    bench: str
    machine: Facts
    figures: tuple[Figure, ...]
    skipped: dict[str, str] = {}

    @property
    def missed(self) -> tuple[Figure, ...]:
        """Figures that are not within their target."""
        return tuple(figure for figure in self.figures if figure.ok is False)

    def to_json(self) -> str:
        """The object as one line of JSON."""
        return msgspec.json.encode(self).decode()

    def table(self) -> Table:
        """One line per figure, then what was skipped."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(self.bench, no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("unit", no_wrap=True)
        table.add_column("target", justify="right", no_wrap=True)
        for figure in self.figures:
            table.add_row(
                figure.name,
                f"{figure.value:,.4g}" if abs(figure.value) < 1000 else f"{figure.value:,.0f}",
                figure.unit,
                "" if figure.target is None else f"{figure.target:g}",
                style="bold red" if figure.ok is False else None,
            )
        for name, reason in self.skipped.items():
            table.add_row(name, "-", "", "", style="dim")
            table.add_row(f"  skipped: {reason}", style="dim")
        return table


def machine_line(machine: Facts) -> str:
    """The machine in one line, for above a table."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())

"""The report of `k3 bench kernel` for a person: a row per back end and order, a column per T. Pure.

Owns how figure names become a table. Must not know how they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from rich.table import Table

from services.bench.report import Report

_CELL: Final = re.compile(r"kernel\.(.+)\.t(\d+)\.threads(\d+)\.(\w+)$")
_RATE: Final = "gb_per_s"
_SHARE: Final = "share_of_probe"
# a name of two parts is a back end and the order of its records
_WORDS: Final = {"interleaved_4": "interleaved-4", "row_major": "row-major"}


def kernel_tables(report: Report) -> Iterator[Table]:
    """One table per number of threads, then the figures that are not of a cell, and the skipped."""
    values = {figure.name: figure.value for figure in report.figures}
    cells: dict[int, dict[str, set[int]]] = {}
    for name in values:
        if (found := _CELL.match(name)) and found[4] == _RATE:
            by_name = cells.setdefault(int(found[3]), {})
            by_name.setdefault(found[1], set()).add(int(found[2]))
    for threads, by_name in sorted(cells.items()):
        yield _rates(values, threads, by_name)
    others = tuple(
        figure for figure in report.figures if figure.ok is False or not _is_in_a_table(figure.name)
    )
    yield Report(report.bench, report.machine, others, report.skipped).table()


def _is_in_a_table(name: str) -> bool:
    backend_error = name.count(".") > 1 and name.endswith((".rel_err", ".cosine"))
    return bool(_CELL.match(name)) or backend_error


def _rates(values: dict[str, float], threads: int, by_name: dict[str, set[int]]) -> Table:
    tokens = sorted(set().union(*by_name.values()))
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title=f"{threads} thread{'s' * (threads > 1)}: GB/s of packed weights (of the read probe)",
        title_justify="left",
    )
    table.add_column("back end", no_wrap=True)
    table.add_column("records", no_wrap=True)
    for count in tokens:
        table.add_column(f"T = {count}", justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    for name in by_name:
        backend, _, order = name.partition(".")
        row = [_cell(values, f"kernel.{name}.t{count}.threads{threads}") for count in tokens]
        error = values.get(f"kernel.{backend}.rel_err")
        table.add_row(backend, _WORDS.get(order, ""), *row, "" if error is None else f"{error:.1e}")
    return table


def _cell(values: dict[str, float], base: str) -> str:
    rate, share = values.get(f"{base}.{_RATE}"), values.get(f"{base}.{_SHARE}")
    if rate is None:
        return ""
    return f"{rate:.2f}" if share is None else f"{rate:.2f} ({100 * share:.0f}%)"

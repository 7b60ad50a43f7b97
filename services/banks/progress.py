"""How far a long run over records is: a bar on a terminal, a line now and then in a log.

Owns the wording. Must not know what is done with the records.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import click

from services.banks.records import Notice, Progress

_LOG_EVERY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Display:
    """Where a run shows records done (as bytes, rate and time left) and single lines."""

    progress: Progress
    notice: Notice


@contextmanager
def shown_progress(title: str, record_bytes: int) -> Iterator[Display]:
    """A display on stderr."""
    if sys.stderr.isatty():
        with _bar(title, record_bytes) as display:
            yield display
    else:
        yield Display(_log(title, record_bytes), lambda line: click.echo(line, err=True))


@contextmanager
def shown_bytes(title: str) -> Iterator[Display]:
    """The same for work whose progress is told in bytes."""
    if sys.stderr.isatty():
        with _bar(title, 1) as display:
            yield display
    else:
        yield Display(_log(title, None), lambda line: click.echo(line, err=True))


def byte_line(title: str, *, done: int, total: int, elapsed_s: float) -> str:
    """One line for a log: bytes, rate and time left."""
    rate = done / elapsed_s
    left_s = (total - done) / rate
    return (
        f"{title}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, "
        f"{left_s:.0f} s left"
    )


def progress_line(title: str, record_bytes: int, *, done: int, total: int, elapsed_s: float) -> str:
    """One line for a log: records, bytes, rate and time left."""
    rate = done * record_bytes / elapsed_s
    left_s = (total - done) * record_bytes / rate
    return (
        f"{title}: {done} of {total} records, {done * record_bytes / 1e9:.1f} of "
        f"{total * record_bytes / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left_s:.0f} s left"
    )


def _log(title: str, record_bytes: int | None) -> Progress:
    """A line every _LOG_EVERY_S; without `record_bytes` progress is in bytes."""
    begun = last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LOG_EVERY_S:
            last = now
            elapsed_s = now - begun
            if record_bytes is None:
                line = byte_line(title, done=done, total=total, elapsed_s=elapsed_s)
            else:
                line = progress_line(
                    title, record_bytes, done=done, total=total, elapsed_s=elapsed_s
                )
            click.echo(line, err=True)

    return progress


@contextmanager
def _bar(title: str, record_bytes: int) -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done * record_bytes, total=total * record_bytes)

        # through the bar, which would overwrite a line printed past it
        yield Display(progress, lambda line: bar.console.print(line, markup=False, highlight=False))

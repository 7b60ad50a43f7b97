"""The banks of a folder, finished or not, from their headers and journals alone.

Owns what `k3 bank ls` says about each. Nothing is changed or locked.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from services.banks.builder import SUFFIX, journal_path
from shared.core.errors import BankError
from shared.io.bank_file import BankFile
from shared.io.partial_file import SUFFIX as PARTIAL_SUFFIX
from shared.io.record_journal import count_finished


class BankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One bank; what is not known of an unfinished or damaged one is None."""

    path: str
    state: Literal["whole", "unfinished", "damaged"]
    file_bytes: int
    records: int | None = None
    node: str | None = None
    tier: str | None = None
    layout: str | None = None
    model_digest: str | None = None
    placement_digest: str | None = None
    digest: str | None = None
    problem: str | None = None


def list_banks(folder: Path) -> list[BankEntry]:
    """Every bank of a folder by name; BankError when the folder cannot be read."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if _is_file(entry))
        return [entry for name in names if (entry := _entry(folder, name)) is not None]
    except OSError as error:
        raise BankError(
            f"{folder}: cannot list banks: {error.strerror}: check the path and its permissions"
        ) from error


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # e.g. a loop of links, which is nobody's bank
        return False


def _entry(folder: Path, name: str) -> BankEntry | None:
    if name.endswith(SUFFIX):
        return _finished(folder / name)
    if name.endswith(SUFFIX + PARTIAL_SUFFIX):
        return _unfinished(folder / name.removesuffix(PARTIAL_SUFFIX), folder / name)
    return None


def _finished(path: Path) -> BankEntry:
    size = path.stat().st_size
    try:
        with BankFile.open(path) as bank:
            header = bank.header
            return BankEntry(
                path=str(path),
                state="whole",
                file_bytes=size,
                records=bank.rows,
                node=header.node,
                tier=header.tier,
                layout=header.layout,
                model_digest=header.model_digest,
                placement_digest=header.placement_digest,
                digest=bank.digest,
            )
    except BankError as error:
        return BankEntry(path=str(path), state="damaged", file_bytes=size, problem=str(error))


def _unfinished(final: Path, partial: Path) -> BankEntry:
    return BankEntry(
        path=str(partial),
        state="unfinished",
        file_bytes=partial.stat().st_size,
        records=count_finished(journal_path(final)),
        problem="build or stage the same bank again to go on",
    )

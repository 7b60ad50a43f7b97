"""Which bank file holds which expert, from the headers of all banks in some folders.

Owns the index and when a header is read again. It is a hint: whoever reads a record opens the file
and looks himself. Must not know what records are wanted for. For one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from structlog.typing import FilteringBoundLogger

from services.bank_service.open_banks import SUFFIX, Identity, identity_of
from shared.core.errors import BankError
from shared.core.placement import ExpertKey
from shared.io.bank_file import BankFile


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file as it was when its header was read; unusable ones have no model and no rows."""

    identity: Identity
    model_digest: str | None
    rows: Mapping[ExpertKey, int]


class BankIndex:
    """(model, layer, expert) -> bank files and rows. Mutable: `refresh` follows the folders."""

    def __init__(self, folders: Sequence[Path], log: FilteringBoundLogger) -> None:
        """Nothing is read yet."""
        self._folders: Final = tuple(folders)
        self._log = log
        self._entries: dict[Path, _Entry] = {}

    def refresh(self) -> None:
        """Read the headers of files that are new or changed; forget files that are gone."""
        entries: dict[Path, _Entry] = {}
        for path, identity in self._files():
            known = self._entries.get(path)
            if known is None or known.identity != identity:
                known = self._entry(path, identity)
            entries[path] = known
        self._entries = entries

    def has_model(self, model_digest: str) -> bool:
        """Whether any bank is of this model."""
        return any(entry.model_digest == model_digest for entry in self._entries.values())

    def holders(self, model_digest: str, layer: int, expert: int) -> list[tuple[Path, int]]:
        """(file, row) of every bank of the model that holds the expert, in folder order."""
        return [
            (path, entry.rows[layer, expert])
            for path, entry in self._entries.items()
            if entry.model_digest == model_digest and (layer, expert) in entry.rows
        ]

    def _files(self) -> Iterator[tuple[Path, Identity]]:
        for folder in self._folders:
            try:
                paths = sorted(folder.glob(f"*{SUFFIX}"))
            except OSError as error:
                self._log.warning("bank_folder_unreadable", error=str(error))
                continue
            for path in paths:
                try:
                    yield path, identity_of(path.stat())
                except OSError:
                    continue  # gone since the folder was listed

    def _entry(self, path: Path, identity: Identity) -> _Entry:
        try:
            with BankFile.open(path) as bank:
                return _Entry(identity, bank.header.model_digest, bank.header.row_of())
        except BankError as error:  # once per file, until it changes
            self._log.warning("bank_unusable", bank=path.stem, error=str(error))
            return _Entry(identity, None, {})

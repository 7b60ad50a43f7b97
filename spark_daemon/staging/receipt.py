"""Receipts: one JSON file for every attempt to stage a bank, whatever became of it.

Owns their names (`receipts/BANK.NNNN.json` beside the bank), their fields, and how many are kept.
A receipt says "running" until its attempt ends; one that still says so when a later attempt has
the bank to itself was killed, and is closed as "interrupted".
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from shared.core.errors import BankError
from shared.io.files import replace_file

FOLDER: Final = "receipts"
KEPT_MAX: Final = 32
_FILE_BYTES_MAX: Final = 64 * 1024

Outcome: TypeAlias = Literal["running", "complete", "refused_exists", "interrupted", "failed"]


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attempt. Times are ISO 8601; what an attempt never learnt is None or 0.

    `records_kept` were there from an earlier attempt and matched their hashes; `records_retried`
    counts answers that did not. `superseded` are digests given up because the service's bank
    changed, the last attempt's included. `code` and `text` are the error's.
    """

    bank: str
    attempt: int
    outcome: Outcome
    service: str
    node: str
    started: str
    ended: str | None = None
    digest: str | None = None
    superseded: tuple[str, ...] = ()
    file_bytes: int = 0
    records: int = 0
    records_pulled: int = 0
    records_kept: int = 0
    records_retried: int = 0
    pulled_bytes: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
    bytes_per_s: float = 0.0
    code: str | None = None
    text: str | None = None


class ReceiptBook:
    """The receipts of one bank; at most KEPT_MAX of them, the newest."""

    def __init__(self, bank_path: Path) -> None:
        """For the bank file `bank_path`; makes nothing yet."""
        self.folder: Final = bank_path.parent / FOLDER
        self._bank = bank_path.stem
        self._name = re.compile(rf"{re.escape(self._bank)}\.(\d{{4,}})\.json")

    def begin(self, *, service: str, node: str, started: str) -> Receipt:
        """A new receipt that says "running"; BankError when the folder cannot be written."""
        try:
            self.folder.mkdir(exist_ok=True)
            receipt = Receipt(
                bank=self._bank,
                attempt=self._claim(),
                outcome="running",
                service=service,
                node=node,
                started=started,
            )
            try:
                self.write(receipt)
            except BaseException:  # e.g. a full disk: an empty file would push out a good receipt
                self.path(receipt.attempt).unlink(missing_ok=True)
                raise
            for attempt in self.attempts()[:-KEPT_MAX]:
                self.path(attempt).unlink(missing_ok=True)
        except OSError as error:
            raise BankError(
                f"{self.folder}: cannot write a receipt: {error.strerror}: check that the bank's "
                "folder exists, its free space and its permissions"
            ) from error
        return receipt

    def write(self, receipt: Receipt) -> None:
        """Put a receipt in the place of its earlier state, in one step. Raises OSError."""
        data = msgspec.json.format(msgspec.json.encode(receipt), indent=2)
        replace_file(self.path(receipt.attempt), data + b"\n")

    def close_killed(self, *, before: int, ended: str) -> Receipt | None:
        """Close what attempts before `before` left running, and return the last attempt's receipt.

        Only for an attempt that holds the lock of the unfinished bank. Raises OSError.
        """
        last: Receipt | None = None
        for attempt in self.attempts():
            receipt = self.read(attempt) if attempt < before else None
            if receipt is None:
                continue
            if receipt.outcome == "running":
                receipt = msgspec.structs.replace(receipt, outcome="interrupted", ended=ended)
                self.write(receipt)
            if receipt.digest is not None:
                last = receipt
        return last

    def read(self, attempt: int) -> Receipt | None:
        """One receipt; None when it is gone or damaged."""
        try:
            # O_NONBLOCK: a FIFO in its place must not hang the attempt
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            with open(os.open(self.path(attempt), flags), "rb") as file:
                return msgspec.json.decode(file.read(_FILE_BYTES_MAX) or b"", type=Receipt)
        except (OSError, msgspec.DecodeError):
            return None

    def attempts(self) -> list[int]:
        """Numbers of the receipts there are, ascending; none without a folder."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := self._name.fullmatch(name)))

    def path(self, attempt: int) -> Path:
        """Where the receipt of an attempt is."""
        return self.folder / f"{self._bank}.{attempt:04d}.json"

    def _claim(self) -> int:
        """The next free number; two attempts at once get different ones."""
        attempt = max(self.attempts(), default=0)
        while True:
            attempt += 1
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                os.close(os.open(self.path(attempt), flags, 0o644))
            except FileExistsError:
                continue
            return attempt

"""A bank against the checkpoint it was made from: every difference by layer, expert and tensor.

Owns the comparison and the verdict which of the two changed. Whatever the order of a bank's
records, bytes are named as the checkpoint's tensors have them. Must not know how banks are made.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from services.banks.source import ExpertSource, read_source
from shared.core.errors import BankError, DigestMismatch, LocalProtocolError
from shared.core.record_order import reorder
from shared.io.bank_file import BankFile, FaultKind, RecordFault, blake3_digest, find_fault


def verify_against(
    bank: BankFile, source: ExpertSource
) -> Iterator[tuple[int, RecordFault | None]]:
    """Compare every record with the bank's hashes and, byte by byte, with the checkpoint.

    Yields (row, its fault or None) in row order, in the memory of three records. DigestMismatch
    when the checkpoint is another model, BankError when it has no such expert.
    """
    if bank.header.model_digest != source.digest:
        raise DigestMismatch(
            f"{bank.path}: made from model {bank.header.model_digest}, the checkpoint is "
            f"{source.digest}: name the checkpoint it was made from, or build it again"
        )
    record = np.empty(bank.layout.record_bytes, np.uint8)
    theirs = np.empty_like(record)
    ours = record if bank.layout == source.layout else np.empty_like(record)
    for row, (layer, expert) in enumerate(bank.header.rows):
        bank.read_into(row, record.data)
        own = find_fault(bank, row, record)
        if ours is not record:
            reorder(record, bank.layout, ours, source.layout)
        try:
            read_source(source, layer, expert, theirs.data)
        except LocalProtocolError as error:
            raise BankError(
                f"{bank.path}: row {row}: {error}: its header was not made from this checkpoint, "
                "build the bank again"
            ) from error
        yield row, _fault(bank, source, row, own, ours, theirs)
        source.release([(layer, expert)])


def _fault(
    bank: BankFile,
    source: ExpertSource,
    row: int,
    own: RecordFault | None,
    ours: npt.NDArray[np.uint8],
    theirs: npt.NDArray[np.uint8],
) -> RecordFault | None:
    """The verdict on a record, in the checkpoint's order, whose own hash says `own`."""
    if own is None and np.array_equal(ours, theirs):
        return None
    layer, expert = bank.header.rows[row]
    differing = _differing_tensors(bank, ours, theirs)
    if own is not None:
        against = (
            f"differs from the checkpoint in {differing}" if differing else "is the checkpoint's"
        )
        return RecordFault(row, layer, expert, own.kind, f"{own.detail}; it {against}")
    stored = source.stored_hash(layer, expert) or blake3_digest(theirs.data)
    if stored.hex() == bank.header.source_hashes[row]:
        cause = "was wrong from the start"
        kind = FaultKind.MISBUILT
    else:
        cause = "is as it was built: the checkpoint changed since"
        kind = FaultKind.SOURCE_CHANGED
    detail = f"differs from the checkpoint in {differing}; the bank's record {cause}"
    return RecordFault(row, layer, expert, kind, detail)


def _differing_tensors(
    bank: BankFile, ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8]
) -> str:
    """Names and first differing byte of each tensor."""
    parts: list[str] = []
    for field in bank.layout.fields:
        span = slice(field.offset, field.offset + field.length)
        differing = np.flatnonzero(ours[span] != theirs[span])
        if len(differing):
            parts.append(f"{field.name} ({len(differing)} bytes, first {int(differing[0])})")
    return ", ".join(parts)

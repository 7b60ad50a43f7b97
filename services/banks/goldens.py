"""The goldens of a bank: of which rows, how they are computed, and whether a bank's own still hold.

Owns the choice of rows and seeds, which follows from the bank's experts alone. Must not know how a
bank is written or who serves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from shared.core.bank_header import Golden
from shared.core.errors import CheckpointError
from shared.core.placement import ExpertKey
from shared.core.record import RecordLayout
from shared.core.ring_layout import all_finite
from shared.io.bank_file import BankFile, FaultKind, RecordFault, find_fault
from shared.kernels.golden import golden_row, is_golden, largest_difference

GOLDENS: Final = 8
# One golden costs a thread as much as copying about five records of its size: a large bank hides
# all of them behind its disk, a small one of large experts has fewer.
_RECORDS_PER_GOLDEN: Final = 128
_FREE_BYTES: Final = 32 * 2**20  # of records whose goldens cost nothing that anybody notices


def draft_goldens(rows: Sequence[ExpertKey], layout: RecordLayout) -> tuple[Golden, ...]:
    """Which goldens a bank of these experts (at least one) gets; their rows are zeros.

    They are spread evenly over the experts in the order of (layer, expert), whatever the rows'.
    """
    count = max(1, _FREE_BYTES // layout.record_bytes, len(rows) // _RECORDS_PER_GOLDEN)
    count = min(GOLDENS, len(rows), count)
    by_key = sorted(range(len(rows)), key=rows.__getitem__)
    chosen = (by_key[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count))
    zeros = bytes(2 * layout.shape.latent)
    # the seed is the row: no two goldens of a bank share an activation
    return tuple(Golden(bank_row=row, seed=row, row=zeros) for row in chosen)


def compute_golden(layout: RecordLayout, record: memoryview, seed: int, key: ExpertKey) -> bytes:
    """The row of a golden from a record in `layout`; CheckpointError when it is not finite."""
    row = golden_row(layout, np.frombuffer(record, np.uint8), seed)
    if not all_finite(row[None]):
        raise CheckpointError(
            f"layer {key[0]} expert {key[1]}: its row for the canary activation {seed} is not "
            "finite: its scales are out of all proportion, the checkpoint is damaged: fetch this "
            "shard again"
        )
    return row.astype("<u2").tobytes()


def check_goldens(bank: BankFile) -> Iterator[RecordFault]:
    """Goldens that the bank's own records do not give, though their hashes are right.

    Computed in float64, in the memory of one record. Records with a wrong hash are left to
    `verify`.
    """
    record = np.empty(bank.layout.record_bytes, np.uint8)
    for golden in bank.header.goldens:
        bank.read_into(golden.bank_row, record.data)
        if find_fault(bank, golden.bank_row, record) is not None:
            continue
        row = golden_row(bank.layout, record, golden.seed)
        if is_golden(row, golden.bits):
            continue
        layer, expert = bank.header.rows[golden.bank_row]
        detail = (
            "has the hash that the header states, but not its golden row (largest difference "
            f"{largest_difference(row, golden.bits):.3g}): record or header were changed after the "
            "bank was built"
        )
        yield RecordFault(golden.bank_row, layer, expert, FaultKind.MISBUILT, detail)

"""Proof that this node's memory, kernel and bank give right rows, before it serves and after.

Owns what counts as a failed proof and which of the three is to blame. A proof compares with what
this machine has no part in: rows that were computed in float64 when the bank was built (goldens).
Repeated, it compares with its own first answer, bit for bit, and the record with its hash: rows of
different kernels differ by more than one flipped bit of a record does. Must not know leases or
clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shared.core.bank_header import BankHeader, Golden
from shared.core.errors import EXIT_CONFIG, MeshError
from shared.core.ring_layout import Rows
from shared.io.bank_file import blake3_digest
from shared.kernels import canary
from shared.kernels.expert import ExpertKernel
from shared.kernels.golden import largest_difference
from spark_daemon.executor import Executor


class CanaryFailed(MeshError):
    """A record in memory is not the bank's any more; a new start reads it again."""

    code: ClassVar[str] = "canary_failed"

    def __init__(
        self, message: str, *, layer: int, expert: int, bank_row: int, difference: float
    ) -> None:
        """`difference` is the largest one between a value of the row and what it should be."""
        super().__init__(message)
        self.layer = layer
        self.expert = expert
        self.bank_row = bank_row
        self.difference = difference


class BadKernel(CanaryFailed):
    """The serving kernel computes wrong rows from right records: no new start changes that."""

    exit_status = EXIT_CONFIG


class BadBank(CanaryFailed):
    """Record and hash agree with each other but not with the golden: the bank was changed."""

    exit_status = EXIT_CONFIG


@dataclass(frozen=True, slots=True)
class Proved:
    """A canary row of the serving kernel that was right: uint16 (bf16 bits) [latent]."""

    bank_row: int
    seed: int
    row: Rows


@dataclass(frozen=True, slots=True)
class Prover:
    """The serving kernel and the bank in memory, on trial. `reference` takes another way to a row.

    Methods may run in any thread beside the one that serves.
    """

    executor: Executor
    reference: ExpertKernel
    header: BankHeader

    def prove(self, bank_row: int, seed: int) -> Proved:
        """The canary of a lease, checked against the reference kernel, from a record that is as the
        bank has it; CanaryFailed otherwise.
        """
        row = self._row(self.executor.kernel, bank_row, seed)
        expected = self._row(self.reference, bank_row, seed)
        if not canary.agrees(row, expected, same_kernel=False) or not self._is_intact(bank_row):
            raise self._failure(bank_row, row, expected, blames_bank=False)
        return Proved(bank_row, seed, row)

    def prove_golden(self, golden: Golden) -> Proved:
        """The serving kernel's row of a golden, which it agrees with; CanaryFailed otherwise."""
        row = self._row(self.executor.kernel, golden.bank_row, golden.seed)
        if canary.agrees(row, golden.bits, same_kernel=False):
            return Proved(golden.bank_row, golden.seed, row)
        reference = self._row(self.reference, golden.bank_row, golden.seed)
        blames_bank = not canary.agrees(reference, golden.bits, same_kernel=False)
        raise self._failure(golden.bank_row, row, golden.bits, blames_bank=blames_bank)

    def prove_again(self, proved: Proved) -> None:
        """CanaryFailed unless the row has the bits it had, and its record the bank's hash."""
        row = self._row(self.executor.kernel, proved.bank_row, proved.seed)
        is_same = canary.agrees(row, proved.row, same_kernel=True)
        if not is_same or not self._is_intact(proved.bank_row):
            raise self._failure(proved.bank_row, row, proved.row, blames_bank=False)

    def _row(self, kernel: ExpertKernel, bank_row: int, seed: int) -> Rows:
        return canary.canary_row(kernel, self.executor.arena, bank_row, seed)

    def _is_intact(self, bank_row: int) -> bool:
        record = self.executor.arena[bank_row, : self.header.record_layout.record_bytes]
        return blake3_digest(record.data).hex() == self.header.record_hashes[bank_row]

    def _failure(
        self, bank_row: int, row: Rows, expected: Rows, *, blames_bank: bool
    ) -> CanaryFailed:
        """What is wrong: memory, when its hash says so, else the kernel, else the bank."""
        layer, expert = self.header.rows[bank_row]
        difference = largest_difference(row, expected)
        where = (
            f"layer {layer} expert {expert} (bank row {bank_row}): the canary row of kernel "
            f"{self.executor.kernel.name} is off by up to {difference:.3g}"
        )
        if not self._is_intact(bank_row):
            kind, why = (
                CanaryFailed,
                "the record in memory is not the bank's any more: it is read again at the next "
                "start; test this machine's memory if that happens twice",
            )
        elif blames_bank:
            kind, why = (
                BadBank,
                "the record has its hash but not its golden, for the reference kernel either: "
                "the bank was changed after it was built: build or stage it again",
            )
        else:
            kind, why = (
                BadKernel,
                "its record is right, so the kernel computes wrongly on this machine: rebuild the "
                "native module here, or choose another kernel for the whole pod",
            )
        return kind(
            f"{where}; {why}", layer=layer, expert=expert, bank_row=bank_row, difference=difference
        )

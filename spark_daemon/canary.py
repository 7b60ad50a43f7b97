"""Proof that this node's memory and kernel give right rows, before it serves and while it does.

Owns what counts as a failed proof. Must not know leases or clocks.
"""

from __future__ import annotations

from typing import ClassVar

from shared.core.errors import MeshError
from shared.core.ring_layout import Rows
from shared.kernels import canary
from shared.kernels.expert import ExpertKernel
from spark_daemon.executor import Executor


class CanaryFailed(MeshError):
    """The serving kernel computed a row that cannot be right on this machine."""

    code: ClassVar[str] = "canary_failed"


def prove(executor: Executor, reference: ExpertKernel, *, bank_row: int, seed: int) -> Rows:
    """The canary row uint16 [latent] of the serving kernel, checked against the reference kernel.

    Raises CanaryFailed when they disagree (cosine below 0.999).
    """
    row = canary.canary_row(executor.kernel, executor.arena, bank_row, seed)
    expected = canary.canary_row(reference, executor.arena, bank_row, seed)
    if not canary.agrees(row, expected, same_kernel=False):
        raise CanaryFailed(
            f"kernel {executor.kernel.name} computed a wrong canary row from bank row {bank_row} "
            f"(seed {seed}): rebuild the native module on this machine, or run with "
            "--kernel reference; do not serve from it"
        )
    return row


def prove_again(executor: Executor, attested: Rows, *, bank_row: int, seed: int) -> None:
    """Compute the canary once more; CanaryFailed unless it has the bits it had at the grant."""
    row = canary.canary_row(executor.kernel, executor.arena, bank_row, seed)
    if not canary.agrees(row, attested, same_kernel=True):
        raise CanaryFailed(
            f"the canary row of bank row {bank_row} (seed {seed}) changed since this node began to "
            "serve: its memory is damaged or its bank was overwritten; restart it, and test the "
            "machine's memory if it happens again"
        )

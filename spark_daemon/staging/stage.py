"""Staging one bank: an attempt with its receipt, and what a node does that lacks its bank.

Owns the order receipt, refusal, pull, receipt, and the outcome of every end. Must not know how
bytes are pulled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from shared.core.errors import BankError, MeshError
from shared.core.names import checked_name
from shared.core.placement import Tier
from shared.io import keys
from shared.io.address import parse_address
from shared.io.partial_file import partial_path, refuse_existing
from spark_daemon.staging.client import BankClient, Notice, Patience, Service, now_us, open_client
from spark_daemon.staging.puller import Progress, PullWatch, Tally, Wanted, pull_bank
from spark_daemon.staging.receipt import Outcome, Receipt, ReceiptBook

if TYPE_CHECKING:
    from spark_daemon.config import NodeConfig

Now: TypeAlias = Callable[[], datetime]
SUFFIX: Final = ".k3bank"
# a start without progress for 30 s is ended by the service manager, and that would say less
AT_START: Final = Patience(answer_us=15_000_000, give_up_us=25_000_000)


def service_of(address: str, *, node_key: Path, station_key: Path) -> Service:
    """The bank service at `address`, with the keys of two files; KeyRefused or ConfigError."""
    parse_address(address)
    return Service(address, keys.load_secret(node_key), keys.load_public(station_key))


def wanted_bank(path: Path, *, node: str, tier: Tier) -> Wanted:
    """What to ask the service for when `path` is to become the bank of `node`."""
    if path.suffix != SUFFIX:
        raise BankError(f"{path}: a bank's file is called NAME{SUFFIX}: choose such a name")
    return Wanted(checked_name(path.stem, kind="bank"), node, tier)


async def ensure_bank(
    config: NodeConfig,
    progress: Progress,
    *,
    notice: Notice | None = None,
    patience: Patience | None = None,
) -> Receipt | None:
    """Pull the bank of a node that has none; None when there is one, or nowhere to pull from.

    `progress` gets (bytes done, bytes in all) with every range. Without `patience` it gives up
    before the service manager does. Cancelling keeps what was pulled. Raises BankError,
    KeyRefused or another ConfigError (a person has to act), or StationUnreachable (start again).
    """
    path = Path(config.bank)
    if not config.bank_service or _exists(path):
        return None
    service = service_of(
        config.bank_service, node_key=Path(config.node_key), station_key=Path(config.station_key)
    )
    wanted = wanted_bank(path, node=config.name, tier=config.tier)
    return await stage(
        service, wanted, path, progress=progress, notice=notice, patience=patience or AT_START
    )


async def stage(
    service: Service,
    wanted: Wanted,
    path: Path,
    *,
    replace: bool = False,
    rate_bytes_per_s: int = 0,
    progress: Progress,
    notice: Notice | None = None,
    patience: Patience | None = None,
    wall_clock: Now = lambda: datetime.now(UTC),
) -> Receipt:
    """Pull `wanted` to `path` and leave a receipt beside it, whatever happens.

    Raises as `puller.pull_bank` and `BankClient.read`; an existing bank is refused without
    `replace` (BankError) before the service is asked.
    """
    attempt = _Attempt(service, wanted, path, notice or _no_notice, wall_clock)
    try:
        attempt.outcome = "refused_exists"
        attempt.refuse_existing(path, replace=replace)
        attempt.outcome = "failed"
        async with open_client(
            service, patience=patience, rate_bytes_per_s=rate_bytes_per_s, notice=notice
        ) as client:
            watch = PullWatch(progress, attempt.notice, attempt.close_killed)
            try:
                await pull_bank(client, wanted, path, attempt.tally, watch, replace=replace)
                attempt.outcome = "complete"
            finally:
                attempt.tell(client)
    except MeshError as error:
        attempt.end(code=error.code, text=str(error))
        raise
    except asyncio.CancelledError:
        # too late, if the bank has its name already
        attempt.outcome = "complete" if attempt.tally.published else "interrupted"
        attempt.end()
        raise
    except Exception as error:  # a bug, or memory that ran out
        attempt.outcome = "failed"
        attempt.end(code=MeshError.code, text=_named(error))
        raise
    return attempt.end()


class _Attempt:
    """The receipt of one attempt while it is under way."""

    def __init__(
        self, service: Service, wanted: Wanted, path: Path, notice: Notice, wall_clock: Now
    ) -> None:
        self.outcome: Outcome = "running"
        self.tally = Tally()
        self.notice = notice
        self._wall_clock = wall_clock
        self._begun_us = now_us()
        self._book = ReceiptBook(path)
        self._receipt = self._book.begin(
            service=service.address, node=wanted.node, started=self._time()
        )

    def refuse_existing(self, path: Path, *, replace: bool) -> None:
        """As `partial_file.refuse_existing`; an attempt killed just after it published is closed.

        Without an unfinished file nobody is under way, so nobody's receipt is closed too early.
        """
        try:
            refuse_existing(path, replace=replace)
        except BankError:
            if not partial_path(path).exists():
                with suppress(OSError):
                    self.close_killed()
            raise

    def close_killed(self) -> None:
        """Close the receipts of attempts that were killed, and learn what the last one pulled."""
        last = self._book.close_killed(before=self._receipt.attempt, ended=self._time())
        if last is not None and last.outcome in ("interrupted", "failed"):
            self.tally.previous = last.digest

    def tell(self, client: BankClient) -> None:
        """The service's log learns how it ended."""
        if self.tally.digest is not None:
            client.say_ended(
                self.tally.digest,
                complete=self.outcome == "complete",
                pulled_bytes=self.tally.pulled_bytes,
                kept_bytes=self.tally.kept_bytes,
                elapsed_us=now_us() - self._begun_us,
            )

    def end(self, *, code: str | None = None, text: str | None = None) -> Receipt:
        """Write the final receipt; one that cannot be written must not hide how it ended."""
        tally, seconds = self.tally, (now_us() - self._begun_us) / 1e6
        receipt = msgspec.structs.replace(
            self._receipt,
            outcome=self.outcome,
            ended=self._time(),
            digest=tally.digest,
            superseded=tuple(tally.superseded),
            file_bytes=tally.file_bytes,
            records=tally.records,
            records_pulled=tally.records_pulled,
            records_kept=tally.records_kept,
            records_retried=tally.records_retried,
            pulled_bytes=tally.pulled_bytes,
            kept_bytes=tally.kept_bytes,
            seconds=round(seconds, 6),
            bytes_per_s=round(tally.pulled_bytes / seconds, 1) if seconds else 0.0,
            code=code,
            text=text,
        )
        try:
            self._book.write(receipt)
        except OSError as error:
            self.notice(f"{self._book.folder}: cannot write the receipt: {error.strerror}")
        return receipt

    def _time(self) -> str:
        return self._wall_clock().isoformat(timespec="milliseconds")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # e.g. a folder that may not be searched
        raise BankError(
            f"{path}: cannot look for the bank: {error.strerror}: check its folder's permissions"
        ) from error


def _named(error: Exception) -> str:
    """What it was, without the groups around it."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _no_notice(_line: str) -> None:
    """Nobody listens."""

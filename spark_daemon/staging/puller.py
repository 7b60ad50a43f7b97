"""Pulls one bank: header, then records in row order, each verified before it is written.

Owns the order of writes (records, header, rename), what an interruption leaves behind, and what is
taken from an earlier attempt. Must not know the link, receipts or who asked. Memory is the header
and BUFFERS_BYTES of records, but at least BUFFERS_MIN and at most BUFFERS_MAX of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from shared.core.bank_header import (
    JSON_BYTES_MAX,
    BankHeader,
    decode,
    header_block_bytes,
    stored_digest,
)
from shared.core.bank_wire import BankFound
from shared.core.errors import BankError
from shared.core.placement import Tier
from shared.core.record import PAGE_BYTES
from shared.io import record_journal as journals
from shared.io.bank_file import blake3_digest
from shared.io.partial_file import PartialFile
from shared.io.record_journal import Finished, Journal
from spark_daemon.staging.client import BankClient, Notice, SourceGone
from spark_daemon.staging.tasks import all_of

TRIES: Final = 3  # for a header or record that does not match its hash
GONE_MAX: Final = 5  # times in a row, without a record in between
BUFFERS_BYTES: Final = 64 * 2**20
BUFFERS_MIN: Final = 2  # one is received while another is hashed and written
BUFFERS_MAX: Final = 16

R = TypeVar("R")
Progress: TypeAlias = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which bank to ask for, and whom it has to be for."""

    name: str
    node: str
    tier: Tier


@dataclass(slots=True)
class Tally:
    """What a pull did so far. Mutable: the puller counts in place, also when it fails."""

    published: bool = False
    digest: str | None = None
    previous: str | None = None  # the digest that an earlier, unfinished attempt was pulling
    superseded: list[str] = field(default_factory=list)
    file_bytes: int = 0
    records: int = 0
    records_pulled: int = 0
    records_kept: int = 0
    records_retried: int = 0
    pulled_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PullWatch:
    """Who is told how a pull goes; `locked` is called once no other attempt has this bank."""

    progress: Progress
    notice: Notice
    locked: Callable[[], None]


async def pull_bank(
    client: BankClient, wanted: Wanted, path: Path, tally: Tally, watch: PullWatch, *, replace: bool
) -> None:
    """Pull a bank to `path`; nothing has that name unless every record and the header are right.

    What an earlier attempt left beside `path` is compared with the header's hashes and used; what
    a failed or cancelled attempt has is left there. Raises BankError (refused, damaged, foreign,
    or no room), and what `BankClient.read` raises but SourceGone only after GONE_MAX times.
    """
    try:
        with _unfinished(path) as partial:
            watch.locked()
            with ThreadPoolExecutor(BUFFERS_MIN, thread_name_prefix="staging") as pool:
                puller = _Puller(client, wanted, partial, tally, watch, pool=pool)
                await puller.run()
                await puller.in_thread(lambda: _publish(partial, path, tally, replace=replace))
    except OSError as error:
        raise BankError(
            f"{error.filename or path}: cannot write the bank: {error.strerror}: check free space "
            f"and permissions of {path.parent}, then stage it again: finished records are kept"
        ) from error


def journal_path(path: Path) -> Path:
    """Where the journal of the bank `path` is while it is unfinished."""
    return path.with_name(path.name + journals.SUFFIX)


def _publish(partial: PartialFile, path: Path, tally: Tally, *, replace: bool) -> None:
    """All of the end in one thread: a caller that is cancelled meanwhile cannot halve it."""
    partial.publish(replace=replace)
    tally.published = True
    journal_path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[PartialFile]:
    """The locked partial file; after a failure it goes unless an attempt can go on with it."""
    partial = PartialFile.open(path)
    try:
        yield partial
    except BaseException:
        if not journals.count_finished(journal_path(path)):
            partial.remove()
            journal_path(path).unlink(missing_ok=True)
        raise
    finally:
        partial.close()


class _Puller:
    """One attempt; begins anew when the service has another bank under the same name."""

    def __init__(
        self,
        client: BankClient,
        wanted: Wanted,
        partial: PartialFile,
        tally: Tally,
        watch: PullWatch,
        *,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._client = client
        self._wanted = wanted
        self._partial = partial
        self._tally = tally
        self._watch = watch
        self._pool = pool
        self._counting = threading.Lock()

    async def run(self) -> None:
        """Everything but the final name."""
        bank: _Bank | None = None
        gone = 0
        try:
            while True:
                pulled = self._tally.records_pulled
                try:
                    found = await self._client.find_bank(self._wanted.name)
                    if bank is None or bank.digest != found.digest:
                        if bank is not None:
                            bank.journal.close()
                            bank = None
                        bank = await self._begin(found)
                    await self._pull(bank)
                except SourceGone:
                    gone = 0 if self._tally.records_pulled > pulled else gone + 1
                    if gone >= GONE_MAX:
                        raise
                else:
                    return
        finally:
            if bank is not None:
                bank.journal.close()

    async def _begin(self, found: BankFound) -> _Bank:
        """The header of what was found, and a place for its records."""
        header, block = await self._header(found)
        self._check_fit(header)
        self._note_begin(found, records=len(header.rows))
        identity = blake3_digest(block).hex()
        path = journal_path(self._partial.final)
        journal = Journal.open(path, identity, rows=len(header.rows))
        try:
            kept = bool(journal.finished)
            await self.in_thread(lambda: self._partial.reserve(found.file_bytes, keep=kept))
        except BaseException:
            journal.close()
            raise
        if kept:
            self._watch.notice(
                f"{len(journal.finished)} of {len(header.rows)} records are there and will be "
                "checked"
            )
        return _Bank(found.digest, header, block, journal)

    async def _header(self, found: BankFound) -> tuple[BankHeader, memoryview]:
        """The header that was promised, and its block in page-aligned memory."""
        size = found.header_bytes
        if size % PAGE_BYTES or not 0 < size <= JSON_BYTES_MAX + 2 * PAGE_BYTES:
            raise BankError(
                f"{self._named()} has a header of {size} bytes, which no bank has: run the same "
                "version at both ends"
            )
        block = memoryview(mmap.mmap(-1, size))
        for _ in range(TRIES - 1):
            with contextlib.suppress(BankError):
                return await self._pulled_header(found, block), block
            self._tally.records_retried += 1
        return await self._pulled_header(found, block), block

    async def _pulled_header(self, found: BankFound, block: memoryview) -> BankHeader:
        await self._client.read(found.digest, 0, block)
        self._tally.pulled_bytes += len(block)
        return await self.in_thread(lambda: self._checked_header(found, bytes(block)))

    def _checked_header(self, found: BankFound, block: bytes) -> BankHeader:
        """The header in `block`, if it is whole and the promised one; in a thread."""
        header = decode(block, hasher=blake3_digest, source=self._named())
        digest, size = stored_digest(block).hex(), header_block_bytes(block, source=self._named())
        expected = size + len(header.rows) * header.record_layout.stride_bytes
        if (digest, size, expected) != (found.digest, found.header_bytes, found.file_bytes):
            raise BankError(
                f"{self._named()} was promised with digest {found.digest} and {found.file_bytes} "
                f"bytes, its header says {digest} and {expected}: build it again"
            )
        return header

    def _note_begin(self, found: BankFound, *, records: int) -> None:
        tally = self._tally
        before = tally.digest or tally.previous
        if before is not None and before != found.digest:
            tally.superseded.append(before)
            self._watch.notice(
                f"{self._named()} is now {found.digest}, not {before}: starting over"
            )
        tally.digest, tally.file_bytes, tally.records = found.digest, found.file_bytes, records
        tally.records_kept = tally.kept_bytes = 0

    def _check_fit(self, header: BankHeader) -> None:
        wanted = self._wanted
        if header.node != wanted.node or header.tier != wanted.tier:
            raise BankError(
                f"{self._named()} was built for node {header.node} of tier {header.tier}, but this "
                f"is {wanted.node} of tier {wanted.tier}: name the right bank or build it for this "
                "node"
            )

    async def _pull(self, bank: _Bank) -> None:
        layout, rows = bank.header.record_layout, len(bank.header.rows)
        bank.arriving.clear()
        self._tell(bank)
        left = iter([row for row in range(rows) if row not in bank.done])
        workers = max(BUFFERS_MIN, min(BUFFERS_MAX, BUFFERS_BYTES // layout.stride_bytes, rows))
        await all_of(self._work(bank, left) for _ in range(workers))
        await self.in_thread(lambda: self._partial.write(bank.block, 0))

    async def _work(self, bank: _Bank, left: Iterator[int]) -> None:
        """Records one after the other through one buffer."""
        # in page-aligned zeros: what follows the record up to the next page stays zero
        block = memoryview(mmap.mmap(-1, bank.header.record_layout.stride_bytes))
        for row in left:
            await self._one(bank, row, block)
            bank.done.add(row)
            bank.arriving.pop(row, None)
            self._tell(bank)

    async def _one(self, bank: _Bank, row: int, block: memoryview) -> None:
        layout, tally = bank.header.record_layout, self._tally
        if row in bank.journal.finished and await self.in_thread(
            lambda: self._is_kept(bank, row, block)
        ):
            tally.records_kept += 1
            tally.kept_bytes += layout.record_bytes
            return
        record = block[: layout.record_bytes]

        def arrived(count: int) -> None:
            bank.arriving[row] += count
            self._tell(bank)

        for _ in range(TRIES):
            bank.arriving[row] = 0
            await self._client.read(bank.digest, bank.offset(row), record, arrived)
            tally.pulled_bytes += layout.record_bytes
            if await self.in_thread(lambda: self._is_stored(bank, row, block)):
                return
            tally.records_retried += 1
        layer, expert = bank.header.rows[row]
        raise BankError(
            f"{self._named()}: row {row} (layer {layer}, expert {expert}) did not match its BLAKE3 "
            f"{TRIES} times: run `k3 bank verify` on the Station and build that bank again"
        )

    def _is_kept(self, bank: _Bank, row: int, block: memoryview) -> bool:
        """Whether an earlier attempt left this record whole; in a thread."""
        size = bank.header.record_layout.record_bytes
        self._partial.read(block, bank.offset(row))
        padded = not any(block[size:])
        block[size:] = bytes(len(block) - size)
        return padded and blake3_digest(block[:size]).hex() == bank.header.record_hashes[row]

    def _is_stored(self, bank: _Bank, row: int, block: memoryview) -> bool:
        """Write, note and count the record, if it is right by its hash; in a thread."""
        header = bank.header
        record = block[: header.record_layout.record_bytes]
        if blake3_digest(record).hex() != header.record_hashes[row]:
            return False
        self._partial.write(block, bank.offset(row))
        bank.journal.append(
            Finished(
                row=row,
                record_hash=header.record_hashes[row],
                source_hash=header.source_hashes[row],
                tensor_checks=header.tensor_checks[row],
            )
        )
        with self._counting:  # here, because a cancelled caller is not there to do it
            self._tally.records_pulled += 1
            bank.done.add(row)
        return True

    async def in_thread(self, work: Callable[[], R]) -> R:
        """Run what hashes or waits for a disk beside the event loop.

        A cancelled caller waits for the thread too: it uses the caller's buffer and file.
        """
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            running.exception()  # looked at, so that asyncio does not report it as lost
            raise

    def _tell(self, bank: _Bank) -> None:
        arriving = sum(count for row, count in bank.arriving.items() if row not in bank.done)
        done = len(bank.block) + len(bank.done) * bank.header.record_layout.stride_bytes
        self._watch.progress(done + arriving, self._tally.file_bytes)

    def _named(self) -> str:
        return f"bank {self._wanted.name} of {self._client.service}"


@dataclass(frozen=True, slots=True)
class _Bank:
    """A bank that is being pulled.

    `done` are the rows that are right on this disk, `arriving` the bytes there are of others.
    """

    digest: str
    header: BankHeader
    block: memoryview
    journal: Journal
    done: set[int] = field(default_factory=set)
    arriving: dict[int, int] = field(default_factory=dict)

    def offset(self, row: int) -> int:
        """Where a record lies in the file."""
        return len(self.block) + row * self.header.record_layout.stride_bytes

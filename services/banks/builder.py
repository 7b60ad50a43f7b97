"""Makes the bank of one node: records streamed from a checkpoint into a file that appears whole.

Owns the order of writes (records, header, fsync, rename), what a failure leaves behind and the
refusal of what does not fit together. Must not know checkpoint formats or placements' reasons.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from services.banks.plan import PRODUCER, LayoutChoice, draft_header
from services.banks.records import Notice, Progress, RecordMaker, Watch, make_records
from services.banks.source import ExpertSource
from shared.core.bank_header import BankHeader, encode
from shared.core.errors import BankError, CheckpointError, DigestMismatch
from shared.core.names import checked_name
from shared.core.placement import Placement
from shared.io import record_journal as journals
from shared.io.bank_file import blake3_digest
from shared.io.partial_file import PartialFile, refuse_existing
from shared.io.record_journal import Finished, Journal

SUFFIX: Final = ".k3bank"
WORKERS: Final = 4
STALL_S: Final = 30.0


def build(
    checkpoint: ExpertSource,
    placement: Placement,
    node: str,
    path: Path,
    progress: Progress | None = None,
    *,
    layout: LayoutChoice = "auto",
    replace: bool = False,
    producer: str = PRODUCER,
    keep_partial: bool = False,
    workers: int = WORKERS,
    notice: Notice | None = None,
    stall_s: float = STALL_S,
) -> BankHeader:
    """Write the bank of `node` to `path` (NAME.k3bank) in `layout`; returns its header.

    Equal inputs give equal files. Nothing appears under `path` unless everything succeeded, and an
    existing file stays untouched unless `replace`. What a killed build left beside `path` is
    checked and used; a build that fails leaves its records there only with `keep_partial`.
    Raises DigestMismatch, PlacementError, CheckpointError or BankError.
    """
    name = _bank_name(path)
    draft = draft_header(name, placement, placement.node(node), producer, layout)
    _refuse_other_model(checkpoint, placement)
    watch = Watch(progress or _no_progress, notice or _no_notice, stall_s)
    kept = False
    try:
        refuse_existing(path, replace=replace)
        with _unfinished(path, draft, keep=keep_partial) as (partial, journal):
            kept = keep_partial
            header = _fill(partial, journal, draft, checkpoint, workers, watch)
            partial.publish(replace=replace)
        journal_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise BankError(
            f"{path}: cannot write the bank: {error.strerror}: check free space and permissions of "
            f"{path.parent}" + (", then build again: finished records are kept" if kept else "")
        ) from error
    return header


def journal_path(path: Path) -> Path:
    """Where the journal of the bank `path` is while it is unfinished."""
    return path.with_name(path.name + journals.SUFFIX)


def _fill(
    partial: PartialFile,
    journal: Journal,
    draft: BankHeader,
    checkpoint: ExpertSource,
    workers: int,
    watch: Watch,
) -> BankHeader:
    """Write records, then the header: until then the file starts with zeros and is no bank."""
    layout, rows = draft.record_layout, len(draft.rows)
    start = len(encode(draft, hasher=blake3_digest))
    partial.reserve(start + rows * layout.stride_bytes, keep=bool(journal.finished))
    if journal.finished:
        watch.notice(f"{len(journal.finished)} of {rows} records are there and will be checked")
    elif journal.discarded:
        watch.notice(
            f"{journal.discarded} records that were there belong to another bank (its checkpoint, "
            "placement or layout differs) and are discarded"
        )
    workers = min(workers, rows)
    maker = RecordMaker(checkpoint, draft, partial, journal, start=start, buffers=workers)
    made = make_records(maker, rows, workers, watch)
    header = _with_hashes(draft, made)
    block = encode(header, hasher=blake3_digest)
    assert len(block) == start, "the header's length depends on its hashes"
    with mmap.mmap(-1, start) as pages, memoryview(pages) as view:
        view[:] = block
        partial.write(view, 0)
    return header


def _with_hashes(draft: BankHeader, made: list[Finished]) -> BankHeader:
    return msgspec.structs.replace(
        draft,
        record_hashes=tuple(entry.record_hash for entry in made),
        source_hashes=tuple(entry.source_hash for entry in made),
        tensor_checks=tuple(entry.tensor_checks for entry in made),
        goldens=tuple(
            msgspec.structs.replace(golden, row=made[golden.bank_row].golden or b"")
            for golden in draft.goldens
        ),
    )


@contextlib.contextmanager
def _unfinished(
    path: Path, draft: BankHeader, *, keep: bool
) -> Iterator[tuple[PartialFile, Journal]]:
    """The partial file and its journal; after a failure both go unless they are worth keeping."""
    partial = PartialFile.open(path)
    try:
        identity = blake3_digest(encode(draft, hasher=blake3_digest)).hex()
        journal = Journal.open(journal_path(path), identity, rows=len(draft.rows))
        try:
            yield partial, journal
        except BaseException:
            if not keep or journal.is_empty:
                partial.remove()
                journal.path.unlink(missing_ok=True)
            raise
        finally:
            journal.close()
    finally:
        partial.close()


def _refuse_other_model(checkpoint: ExpertSource, placement: Placement) -> None:
    if placement.model_digest != checkpoint.digest:
        raise DigestMismatch(
            f"the placement was made for model {placement.model_digest}, the checkpoint is "
            f"{checkpoint.digest}: make a placement from this checkpoint"
        )
    ours, theirs = placement.shape.expert, checkpoint.layout.shape
    if ours != theirs:
        raise CheckpointError(
            f"the placement's experts have latent {ours.latent} and width {ours.width}, the "
            f"checkpoint's {theirs.latent} and {theirs.width}: wrong placement for this model"
        )


def _bank_name(path: Path) -> str:
    if path.suffix != SUFFIX:
        raise BankError(f"{path}: a bank's file is called NAME{SUFFIX}: choose such a name")
    return checked_name(path.stem, kind="bank")


def _no_progress(_done: int, _total: int) -> None:
    """Nobody watches."""


def _no_notice(_line: str) -> None:
    """Nobody listens."""

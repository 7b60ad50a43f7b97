"""Single expert records: found in any bank or in the checkpoint, checked, and kept to be read.

Owns where a record is looked for, in which order its bytes are handed out, and the few records in
memory. Must not know who asks. `find` is for one thread, `read` for any.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from structlog.typing import FilteringBoundLogger

from services.bank_service.bank_index import BankIndex
from services.bank_service.open_banks import AHEAD_BYTES
from services.bank_service.refusal import Refusal, gone, out_of_range
from services.banks.source import ExpertSource, read_record
from shared.core.errors import BankError, ConfigError, LocalProtocolError
from shared.core.record import RecordLayout, RecordOrder
from shared.core.record_order import reorder
from shared.core.shape import ExpertShape
from shared.io.bank_file import BankFile, blake3_digest, find_fault

RECORDS_MAX: Final = 8  # 149 MB at K3 size

Wanted = tuple[str, int, int, RecordOrder]  # model, layer, expert, order


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record in memory: uint8 [record_bytes] in the order that was asked for."""

    wanted: Wanted
    shape: ExpertShape
    record_hash: str
    origin: str  # for the log: the bank's or the checkpoint's path
    data: npt.NDArray[np.uint8]


class Records:
    """Finds records and keeps the `kept_max` that were used last."""

    def __init__(
        self,
        folders: Sequence[Path],
        open_checkpoint: Callable[[], ExpertSource] | None,
        log: FilteringBoundLogger,
        *,
        kept_max: int = RECORDS_MAX,
    ) -> None:
        """`open_checkpoint` is called when a bank does not suffice, at most once if it succeeds."""
        self._index = BankIndex(folders, log)
        self._open_checkpoint = open_checkpoint
        self._checkpoint: ExpertSource | None = None
        self._log = log
        self._kept_max: Final = kept_max
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, FoundRecord] = OrderedDict()  # by hash, longest unused first

    def find(
        self, model_digest: str, layer: int, expert: int, order: RecordOrder
    ) -> FoundRecord | Refusal:
        """The record of an expert, checked against its hash, or by its scales."""
        wanted = (model_digest, layer, expert, order)
        with self._lock:
            for kept in self._kept.values():
                if kept.wanted == wanted:
                    self._kept.move_to_end(kept.record_hash)
                    return kept
        found = self._from_banks(wanted)
        if not isinstance(found, FoundRecord) and self._open_checkpoint is not None:
            found = self._from_checkpoint(wanted, found)
        if isinstance(found, FoundRecord):
            with self._lock:
                self._kept[found.record_hash] = found
                while len(self._kept) > self._kept_max:
                    self._kept.popitem(last=False)
        return found

    def has(self, record_hash: str) -> bool:
        """Whether this record is in memory."""
        return record_hash in self._kept

    def read(self, record_hash: str, offset: int, length: int) -> bytes | Refusal:
        """Bytes of a record that was found."""
        with self._lock:
            kept = self._kept.get(record_hash)
            if kept is None:
                return gone(record_hash)
            self._kept.move_to_end(record_hash)
        if offset + length > len(kept.data):
            return out_of_range(record_hash, len(kept.data))
        return kept.data[offset : offset + length].tobytes()

    def _from_banks(self, wanted: Wanted) -> FoundRecord | Refusal:
        model_digest, layer, expert, _ = wanted
        self._index.refresh()
        if not self._index.has_model(model_digest):
            return Refusal(
                "model_unknown",
                f"no bank here is of model {model_digest}: stage from the Station of that model",
                permanent=True,
            )
        holders = self._index.holders(model_digest, layer, expert)
        faults: list[str] = []
        for path, row in holders:
            try:
                found = self._from_bank(path, row, wanted)
            except (BankError, OSError) as error:
                self._log.warning(
                    "bank_record_skipped", layer=layer, expert=expert, error=str(error)
                )
                faults.append(str(error))
                continue
            if found is not None:
                return found
        if faults:
            return Refusal("record_damaged", faults[0], permanent=True)
        return _nobody_has(layer, expert)

    def _from_bank(self, path: Path, row: int, wanted: Wanted) -> FoundRecord | Refusal | None:
        """None when the file is another one since the index was made; BankError for damage."""
        model_digest, layer, expert, _ = wanted
        with BankFile.open(path) as bank:
            if bank.header.model_digest != model_digest or (
                bank.header.rows[row : row + 1] != ((layer, expert),)
            ):
                return None
            record = np.empty(bank.layout.record_bytes, np.uint8)
            bank.read_into(row, record.data)
            offset = bank.records_offset + row * bank.layout.stride_bytes
            dropped_bytes = bank.layout.stride_bytes + AHEAD_BYTES
            os.posix_fadvise(bank.fileno(), offset, dropped_bytes, os.POSIX_FADV_DONTNEED)
            fault = find_fault(bank, row, record)
            if fault is not None:
                raise BankError(f"{path}: {fault}: build the bank again")
            return _ordered(wanted, bank.layout, record, str(path))

    def _from_checkpoint(self, wanted: Wanted, missing: Refusal) -> FoundRecord | Refusal:
        """The record as the checkpoint has it; `missing` says why no bank has."""
        model_digest, layer, expert, _ = wanted
        try:
            source = self._opened_checkpoint()
            if source.digest != model_digest:
                return missing
            record = np.empty(source.layout.record_bytes, np.uint8)
            try:
                read_record(source, layer, expert, record.data)
            except LocalProtocolError:  # how a checkpoint says that the model has no such expert
                return _nobody_has(layer, expert)
            source.release([(layer, expert)])
        except (ConfigError, OSError) as error:  # CheckpointError is below ConfigError
            self._log.warning("checkpoint_unusable", layer=layer, expert=expert, error=str(error))
            return Refusal("checkpoint_invalid", str(error), permanent=True)
        return _ordered(wanted, source.layout, record, "checkpoint")

    def _opened_checkpoint(self) -> ExpertSource:
        if self._checkpoint is None:
            assert self._open_checkpoint is not None
            self._checkpoint = self._open_checkpoint()
        return self._checkpoint


def _nobody_has(layer: int, expert: int) -> Refusal:
    return Refusal(
        "expert_unknown",
        f"no bank or checkpoint here holds layer {layer} expert {expert} of this model",
        permanent=True,
    )


def _ordered(
    wanted: Wanted, have: RecordLayout, record: npt.NDArray[np.uint8], origin: str
) -> FoundRecord | Refusal:
    try:
        want = RecordLayout(have.shape, wanted[3])
    except ValueError as error:
        return Refusal("order_unsupported", str(error), permanent=True)
    data = record
    if want.order != have.order:
        data = np.empty_like(record)
        reorder(record, have, data, want)
    data.flags.writeable = False
    return FoundRecord(wanted, have.shape, blake3_digest(data.data).hex(), origin, data)

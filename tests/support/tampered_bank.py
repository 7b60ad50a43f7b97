"""Banks that were changed so well that only their goldens know."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from shared.core.bank_header import BankHeader, encode
from shared.io.bank_file import BankFile, blake3_digest, tensor_checks
from tests.support.expert_records import tensor


def tamper(path: Path, row: int, factor: float = 1.5) -> BankHeader:
    """Multiply w2 of one record by `factor` and make every hash of the bank right again.

    The file is replaced, so that whoever has it open keeps the old one. Returns the new header.
    """
    with BankFile.open(path) as bank:
        header, start, layout = bank.header, bank.records_offset, bank.layout
    data = np.fromfile(path, np.uint8)
    record = data[start + row * layout.stride_bytes :][: layout.record_bytes]
    tensor(layout, record, "w2.weight_scale_2").view("<f4")[:] *= factor
    header = _replaced(header, "record_hashes", row, blake3_digest(record.data).hex())
    header = _replaced(header, "tensor_checks", row, tensor_checks(layout, record.data))
    data[:start] = np.frombuffer(encode(header, hasher=blake3_digest), np.uint8)
    replace(path, data.tobytes())
    return header


def rewrite_header(path: Path, change: Callable[[BankHeader], BankHeader]) -> BankHeader:
    """Another header in a block of the same size, with a right digest."""
    with BankFile.open(path) as bank:
        header, start = change(bank.header), bank.records_offset
    block = encode(header, hasher=blake3_digest)
    assert len(block) == start, "the records would move"
    replace(path, block + path.read_bytes()[start:])
    return header


def replace(path: Path, data: bytes) -> None:
    """A new file under an old name."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    os.replace(new, path)


def _replaced(header: BankHeader, name: str, row: int, value: str) -> BankHeader:
    values = list(getattr(header, name))
    values[row] = value
    return msgspec.structs.replace(header, **{name: tuple(values)})

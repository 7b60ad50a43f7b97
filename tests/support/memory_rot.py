"""A bit that flips in the memory of another process, as memory does that goes bad."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shared.core.bank_header import Golden
from shared.io.bank_file import BankFile

_SPAN_BYTES_MAX = 2**27
_AT = 200


def record_of(bank: Path, golden: int) -> tuple[Golden, tuple[int, int], bytes]:
    """One golden of a bank, its (layer, expert), and the bytes of its record."""
    with BankFile.open(bank) as opened:
        chosen = opened.header.goldens[golden]
        record = np.empty(opened.layout.record_bytes, np.uint8)
        opened.read_into(chosen.bank_row, record.data)
        return chosen, opened.header.rows[chosen.bank_row], record.tobytes()


def flip_in_memory(pid: int, record: bytes) -> int:
    """Flip one bit in every copy of a record in the memory of a process; how many there were."""
    found = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, *_ = line.split()
            first, last = (int(part, 16) for part in span.split("-"))
            if not mode.startswith("rw") or last - first > _SPAN_BYTES_MAX:
                continue
            try:
                memory.seek(first)
                data = memory.read(last - first)
            except OSError:  # a mapping without memory behind it
                continue
            at = data.find(record)
            while at >= 0:
                memory.seek(first + at + _AT)
                memory.write(bytes([record[_AT] ^ 0x10]))
                found += 1
                at = data.find(record, at + 1)
    return found

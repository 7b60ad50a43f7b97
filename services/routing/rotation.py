"""Writes a recording into rotating files: bounded on disk, whole blocks only.

Owns file names and which file is written or dropped. Must not know where tokens come from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np

from services.routing import format as layout
from services.routing.file import SUFFIX
from services.routing.format import LossTotals, Records, TraceMeta
from shared.core.errors import TraceError

FILE_BYTES_MIN: Final = 2**20  # a head, and a block of at least one token of any model we serve


@dataclass(frozen=True, slots=True)
class Rotation:
    """Where a recording goes: NAME.0001.k3trace and so on, `files` of at most `file_bytes`."""

    folder: Path
    name: str
    file_bytes: int
    files: int

    def existing(self) -> list[tuple[int, Path]]:
        """Number and path of the files there are, oldest first, whoever recorded them."""
        pattern = re.compile(rf"{re.escape(self.name)}\.(\d{{4,9}}){re.escape(SUFFIX)}")
        found = [
            (int(match[1]), path)
            for path in self.folder.iterdir()
            if (match := pattern.fullmatch(path.name))
        ]
        return sorted(found)


class RotatingWriter:
    """Appends tokens of one recording. Every OSError is one TraceError with a remedy."""

    def __init__(self, rotation: Rotation, meta: TraceMeta) -> None:
        """Makes the folder; the first file comes with the first block.

        A recording never appends to another one's file, which may end in a torn block.
        """
        self._rotation = rotation
        self._meta = meta
        self._stream: BinaryIO | None = None
        self._held: list[Records] = []
        self._held_tokens = 0
        self._totals = LossTotals()
        self._noted = LossTotals()
        room = rotation.file_bytes - len(layout.head_bytes(meta)) - layout.BLOCK_HEADER_BYTES
        self._block_tokens = max(1, min(layout.BLOCK_TOKENS, room // meta.record.itemsize))
        self.tokens = 0
        self.paths: list[Path] = []
        self.files_dropped = 0
        with _write_errors(rotation.folder):
            rotation.folder.mkdir(parents=True, exist_ok=True)

    def add(self, records: Records) -> None:
        """Tokens, of `meta.record`; written as soon as they fill a block."""
        self._held.append(records)
        self._held_tokens += len(records)
        if self._held_tokens >= self._block_tokens:
            self._write_held(whole_blocks=True)

    def note(self, totals: LossTotals) -> None:
        """What the recording lacks so far; written with the next flush when it changed."""
        self._totals = totals

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._write_held(whole_blocks=False)
        if self._totals != self._noted:
            self._write(layout.totals_block(self._totals))
            self._noted = self._totals

    def close(self) -> None:
        """Flush, and put the last file safely on disk."""
        self.flush()
        self._end_file()

    def _write_held(self, *, whole_blocks: bool) -> None:
        if not self._held:
            return
        records = np.concatenate(self._held)
        size = self._block_tokens
        end = len(records) // size * size if whole_blocks else len(records)
        for start in range(0, end, size):
            block = records[start : min(start + size, end)]
            self._write(layout.token_block(block))
            self.tokens += len(block)
        self._held = [records[end:]] if end < len(records) else []
        self._held_tokens = len(records) - end

    def _write(self, block: bytes) -> None:
        with _write_errors(self._rotation.folder):
            stream = self._stream
            if stream is not None and stream.tell() + len(block) > self._rotation.file_bytes:
                self._end_file()
                stream = None
            if stream is None:
                stream = self._next_file()
            stream.write(block)
            stream.flush()

    def _next_file(self) -> BinaryIO:
        rotation = self._rotation
        existing = rotation.existing()
        for _, oldest in existing[: max(0, len(existing) - rotation.files + 1)]:
            oldest.unlink()
            self.files_dropped += oldest in self.paths
        number = existing[-1][0] + 1 if existing else 1
        path = rotation.folder / f"{rotation.name}.{number:04d}{SUFFIX}"
        self.paths.append(path)
        meta = msgspec.structs.replace(self._meta, part=len(self.paths))
        self._stream = path.open("xb")
        self._stream.write(layout.head_bytes(meta))
        return self._stream

    def _end_file(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with _write_errors(self._rotation.folder), stream:
                stream.flush()
                os.fsync(stream.fileno())


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into the one error an operator can act on."""
    try:
        yield
    except OSError as error:
        raise TraceError(
            f"{folder}: cannot write the recording: {error.strerror}; make room or choose another "
            "--out"
        ) from error

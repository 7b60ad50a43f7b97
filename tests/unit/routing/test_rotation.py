"""Rotating files: bounded on disk, readable as one trace, never appended to by another run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from services.routing.file import load
from services.routing.format import LossTotals
from services.routing.rotation import RotatingWriter, Rotation
from shared.core.errors import TraceError
from tests.unit.routing.test_file import records_of
from tests.unit.routing.traces import meta_of, same, trace_of

TRACE = trace_of([400, 300, 300])
FILE_BYTES = 12_000  # some 350 records


def write(rotation: Rotation, *, recording: str = "a" * 16, piece: int = 7) -> RotatingWriter:
    """Record TRACE in small pieces."""
    records = records_of(TRACE)
    writer = RotatingWriter(rotation, meta_of(TRACE, recording=recording))
    with closing(writer):
        for start in range(0, len(records), piece):
            writer.add(records[start : start + piece])
            if start % 5 == 0:
                writer.flush()
    return writer


def test_a_recording_in_many_files_is_one_trace(tmp_path: Path) -> None:
    """No file larger than asked; all together hold every token in order."""
    writer = write(Rotation(tmp_path / "new", "r", FILE_BYTES, files=50))

    assert len(writer.paths) > 2
    assert [path.name for path in writer.paths][:2] == ["r.0001.k3trace", "r.0002.k3trace"]
    assert all(path.stat().st_size <= FILE_BYTES for path in writer.paths)
    assert same(load(writer.paths).trace, TRACE)
    assert (writer.tokens, writer.files_dropped) == (1000, 0)


def test_the_oldest_file_is_dropped(tmp_path: Path) -> None:
    """So many files and no more; what is left is the end of the trace, and the loss is told."""
    writer = write(Rotation(tmp_path, "r", FILE_BYTES, files=2))

    left = sorted(tmp_path.iterdir())
    assert len(left) == 2
    assert left == writer.paths[-2:]
    assert writer.files_dropped == len(writer.paths) - 2 > 0
    kept = load(left).trace
    assert np.array_equal(kept.ids, TRACE.ids[-kept.tokens :])


def test_another_recording_starts_a_file_of_its_own(tmp_path: Path) -> None:
    """Even when the last one ended torn; other names are not touched."""
    rotation = Rotation(tmp_path, "r", 10**6, files=3)
    (tmp_path / "other.0001.k3trace").write_bytes(b"not mine")
    first = write(rotation)
    torn = first.paths[0].read_bytes()[:-3]
    first.paths[0].write_bytes(torn)

    second = write(rotation, recording="b" * 16)

    assert first.paths[0].read_bytes() == torn
    assert second.paths[0].name == "r.0002.k3trace"
    assert same(load(second.paths).trace, TRACE)
    write(rotation, recording="c" * 16)
    write(rotation, recording="d" * 16)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["other.0001.k3trace", *(f"r.000{n}.k3trace" for n in (2, 3, 4))]


def test_a_flush_is_readable_by_others(tmp_path: Path) -> None:
    """While the recording goes on; losses are written once they changed."""
    writer = RotatingWriter(Rotation(tmp_path, "r", 10**6, files=3), meta_of(TRACE))
    with closing(writer):
        writer.add(records_of(TRACE)[:5])
        writer.note(LossTotals(dropped=2, incomplete=1))
        assert writer.paths == [], "five tokens fill no block"
        writer.flush()

        loaded = load(writer.paths)
        assert (loaded.trace.tokens, loaded.losses) == (5, LossTotals(2, 1))
        size = writer.paths[0].stat().st_size
        writer.flush()
        assert writer.paths[0].stat().st_size == size


def test_nothing_recorded_leaves_no_file(tmp_path: Path) -> None:
    """An empty file would be an error for every reader."""
    RotatingWriter(Rotation(tmp_path, "r", 10**6, files=3), meta_of(TRACE)).close()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    """Before anything was recorded."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(TraceError, match="cannot write the recording"):
        RotatingWriter(Rotation(tmp_path / "file", "r", 10**6, files=3), meta_of(TRACE))

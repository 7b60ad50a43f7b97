"""The safetensors reader: agrees with the reference library, refuses every damaged header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.core.errors import CheckpointError
from station.model.safetensors_file import SafetensorsFile


def _write(path: Path, header: Any, data: bytes) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def _row(start: int, stop: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_reads_what_the_reference_library_wrote(tmp_path: Path) -> None:
    """Names, shapes and bytes are those of `safetensors`, scalars and empty tensors included."""
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(0, 255, (7,), dtype=np.uint8),
        "c": np.array(2.5, dtype=np.float32),
        "d": np.zeros((0, 4), dtype=np.float16),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "pt"})
    file = SafetensorsFile.open(path)
    assert file.entries.keys() == load_file(path).keys()
    for name, value in tensors.items():
        assert file.entries[name].shape == value.shape
        assert bytes(file.read(file.entries[name])) == value.tobytes()
    file.close()


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        (b"not json", b"", "header is damaged"),
        ({"a": {"dtype": "U8", "shape": [1]}}, b"x", "header is damaged"),
        ({"a": _row(0, 2, [2])}, b"x", "truncated or appended"),
        ({"a": _row(0, 2, [2])}, b"xxx", "truncated or appended"),
        ({"a": _row(0, 2, [2]), "b": _row(3, 4, [1])}, b"xxxx", "gap or overlap"),
        ({"a": _row(0, 2, [2]), "b": _row(1, 3, [2])}, b"xxx", "gap or overlap"),
        ({"a": _row(-1, 1, [2])}, b"xx", "gap or overlap"),
        ({"a": _row(0, 2, [2], "U4")}, b"xx", "unknown dtype"),
        ({"a": _row(0, 2, [-2])}, b"xx", "bad shape"),
        ({"a": _row(0, 2, [3])}, b"xx", "tensor a holds 2 bytes, but U8"),
        ({"a": _row(0, 2, [2], "F32")}, b"xx", "needs 8"),
    ],
)
def test_damaged_header_is_refused(
    tmp_path: Path, header: Any, data: bytes, complaint: str
) -> None:
    """One error that names the file; nothing is read past a header that does not add up."""
    path = _write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=complaint) as error:
        SafetensorsFile.open(path)
    assert "bad.safetensors" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"1234567", (2**40).to_bytes(8, "little") + b"{}"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """Too short, or a header length beyond the file."""
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="safetensors"):
        SafetensorsFile.open(path)


def test_file_that_shrinks_after_opening_is_noticed(tmp_path: Path) -> None:
    """A read past the end names the byte instead of returning short data."""
    path = _write(tmp_path / "x.safetensors", {"a": _row(0, 4, [4])}, b"abcd")
    file = SafetensorsFile.open(path)
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 2)
    with pytest.raises(CheckpointError, match="ends at byte"):
        file.read(file.entries["a"])
    file.close()

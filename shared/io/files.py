"""Small files: read within bounds, and written so that they are the old one or the new one."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path


def read_file(path: Path, *, bytes_max: int) -> bytes:
    """All of a file, of which a device or a pipe may have no end; OSError when it is longer."""
    with path.open("rb") as stream:
        data = stream.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"more than {bytes_max} bytes")
    return data


def replace_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Put `data` under `path` in one durable step; on any OSError the old file stays."""
    partial = path.with_name(f"{path.name}.partial")
    with ExitStack() as undo:
        undo.callback(partial.unlink, missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        undo.pop_all()
    # without this a power cut may bring the old file back
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

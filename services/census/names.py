"""Which tensor names each shard should hold, as digests that two processes can compare.

A million names take half a second to decode, as long as everything else of a census together, so
a large index is read by a process of its own: `python -m services.census.names INDEX` prints the
digests as JSON. Must not know headers.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import blake3
import msgspec

from shared.core.errors import CheckpointError
from station.model.shard_index import names_by_shard

_LARGE_BYTES: Final = 8 * 2**20
_CHILD_S: Final = 600.0

Digests = dict[str, str]  # by shard file name


class _Answer(msgspec.Struct, frozen=True):
    """What the process prints: digests, or the CheckpointError's message."""

    digests: Digests = {}
    error: str | None = None


def names_text(names: Sequence[str]) -> bytes:
    """The names, sorted, as one text that no other set of names has."""
    ordered = sorted(names)
    lines = "\n".join(ordered)
    if lines.count("\n") == len(ordered) - 1:
        return lines.encode()
    return msgspec.json.encode(ordered)  # a name holds a line break; JSON escapes it


def digest(text: bytes | bytearray) -> str:
    """Digest of a `names_text`."""
    return blake3.blake3(text).hexdigest()


def listed_digests(index: Path) -> Digests:
    """Digest of the names that the index places in each shard; CheckpointError names the index."""
    return {shard: digest(names_text(names)) for shard, names in names_by_shard(index).items()}


@contextlib.contextmanager
def reading(index: Path, *, large_bytes: int = _LARGE_BYTES) -> Iterator[Callable[[], Digests]]:
    """Read the index while the block runs, in a process of its own when it is large and a core is
    free for it. Yields what waits for the result, or raises its CheckpointError."""
    if len(os.sched_getaffinity(0)) < 2 or _size(index) < large_bytes:
        yield lambda: listed_digests(index)
        return
    with subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", __name__, str(index)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        try:
            yield lambda: _result(index, child)
        finally:
            child.kill()  # it has ended, unless the block was left early


def _size(index: Path) -> int:
    try:
        return index.stat().st_size
    except OSError:
        return 0


def _result(index: Path, child: subprocess.Popen[bytes]) -> Digests:
    try:
        printed, _ = child.communicate(timeout=_CHILD_S)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{index}: not read within {_CHILD_S:g} s; check the disk") from None
    try:
        answer = msgspec.json.decode(printed, type=_Answer)
    except msgspec.DecodeError:  # killed, or out of memory: a second attempt says why
        return listed_digests(index)
    if answer.error is not None:
        raise CheckpointError(answer.error)
    return answer.digests


def _main(index: Path) -> _Answer:
    try:
        return _Answer(digests=listed_digests(index))
    except CheckpointError as error:
        return _Answer(error=str(error))


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_main(Path(sys.argv[1]))))

"""Makes the bank of one node: records streamed from a checkpoint into a file that appears whole.

Owns the order of writes (records, header, fsync, rename), the check of scales that kernels rely on,
and the refusal of what does not fit together. Must not know checkpoint formats or placements'
reasons. One record is in memory at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shared.core.bank_header import FORMAT_VERSION, BankHeader, encode
from shared.core.errors import BankError, CheckpointError, DigestMismatch, PlacementError
from shared.core.names import checked_name
from shared.core.placement import PlacedNode, Placement
from shared.core.record import RecordLayout
from shared.io.bank_file import blake3_digest, tensor_checks

SUFFIX: Final = ".k3bank"
PARTIAL_SUFFIX: Final = ".partial"
_E4M3_NAN: Final = 0x7F  # codes from here on are NaN or have the sign bit set

Progress: TypeAlias = Callable[[int, int], None]  # (records done, records in all)


class ExpertSource(Protocol):
    """What the builder needs of a checkpoint."""

    @property
    def digest(self) -> str:
        """Digest of the model."""

    def expert_record(self, layer: int, expert: int) -> bytes:
        """The 12 tensors of one expert in RecordLayout order, found by their names."""


def build(
    checkpoint: ExpertSource,
    placement: Placement,
    node: str,
    path: Path,
    progress: Progress | None = None,
    *,
    replace: bool = False,
    producer: str = "k3-pod",
) -> BankHeader:
    """Write the bank of `node` to `path` (NAME.k3bank); returns its header.

    Equal inputs give equal files. Nothing appears under `path` unless everything succeeded, and an
    existing file stays untouched unless `replace`. Raises DigestMismatch, PlacementError,
    CheckpointError or BankError.
    """
    name = _bank_name(path)
    placed = placement.node(node)
    if not placed.rows:
        raise PlacementError(f"placement gives node {node} no experts: it needs no bank")
    if placement.model_digest != checkpoint.digest:
        raise DigestMismatch(
            f"the placement was made for model {placement.model_digest}, the checkpoint is "
            f"{checkpoint.digest}: make a placement from this checkpoint"
        )
    _refuse_existing(path, replace=replace)
    draft = _draft(name, placement, placed, producer)
    try:
        with _partial_file(path) as fd:
            header = _write_bank(fd, draft, checkpoint, progress or _no_progress)
            os.fsync(fd)
            _refuse_existing(path, replace=replace)
            _partial(path).rename(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise BankError(
            f"{path}: cannot write the bank: {error.strerror}: check free space and permissions of "
            f"{path.parent}"
        ) from error
    return header


def _draft(name: str, placement: Placement, placed: PlacedNode, producer: str) -> BankHeader:
    """The header with hashes still to come; its encoding has the final length."""
    count = len(placed.rows)
    return BankHeader(
        version=FORMAT_VERSION,
        name=name,
        node=placed.name,
        tier=placed.tier,
        model_digest=placement.model_digest,
        placement_digest=placement.digest,
        shape=placement.shape.expert,
        layout="row-major",
        rows=placed.rows,
        record_hashes=("0" * 64,) * count,
        tensor_checks=("0" * 96,) * count,
        producer=producer,
    )


def _write_bank(
    fd: int, draft: BankHeader, checkpoint: ExpertSource, progress: Progress
) -> BankHeader:
    layout = draft.record_layout
    start = len(encode(draft, hasher=blake3_digest))
    os.posix_fallocate(fd, 0, start + len(draft.rows) * layout.stride_bytes)
    hashes: list[str] = []
    checks: list[str] = []
    for row, (layer, expert) in enumerate(draft.rows):
        record = _read_record(checkpoint, layer, expert)
        _check_record(layout, record, layer, expert)
        hashes.append(blake3_digest(record).hex())
        checks.append(tensor_checks(layout, record))
        _write_all(fd, record, start + row * layout.stride_bytes)
        progress(row + 1, len(draft.rows))
    header = msgspec.structs.replace(
        draft, record_hashes=tuple(hashes), tensor_checks=tuple(checks)
    )
    # last: until here the file starts with zeros and is no bank
    block = encode(header, hasher=blake3_digest)
    assert len(block) == start, "the header's length depends on its hashes"
    _write_all(fd, block, 0)
    return header


def _read_record(checkpoint: ExpertSource, layer: int, expert: int) -> bytes:
    try:
        return checkpoint.expert_record(layer, expert)
    except OSError as error:  # not to be blamed on the bank's disk
        raise CheckpointError(
            f"layer {layer} expert {expert}: cannot read the checkpoint: {error.strerror}: "
            "check its disk"
        ) from error


def _check_record(layout: RecordLayout, record: bytes, layer: int, expert: int) -> None:
    """Kernels rely on finite, non-negative scales; a bad one is named here, once, by tensor."""
    where = f"layer {layer} expert {expert}"
    if len(record) != layout.record_bytes:
        raise CheckpointError(
            f"{where}: {len(record)} bytes, but an expert of latent {layout.shape.latent} and "
            f"width {layout.shape.width} has {layout.record_bytes}: wrong placement for this model"
        )
    data = np.frombuffer(record, np.uint8)
    for field in layout.fields:
        tensor = data[field.offset : field.offset + field.length]
        if field.dtype == "F8_E4M3":
            bad = np.flatnonzero(tensor >= _E4M3_NAN)
            if len(bad):
                block = np.unravel_index(int(bad[0]), field.shape)
                raise CheckpointError(
                    f"{where}: {field.name}[{block[0]}, {block[1]}] is E4M3 byte "
                    f"0x{int(tensor[bad[0]]):02x}, negative or NaN ({len(bad)} such scales): "
                    "the checkpoint is damaged, fetch this shard again"
                )
        elif field.dtype == "F32":
            _check_scalar(f"{where}: {field.name}", tensor)


def _check_scalar(where: str, tensor: npt.NDArray[np.uint8]) -> None:
    value = float(np.frombuffer(tensor.tobytes(), "<f4")[0])
    if not (np.isfinite(value) and value >= 0):
        raise CheckpointError(
            f"{where} is {value}, not a finite scale >= 0: "
            "the checkpoint is damaged, fetch this shard again"
        )


def _bank_name(path: Path) -> str:
    if path.suffix != SUFFIX:
        raise BankError(f"{path}: a bank's file is called NAME{SUFFIX}: choose such a name")
    return checked_name(path.stem, kind="bank")


def _refuse_existing(path: Path, *, replace: bool) -> None:
    if path.exists() and not replace:
        raise BankError(f"{path}: exists already: choose another name, or ask to replace it")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


@contextlib.contextmanager
def _partial_file(path: Path) -> Iterator[int]:
    """An empty file next to `path`, locked; removed at the end unless it was renamed away."""
    partial = _partial(path)
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        _lock(fd, partial)
        os.ftruncate(fd, 0)  # what a killed builder left
        try:
            yield fd
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    finally:
        os.close(fd)


def _lock(fd: int, partial: Path) -> None:
    """Refuse a second builder, also one that renames the file between our open and our lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = partial.exists() and os.path.samestat(os.fstat(fd), partial.stat())
    except BlockingIOError:
        alone = False
    if not alone:
        raise BankError(f"{partial}: another builder is writing it: wait for it, or stop it")


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _no_progress(_done: int, _total: int) -> None:
    """Nobody watches."""

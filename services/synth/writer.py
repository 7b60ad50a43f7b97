"""Writes a synthetic checkpoint: shards, index and JSON files that appear together or not at all.

Owns the file format (as `safetensors.save_file` writes it, byte for byte), the order of writes and
what may be replaced. One shard's table and one chunk of data are in memory at a time. Must not know
what a tensor holds or why it exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from services.progress import ByteProgress
from services.synth import sizes as json_files
from services.synth.contents import chunks
from services.synth.sizes import SynthSizes
from services.synth.tensors import (
    SynthTensor,
    quantised_modules,
    shard_count,
    shards,
    totals,
)
from shared.core.errors import ConfigError
from station.model.config import CONFIG_FILE, K3Config
from station.model.safetensors_header import HEADER_BYTES_MAX
from station.model.shard_index import INDEX_FILE

QUANTISATION_FILE: Final = "hf_quant_config.json"
PARTIAL_SUFFIX: Final = ".partial"
_SHARD_NAME: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_BUFFER_BYTES: Final = 2**20
_TELL_BYTES: Final = 2**20  # a bar drawn for each of a million tensors would take minutes
_HEADER_ALIGNMENT: Final = 8


@dataclass(frozen=True, slots=True)
class Written:
    """What a finished synthesis left on disk."""

    shards: int
    tensors: int
    payload_bytes: int


def write(
    directory: Path,
    sizes: SynthSizes,
    seed: int,
    progress: ByteProgress | None = None,
    *,
    replace: bool = False,
) -> Written:
    """Write the checkpoint of (sizes, seed) as `directory`, which appears complete or not at all.

    Equal arguments write equal files. With `replace` an older checkpoint there goes away at the
    end, but never a directory that holds anything else. ConfigError says what is in the way.
    """
    config = sizes.config
    count = shard_count(config, sizes.shards)
    _refuse_occupied(directory, replace=replace)
    tensors, total = totals(config)
    try:
        _require_space(directory, total)
        with _partial_directory(directory) as partial:
            _write_shards(partial, config, count, seed, total, progress)
            quantisation = json_files.quantisation(*quantised_modules(config))
            _write_json(partial / CONFIG_FILE, json_files.model_config(sizes, quantisation))
            producer = {"name": "k3-pod synth", "version": "1"}
            release = {"producer": producer, "quantization": quantisation}
            _write_json(partial / QUANTISATION_FILE, release)
            _sync(partial)
            _refuse_occupied(directory, replace=replace)
            _put_in_place(partial, directory)
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot write the checkpoint ({error.strerror}): check free space and "
            f"permissions of {directory.parent}; nothing was left behind"
        ) from error
    return Written(shards=count, tensors=tensors, payload_bytes=total)


def _write_shards(
    folder: Path, config: K3Config, count: int, seed: int, total: int, progress: ByteProgress | None
) -> None:
    """All shards and their index."""
    done = told = 0
    with _synced(folder / INDEX_FILE) as index:
        index.write(b'{"metadata":{"total_size":%d},"weight_map":{' % total)
        for number, table in enumerate(shards(config, count), start=1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            with _synced(folder / name) as file:
                file.write(_header(table))
                for tensor in table:
                    for chunk in chunks(seed, tensor):
                        file.write(chunk)
                        done += len(chunk)
                        if progress is not None and (done - told >= _TELL_BYTES or done == total):
                            progress(told := done, total)
            lines = ",\n".join(f'"{tensor}":"{name}"' for tensor in sorted(t.name for t in table))
            index.write(((",\n" if number > 1 else "\n") + lines).encode())
        index.write(b"\n}}\n")


def _header(table: Sequence[SynthTensor]) -> bytes:
    """Length prefix and JSON table, padded as the reference library pads it."""
    rows = ['{"__metadata__":{"format":"pt"}']
    start = 0
    for tensor in table:
        stop = start + tensor.length
        shape = ",".join(map(str, tensor.shape))
        rows.append(
            f'"{tensor.name}":{{"dtype":"{tensor.dtype}","shape":[{shape}],'
            f'"data_offsets":[{start},{stop}]}}'
        )
        start = stop
    text = (",".join(rows) + "}").encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(
            f"a shard of {len(table)} tensors needs a header of {len(text)} bytes, readers accept "
            f"{HEADER_BYTES_MAX}: choose more shards"
        )
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, content: object) -> None:
    with _synced(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is on the disk when the block ends."""
    with path.open("xb", buffering=_BUFFER_BYTES) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _require_space(directory: Path, total: int) -> None:
    free = shutil.disk_usage(directory.absolute().parent).free
    if free < total:
        raise ConfigError(
            f"{directory}: needs {total} bytes, the disk has {free} free: free some or write "
            "somewhere else"
        )


def _refuse_occupied(directory: Path, *, replace: bool) -> None:
    """Only an absent or empty directory, or with `replace` an older checkpoint, may be written."""
    if not directory.exists() and not directory.is_symlink():
        return
    if directory.is_symlink() or not directory.is_dir():
        raise ConfigError(f"{directory}: is not a directory: choose another name")
    names = sorted(entry.name for entry in directory.iterdir())
    if names and not replace:
        raise ConfigError(
            f"{directory}: exists and is not empty: choose another name, or give --replace"
        )
    ours = {CONFIG_FILE, QUANTISATION_FILE, INDEX_FILE}
    foreign = [name for name in names if name not in ours and not _SHARD_NAME.fullmatch(name)]
    if foreign:
        raise ConfigError(
            f"{directory}: holds {foreign[0]}, which no synthetic checkpoint has: it will not be "
            "replaced; choose another name or remove the directory yourself"
        )


@contextlib.contextmanager
def _partial_directory(directory: Path) -> Iterator[Path]:
    """An empty, locked directory next to `directory`; removed unless it was renamed away."""
    partial = directory.absolute().with_name(f".{directory.absolute().name}{PARTIAL_SUFFIX}")
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{partial}: another synthesis is writing it: wait for it, or stop it"
            ) from None
        for left in partial.iterdir():  # by a synthesis that was killed
            left.unlink()
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _put_in_place(partial: Path, directory: Path) -> None:
    """Rename; an older checkpoint steps aside first and is removed last."""
    directory = directory.absolute()
    old = directory.with_name(f".{directory.name}.old")
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

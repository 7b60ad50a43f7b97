"""Takes the census of a checkpoint directory.

Owns which files are read, how many at once, and that index and headers agree. Headers are fetched
by several threads, so that a disk array sees all requests at once, and parsed in order with a
bounded number waiting. Decides nothing about figures.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from services.census.block_scales import ScaleShard, read_block_scales
from services.census.headers import HeaderParser
from services.census.names import Digests, reading
from services.census.published import differences
from services.census.report import Census, ShardFacts, census_of
from services.census.scales import Scalars, judge, read_scalars
from services.progress import ByteProgress
from shared.core.errors import CheckpointError
from station.model.safetensors_header import REMEDY, HeaderText, parse_header, read_header
from station.model.shard_index import INDEX_FILE, SHARD_SUFFIX, disagreement, names_by_shard

_READERS: Final = 8


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file of the checkpoint, read and parsed."""

    facts: ShardFacts
    names_digest: str
    scalars: list[Scalars]


def take_census(directory: Path, block_scales: ByteProgress | None = None) -> Census:
    """Read the index, all headers and the scale scalars of the experts, nothing else; with a
    progress for `block_scales` also all of those, which takes as long as the disk needs for them.

    CheckpointError names the file, the tensor and the remedy, for the first file that is damaged
    or does not agree with the index.
    """
    index = directory / INDEX_FILE
    files = _shard_files(directory)
    if not index.exists():
        if len(files) != 1:
            raise CheckpointError(
                f"{directory}: holds {len(files)} {SHARD_SUFFIX} files and no {INDEX_FILE}; name "
                "the directory of a checkpoint, or fetch its index"
            )
        return _census(directory, _read_shards(directory, files), block_scales, indexed=False)
    with reading(index) as listed:
        shards = _read_shards(directory, files)
        _check_names(directory, shards, digests := listed())
    listed_shards = {name: shards[name] for name in sorted(digests)}
    census = _census(directory, listed_shards, block_scales, indexed=True)
    strays = [f"file that the index does not list: {name}" for name in files if name not in digests]
    return msgspec.structs.replace(census, differences=(*census.differences, *strays))


def _census(
    directory: Path,
    shards: Mapping[str, _Shard],
    block_scales: ByteProgress | None,
    *,
    indexed: bool,
) -> Census:
    scales = judge([piece for shard in shards.values() for piece in shard.scalars])
    facts = {name: shard.facts for name, shard in shards.items()}
    census = census_of(str(directory), list(facts.values()), scales, indexed=indexed)
    if block_scales is not None:
        places = [
            ScaleShard(directory / name, fact.header_bytes, fact.ledger.layers)
            for name, fact in facts.items()
        ]
        blocks = read_block_scales(places, block_scales)
        census = msgspec.structs.replace(census, block_scales=blocks)
    return msgspec.structs.replace(census, differences=differences(census))


def _shard_files(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith(SHARD_SUFFIX))
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be read ({error.strerror}); name the directory of a checkpoint"
        ) from error


def _read_shards(directory: Path, names: Sequence[str]) -> dict[str, _Shard]:
    parser = HeaderParser()
    facts: list[tuple[str, ShardFacts, str]] = []
    scalars: list[Future[list[Scalars]]] = []
    with ThreadPoolExecutor(_READERS, thread_name_prefix="census") as pool:
        try:
            for header in _headers(pool, [directory / name for name in names]):
                parsed = parser.parse(header)
                sizes = ShardFacts(header.file_bytes, header.data_start, parsed.ledger)
                facts.append((header.path.name, sizes, parsed.names_digest))
                layers = parsed.ledger.layers
                scalars.append(pool.submit(read_scalars, header.path, header.data_start, layers))
            return {
                name: _Shard(sizes, names_digest, read.result())
                for (name, sizes, names_digest), read in zip(facts, scalars, strict=True)
            }
        finally:
            pool.shutdown(cancel_futures=True)


def _headers(pool: ThreadPoolExecutor, paths: Sequence[Path]) -> Iterator[HeaderText]:
    """Headers in order, at most _READERS of them read ahead."""
    waiting: deque[Future[HeaderText]] = deque()
    for path in paths:
        waiting.append(pool.submit(_read, path))
        if len(waiting) == _READERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _read(path: Path) -> HeaderText:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); {REMEDY}") from error
    try:
        return read_header(path, file)
    finally:
        os.close(file)


def _check_names(directory: Path, shards: Mapping[str, _Shard], digests: Digests) -> None:
    """Index and headers must place the same names in the same shards."""
    for name, listed in sorted(digests.items()):
        if name not in shards:
            raise CheckpointError(
                f"{directory / name}: is missing although the index lists it; fetch the shard"
            )
        if shards[name].names_digest != listed:
            stored = set(parse_header(_read(directory / name)).names)
            wanted = set(names_by_shard(directory / INDEX_FILE).get(name, ()))
            if stored != wanted:
                raise disagreement(directory, name, stored=stored, listed=wanted)

"""The names of a checkpoint's files, and the index that says which shard holds which tensor.

Owns `model.safetensors.index.json`: its size limit, its shape, and that no shard name can leave the
directory. Must not know tensors' contents, headers, or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

import msgspec

from shared.core.errors import CheckpointError

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
SHARD_SUFFIX: Final = ".safetensors"
_PIECE_BYTES: Final = 2**16
_PROBE: Final = b'{"probe":"probe"}'
_INDEX_BYTES_MAX: Final = 2**29  # the largest public index, K3's, has about 110 MB


class _Index(msgspec.Struct, frozen=True):
    """The file; its metadata is not needed."""

    weight_map: msgspec.Raw


def read_index(path: Path) -> dict[str, str]:
    """Shard file name of every tensor; CheckpointError names the file, the shard and the remedy."""
    weight_map: dict[str, str] = {}
    for part in _parts(path):
        weight_map |= part
    for shard in set(weight_map.values()):
        _check_name(path, shard)
    return weight_map


def names_by_shard(path: Path) -> dict[str, list[str]]:
    """The tensors that the index places in each shard, in its order; errors as `read_index`."""
    names: dict[str, list[str]] = {}
    for part in _parts(path):
        shards = set(part.values())
        for shard in shards:
            if shard not in names:
                _check_name(path, shard)
                names[shard] = []
        if len(shards) == 1:  # the usual case, and four times as fast
            names[shards.pop()] += part
        else:
            for name, shard in part.items():
                names[shard].append(name)
    return names


def disagreement(
    directory: Path, shard: str, *, stored: Set[str], listed: Set[str]
) -> CheckpointError:
    """The error that names a tensor which only the shard, or only the index, has."""
    if stored - listed:
        return CheckpointError(
            f"{directory / shard}: holds tensor {min(stored - listed)}, which the index does not "
            "place there; fetch index and shards of one revision"
        )
    return CheckpointError(
        f"{directory / shard}: tensor {min(listed - stored)} is missing although "
        "the index lists it; fetch the shard again"
    )


def _parts(path: Path) -> Iterator[dict[str, str]]:
    """The weight map in small objects: a dict of a million names would not fit any cache."""
    data = _read(path)
    try:
        span = _span(data)
        if span is None:
            data = bytes(msgspec.json.decode(data, type=_Index).weight_map)
            span = (0, len(data))
        yield from _decoded(data, *span)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors index ({error}); fetch it again"
        ) from error


def _span(data: bytes) -> tuple[int, int] | None:
    """Where the weight map's object lies in a usual index; None asks for a whole parse.

    Usual is: the map comes last and no name in it has a brace. Proved by putting a small map in its
    place: what is left must be an index with that map.
    """
    start = data.find(b"{", data.find(b'"weight_map"') + 1)
    last = data.rfind(b"}", 0, max(0, data.rfind(b"}")))
    if not 0 < start < last:
        return None
    if data.find(b"{", start + 1, last) >= 0 or data.find(b"}", start + 1, last) >= 0:
        return None
    try:
        probed = msgspec.json.decode(data[:start] + _PROBE + data[last + 1 :], type=_Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return (start, last + 1) if bytes(probed.weight_map) == _PROBE else None


def _decoded(text: bytes, start: int, stop: int) -> Iterator[dict[str, str]]:
    """The JSON object of strings text[start:stop], cut after a string about every _PIECE_BYTES.

    A cut that is not between two entries leaves two halves that are not JSON, so a half that
    decodes proves its cut right; if one does not, all that is left is decoded at once.
    """
    decoder = msgspec.json.Decoder(dict[str, str])
    start, end = text.find(b"{", start, stop) + 1, text.rfind(b"}", start, stop)
    if not start:
        decoder.decode(text)  # raises: the map is no object
    while start < end:
        cut = text.find(b'",', start + _PIECE_BYTES, end)
        stop = end if cut < 0 else cut + 1
        try:
            part = decoder.decode(b"{%b}" % text[start:stop])
        except msgspec.DecodeError:
            stop = end
            part = decoder.decode(b"{%b}" % text[start:end])
        yield part
        start = stop + 1


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_INDEX_BYTES_MAX + 1)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); fetch it again"
        ) from error
    if len(data) > _INDEX_BYTES_MAX:
        raise CheckpointError(
            f"{path}: larger than {_INDEX_BYTES_MAX} bytes; not an index: fetch it again"
        )
    return data


def _check_name(path: Path, shard: str) -> None:
    if Path(shard).name != shard or "\0" in shard or not shard.endswith(SHARD_SUFFIX):
        raise CheckpointError(
            f"{path}: shard name {shard[:200]!r} is not a plain .safetensors file name; fetch the "
            "index again"
        )

"""Experts for measuring kernels: synthetic records, arenas of them, and what their rows should be.

Owns the random weights, which memory is used when, and the float64 definition of a row. Must not
know clocks or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.core.errors import ConfigError
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape
from shared.io import memory
from shared.kernels.codecs import bf16_bits, nvfp4_decode
from shared.kernels.expert import Arena, Bf16Bits, Ids

U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]
Activation: TypeAlias = Literal["situ", "silu"]

CACHE: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHES_APART: Final = 2.0  # how many times the cache is read before a record comes again
_CODE_RMS: Final = 2.93  # of the 16 E2M1 values
_SCALE_CODES: Final = (0x30, 0x41)  # E4M3 0.5 to 2.0
_SCALE_RMS: Final = 1.15
_ROOM: Final = 0.8  # of the memory that is free


def synthetic_record(shape: ExpertShape, seed: int) -> U8:
    """A row-major record uint8 [record_bytes] of random codes and scales.

    For activations of variance 1, g and u have a variance of about 1 and about 1/2; each matrix has
    its own scale_2.
    """
    rng = np.random.default_rng(seed)
    layout = RecordLayout(shape)
    record = np.zeros(layout.record_bytes, np.uint8)
    inputs = {"w1": shape.latent, "w3": 2 * shape.latent, "w2": shape.width}
    for field in layout.fields:
        span = slice(field.offset, field.offset + field.length)
        matrix, _, kind = field.name.partition(".")
        if kind == "weight":
            record[span] = rng.integers(0, 256, field.length, np.uint8)
        elif kind == "weight_scale":
            record[span] = rng.integers(*_SCALE_CODES, field.length, np.uint8)
        else:
            rms = _CODE_RMS * _SCALE_RMS * inputs[matrix] ** 0.5
            value = 1 / rms if kind == "weight_scale_2" else 1.0
            record[span] = np.array([value], "<f4").view(np.uint8)
    return record


def synthetic_activations(tokens: int, latent: int, seed: int) -> Bf16Bits:
    """Standard normal values, bf16 bits uint16 [tokens, latent]."""
    rng = np.random.default_rng(seed)
    return bf16_bits(rng.standard_normal((tokens, latent)).astype(np.float32))


def expected_rows(record: U8, shape: ExpertShape, x: F64, activation: Activation = "situ") -> F64:
    """Rows float64 [tokens, latent] of a row-major record, nothing rounded; x [tokens, latent]."""
    fields = {field.name: field for field in RecordLayout(shape).fields}

    def tensor(name: str) -> U8:
        field = fields[name]
        flat = record[field.offset : field.offset + field.length]
        return flat.reshape(field.shape) if field.shape else flat

    def product(matrix: str, inputs: F64) -> F64:
        packed, scale = tensor(f"{matrix}.weight"), tensor(f"{matrix}.weight_scale")
        weight = nvfp4_decode(packed, scale, np.float32(1)).astype(np.float64)
        scale_2 = float(tensor(f"{matrix}.weight_scale_2").view("<f4")[0])
        return np.asarray(inputs @ weight.T * scale_2)

    g, u = product("w1", x), product("w3", x)
    sigmoid = 1 / (1 + np.exp(-g))
    if activation == "silu":
        return product("w2", g * sigmoid * u)
    return product("w2", 4 * np.tanh(g / 4) * sigmoid * 25 * np.tanh(u / 25))


@dataclass(frozen=True, slots=True)
class Error:
    """How far rows are from what they should be: the worst of them."""

    relative_rms: float
    cosine: float


def error_of(rows: npt.ArrayLike, expected: F64) -> Error:
    """Compare rows [..., latent] with those in float64."""
    found = np.asarray(rows, np.float64).reshape(-1, expected.shape[-1])
    wanted = expected.reshape(found.shape)
    length = np.linalg.norm(wanted, axis=1)
    distance = np.linalg.norm(found - wanted, axis=1)
    cosine = (found * wanted).sum(axis=1) / (np.linalg.norm(found, axis=1) * length)
    return Error(float((distance / length).max()), float(cosine.min()))


class Rotation:
    """Hands out the records of an arena in turn: none comes again before nearly all have."""

    def __init__(self, records: int, lap_max: int) -> None:
        """`lap_max` records at most are taken at a time."""
        assert records >= 2 * lap_max, "an arena has several laps"
        self._records = records
        self._lap_max = lap_max
        self._next = 0

    @property
    def distance_min(self) -> int:
        """Records that are read, at least, between two uses of one."""
        return self._records - 2 * self._lap_max + 1

    def take(self, count: int) -> range:
        """The next `count` records, side by side in memory."""
        assert 1 <= count <= self._lap_max
        first = self._next if self._next + count <= self._records else 0
        self._next = first + count
        return range(first, first + count)


def filled(distinct: list[U8], stride_bytes: int, records: int) -> Arena:
    """An arena uint8 [records, stride_bytes] that repeats a few distinct records.

    What a cache keeps depends on addresses: equal contents at different ones are read anew.
    """
    held, _ = memory.allocate(records * stride_bytes)
    arena = np.frombuffer(held, np.uint8)[: records * stride_bytes].reshape(records, stride_bytes)
    for row in range(records):
        record = distinct[row % len(distinct)]
        arena[row, : len(record)] = record
    return arena


def records_that_fit(
    wanted_bytes: int | None, stride_bytes: int, *, arenas: int, lap_max: int, cache_bytes: int
) -> int:
    """How many records each of `arenas` arenas gets: `wanted_bytes`, or about 4 GB.

    ConfigError when memory does not hold them, or when records would come again while a cache of
    `cache_bytes` may still hold them.
    """
    free = memory.available_bytes()
    room = None if free is None else int(free * _ROOM / arenas)
    size = 4 * 10**9 if wanted_bytes is None else wanted_bytes
    if room is not None and size > room:
        if wanted_bytes is not None:
            raise ConfigError(
                f"{arenas} arenas of {size / 1e9:.1f} GB do not fit into the "
                f"{(free or 0) / 1e9:.1f} GB of free memory: "
                f"give --bytes {room // 10**8 / 10:g}e9 or fewer"
            )
        size = room
    least = int(_CACHES_APART * cache_bytes) + 2 * lap_max * stride_bytes
    if size < least:
        raise ConfigError(
            f"records in {size / 1e9:.2f} GB would be read again from the cache of "
            f"{cache_bytes / 1e6:.0f} MB: give --bytes {-(-least // 10**8) / 10:g}e9 or more"
        )
    return size // stride_bytes


def cache_bytes(folder: Path = CACHE) -> int:
    """The largest cache of a processor; 64 MB where the kernel does not say."""
    sizes = []
    for file in folder.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        if text[:-1].isdecimal() and text[-1:] in "KMG":
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes, default=64 * 10**6)


def ids(rows: range) -> Ids:
    """A range of records as the kernels take them."""
    return np.arange(rows.start, rows.stop, dtype=np.int32)

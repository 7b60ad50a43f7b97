"""The bytes of a synthetic tensor: a function of (seed, name) and nothing else.

Owns the values. They come from BLAKE3's output stream, so a tensor is the same whatever the
sharding, the order of writing or the versions of libraries, and any part of it can be made alone.
The weights mean nothing, but a network made of them stays finite, and nothing lies at a value
(0, 1, powers of two) that would hide a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import blake3
import numpy as np

from services.synth.tensors import Fill, SynthTensor
from shared.kernels.codecs import F32, U8, bf16_bits

CHUNK_ELEMENTS: Final = 4 * 2**20
_E4M3_HALF: Final = 0x30  # 0.5; the 16 codes from here reach 1.875
_E4M3_EIGHTH: Final = 0x20  # 0.125; the 32 codes from here reach 1.875
_NIBBLES_RMS: Final = 2.93  # of uniform E2M1 codes
_SCALE_RMS: Final = 1.15  # of E4M3 0.5 .. 1.875
_E4M3_RMS: Final = 0.82  # of E4M3 0.125 .. 1.875
_UNIT: Final = math.sqrt(12.0) / 2**16  # a uniform u16 times this has variance 1
_NORM_STD: Final = 0.2
_BIAS_STD: Final = 0.1


def chunks(seed: int, tensor: SynthTensor) -> Iterator[bytes]:
    """The tensor's bytes, row-major and little endian, in pieces of at most 16 MiB."""
    # w1 and w3 share their second scale, as in the release: both draw from one name.
    name = tensor.name.replace(".w3.weight_scale_2", ".w1.weight_scale_2")
    stream = blake3.blake3(f"{seed}/{name}".encode())
    count = math.prod(tensor.shape)
    for start in range(0, count, CHUNK_ELEMENTS):
        yield _values(tensor, stream, start, min(count - start, CHUNK_ELEMENTS))


def _values(tensor: SynthTensor, stream: blake3.blake3, start: int, count: int) -> bytes:
    match tensor.fill:
        case Fill.NIBBLES:
            return stream.digest(length=count, seek=start)
        case Fill.SCALE:
            return (_E4M3_HALF + (_codes(stream, start, count) & 0x0F)).tobytes()
        case Fill.ONE:
            return np.ones(count, np.float32).tobytes()
        case Fill.MATRIX if tensor.dtype == "F8_E4M3":
            codes = _codes(stream, start, count)
            return (codes & 0x80 | (_E4M3_EIGHTH + (codes & 0x1F))).tobytes()
        case _:
            values = _floats(tensor, _units(stream, start, count), start)
            return (bf16_bits(values) if tensor.dtype == "BF16" else values).tobytes()


def _floats(tensor: SynthTensor, units: F32, start: int) -> F32:
    """Values of a float tensor from `units`, uniform with mean 0 and variance 1."""
    spread = tensor.inputs**-0.5
    match tensor.fill:
        case Fill.NORM:
            return 1 + units * np.float32(_NORM_STD)
        case Fill.BIAS:
            return units * np.float32(_BIAS_STD)
        case Fill.DECAY:
            kept = np.arange(start, start + len(units)) < tensor.inputs
            return np.where(kept, units, np.float32(0))
        case Fill.SCALE_2:
            scale = spread / (_NIBBLES_RMS * _SCALE_RMS)
            return np.float32(scale) * (1 + units * np.float32(_NORM_STD))
        case Fill.TILE_SCALE:
            return np.float32(spread / _E4M3_RMS) * (1 + units * np.float32(_NORM_STD))
        case _:
            return units * np.float32(spread)


def _codes(stream: blake3.blake3, start: int, count: int) -> U8:
    return np.frombuffer(stream.digest(length=count, seek=start), np.uint8)


def _units(stream: blake3.blake3, start: int, count: int) -> F32:
    drawn = np.frombuffer(stream.digest(length=2 * count, seek=2 * start), "<u2")
    return (drawn.astype(np.float32) - np.float32(2**15 - 0.5)) * np.float32(_UNIT)

"""Rows by ggml: records in its block format, and the call into ggml_loop.c.

Owns the conversion of a record and the crossing into C. Must not know how the library came about.

What is not equal to a row of ours, apart from speed: activations and hidden values become 8-bit
integers with a float16 scale per 32 (W4A8, ours is W4A16), the activation is SiLU(g) u (which is
cheaper than K3's), and rows are float32. The weights are the same numbers: a block of 64 holds 4
E4M3 scales and 32 bytes of codes, which of two codes shares a byte differs, and scale_2 is a factor
of a whole matrix in both.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.errors import ConfigError
from shared.core.record import PAGE_BYTES, RecordLayout
from shared.core.shape import ExpertShape
from shared.kernels.expert import Arena, Ids

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_BLOCK: Final = 64  # inputs of a block of ggml's
_GROUP: Final = 16  # inputs that share a scale
_MATRICES: Final = ("w1", "w3", "w2")  # gate, up, down


class GgmlRows:
    """ggml's products for experts of one shape on `threads` threads; closes with the object."""

    def __init__(self, library: Path, shape: ExpertShape, threads: int) -> None:
        """ConfigError when sizes are no multiples of 64, or the library cannot be loaded."""
        if shape.latent % _BLOCK or shape.width % _BLOCK:
            raise ConfigError(f"ggml's NVFP4 needs sizes that are multiples of {_BLOCK}")
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise ConfigError(f"{library}: cannot be loaded: {error}") from error
        self._library.k3_ggml_open.restype = ctypes.c_void_p
        self._library.k3_ggml_scratch_bytes.restype = ctypes.c_int64
        self._library.k3_ggml_init()
        self.shape: Final = shape
        self.stride_bytes: Final = stride_bytes(shape)
        pool = self._library.k3_ggml_open(ctypes.c_int32(threads))
        if pool is None:
            raise ConfigError(f"the system refused {threads} threads: use fewer")
        self._pool: ctypes.c_void_p | None = ctypes.c_void_p(pool)
        self._scratch: U8 = np.empty(0, np.uint8)
        self._out: F32 = np.empty((0, 0, shape.latent), np.float32)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._library.k3_ggml_close(self._pool)
            self._pool = None

    def rows(self, arena: Arena, bank_rows: Ids, activations: F32) -> F32:
        """Rows float32 [experts, tokens, latent] of every token for every expert of `bank_rows`.

        arena uint8 [n, stride_bytes] of records by `converted`; activations [tokens, latent]. The
        result is overwritten by the next call: no call pays for memory that another one has had.
        """
        assert self._pool is not None, "closed"
        latent, width = self.shape.latent, self.shape.width
        experts, tokens = len(bank_rows), len(activations)
        assert arena.shape[1:] == (self.stride_bytes,)
        assert activations.shape == (tokens, latent)
        assert all(array.flags.c_contiguous for array in (arena, bank_rows, activations))
        assert 0 <= bank_rows.min() <= bank_rows.max() < len(arena)
        sizes = [ctypes.c_int64(size) for size in (latent, width, experts, tokens)]
        needed = self._library.k3_ggml_scratch_bytes(*sizes)
        if self._scratch.nbytes < needed:
            self._scratch = np.zeros(needed, np.uint8)
        if self._out.shape[:2] != (experts, tokens):
            self._out = np.zeros((experts, tokens, latent), np.float32)
        self._library.k3_ggml_rows(
            self._pool,
            *(ctypes.c_int64(size) for size in (latent, width, self.stride_bytes)),
            _pointer(arena),
            _pointer(bank_rows),
            ctypes.c_int64(experts),
            _pointer(activations),
            ctypes.c_int64(tokens),
            _pointer(self._scratch),
            _pointer(self._out),
        )
        return self._out


def stride_bytes(shape: ExpertShape) -> int:
    """Distance of converted records: at K3's sizes as many bytes as ours."""
    blocks = 3 * shape.latent * shape.width // _BLOCK
    size = blocks * (_BLOCK // 2 + _BLOCK // _GROUP) + 4 * len(_MATRICES)
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def converted(record: U8, shape: ExpertShape) -> U8:
    """The row-major record uint8 [record_bytes] in ggml's blocks, uint8 [stride_bytes]."""
    fields = {field.name: field for field in RecordLayout(shape).fields}

    def tensor(name: str) -> U8:
        field = fields[name]
        return record[field.offset : field.offset + field.length]

    target = np.zeros(stride_bytes(shape), np.uint8)
    used = 0
    for matrix in _MATRICES:
        blocks = _blocks(tensor(f"{matrix}.weight"), tensor(f"{matrix}.weight_scale"))
        target[used : used + blocks.size] = blocks
        used += blocks.size
    for matrix in _MATRICES:
        target[used : used + 4] = tensor(f"{matrix}.weight_scale_2")
        used += 4
    return target


def _blocks(weight: U8, scale: U8) -> U8:
    """Blocks of 4 scales and 32 bytes; byte j of a group of 16 holds inputs j and j + 8."""
    pairs = weight.reshape(-1, _GROUP // 2)  # inputs 2i and 2i + 1 of a group
    first, second = pairs[:, :4], pairs[:, 4:]
    codes = np.empty((len(pairs), 4, 2), np.uint8)
    codes[:, :, 0] = first & 0x0F | second << 4
    codes[:, :, 1] = first >> 4 | second & 0xF0
    groups = _BLOCK // _GROUP
    blocks = np.empty((len(pairs) // groups, groups + _BLOCK // 2), np.uint8)
    blocks[:, :groups] = scale.reshape(-1, groups)
    blocks[:, groups:] = codes.reshape(-1, _BLOCK // 2)
    return blocks.reshape(-1)


def _pointer(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)

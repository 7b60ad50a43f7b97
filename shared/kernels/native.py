"""The native kernels "int16" and "bf16": `shared/native/rows.c` behind the ExpertKernel protocol.

Owns the crossing into C, the choice among the back ends of a kernel and the thread pool's life;
importing it raises ImportError where the native module was not built. A call releases the GIL. Must
not know who chose the pairs.

"int16" has one definition for every instruction set, so all its back ends share a kernel id: inputs
become 16-bit integers with one float32 step per 128 columns, the eight products of a lane are
summed as integers, exactly, and each such sum enters one of 16 float32 accumulators by one fused
multiply-add, in the order of the columns; the accumulators are added by a fixed tree. For
activations of variance 1 it stays within 1e-4 of float64 (relative, over a row before its rounding
to bf16), measured 6e-5. That is no bound: one value ten to a thousand times its 128 neighbours
gives 1.6e-4, and where g and u saturate besides, far beyond the scale of a normalised activation,
up to 2e-2. Hidden values below 2^-64 count as zero. The step is per 128 columns and not per token:
hidden values have a long tail, and the largest of 3,072 would set a step too coarse.

"bf16" lets the processor multiply bf16 pairs (`vdpbf16ps`), whose rounding no other instruction set
repeats; within 2e-3 of float64, because the hidden row is rounded to bf16. That instruction takes
four times as long as the integer one on Sapphire Rapids, so "bf16" pays on other processors only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shared._native import ffi, lib
from shared.core.errors import ConfigError, LocalProtocolError
from shared.core.record import RecordLayout, RecordOrder
from shared.core.shape import ExpertShape
from shared.kernels.expert import (
    Arena,
    Bf16Bits,
    Ids,
    bad_bank_row,
    bad_token,
    check_arrays,
    checked_layout,
)

_NO_MEMORY: Final = -(2**63)  # INT64_MIN
_OVERLAP: Final = _NO_MEMORY + 1
_KERNEL_IDS: Final = {"int16": 0x0002_0002, "bf16": 0x0003_0002}  # implementation, version
_SPIN_US_MAX: Final = 3_600_000_000  # an hour; in nanoseconds it fits 64 bits
_CPUS_MAX: Final = 2**31


@dataclass(frozen=True, slots=True)
class Backend:
    """One compiled form of a kernel; `usable` says whether this processor has its instructions."""

    kernel: str
    isa: str
    number: int
    usable: bool


def backends() -> Iterator[Backend]:
    """What the module was built with, the best of each kernel first."""
    number = 0
    while (kernel := lib.k3_backend_kernel(number)) != ffi.NULL:
        name, isa = (ffi.string(text).decode() for text in (kernel, lib.k3_backend_isa(number)))
        yield Backend(name, isa, number, bool(lib.k3_backend_usable(number)))
        number += 1


class NativeKernel:
    """Rows by the fastest back end of a kernel that this processor can run."""

    def __init__(
        self,
        shape: ExpertShape,
        order: RecordOrder = "row-major",
        *,
        name: str = "int16",
        isa: str = "auto",
        threads: int = 1,
        cpus: Sequence[int] = (),
        spin_us: int = 0,
    ) -> None:
        """Start threads - 1 workers, which end with the kernel; a caller of `rows` is the first.

        Worker i runs on cpus[i % len(cpus)] only, if any are named; an idle worker looks for work
        for spin_us before it sleeps. LocalProtocolError when no record can have this shape and
        order; ConfigError for a name, isa, number of threads or CPU that cannot be had here.
        """
        self._layout = checked_layout(shape, order)
        backend = _find(name, isa)
        self.shape: Final = shape
        self.order: Final = order
        self.name: Final = name
        self.isa: Final = backend.isa
        self.kernel_id: Final = _KERNEL_IDS[name]
        self.threads: Final = threads
        self._backend = backend.number
        self._native_layout = _native_layout(self._layout)
        self._pool = _open_pool(threads, cpus, spin_us)

    def rows(
        self, arena: Arena, bank_rows: Ids, tokens: Ids, activations: Bf16Bits, out: Bf16Bits
    ) -> None:
        """See ExpertKernel.rows; also MemoryError when the scratch memory cannot be had.

        A row with a NaN or negative block scale is NaN in every element that the scale touches, and
        so is one with a negative or infinite scale_2 or a sum beyond float32. LocalProtocolError
        also when `out` overlaps another array.
        """
        check_arrays(self._layout, arena, bank_rows, tokens, activations, out)
        self._call(
            arena, bank_rows, tokens, activations, ffi.from_buffer("uint16_t[]", out), ffi.NULL
        )

    def rows_f32(
        self, arena: Arena, bank_rows: Ids, tokens: Ids, activations: Bf16Bits
    ) -> npt.NDArray[np.float32]:
        """The same rows before their rounding to bf16, float32 [P, latent]: shows the error."""
        out = np.empty((len(bank_rows), self.shape.latent), np.float32)
        check_arrays(
            self._layout, arena, bank_rows, tokens, activations, np.empty(out.shape, np.uint16)
        )
        self._call(arena, bank_rows, tokens, activations, ffi.NULL, ffi.from_buffer("float[]", out))
        return out

    def read_probe(self, memory: npt.NDArray[np.uint8]) -> None:
        """Read every byte of C-contiguous `memory` once with this kernel's threads."""
        lib.k3_read_probe(self._pool, ffi.from_buffer("uint8_t[]", memory), memory.nbytes)

    def cpu_ns(self) -> int:
        """Processor time that calls have taken so far, all threads together, in nanoseconds."""
        return int(lib.k3_pool_cpu_ns(self._pool))

    def _call(
        self,
        arena: Arena,
        bank_rows: Ids,
        tokens: Ids,
        activations: Bf16Bits,
        out: object,
        out_f32: object,
    ) -> None:
        n_rows, n_tokens = len(arena), len(activations)
        view = ffi.from_buffer
        wrong = lib.k3_rows(
            self._backend,
            self._pool,
            self._native_layout,
            view("uint8_t[]", arena),
            n_rows,
            view("int32_t[]", bank_rows),
            view("int32_t[]", tokens),
            len(bank_rows),
            view("uint16_t[]", activations),
            n_tokens,
            out,
            out_f32,
        )
        if wrong == 0:
            return
        if wrong == _NO_MEMORY:
            raise MemoryError(f"expert rows: no scratch memory for {len(bank_rows)} pairs")
        if wrong == _OVERLAP:
            raise LocalProtocolError(
                "expert rows: out overlaps the arena, the activations or the pairs: rows would be "
                "written over what is still to be read, give it memory of its own"
            )
        pair = abs(wrong) - 1
        if wrong > 0:
            raise bad_bank_row(pair, int(bank_rows[pair]), n_rows)
        raise bad_token(pair, int(tokens[pair]), n_tokens)


def _find(name: str, isa: str) -> Backend:
    """The back end of kernel `name` for `isa`, the best usable one for "auto"."""
    built = [backend for backend in backends() if backend.kernel == name]
    chosen = [backend for backend in built if isa in ("auto", backend.isa)]
    for backend in chosen:
        if backend.usable:
            return backend
    if not chosen:
        forms = " or ".join(["auto", *(backend.isa for backend in built)])
        raise ConfigError(
            f"kernel {name} for isa {isa!r} was not built for this kind of processor: "
            + (f"use isa {forms}" if built else "use kernel int16")
        )
    raise ConfigError(
        f"kernel {name} needs the instructions of {' or '.join(b.isa for b in chosen)}, which this "
        "processor lacks: use isa auto" + ("" if name == "int16" else " and kernel int16")
    )


def _open_pool(threads: int, cpus: Sequence[int], spin_us: int) -> object:
    most = lib.THREADS_MAX
    if not 1 <= threads <= most:
        raise ConfigError(f"kernel threads {threads} is outside 1 to {most}")
    if not 0 <= spin_us <= _SPIN_US_MAX:
        raise ConfigError(f"kernel spin_us {spin_us} is outside 0 to {_SPIN_US_MAX}")
    if beyond := [cpu for cpu in cpus if not 0 <= cpu < _CPUS_MAX]:
        raise ConfigError(f"kernel cpus: {beyond[0]} is outside 0 to {_CPUS_MAX - 1}")
    pool = lib.k3_pool_open(threads, ffi.new("int32_t[]", list(cpus)), len(cpus), spin_us * 1000)
    if pool == ffi.NULL:
        where = f" on CPUs {list(cpus)}" if cpus else ""
        raise ConfigError(
            f"kernel threads: the system refused {threads - 1} more threads{where}: name CPUs of "
            "this machine that the process may use, or fewer threads"
        )
    return ffi.gc(pool, lib.k3_pool_close)


def _native_layout(layout: RecordLayout) -> object:
    offset = {field.name: field.offset for field in layout.fields}
    matrices = ("w1", "w3", "w2")
    return ffi.new(
        "k3_expert_layout *",
        {
            "latent": layout.shape.latent,
            "width": layout.shape.width,
            "interleaved": layout.order == "interleaved-4",
            "stride_bytes": layout.stride_bytes,
            "weight": [offset[f"{matrix}.weight"] for matrix in matrices],
            "scale": [offset[f"{matrix}.weight_scale"] for matrix in matrices],
            "scale_2": [offset[f"{matrix}.weight_scale_2"] for matrix in matrices],
        },
    )

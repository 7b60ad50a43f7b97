"""Who takes part in `k3 bench kernel`: our back ends, the read probe, ggml and torch.

Owns the table of back ends, their names in figures and how each is called. Must not know clocks or
targets. One that cannot take part is a ConfigError that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from services.bench.kernel_laps import Action
from services.bench.kernel_records import Rotation, ids
from services.bench.peers.ggml_rows import GgmlRows
from shared.core.errors import ConfigError
from shared.core.record import RecordLayout, RecordOrder
from shared.core.shape import ExpertShape
from shared.kernels.codecs import bf16_float
from shared.kernels.expert import Arena, Bf16Bits

if TYPE_CHECKING:
    from services.bench.peers.torch_rows import TorchRows
    from shared.kernels.native import NativeKernel

ORDERS: Final[Mapping[RecordOrder, str]] = {
    "interleaved-4": "interleaved_4",
    "row-major": "row_major",
}


@dataclass(frozen=True, slots=True)
class Backend:
    """One of our back ends; `reason` says why it cannot run here."""

    name: str
    kernel: str
    isa: str
    reason: str | None = None


def our_backends() -> Iterator[Backend]:
    """Every back end that this build has, best first. ConfigError without the native module."""
    with native_module():
        from shared.kernels.native import backends
    for one in backends():
        reason = None if one.usable else f"this processor has not the instructions of {one.isa}"
        yield Backend(f"{one.kernel}_{one.isa}", one.kernel, one.isa, reason)


@dataclass(frozen=True, slots=True)
class Memory:
    """An arena, its rotation, and the activations of all contenders: bf16 bits [tokens, latent]."""

    arena: Arena
    rotation: Rotation
    activations: Bf16Bits


class Kernel:
    """One of our back ends, on records of one order."""

    def __init__(
        self,
        backend: Backend,
        shape: ExpertShape,
        order: RecordOrder,
        threads: int,
        memory: Memory,
    ) -> None:
        """ConfigError when it cannot be had on so many threads; `out` has the last lap's rows."""
        if backend.reason is not None:
            raise ConfigError(backend.reason)
        self.name: Final = f"{backend.name}.{ORDERS[order]}"
        self.rotation: Final = memory.rotation
        self.packed_bytes: Final = RecordLayout(shape).record_bytes
        self._kernel: Final = kernel_of(backend, shape, order, threads)
        self._memory: Final = memory
        self.out: Bf16Bits = np.empty((0, shape.latent), np.uint16)

    def prepare(self, records: range, tokens: int) -> Action:
        """See Contender. The bytes of a record in another order are another random expert."""
        rows = np.repeat(ids(records), tokens)
        which = np.tile(np.arange(tokens, dtype=np.int32), len(records))
        x = self._memory.activations[:tokens]
        if len(self.out) != len(rows):
            self.out = np.zeros((len(rows), x.shape[1]), np.uint16)
        return lambda: self._kernel.rows(self._memory.arena, rows, which, x, self.out)


@contextmanager
def native_module() -> Iterator[None]:
    """Around its import: it may not have been built."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"there is no native module to measure ({error}): install a C compiler and run "
            "`pip install .` again"
        ) from error


def kernel_of(
    backend: Backend, shape: ExpertShape, order: RecordOrder, threads: int
) -> NativeKernel:
    """The kernel of a back end; ConfigError where it cannot be had."""
    with native_module():
        from shared.kernels.native import NativeKernel
    return NativeKernel(shape, order, name=backend.kernel, isa=backend.isa, threads=threads)


class Probe:
    """Reads records with plain loads and does nothing with them: the limit that memory sets."""

    name: Final = "read_probe"

    def __init__(self, shape: ExpertShape, threads: int, memory: Memory) -> None:
        """ConfigError without the native module."""
        self.rotation: Final = memory.rotation
        self.packed_bytes: Final = memory.arena.shape[1]
        self._arena: Final = memory.arena
        with native_module():
            from shared.kernels.native import NativeKernel
        self._kernel: Final = NativeKernel(shape, threads=threads)

    def prepare(self, records: range, tokens: int) -> Action:
        """See Contender; it has no use for tokens."""
        del tokens
        memory = self._arena[records.start : records.stop]
        return lambda: self._kernel.read_probe(memory)


class Ggml:
    """ggml's vec_dot over records in its own format, in an arena of its own."""

    def __init__(
        self, name: str, library: Path, shape: ExpertShape, threads: int, memory: Memory
    ) -> None:
        """See GgmlRows."""
        self.name: Final = name
        self.rotation: Final = memory.rotation
        self.packed_bytes: Final = RecordLayout(shape).record_bytes
        self._rows: Final = GgmlRows(library, shape, threads)
        self._arena: Final = memory.arena
        self._x: Final = np.ascontiguousarray(bf16_float(memory.activations))

    def prepare(self, records: range, tokens: int) -> Action:
        """See Contender."""
        rows, x = ids(records), self._x[:tokens]
        return lambda: self._rows.rows(self._arena, rows, x)

    def close(self) -> None:
        """End its threads."""
        self._rows.close()


class Torch:
    """torch's dequantise and matmul; it has no threads of its own to end."""

    name: Final = "torch_bf16"

    def __init__(self, shape: ExpertShape, threads: int, memory: Memory) -> None:
        """Sets torch's threads for the whole process."""
        from services.bench.peers.torch_rows import TorchRows

        self.rotation: Final = memory.rotation
        self.packed_bytes: Final = RecordLayout(shape).record_bytes
        self._rows: Final[TorchRows] = TorchRows(shape, threads)
        self._memory: Final = memory

    def prepare(self, records: range, tokens: int) -> Action:
        """See Contender."""
        rows, x = ids(records), self._memory.activations[:tokens]
        return lambda: self._rows.rows(self._memory.arena, rows, x)

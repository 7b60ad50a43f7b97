"""The host's side of the persistent kernel: memory of one ring pair, launch, stop and why it ended.

Owns the buffers and the life of a launch. The caller writes verified dispatches into the request
ring, rings bells, and seals and sends the replies: the kernel neither checks nor makes checksums
(`shared.io.ring` has both directions). Rings lie in whole pages, which the driver pins.
"""

from __future__ import annotations

import mmap
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton

from shared.core.errors import LocalProtocolError
from shared.core.ring_layout import RingShape
from shared.kernels.expert import Arena
from shared.kernels.gpu import serve
from shared.kernels.gpu.experts import WARPS, GpuKernel, processors
from shared.kernels.gpu.memory import INTERPRETED, device, shared_with_gpu, tensor_of

_PROGRAMS_PER_PROCESSOR: Final = 4  # as many as its registers hold


class Ended(Enum):
    """Why a launch ended."""

    RUNNING = 0
    STOPPED = serve.STOPPED.value
    IDLE = serve.IDLE.value  # no bell for the whole bound: launch again
    REFUSED = serve.REFUSED.value  # a bell rang for a slot that nobody can have verified
    LOST = serve.LOST.value  # a program never arrived: the GPU is not to be trusted


class GpuRing:
    """Serves one ring pair from one arena with one launch."""

    def __init__(
        self,
        kernel: GpuKernel,
        shape: RingShape,
        arena: Arena,
        table: npt.NDArray[np.int32],
        *,
        requests: npt.NDArray[np.uint8],
        replies: npt.NDArray[np.uint8],
        programs: int | None = None,
    ) -> None:
        """Share the rings, uint8 [ring bytes] in host memory, with the GPU; the kernel holds arena.

        table int32 [layers, experts]: bank row, -1 where the arena has none. programs: how much of
        the GPU a launch occupies while it runs, by default all. Raises LocalProtocolError when
        sizes do not fit, a ring does not start a page or the arena is not held, ConfigError when
        the driver does not share memory.
        """
        for name, ring, length in (
            ("requests", requests, shape.request_ring_bytes),
            ("replies", replies, shape.reply_ring_bytes),
        ):
            if ring.shape != (length,) or ring.dtype != np.uint8 or not ring.flags.writeable:
                raise LocalProtocolError(
                    f"gpu ring: {name} is {ring.dtype} {ring.shape}, not writable uint8 ({length},)"
                )
        if shape.latent != kernel.shape.latent:
            raise LocalProtocolError(
                f"gpu ring: slots of latent {shape.latent}, experts of {kernel.shape.latent}"
            )
        if table.ndim != 2 or table.dtype != np.int32 or (table >= len(arena)).any():
            raise LocalProtocolError("gpu ring: table is not int32 [layers, experts] of arena rows")
        self._kernel = kernel
        self._shape = shape
        # a page of its own, because the driver pins whole pages
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._control: Final = page[: 8 * serve.CONTROL_WORDS].view(np.int64)
        self._arena: Final = kernel.held(arena)
        self._memory: Final = tuple(shared_with_gpu(memory) for memory in (requests, replies, page))
        # under the interpreter a second program would start when the first has ended
        self._programs: Final = (
            1 if INTERPRETED else programs or processors() * _PROGRAMS_PER_PROCESSOR
        )
        self._table = tensor_of(np.ascontiguousarray(table)).to(device())
        self._layers, self._experts = table.shape
        self._allocate()

    def _allocate(self) -> None:
        shape, kernel, where = self._shape, self._kernel, device()
        self._buffers = kernel.buffers(shape.max_rows)
        pairs = self._buffers.pairs_max
        self._state = torch.zeros(serve.STATE_WORDS, dtype=torch.int64, device=where)
        self._echo = torch.zeros(pairs, dtype=torch.int32, device=where)
        self._activations = torch.zeros(
            (shape.max_tokens, shape.latent), dtype=torch.int16, device=where
        )
        self._out = torch.zeros((pairs, shape.latent), dtype=torch.int16, device=where)

    @property
    def ended(self) -> Ended:
        """Why the last launch ended, or RUNNING."""
        return Ended(int(self._control[1]))

    @property
    def served(self) -> int:
        """Dispatches of the last launch; known once it has ended."""
        return int(self._control[2])

    def stop(self) -> None:
        """Ask the running launch to end; it finishes the dispatch it is at."""
        self._control[0] = 1

    def launch(self, polls_max: int) -> None:
        """Queue the kernel on the current stream; it ends after `polls_max` looks without a bell.

        Give it a stream of its own, and allocate before: what the driver does for the whole device
        waits until it has ended.
        The driver refuses a grid that cannot run at once (RuntimeError): ask for fewer programs.
        Under the interpreter this call returns when the kernel has ended.
        """
        shape, kernel = self._shape, self._kernel
        requests, replies, control = self._memory
        self._control[:] = 0
        self._state[:4] = 0
        serve.serve_launch[(self._programs,)](
            requests,
            replies,
            control.view(torch.int64),
            polls_max,
            self._arena,
            len(self._arena),
            self._table,
            self._state,
            self._buffers.work,
            self._echo,
            self._activations,
            self._buffers.hidden,
            self._out,
            kernel.kernel_id,
            RING=ring_constants(shape),
            TABLE=(self._layers, self._experts),
            PAIRS=self._buffers.pairs_max,
            ROW_BLOCK=triton.next_power_of_2(shape.latent),
            PTX=not INTERPRETED,
            num_warps=WARPS,
            launch_cooperative_grid=True,
            **kernel.constants,
        )


def ring_constants(shape: RingShape) -> tuple[int, ...]:
    """What the Triton functions call RING."""
    return (
        shape.slots,
        shape.bells_bytes,
        shape.request_slot_bytes,
        shape.reply_slot_bytes,
        shape.max_tokens,
        shape.max_rows,
    )

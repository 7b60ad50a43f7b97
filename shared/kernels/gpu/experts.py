"""The GPU kernel behind the ExpertKernel protocol, and its entry for tensors on the device.

Owns the launches of a dispatch and the buffers they need, allocated once. Imports torch and triton,
so CPU nodes must not import it; it must not know rings or who chose the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from shared.core.errors import LocalProtocolError
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
from shared.kernels.gpu.kernel import WORK_HEAD, hidden_launch, order_launch, output_launch
from shared.kernels.gpu.memory import INTERPRETED, device, shared_with_gpu, tensor_of

VERSION: Final = 1
WARPS: Final = 2  # of one program: one for each 16 outputs of a tile, or both decode all of it
_IMPLEMENTATION: Final = 0x1000
_PROGRAMS_PER_PROCESSOR: Final = 6  # as many as its registers hold
_CAPABILITY_MIN: Final = 80  # bf16 in the matrix units


def why_unavailable() -> str | None:
    """What this process lacks to run the kernel, with the remedy; None when nothing."""
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU (look at nvidia-smi, and install a CUDA build of torch)"
    if (capability := _capability()) < _CAPABILITY_MIN:
        return f"the GPU has compute capability {capability}: use one of {_CAPABILITY_MIN} or more"
    return None


@dataclass(frozen=True, slots=True)
class Buffers:
    """Device memory of dispatches with at most `pairs_max` pairs; their addresses never change.

    Write `count` int32 [2] = (pairs, tokens), `bank_rows` and `tokens` int32 [pairs_max]; all three
    are views of `work`. `hidden` int16 [pairs_max, width] is scratch. A launch reads the first
    `count[0]` pairs, and gives zeros for a pair whose row or token is out of range.
    """

    pairs_max: int
    work: torch.Tensor
    count: torch.Tensor
    bank_rows: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor


def expert_layout(layout: RecordLayout) -> tuple[int, ...]:
    """What the Triton functions call `layout`: stride and the offsets of nine tensors, in bytes."""
    offset = {field.name: field.offset for field in layout.fields}
    parts = ("weight", "weight_scale", "weight_scale_2")
    return (layout.stride_bytes, *(offset[f"{m}.{p}"] for m in ("w1", "w3", "w2") for p in parts))


def operand() -> tl.dtype:
    """The type that weights are multiplied in: bf16, or float32 under the interpreter."""
    return tl.float32 if INTERPRETED else tl.bfloat16


class GpuKernel:
    """Rows by Triton, from records in device memory or in host memory that the GPU can reach."""

    name: Final = "gpu"

    def __init__(self, shape: ExpertShape, order: RecordOrder = "row-major") -> None:
        """LocalProtocolError for a shape no record can have, or an order it does not read."""
        if order != "row-major":
            raise LocalProtocolError(f"kernel gpu reads row-major records, not {order}: rebuild it")
        self.layout: Final = checked_layout(shape, order)
        self.shape: Final = shape
        self.order: Final = order
        self.kernel_id: Final = kernel_id()
        self._held: dict[tuple[int, int], torch.Tensor] = {}
        # the interpreter runs programs one after the other, so two are enough to show striding
        self.programs: Final = 2 if INTERPRETED else processors() * _PROGRAMS_PER_PROCESSOR
        self.constants: Final = {
            "LAYOUT": expert_layout(self.layout),
            "LATENT": shape.latent,
            "WIDTH": shape.width,
            "OPERAND": operand(),
        }

    def rows(
        self, arena: Arena, bank_rows: Ids, tokens: Ids, activations: Bf16Bits, out: Bf16Bits
    ) -> None:
        """See ExpertKernel.rows; waits for the GPU.

        An arena given to `hold` is read where it is. Of any other, the records of the call are
        copied to the GPU first, which is right and slow.
        """
        check_arrays(self.layout, arena, bank_rows, tokens, activations, out)
        _check_indices(arena, bank_rows, tokens, activations)
        if not len(bank_rows):
            return
        held = self._held.get((arena.ctypes.data, arena.nbytes))
        if held is None:
            held, bank_rows = _used_records(arena, bank_rows)
        buffers = self.buffers(len(bank_rows))
        buffers.bank_rows.copy_(tensor_of(bank_rows))
        buffers.tokens.copy_(tensor_of(tokens))
        buffers.count.copy_(torch.tensor([len(bank_rows), len(activations)], dtype=torch.int32))
        rows = torch.empty(out.shape, dtype=torch.int16, device=device())
        self.launch(held, buffers, tensor_of(activations.view(np.int16)).to(device()), rows)
        out.view(np.int16)[:] = rows.cpu().numpy()

    def hold(self, arena: Arena, *, in_place: bool) -> None:
        """Make `arena` one that `rows` reads without a copy per call; it must outlive the kernel.

        in_place: registered host memory (Grace, unified memory), else a copy in device memory.
        Raises ConfigError when the driver cannot register it, LocalProtocolError for other shapes
        or, in place, an arena that does not start a page.
        """
        stride = self.layout.stride_bytes
        if arena.ndim != 2 or arena.shape[1] != stride or not arena.flags.c_contiguous:
            raise LocalProtocolError(f"arena has shape {arena.shape}, not (rows, {stride})")
        tensor = shared_with_gpu(arena) if in_place else tensor_of(arena).to(device())
        self._held[arena.ctypes.data, arena.nbytes] = tensor

    def held(self, arena: Arena) -> torch.Tensor:
        """The tensor of an arena given to `hold`; LocalProtocolError for any other."""
        try:
            return self._held[arena.ctypes.data, arena.nbytes]
        except KeyError:
            raise LocalProtocolError(
                "kernel gpu does not hold this arena: call hold first"
            ) from None

    def buffers(self, pairs_max: int) -> Buffers:
        """Allocate what `launch` needs for up to `pairs_max` pairs, with no pair in it yet."""
        # a power of two of at least a block, so that few sizes are ever compiled
        slots = max(16, 1 << (pairs_max - 1).bit_length())
        work = torch.zeros(WORK_HEAD.value + 4 * slots, dtype=torch.int32, device=device())
        rows = work[WORK_HEAD.value :]
        hidden = torch.empty((slots, self.shape.width), dtype=torch.int16, device=device())
        return Buffers(
            slots, work, work[:2], rows[:pairs_max], rows[slots : slots + pairs_max], hidden
        )

    def launch(
        self, arena: torch.Tensor, buffers: Buffers, activations: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Queue out[p] = expert bank_rows[p] of activations[tokens[p]] on the current stream.

        arena uint8 [rows, stride] in device memory or shared with the GPU; activations int16 (bf16
        bits) [at least count[1], latent]; out int16 [at least count[0], latent], where further rows
        stay as they are. All contiguous. Sizes are not checked, because the device alone knows the
        counts. Neither waits nor allocates: after a first call, which compiles, a CUDA graph can
        capture it.
        """
        grid, pairs = (self.programs,), buffers.pairs_max
        order_launch[grid](buffers.work, len(arena), PAIRS=pairs, num_warps=WARPS)
        hidden_launch[grid](
            arena,
            len(arena),
            buffers.work,
            activations,
            buffers.hidden,
            PAIRS=pairs,
            num_warps=WARPS,
            **self.constants,
        )
        output_launch[grid](
            arena,
            len(arena),
            buffers.work,
            buffers.hidden,
            out,
            PAIRS=pairs,
            num_warps=WARPS,
            **self.constants,
        )


def kernel_id() -> int:
    """u32: 0x1000 + compute capability (0: the interpreter), 32 x Triton's major + minor, VERSION.

    The bits of a sum depend on the matrix unit and on the order the compiler gives its steps, so
    another GPU or another Triton is another kernel until somebody shows that the bits agree.
    """
    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    capability = 0 if INTERPRETED else _capability()
    return (_IMPLEMENTATION + capability) << 16 | (major << 5 | minor) << 8 | VERSION


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def processors() -> int:
    """Multiprocessors of the current GPU."""
    return int(torch.cuda.get_device_properties(device()).multi_processor_count)


def _check_indices(arena: Arena, bank_rows: Ids, tokens: Ids, activations: Bf16Bits) -> None:
    wrong = np.flatnonzero((bank_rows < -1) | (bank_rows >= len(arena)))
    if len(wrong):
        raise bad_bank_row(int(wrong[0]), int(bank_rows[wrong[0]]), len(arena))
    wrong = np.flatnonzero((tokens < 0) | (tokens >= len(activations)))
    if len(wrong):
        raise bad_token(int(wrong[0]), int(tokens[wrong[0]]), len(activations))


def _used_records(arena: Arena, bank_rows: Ids) -> tuple[torch.Tensor, Ids]:
    """The records of a call on the device, and the rows renumbered to match."""
    if INTERPRETED:
        return tensor_of(arena), bank_rows
    used, renumbered = np.unique(bank_rows, return_inverse=True)
    first = int(used[0] < 0)  # -1 sorts first: it names no record
    records = tensor_of(arena[used[first:]]).to(device())
    return records, (renumbered - first).astype(np.int32)

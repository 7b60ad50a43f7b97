"""What an expert kernel is: the definition of one row and the guard of a call.

Owns the arithmetic that every implementation must reproduce and the checks at the edge of a call.
Must not know banks, slots, placements or torch.

One row, for a record (w1, w3, w2, each NVFP4 with its own scale_2) and one bf16 activation z:

    W    = E2M1 nibble x E4M3 block scale, exact in float32       (input_scale plays no part: W4A16)
    g    = (W1 z) x w1.scale_2      u = (W3 z) x w3.scale_2       sums and products in float32
    h    = SiTU(g, u) = 4 tanh(g/4) sigmoid(g) x 25 tanh(u/25)    in float32, rounded once
    row  = (W2 h) x w2.scale_2                                    in float32, rounded once to bf16

z and h enter a product in the kernel's own format: bf16 ("bf16", "gpu", "reference"), or 16-bit
integers with a step per 128 columns ("int16"). The order of a sum is each kernel's own but fixed: a
row depends on (record, z, kernel id) and on nothing else in the call, nor on the order of the
record's bytes. Rows of different kernels agree to about 2^-7 of the row's largest value.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.core.errors import LocalProtocolError
from shared.core.record import RecordLayout, RecordOrder
from shared.core.shape import ExpertShape

Arena: TypeAlias = npt.NDArray[np.uint8]
Ids: TypeAlias = npt.NDArray[np.int32]
Bf16Bits: TypeAlias = npt.NDArray[np.uint16]


class ExpertKernel(Protocol):
    """Computes rows of experts that lie in an arena.

    A call runs on the calling thread, and on the threads that the kernel was made with, if any; it
    may be made from several threads at once.
    """

    @property
    def kernel_id(self) -> int:
        """u32, changed whenever the bits of a row may change; equal ids mean equal bits."""

    @property
    def shape(self) -> ExpertShape:
        """The shape of the experts it computes."""

    @property
    def order(self) -> RecordOrder:
        """The order of the records it reads; an arena in another order gives wrong rows."""

    @property
    def name(self) -> str:
        """The name that selects this kernel, never "auto"."""

    def rows(
        self, arena: Arena, bank_rows: Ids, tokens: Ids, activations: Bf16Bits, out: Bf16Bits
    ) -> None:
        """Write out[p] = expert arena[bank_rows[p]] of activations[tokens[p]] for every pair p.

        arena uint8 [n_rows, stride_bytes]; bank_rows and tokens int32 [P]; activations uint16
        (bf16 bits) [T, latent]; out uint16 [P, latent]. All C-contiguous; `out` overlaps nothing.
        Bank row -1 gives a row of zeros. Raises LocalProtocolError, before anything is written,
        when an array does not fit or an index is out of range.
        """


def checked_layout(shape: ExpertShape, order: RecordOrder = "row-major") -> RecordLayout:
    """Layout of records of this shape and order, or LocalProtocolError when none can have both."""
    for name, size in (("latent", shape.latent), ("width", shape.width)):
        if size <= 0 or size % 16:
            raise LocalProtocolError(f"expert {name} {size} is not a positive multiple of 16")
    try:
        return RecordLayout(shape, order)
    except ValueError as error:
        raise LocalProtocolError(str(error)) from error


def check_arrays(
    layout: RecordLayout,
    arena: Arena,
    bank_rows: Ids,
    tokens: Ids,
    activations: Bf16Bits,
    out: Bf16Bits,
) -> None:
    """Raise LocalProtocolError for the first array with a wrong type, shape or memory order.

    Compares whole properties first: a call with eight small experts takes 40 us, so this may not
    take ten.
    """
    latent, pairs = layout.shape.latent, len(bank_rows)
    for name, array, dtype, shape in (
        ("arena", arena, np.uint8, (arena.shape[0] if arena.ndim else 0, layout.stride_bytes)),
        ("bank_rows", bank_rows, np.int32, (pairs,)),
        ("tokens", tokens, np.int32, (pairs,)),
        ("activations", activations, np.uint16, (len(activations), latent)),
        ("out", out, np.uint16, (pairs, latent)),
    ):
        if array.dtype != dtype:
            raise LocalProtocolError(f"expert rows: {name} is {array.dtype}, not {np.dtype(dtype)}")
        if array.shape != shape:
            raise LocalProtocolError(f"expert rows: {name} has shape {array.shape}, not {shape}")
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            what = "aligned" if flags.c_contiguous else "C-contiguous"
            raise LocalProtocolError(f"expert rows: {name} is not {what}: copy it first")
    if not out.flags.writeable:
        raise LocalProtocolError("expert rows: out is read-only")


def bad_bank_row(pair: int, bank_row: int, n_rows: int) -> LocalProtocolError:
    """The error for a bank row outside the arena."""
    return LocalProtocolError(
        f"expert rows: bank_rows[{pair}] is {bank_row}, outside -1 (none) to {n_rows - 1}"
    )


def bad_token(pair: int, token: int, n_tokens: int) -> LocalProtocolError:
    """The error for a token index without an activation."""
    return LocalProtocolError(
        f"expert rows: tokens[{pair}] is {token}, outside 0 to {n_tokens - 1}"
    )

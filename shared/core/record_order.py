"""Moving a record between its orders: the same bytes, permuted inside each matrix.

Owns the permutation and nothing else: what the orders are is said in `record.py`. Must not know
files, kernels, or why a record has its order.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.core.record import (
    BLOCK,
    CHUNK,
    INTERLEAVED_OUTPUTS,
    RecordField,
    RecordLayout,
    RecordOrder,
)

U8: TypeAlias = npt.NDArray[np.uint8]
U64: TypeAlias = npt.NDArray[np.uint64]

_WORD_BYTES: Final = 8
# what a chunk of one output takes, by the tensor's dtype
_CHUNK_BYTES: Final = {"U8": CHUNK // 2, "F8_E4M3": CHUNK // BLOCK}


def reorder(source: U8, have: RecordLayout, target: U8, want: RecordLayout) -> None:
    """Copy the record `source` of layout `have` into `target`, of layout `want`.

    Both are uint8 [record_bytes], C-contiguous, and do not overlap. Exact in both directions, at
    several GB/s and without the interpreter's lock. ValueError when shapes or sizes differ.
    """
    size = have.record_bytes
    if have.shape != want.shape or source.shape != (size,) or target.shape != (size,):
        raise ValueError(
            f"a record of {have.shape} in {source.shape} bytes cannot become one of {want.shape} "
            f"in {target.shape}: give both the same shape and {size} bytes"
        )
    if have.order == want.order:
        np.copyto(target, source)
        return
    for field in have.fields:
        if field.shape:
            np.copyto(by_output(target, field, want.order), by_output(source, field, have.order))
        else:
            span = slice(field.offset, field.offset + field.length)
            np.copyto(target[span], source[span])


def by_output(record: U8, field: RecordField, order: RecordOrder) -> U64:
    """A weight or weight_scale of a record by output, whatever its order: a view.

    uint64 [outputs / 4, 4, chunks, 8 (weight) or 1 (weight_scale)], whose bytes read in this order
    are the row-major tensor. Only for shapes that can be interleaved.
    """
    words = record[field.offset : field.offset + field.length].view(np.uint64)
    groups = field.shape[0] // INTERLEAVED_OUTPUTS
    chunks = field.shape[1] // _CHUNK_BYTES[field.dtype]
    if order == "row-major":
        return words.reshape(groups, INTERLEAVED_OUTPUTS, chunks, -1)
    return words.reshape(groups, chunks, INTERLEAVED_OUTPUTS, -1).swapaxes(1, 2)

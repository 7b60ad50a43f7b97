"""Every kernel in both record orders: the same rows, bit for bit, under one kernel id."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.errors import LocalProtocolError
from shared.core.record import RecordLayout, RecordOrder
from shared.core.record_order import reorder
from shared.core.shape import K3, ExpertShape
from shared.kernels.expert import ExpertKernel
from shared.kernels.select import select_kernel
from tests.support.expert_records import activations, arena_of, expert_record

NAMES = ("int16", "reference")
INTERLEAVED: RecordOrder = "interleaved-4"
POISON = 0x7FC1


def interleaved(shape: ExpertShape, records: list[np.ndarray]) -> np.ndarray:
    """The arena of the same experts in the other order."""
    moved = [np.empty_like(record) for record in records]
    for record, out in zip(records, moved, strict=True):
        reorder(record, RecordLayout(shape), out, RecordLayout(shape, INTERLEAVED))
    return arena_of(shape, moved)


def random_record(shape: ExpertShape, seed: int) -> np.ndarray:
    """Any nibbles under sane scales; much faster to make than an encoded weight."""
    rng = np.random.default_rng(seed)
    layout = RecordLayout(shape)
    record = rng.integers(0, 256, layout.record_bytes, np.uint8)
    for field in layout.fields:
        data = record[field.offset : field.offset + field.length]
        if field.dtype == "F8_E4M3":
            data[:] = rng.integers(0x20, 0x40, field.length, np.uint8)
        if field.dtype == "F32":
            data.view("<f4")[:] = 0.003
    return record


def compute(
    kernel: ExpertKernel, arena: np.ndarray, bank_rows: list[int], tokens: list[int], z: np.ndarray
) -> np.ndarray:
    out = np.full((len(bank_rows), z.shape[1]), POISON, np.uint16)
    kernel.rows(arena, np.array(bank_rows, np.int32), np.array(tokens, np.int32), z, out)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(128, 128), (256, 384), (640, 128), (3584, 128), (128, 3072)])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_rows_are_equal_in_both_orders(name: str, sizes: tuple[int, int], tokens: int) -> None:
    """One, three and eight tokens of each expert, and masked pairs between them."""
    shape = ExpertShape(*sizes)
    records = [expert_record(shape, 21), random_record(shape, 22)]
    z = activations(tokens, shape.latent, seed=tokens)
    bank_rows = [*[1] * tokens, -1, *[0] * tokens]
    which = [*range(tokens), 0, *range(tokens)]
    plain = select_kernel(shape, name)
    other = select_kernel(shape, name, INTERLEAVED)
    rows = compute(plain, arena_of(shape, records), bank_rows, which, z)

    again = compute(other, interleaved(shape, records), bank_rows, which, z)

    assert np.array_equal(again, rows)
    assert not again[tokens].any()
    assert len({row.tobytes() for row in rows}) == 2 * tokens + 1, "equal rows prove nothing"
    assert (plain.kernel_id, plain.order, other.order) == (
        other.kernel_id,
        "row-major",
        INTERLEAVED,
    )


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_k3_rows_are_equal_in_both_orders(tokens: int) -> None:
    """At full size, by the kernel that would serve it."""
    shape = K3.expert
    records = [random_record(shape, 5)]
    z = activations(tokens, shape.latent, seed=tokens)
    pairs = [0] * tokens, list(range(tokens))
    rows = compute(select_kernel(shape), arena_of(shape, records), *pairs, z)

    moved = interleaved(shape, records)
    again = compute(select_kernel(shape, order=INTERLEAVED), moved, *pairs, z)

    assert np.array_equal(again, rows)
    assert len({row.tobytes() for row in rows}) == tokens


@pytest.mark.parametrize("name", NAMES)
def test_an_arena_in_the_other_order_gives_other_rows(name: str) -> None:
    """What the equality above would miss if a kernel ignored its order."""
    shape = ExpertShape(256, 384)
    records = [expert_record(shape, 3)]
    z = activations(1, 256, seed=1)
    right = compute(select_kernel(shape, name), arena_of(shape, records), [0], [0], z)
    wrong = compute(select_kernel(shape, name), interleaved(shape, records), [0], [0], z)
    assert not np.array_equal(right, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_that_order_are_refused(name: str) -> None:
    """The sizes and the remedy are named."""
    with pytest.raises(LocalProtocolError, match=r"latent 128 and width 48 .* use row-major"):
        select_kernel(ExpertShape(latent=128, width=48), name, INTERLEAVED)

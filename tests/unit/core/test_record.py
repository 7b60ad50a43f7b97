"""Layout of a bank record."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.record import RecordLayout
from shared.core.shape import K3, ExpertShape

sizes = st.integers(1, 64).map(lambda blocks: 16 * blocks)


def test_k3_record_has_the_size_of_the_release() -> None:
    """18,579,480 bytes per expert, as the NVFP4 release stores it."""
    layout = RecordLayout(K3.expert)

    assert layout.record_bytes == 18_579_480
    assert layout.stride_bytes == 18_583_552


@given(latent=sizes, width=sizes)
def test_fields_tile_the_record(latent: int, width: int) -> None:
    """Twelve tensors in the fixed order, without gap or overlap, large ones 16-byte aligned."""
    layout = RecordLayout(ExpertShape(latent=latent, width=width))
    fields = layout.fields

    assert [field.name for field in fields] == [
        "w1.weight", "w1.weight_scale", "w3.weight", "w3.weight_scale", "w2.weight",
        "w2.weight_scale", "w1.weight_scale_2", "w3.weight_scale_2", "w2.weight_scale_2",
        "w1.input_scale", "w3.input_scale", "w2.input_scale",
    ]  # fmt: skip
    assert fields[0].offset == 0
    for before, after in pairwise(fields):
        assert before.offset + before.length == after.offset
    assert all(field.offset % 16 == 0 for field in fields[:6])
    assert layout.record_bytes == 3 * latent * width * 9 // 16 + 24
    assert layout.stride_bytes % 4096 == 0
    assert 0 <= layout.stride_bytes - layout.record_bytes < 4096


@pytest.mark.parametrize(("latent", "width"), [(17, 16), (16, 24), (8, 8)])
def test_shapes_without_whole_scale_blocks_are_refused(latent: int, width: int) -> None:
    """NVFP4 shares a scale over 16 inputs, so both sizes are multiples of 16."""
    with pytest.raises(ValueError, match="multiples of 16"):
        ExpertShape(latent=latent, width=width)

"""The header block: round trip, and every malformed input is one BankError."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.bank_header import (
    JSON_BYTES_MAX,
    MAGIC,
    PREFIX_BYTES,
    BankHeader,
    Golden,
    decode,
    encode,
    header_block_bytes,
    stored_digest,
)
from shared.core.errors import BankError
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape
from shared.io.bank_file import blake3_digest

HEADER = BankHeader(
    version=3,
    name="spark0",
    node="spark0",
    tier="spark",
    model_digest="m",
    placement_digest="p",
    shape=ExpertShape(latent=48, width=32),
    layout="row-major",
    rows=((1, 10), (1, 2), (2, 10)),
    record_hashes=("a" * 64, "b" * 64, "c" * 64),
    source_hashes=("d" * 64, "e" * 64, "f" * 64),
    tensor_checks=("0" * 96, "1" * 96, "2" * 96),
    goldens=(Golden(1, 7, bytes(range(96))), Golden(0, 2**32 - 1, bytes(96))),
    producer="test",
)
GOLDEN = json.loads(msgspec.json.encode(HEADER.goldens[0]))
INFINITY = b"\x80\x7f"


def text_of(row: bytes) -> str:
    """How JSON holds the row of a golden."""
    return base64.b64encode(row).decode()


def block_of(
    text: bytes, *, magic: bytes = MAGIC, version: int = 3, length: int | None = None
) -> bytes:
    """A header block with a right hash around any JSON."""
    fields = struct.pack("<8sIQ", magic, version, len(text) if length is None else length)
    block = fields + blake3_digest(fields + text) + text
    return block.ljust(-(-len(block) // 4096) * 4096, b"\0")


def read(block: bytes) -> BankHeader:
    return decode(block, hasher=blake3_digest, source="x.k3bank")


def test_round_trip() -> None:
    """What is written is read, in whole pages, with the same bytes for the same header."""
    block = encode(HEADER, hasher=blake3_digest)
    assert read(block) == HEADER
    assert len(block) % 4096 == 0
    assert header_block_bytes(block[:PREFIX_BYTES], source="x") == len(block)
    assert encode(HEADER, hasher=blake3_digest) == block
    assert read(block + b"records") == HEADER, "what follows the block is not the header's affair"


def test_layout_of_the_records_follows_the_header() -> None:
    """Both orders are read; only sizes that have one are, and row-major blocks keep their bytes."""
    shape = ExpertShape(latent=128, width=256)
    for order in ("row-major", "interleaved-4"):
        header = msgspec.structs.replace(
            HEADER, shape=shape, layout=order, goldens=(Golden(0, 1, bytes(256)),)
        )
        again = read(encode(header, hasher=blake3_digest))
        assert again == header
        assert again.record_layout == RecordLayout(shape, order)
    assert stored_digest(encode(HEADER, hasher=blake3_digest)).hex() == (
        "33010446c79d78746b21e9dfd9296c97ce5d5a1d6e51423f1d28c8c818c757cc"
    ), "banks of format 3 that were built before would get another digest"


def test_digest_covers_hashes_of_records() -> None:
    """The digest tells two banks apart that differ in one record only."""
    other = msgspec.structs.replace(HEADER, record_hashes=("a" * 64, "b" * 64, "d" * 64))
    digests = {stored_digest(encode(header, hasher=blake3_digest)) for header in (HEADER, other)}
    assert len(digests) == 2


def test_block_size_does_not_depend_on_hashes() -> None:
    """A builder reserves the block before it knows the hashes."""
    draft = msgspec.structs.replace(
        HEADER,
        record_hashes=("0" * 64,) * 3,
        source_hashes=("0" * 64,) * 3,
        tensor_checks=("0" * 96,) * 3,
        goldens=tuple(msgspec.structs.replace(g, row=bytes(96)) for g in HEADER.goldens),
    )
    assert len(encode(draft, hasher=blake3_digest)) == len(encode(HEADER, hasher=blake3_digest))


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (b"", "ends at byte 0"),
        (MAGIC, "ends at byte 8"),
        (block_of(b"{}", magic=b"GGUF\0\0\0\0"), "offset 0: .* is not the magic"),
        (block_of(b"{}", version=1), "offset 8: bank format 1, this program reads 3"),
        (block_of(b"{}", version=2), "bank format 2, .* build the bank again with this version"),
        (block_of(b"{}", length=2**63), "offset 12: header of 9223372036854775808 bytes"),
        (block_of(b"{}", length=JSON_BYTES_MAX + 1), "offset 12"),
        (block_of(b"{}", length=0), "offset 12"),
        (block_of(b"{}", length=9000), "ends at byte 4096, inside its"),
        (block_of(b"{}"), "offset 52: not the header of a bank"),
        (block_of(b'{"version": 1e999}'), "offset 52"),
        (block_of(b'{"version": NaN}'), "offset 52"),
        (block_of(b'"\xff\xfe"'), "offset 52"),
        (block_of(b"[" * 3000), "offset 52"),
    ],
)
def test_malformed_blocks_are_named(block: bytes, named: str) -> None:
    """B12: what, at which offset; no allocation follows a length that is out of bounds."""
    with pytest.raises(BankError, match=f"x.k3bank: .*{named}"):
        read(block)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version"),
        ({"name": "../etc"}, "name"),
        ({"tier": "disk"}, "tier"),
        ({"layout": "blk4"}, "layout"),
        (
            {"layout": "interleaved-4"},
            "latent 48 and width 32 cannot be stored interleaved-4, which needs multiples of 128",
        ),
        (
            {"layout": "interleaved-4", "shape": {"latent": 128, "width": 144}},
            "latent 128 and width 144 cannot be stored interleaved-4",
        ),
        ({"shape": {"latent": 40, "width": 32}}, "multiples of 16"),
        ({"shape": {"latent": -16, "width": 32}}, "latent"),
        ({"rows": []}, "rows"),
        ({"rows": [[1, 10], [1, 2], [-2, 10]]}, "rows"),
        ({"rows": [[1, 10], [1, 2], [1, 10]]}, "an expert has two rows"),
        ({"rows": [[1, 10], [1, 2]]}, "2 rows have 3 record hashes"),
        ({"record_hashes": ["a" * 64, "b" * 64, "C" * 64]}, "record_hashes"),
        ({"tensor_checks": ["0" * 96]}, "1 tensor checks"),
        ({"source_hashes": []}, "0 source hashes"),
        ({"goldens": []}, "goldens"),
        ({"goldens": [GOLDEN | {"bank_row": 3}]}, "golden 0 is of bank row 3 of 3"),
        ({"goldens": [GOLDEN | {"bank_row": -1}]}, "bank_row"),
        ({"goldens": [GOLDEN, GOLDEN | {"seed": 8}]}, "a bank row has two goldens"),
        ({"goldens": [GOLDEN | {"seed": 2**32}]}, "seed"),
        ({"goldens": [GOLDEN | {"row": text_of(bytes(95))}]}, "golden 0 has 95 bytes, not 96"),
        ({"goldens": [GOLDEN | {"row": text_of(bytes(2**17 + 2))}]}, "row"),
        ({"goldens": [GOLDEN | {"row": "no base64"}]}, "row"),
        ({"goldens": [GOLDEN | {"row": text_of(bytes(94) + INFINITY)}]}, "golden 0 is not finite"),
        ({"goldens": [GOLDEN | {"extra": 1}]}, "extra"),
        ({"goldens": [GOLDEN] * 65}, "goldens"),
        ({"extra": 1}, "extra"),
    ],
)
def test_fields_are_checked(change: dict[str, Any], named: str) -> None:
    """A header with a right hash still has to make sense."""
    fields = json.loads(msgspec.json.encode(HEADER)) | change
    with pytest.raises(BankError, match=named):
        read(block_of(json.dumps(fields).encode()))


def test_padding_must_be_zero() -> None:
    """A byte that no hash covers is still checked."""
    block = bytearray(encode(HEADER, hasher=blake3_digest))
    block[-1] = 1
    with pytest.raises(BankError, match="the padding after the header is not zero"):
        read(bytes(block))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    """One changed bit anywhere in the block is a BankError, never another header."""
    block = bytearray(encode(HEADER, hasher=blake3_digest))
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BankError):
        read(bytes(block))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_a_header_or_a_bank_error(data: bytes, as_json: bool) -> None:
    """Nothing but BankError comes out, for a whole block or for the JSON in a right one."""
    with pytest.raises(BankError):
        read(block_of(data) if as_json else data)

"""Trace files: what was written comes back, and damage is named, never served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.routing import format as layout
from services.routing.file import load, save
from services.routing.format import LossTotals
from services.routing.trace import Trace
from shared.core.errors import TraceError
from tests.unit.routing.traces import meta_of, same, trace_of

FILE = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def records_of(trace: Trace) -> np.ndarray:
    """Tokens as a file holds them."""
    records = np.empty(trace.tokens, meta_of(trace).record)
    for name in ("request", "step", "ids"):
        records[name] = getattr(trace, name)
    return records


def write(path: Path, trace: Trace, *, per_block: int = 4, **meta: object) -> bytes:
    """A file of small blocks; returns its bytes."""
    records = records_of(trace)
    blocks = [
        layout.token_block(records[start : start + per_block])
        for start in range(0, len(records), per_block)
    ]
    data = layout.head_bytes(meta_of(trace, **meta)) + b"".join(blocks)
    path.write_bytes(data)
    return data


@FILE
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_what_was_saved_comes_back(tmp_path: Path, lengths: list[int], seed: int) -> None:
    """Arrays, digest and parameters; several blocks when there are more tokens than one holds."""
    trace = trace_of(lengths, seed=seed)
    meta = meta_of(trace, source="synthetic", parameters={"zipf_exponent": 0.5, "fitted_to": "x"})

    save(tmp_path / "t.k3trace", trace, meta)
    loaded = load([tmp_path / "t.k3trace"])

    assert same(loaded.trace, trace)
    assert loaded.meta == meta
    assert loaded.notices == ()
    assert [path.name for path in tmp_path.iterdir()] == ["t.k3trace"]


@FILE
@given(data=st.data())
def test_a_torn_tail_is_dropped_and_named(tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere: whole blocks are kept, a file without any is an error, nothing else happens."""
    path, trace = tmp_path / "t.k3trace", trace_of([7, 6])
    whole = write(path, trace)
    head = len(layout.head_bytes(meta_of(trace)))
    cut = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:cut])
    kept = max(0, (cut - head) // (layout.BLOCK_HEADER_BYTES + 4 * records_of(trace).itemsize)) * 4

    if kept == 0:
        with pytest.raises(TraceError, match=str(path)):
            load([path])
        return
    loaded = load([path])

    assert np.array_equal(loaded.trace.ids, trace.ids[:kept])
    is_clean = (cut - head) % (layout.BLOCK_HEADER_BYTES + 4 * records_of(trace).itemsize) == 0
    assert len(loaded.notices) == (0 if is_clean else 1)
    assert is_clean or f"{kept} tokens before it kept" in loaded.notices[0]


@FILE
@given(data=st.data())
def test_a_flipped_bit_never_becomes_routing(tmp_path: Path, data: st.DataObject) -> None:
    """Anywhere but in the last block it is one error; there the block is dropped and named."""
    path, trace = tmp_path / "t.k3trace", trace_of([7, 6])
    whole = bytearray(write(path, trace))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    last_payload = len(whole) - records_of(trace).itemsize

    if at < last_payload:
        with pytest.raises(TraceError, match=str(path)):
            load([path])
    else:
        loaded = load([path])
        assert np.array_equal(loaded.trace.ids, trace.ids[:12])
        assert "torn" in loaded.notices[0]


@FILE
@given(noise=st.binary(max_size=400), with_magic=st.booleans())
def test_foreign_bytes_are_refused(tmp_path: Path, noise: bytes, with_magic: bool) -> None:
    """One TraceError, whatever it is."""
    path = tmp_path / "t.k3trace"
    path.write_bytes((layout.MAGIC if with_magic else b"") + noise)

    with pytest.raises(TraceError, match=str(path)):
        load([path])


def test_a_tail_of_zeros_is_torn(tmp_path: Path) -> None:
    """A power cut can leave a file's length without its data."""
    path, trace = tmp_path / "t.k3trace", trace_of([8])
    path.write_bytes(write(path, trace) + bytes(5000))

    loaded = load([path])

    assert same(loaded.trace, trace)
    assert "5000 bytes" in loaded.notices[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
        (
            lambda path: path.write_bytes(layout.head_bytes(meta_of(trace_of([1])))),
            "no token in it",
        ),
        (
            lambda path: path.write_bytes(
                path.read_bytes()[:8] + b"\2\0\0\0" + path.read_bytes()[12:]
            ),
            "trace format 2",
        ),
    ],
)
def test_an_unusable_file_is_one_clear_error(tmp_path: Path, change: object, words: str) -> None:
    """Missing, empty, a folder, without tokens, of a later format."""
    path = tmp_path / "t.k3trace"
    write(path, trace_of([4]))
    change(path)  # type: ignore[operator]

    with pytest.raises(TraceError, match=words) as failure:
        load([path])

    assert str(path) in str(failure.value)


def test_an_intact_block_with_impossible_ids_is_refused(tmp_path: Path) -> None:
    """A checksum proves who wrote it, not that it is routing."""
    trace = trace_of([4])
    trace.ids[2, 1, 0] = 999
    write(tmp_path / "t.k3trace", trace)

    with pytest.raises(TraceError, match="token 2 chose an expert beyond"):
        load([tmp_path / "t.k3trace"])


def test_lanes_that_were_recorded_mixed_are_sorted_out(tmp_path: Path) -> None:
    """Two requests whose tokens alternate come back as runs with rising steps."""
    trace = trace_of([6, 6])
    order = np.arange(12).reshape(2, 6).T.ravel()
    write(tmp_path / "t.k3trace", trace.select(np.arange(12) >= 0))
    mixed = Trace(
        trace.model_digest, 1, 24, trace.request[order], trace.step[order], trace.ids[order]
    )
    write(tmp_path / "mixed.k3trace", mixed)

    assert same(load([tmp_path / "mixed.k3trace"]).trace, trace)


def test_parts_of_a_recording_are_one_trace(tmp_path: Path) -> None:
    """Request 0 goes on in the second file; another recording's request 0 is another request."""
    trace = trace_of([6, 3])
    first, second = np.arange(9) < 4, np.arange(9) >= 4
    parts = [tmp_path / f"{name}.k3trace" for name in "abc"]
    write(parts[0], trace.select(first), part=1)
    write(parts[1], trace.select(second), part=2)
    other = trace_of([2], seed=9)
    write(parts[2], other, recording="f" * 16, created_s=1_900_000_000)

    assert same(load([parts[1], parts[0]]).trace, trace)
    every = load([parts[2], parts[1], parts[0]]).trace
    assert every.request.tolist() == [0] * 6 + [1] * 3 + [2] * 2
    assert np.array_equal(every.ids[9:], other.ids)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """Of two models, or the same part twice."""
    write(tmp_path / "a.k3trace", trace_of([4]))
    write(tmp_path / "b.k3trace", trace_of([4], digest="other"), recording="f" * 16)
    with pytest.raises(TraceError, match="of another model than"):
        load([tmp_path / "a.k3trace", tmp_path / "b.k3trace"])
    with pytest.raises(TraceError, match="the same part"):
        load([tmp_path / "a.k3trace", tmp_path / "a.k3trace"])


def test_losses_are_cumulative_within_a_recording(tmp_path: Path) -> None:
    """The last totals of each recording count; recordings add up."""
    for name, recording, totals in (("a", "a" * 16, (3, 1)), ("b", "b" * 16, (10, 0))):
        path = tmp_path / f"{name}.k3trace"
        data = write(path, trace_of([4]), recording=recording)
        blocks = [layout.totals_block(LossTotals(1, 0)), layout.totals_block(LossTotals(*totals))]
        path.write_bytes(data + b"".join(blocks))

    loaded = load([tmp_path / "a.k3trace", tmp_path / "b.k3trace"])

    assert loaded.losses == LossTotals(13, 1)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """No half file under the name, and one error with a remedy."""
    path, trace = tmp_path / "t.k3trace", trace_of([4])
    save(path, trace, meta_of(trace))
    (tmp_path / "t.k3trace.partial").mkdir()

    with pytest.raises(TraceError, match="cannot write"):
        save(path, trace_of([9]), meta_of(trace))

    assert same(load([path]).trace, trace)

"""The bank service over real sockets: several nodes at once, and nodes that misbehave."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from typing import Any

import blake3
import pytest

from services.bank_service.server import (
    ANSWERS_WAITING_MAX,
    CONNECTIONS_MAX,
    FINDS_WAITING_MAX,
    LINES_MAX,
)
from shared.core.bank_wire import (
    CHUNK_BYTES_MAX,
    REQUEST_BYTES_MAX,
    WINDOW_MAX,
    BankFound,
    BankRefused,
    FindBank,
    PullEnded,
    Range,
    ReadRange,
    RecordFound,
    encode,
)
from shared.core.errors import KeyRefused
from shared.io.bank_file import BankFile
from tests.unit.bank_service.world import (
    NODE_QUEUE,
    Node,
    RandomExperts,
    World,
    build_bank,
    eventually,
    placement,
)

CHUNK = 64 * 1024
NODES = ("spark0", "spark1", "spark2")


def run(main: Coroutine[Any, Any, None]) -> None:
    """On a fresh loop, with an end in any case."""

    async def bounded() -> None:
        async with asyncio.timeout(50):
            await main

    asyncio.run(bounded())


def refused(answer: object) -> tuple[str, bool]:
    """(code, permanent) of a refusal."""
    assert isinstance(answer, BankRefused), answer
    return answer.code, answer.permanent


def test_three_nodes_pull_at_once_byte_for_byte(world: World) -> None:
    """Two the same bank, one another: BLAKE3 of what they got is that of the file."""

    async def main() -> None:
        names = ("spark0", "grace", "grace")
        async with world.serving(*NODES) as server, world.nodes(*NODES) as nodes:
            assert server.pulse().idle
            pulls = [node.pull(name, chunk=CHUNK) for node, name in zip(nodes, names, strict=True)]
            got = await asyncio.gather(*pulls)
            for data, name in zip(got, names, strict=True):
                expected = (world.folders[0] / f"{name}.k3bank").read_bytes()
                assert blake3.blake3(data).digest() == blake3.blake3(expected).digest()
            await eventually(lambda: server.pulse().idle)
            assert server.pulse().progress >= sum(len(data) // CHUNK for data in got)
            assert server.look().startswith("3 nodes pull at ")
        begun = world.log.events("bank_pull_begun")
        assert sorted((line["node"], line["bank"]) for line in begun) == sorted(
            zip(NODES, names, strict=True)
        )

    run(main())


def test_a_record_is_found_and_read(world: World) -> None:
    """What re-homing an expert needs, over the wire."""
    world.source = RandomExperts()

    async def main() -> None:
        async with world.serving("spark0"), world.node("spark0") as node:
            for layer, expert in (placement().node("grace").rows[0], (1, 5)):
                found = await node.find_record(layer, expert)
                assert isinstance(found, RecordFound)
                data = await node.read(found.record_hash, found.record_bytes, chunk=CHUNK)
                assert data == RandomExperts().expert_record(layer, expert)

    run(main())


def test_every_refusal_has_its_code(world: World) -> None:
    """And says whether asking again can help."""

    async def main() -> None:
        async with world.serving("spark0"), world.node("spark0") as node:
            bank = await node.find("grace")
            assert isinstance(bank, BankFound)
            end = {"source": bank.digest, "offset": bank.file_bytes, "length": 1}

            assert refused(await node.find("nobody")) == ("bank_unknown", True)
            foreign = await node.find_record(1, 0, model_digest="model-b")
            assert refused(foreign) == ("model_unknown", True)
            assert refused(await node.find_record(1, 5)) == ("expert_unknown", True)
            assert refused(await node.ask(ReadRange, **end)) == ("out_of_range", True)
            gone = await node.ask(ReadRange, source="0" * 64, offset=0, length=1)
            assert refused(gone) == ("gone", False)
            other = await node.ask(FindBank, protocol=2, name="grace")
            assert refused(other) == ("protocol_unsupported", True)
        codes = {line["code"] for line in world.log.events("bank_pull_refused")}
        assert {"bank_unknown", "model_unknown", "gone"} <= codes

    run(main())


def test_a_path_that_is_not_utf8_can_be_named(world: World) -> None:
    """A damaged bank of such a name costs its answer, not the service."""
    layer, expert = placement().node("grace").rows[0]
    for path in world.folders[0].iterdir():
        path.unlink()
    odd = build_bank(world.folders[0], "grace").rename(
        world.folders[0] / os.fsdecode(b"b\xff.k3bank")
    )
    with BankFile.open(odd) as bank:
        offset = bank.records_offset
    with odd.open("r+b") as stream:
        stream.seek(offset)
        first = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([first ^ 1]))

    async def main() -> None:
        async with world.serving("spark0"), world.node("spark0") as node:
            answer = await node.find_record(layer, expert)
            assert refused(answer) == ("record_damaged", True)
            assert isinstance(answer, BankRefused)
            assert "b\\udcff.k3bank: row 0" in answer.text
            assert refused(await node.find("grace")) == ("bank_unknown", True)

    run(main())


def test_an_unknown_key_is_turned_away(world: World) -> None:
    """Only nodes of the Station's allow-list get bytes."""

    async def main() -> None:
        async with world.serving("spark0"):
            with pytest.raises(ExceptionGroup) as caught:
                async with world.node("stranger"):
                    pass
            assert caught.group_contains(KeyRefused)

    run(main())


def test_a_bank_replaced_while_it_is_pulled_is_never_mixed(world: World) -> None:
    """The old bytes to the end; the next question for the name gets the new bank."""
    path = world.folders[0] / "grace.k3bank"
    old = path.read_bytes()

    async def main() -> None:
        async with world.serving("spark0"), world.node("spark0") as node:
            found = await node.find("grace")
            assert isinstance(found, BankFound)
            half = len(old) // 2
            first = await node.read(found.digest, half, chunk=CHUNK)
            await asyncio.to_thread(
                build_bank, world.folders[0], "grace", policy="other", replace=True
            )
            rest = await node.ask(ReadRange, source=found.digest, offset=half, length=CHUNK)
            assert isinstance(rest, Range)
            assert first + rest.data == old[: half + CHUNK]
            assert await node.pull("grace") == path.read_bytes() != old
            # a service that was started again does not know the old bytes any more
        async with world.serving("spark0"), world.node("spark0") as node:
            gone = await node.ask(ReadRange, source=found.digest, offset=0, length=1)
            assert refused(gone) == ("gone", False)

    run(main())


def test_the_rate_is_kept(world: World) -> None:
    """About a second for two nodes together, within a factor of two."""
    world.rate_bytes_per_s = 2**20
    size = (world.folders[0] / "grace.k3bank").stat().st_size
    expected_s = (2 * size - CHUNK_BYTES_MAX) / world.rate_bytes_per_s  # the first burst is free

    async def main() -> None:
        async with world.serving(*NODES), world.nodes("spark0", "spark1") as nodes:
            start = time.monotonic()
            await asyncio.gather(*(node.pull("grace", chunk=CHUNK) for node in nodes))
            elapsed_s = time.monotonic() - start
            assert expected_s > 0.5
            assert expected_s / 2 < elapsed_s < 2 * expected_s

    run(main())


def test_who_asks_too_much_is_refused_and_disturbs_nobody(world: World) -> None:
    """Beyond the window: an answer for each question, and the other node's pull is whole."""
    world.rate_bytes_per_s = 2**23  # so that questions wait
    length = 2**18
    questions = 2 * WINDOW_MAX  # with more, the queue of answers may overflow

    async def main() -> None:
        async with world.serving(*NODES), world.nodes("spark0", "spark1") as (greedy, modest):
            found = await greedy.find("grace")
            assert isinstance(found, BankFound)
            ask = {"source": found.digest, "offset": 0, "length": length}
            tickets = [greedy.send(ReadRange, **ask) for _ in range(questions)]
            pulled = await modest.pull("spark0", chunk=CHUNK)
            assert pulled == (world.folders[0] / "spark0.k3bank").read_bytes()
            answers = [await greedy.answer(ticket) for ticket in tickets]
            served = [answer for answer in answers if isinstance(answer, Range)]
            assert WINDOW_MAX <= len(served) < questions
            others = {refused(answer) for answer in answers if answer not in served}
            assert others == {("too_many_requests", False)}
            # only the first of them is worth a line
            assert len(world.log.events("bank_pull_refused")) == 1

    run(main())


def test_finds_are_bounded_too(world: World) -> None:
    """Looking for records costs disk and memory: few may wait."""

    async def main() -> None:
        async with world.serving("spark0") as server, world.node("spark0") as node:
            tickets = [
                node.send(FindBank, protocol=1, name="grace") for _ in range(4 * FINDS_WAITING_MAX)
            ]
            answers = [await node.answer(ticket) for ticket in tickets]
            found = [answer for answer in answers if isinstance(answer, BankFound)]
            assert len(found) >= FINDS_WAITING_MAX
            assert len(found) + server.refusals["too_many_requests"] == len(tickets)

    run(main())


def test_hostile_frames_are_counted_and_harmless(world: World) -> None:
    """Random bytes, messages of the other direction, a path for a name, and a huge frame."""
    rng = os.urandom

    def raw(frame: Any) -> bytes:
        return frame if isinstance(frame, bytes) else encode(frame)

    async def main() -> None:
        async with world.serving(*NODES), world.node("spark1") as good:
            async with world.node("spark0", encoder=raw) as bad:
                frames = [rng(size) for size in (0, 1, 7, 100, 4000)]
                frames.append(encode(Range(ticket=1, source="0" * 64, offset=0, data=b"x")))
                for name in ("../secret", "/etc/passwd", "a/b", "..", "A", ""):
                    frames.append(encode(FindBank(ticket=1, protocol=1, name=name)))
                frames.append(encode(ReadRange(ticket=1, source="0" * 64, offset=0, length=2**21)))
                frames.append(encode(ReadRange(ticket=1, source="../x", offset=-1, length=0)))
                for frame in frames:
                    bad.link.send(frame)  # type: ignore[arg-type]
                assert refused(await bad.find("nobody")) == ("bank_unknown", True)
                link = world.server._link  # type: ignore[union-attr]
                assert link.counters.malformed == len(frames)
                bad.link.send(rng(REQUEST_BYTES_MAX + 1))  # type: ignore[arg-type]
                bad.link.send(rng(2**19))  # type: ignore[arg-type]
                # libzmq itself ends a connection that sends more than a frame may have
                async with asyncio.timeout(10):
                    await bad.link.disconnected.wait()
            assert link.counters.oversized == 1
            assert await good.pull("grace") == (world.folders[0] / "grace.k3bank").read_bytes()

    run(main())


def test_a_node_that_never_reads_stops_nobody(world: World) -> None:
    """Its answers are bounded and dropped; others are served; later it is served again."""

    async def main() -> None:
        async with (
            world.serving(*NODES) as server,
            world.node("spark0", queue_len_max=NODE_QUEUE) as stalled,
            world.node("spark1") as other,
        ):
            found = await stalled.find("grace")
            assert isinstance(found, BankFound)
            ask = {"source": found.digest, "offset": 0, "length": CHUNK_BYTES_MAX}
            counters = server._link.counters
            while not counters.queue_full and counters.received < 1000:
                for _ in range(WINDOW_MAX):
                    stalled.send(ReadRange, **ask)
                expected = counters.received + WINDOW_MAX
                await eventually(lambda: counters.received >= expected and server.pulse().idle)  # noqa: B023
            assert counters.queue_full
            # full queues at both ends, which libzmq fills to one and a half, and the kernel's
            assert counters.sent < 1.5 * (ANSWERS_WAITING_MAX + NODE_QUEUE) + 32
            assert await other.pull("spark0") == (world.folders[0] / "spark0.k3bank").read_bytes()
        async with world.serving(*NODES), world.node("spark0") as again:
            assert await again.pull("grace") == (world.folders[0] / "grace.k3bank").read_bytes()

    run(main())


def test_connections_that_end_leave_nothing_behind(world: World) -> None:
    """Also when a node asks and leaves at once, again and again; too many at once are refused."""

    async def main() -> None:
        async with world.serving("spark0") as server:
            for _ in range(3 * CONNECTIONS_MAX):
                async with world.node("spark0") as node:
                    found = await node.find("grace")
                    assert isinstance(found, BankFound)
                    for _ in range(WINDOW_MAX):
                        node.send(ReadRange, source=found.digest, offset=0, length=CHUNK)
                    ended = {"complete": False, "pulled_bytes": 9, "kept_bytes": 0}
                    node.send(PullEnded, source=found.digest, elapsed_us=3_000_000, **ended)
                await eventually(lambda: len(server._visits) < CONNECTIONS_MAX)
            await eventually(lambda: not server._visits and server.pulse().idle)
            async with world.nodes(*["spark0"] * (CONNECTIONS_MAX + 1)) as nodes:
                *kept, last = nodes
                for node in kept:
                    assert isinstance(await node.find("grace"), BankFound)
                assert refused(await last.find("grace")) == ("too_many_connections", False)
        (line, *_) = world.log.events("bank_pull_ended")
        assert (line["node"], line["bank"], line["bytes_per_s"]) == ("spark0", "grace", 3)

    run(main())


def test_a_node_cannot_fill_the_journal(world: World) -> None:
    """Lines per node are bounded, and come back with time."""

    async def chatter(node: Node, lines: int) -> None:
        for _ in range(lines):
            node.send(PullEnded, source="0" * 64, complete=True, pulled_bytes=1, kept_bytes=0,
                      elapsed_us=1)  # fmt: skip
        assert refused(await node.find("nobody"))[0] == "bank_unknown"

    async def main() -> None:
        async with world.serving("spark0", "spark1") as server, world.nodes("spark0") as (node,):
            await chatter(node, 2 * LINES_MAX)
            assert len(world.log.capture.entries) == LINES_MAX
            server.look()
            await chatter(node, 2)
            assert len(world.log.capture.entries) == LINES_MAX + 1

    run(main())

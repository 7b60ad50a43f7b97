"""The control link with real sockets, under asyncio's loop and under uvloop (case Z6)."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvloop
import zmq

from shared.core.errors import (
    AddressInUse,
    ConfigError,
    KeyRefused,
    LocalProtocolError,
    RemoteProtocolError,
)
from shared.io import keys, zap
from shared.io.address import check_listen_address, parse_address
from shared.io.link import (
    LinkSettings,
    NodeLink,
    PeerUnreachable,
    StationLink,
    StationUnreachable,
    connect,
    listen,
)

Run = Callable[[Coroutine[Any, Any, None]], None]
CALM = LinkSettings(heartbeat_timeout_us=30_000_000)  # a loaded machine must not look like death
QUICK = LinkSettings(
    heartbeat_interval_us=100_000, heartbeat_timeout_us=400_000, handshake_timeout_us=200_000
)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine to its end on a fresh loop of each kind."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_on_loop(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)

    return run_on_loop


@pytest.fixture
def station_keys(tmp_path: Path) -> keys.KeyPair:
    """A Station's identity."""
    return keys.create(tmp_path / "station", "station")


@pytest.fixture
def node_keys(tmp_path: Path) -> keys.KeyPair:
    """A node's identity."""
    return keys.create(tmp_path / "node", "spark3")


def decode(frame: bytes) -> bytes:
    """A codec that refuses frames starting with a zero byte."""
    if frame[:1] == b"\0":
        raise RemoteProtocolError("starts with a zero byte")
    return frame


class Pod:
    """Opens the ends of links with the fixtures' keys and remembers the log lines."""

    def __init__(self, station: keys.KeyPair, node: keys.KeyPair) -> None:
        self.station, self.node = station, node
        self.logs = structlog.testing.LogCapture()
        self.log = structlog.wrap_logger(None, processors=[self.logs]).bind()

    @asynccontextmanager
    async def station_link(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        allow: Mapping[str, str] | None = None,
        settings: LinkSettings = CALM,
    ) -> AsyncIterator[StationLink[bytes, bytes]]:
        """A listening Station that admits the node (or `allow`)."""
        async with (
            asyncio.TaskGroup() as tasks,
            listen(
                address,
                keys=self.station,
                allow_list={self.node.public: self.node.name} if allow is None else allow,
                decode=decode,
                encode=bytes,
                tasks=tasks,
                log=self.log,
                settings=settings,
            ) as link,
        ):
            yield link

    @asynccontextmanager
    async def node_link(
        self,
        address: str,
        *,
        station_key: str | None = None,
        timeout_us: int = 1_000_000,
        settings: LinkSettings = CALM,
    ) -> AsyncIterator[NodeLink[bytes, bytes]]:
        """A connected node."""
        async with (
            asyncio.TaskGroup() as tasks,
            connect(
                address,
                keys=self.node,
                station_key=station_key or self.station.public,
                decode=decode,
                encode=bytes,
                tasks=tasks,
                timeout_us=timeout_us,
                settings=settings,
            ) as link,
        ):
            yield link


@pytest.fixture
def pod(station_keys: keys.KeyPair, node_keys: keys.KeyPair) -> Pod:
    """Both identities and a captured log."""
    return Pod(station_keys, node_keys)


async def soon(wait: Awaitable[Any], seconds: float = 2.0) -> Any:
    """Bound a wait: a test that would hang fails instead."""
    async with asyncio.timeout(seconds):
        return await wait


def only(group: BaseExceptionGroup) -> BaseException:
    """The single exception in (nested) groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        assert len(error.exceptions) == 1
        error = error.exceptions[0]
    return error


def test_a_message_arrives_with_the_name_bound_to_the_key(run: Run, pod: Pod) -> None:
    """The Station learns the node's name from its key, not from what it says, and can answer."""

    async def main() -> None:
        async with pod.station_link() as station, pod.node_link(station.address) as node:
            node.send(b"hello")
            peer, message = await soon(station.receive())

            assert (peer.name, message) == ("spark3", b"hello")

            station.send(peer, b"welcome")

            assert await soon(node.receive()) == b"welcome"
            assert (station.counters.received, station.counters.sent) == (1, 1)
            assert (node.counters.received, node.counters.sent) == (1, 1)

    run(main())


def test_a_burst_right_after_the_handshake_is_complete_and_in_order(run: Run, pod: Pod) -> None:
    """Z7, Z1: of 10,000 messages sent from the first moment on, none is lost or swapped."""
    count = 10_000

    async def send_all(node: NodeLink[bytes, bytes]) -> None:
        for index in range(count):
            while True:
                try:
                    node.send(b"%d" % index)
                    break
                except StationUnreachable:  # the queue is full: refused, not lost
                    assert not node.disconnected.is_set()
                    await asyncio.sleep(0.001)

    async def main() -> None:
        async with pod.station_link() as station, pod.node_link(station.address) as node:
            async with asyncio.TaskGroup() as tasks, asyncio.timeout(20):
                tasks.create_task(send_all(node))
                got = [(await station.receive())[1] for _ in range(count)]

            assert got == [b"%d" % index for index in range(count)]

    run(main())


def test_a_stalled_node_is_refused_messages_and_named(run: Run, pod: Pod) -> None:
    """Z1: a peer that does not read gets back-pressure (counted), never a silent drop."""
    small = LinkSettings(queue_len_max=10, heartbeat_timeout_us=60_000_000)

    async def main() -> None:
        async with (
            pod.station_link(settings=small) as station,
            pod.node_link(station.address, settings=small) as node,
        ):
            node.send(b"hello")
            peer, _ = await soon(station.receive())
            taken, refusal = 0, ""
            while not refusal and taken < 10_000:
                try:
                    station.send(peer, b"%06d" % taken + b"." * 32_000)
                    taken += 1
                except PeerUnreachable as error:
                    refusal = str(error)

            assert "spark3 does not read" in refusal
            assert station.counters.queue_full == 1

            got = [int((await soon(node.receive()))[:6]) for _ in range(taken)]

            assert got == list(range(taken))

    run(main())


def test_cancelled_receives_lose_no_message(run: Run, pod: Pod) -> None:
    """A receive that is given up at any moment leaves its message for the next one."""
    count = 300

    async def main() -> None:
        got: list[bytes] = []
        async with pod.station_link() as station, pod.node_link(station.address) as node:

            async def feed() -> None:
                for index in range(count):
                    node.send(b"%d" % index)
                    await asyncio.sleep(0.0003)

            async with asyncio.TaskGroup() as tasks, asyncio.timeout(20):
                tasks.create_task(feed())
                for attempt in itertools.cycle(range(6)):  # uvloop's timers have whole milliseconds
                    if len(got) == count:
                        break
                    try:
                        async with asyncio.timeout(attempt * 0.0005):
                            got.append((await station.receive())[1])
                    except TimeoutError:
                        continue

        assert got == [b"%d" % index for index in range(count)]

    run(main())


def test_a_stranger_is_refused_counted_and_logged_once(run: Run, pod: Pod) -> None:
    """S2: an unknown key gets KeyRefused naming key, node and remedy; the Station logs it once."""

    async def main() -> None:
        async with pod.station_link(allow={}) as station:
            for _ in range(3):
                with pytest.raises(ExceptionGroup) as raised:
                    async with pod.node_link(station.address):
                        pytest.fail("a stranger was admitted")
                error = only(raised.value)

                assert isinstance(error, KeyRefused)
                assert pod.node.public in str(error)
                assert "spark3.key" in str(error)
                assert "allow-list" in str(error)

            assert station.keys_refused == 3

        refusals = [entry for entry in pod.logs.entries if entry["event"] == "key_refused"]

        assert [entry["public_key"] for entry in refusals] == [pod.node.public]

    run(main())


def test_a_peer_without_curve_never_gets_in(run: Run, pod: Pod) -> None:
    """CURVE is on even on loopback: a plain DEALER delivers nothing."""

    async def main() -> None:
        async with pod.station_link() as station:
            with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
                plain.setsockopt(zmq.LINGER, 0)
                plain.setsockopt(zmq.RECONNECT_IVL, -1)
                plain.connect(station.address)
                plain.send(b"let me in")
                await soon(_until(lambda: station.counters.handshakes_failed > 0))

            assert station.counters.received == 0

    run(main())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - libzmq counts on its own thread, nobody sets an event
        await asyncio.sleep(0.005)


def test_a_dead_doorkeeper_takes_the_station_down(run: Run, pod: Pod) -> None:
    """A Station that cannot tell friend from stranger stops instead of guessing."""

    class Broken(dict[str, str]):
        def get(self, *_: object) -> str:  # type: ignore[override]
            raise RuntimeError("allow-list is broken")

    async def serve() -> None:
        async with pod.station_link(allow=Broken()) as station, pod.node_link(station.address):
            pytest.fail("admitted by a broken doorkeeper")

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            await serve()

        assert isinstance(only(raised.value), RuntimeError)

    started = time.monotonic()
    run(main())

    assert time.monotonic() - started < 2


def test_a_wrong_station_key_is_named(run: Run, pod: Pod, tmp_path: Path) -> None:
    """A node that expects another Station's key is told which key was not proven."""
    other = keys.create(tmp_path / "other", "other")

    async def main() -> None:
        async with pod.station_link() as station:
            with pytest.raises(ExceptionGroup) as raised:
                async with pod.node_link(station.address, station_key=other.public):
                    pytest.fail("connected to a Station that does not hold the key")
            error = only(raised.value)

            assert isinstance(error, KeyRefused)
            assert other.public in str(error)
            assert station.address in str(error)

    run(main())


def test_an_absent_station_is_retryable_and_bounded(run: Run, pod: Pod) -> None:
    """Nothing listens: StationUnreachable after the given time, saying so."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"

        async def main() -> None:
            started = time.monotonic()
            with pytest.raises(ExceptionGroup) as raised:
                async with pod.node_link(address, timeout_us=200_000):
                    pytest.fail("connected to nothing")

            assert isinstance(only(raised.value), StationUnreachable)
            assert "not listening" in str(only(raised.value))
            assert 0.15 < time.monotonic() - started < 1

        run(main())


def test_a_silent_listener_is_told_from_an_absent_one(run: Run, pod: Pod) -> None:
    """A port that accepts and says nothing times out with its own words."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        async def main() -> None:
            with pytest.raises(ExceptionGroup) as raised:
                async with pod.node_link(address, timeout_us=400_000, settings=QUICK):
                    pytest.fail("connected to a mute")

            assert isinstance(only(raised.value), StationUnreachable)
            assert "did not finish the handshake" in str(only(raised.value))

        run(main())


def test_a_name_that_does_not_resolve_is_retryable_and_bounded(run: Run, pod: Pod) -> None:
    """A Station's host name that DNS does not know (yet) ends as StationUnreachable in time."""

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            async with pod.node_link("tcp://station.invalid:7703", timeout_us=300_000):
                pytest.fail("connected to nowhere")

        assert isinstance(only(raised.value), StationUnreachable)
        assert "station.invalid" in str(only(raised.value))

    run(main())


def test_a_node_waits_for_a_station_that_comes_up_later(run: Run, pod: Pod) -> None:
    """The node may start first: it connects as soon as the Station listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"

    async def join(up: asyncio.Event) -> None:
        async with pod.node_link(address, timeout_us=3_000_000) as node:
            assert up.is_set()
            node.send(b"hello")
            await node.disconnected.wait()

    async def main() -> None:
        up = asyncio.Event()
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(5):
            tasks.create_task(join(up))
            await asyncio.sleep(0.12)
            up.set()
            async with pod.station_link(address) as station:
                _, message = await station.receive()

                assert message == b"hello"

    run(main())


def test_the_end_of_a_station_reaches_the_node(run: Run, pod: Pod) -> None:
    """When the Station goes, what had arrived is still read; then every call says so."""

    async def main() -> None:
        async with AsyncExitStack() as node_stack, AsyncExitStack() as station_stack:
            station = await station_stack.enter_async_context(pod.station_link())
            node = await node_stack.enter_async_context(pod.node_link(station.address))
            node.send(b"hello")
            peer, _ = await soon(station.receive())
            station.send(peer, b"last words")
            await soon(node._socket.poll())  # arrived, not yet read
            await station_stack.aclose()
            await soon(node.disconnected.wait())
            node._socket.get(zmq.EVENTS)  # libzmq has dealt with the end, too

            assert await soon(node.receive()) == b"last words"
            with pytest.raises(StationUnreachable, match="join again"):
                await soon(node.receive())
            with pytest.raises(StationUnreachable, match="join again"):
                node.send(b"anyone?")

    run(main())


def test_a_waiting_receive_ends_with_the_connection(run: Run, pod: Pod) -> None:
    """A node blocked in receive is woken when the Station goes."""

    async def wait_for_end(address: str, joined: asyncio.Event) -> None:
        async with pod.node_link(address) as node:
            joined.set()
            with pytest.raises(StationUnreachable):
                await soon(node.receive())

    async def main() -> None:
        joined = asyncio.Event()
        async with asyncio.TaskGroup() as tasks, pod.station_link() as station:
            tasks.create_task(wait_for_end(station.address, joined))
            await soon(joined.wait())

    run(main())


def test_a_returning_node_is_a_new_peer(run: Run, pod: Pod) -> None:
    """L2: after a node's link ended, its departure is told and the old Peer cannot be reached."""

    async def main() -> None:
        async with pod.station_link() as station:
            async with pod.node_link(station.address) as node:
                node.send(b"first life")
                first, _ = await soon(station.receive())
            gone = await soon(station.departed())
            async with pod.node_link(station.address) as node:
                node.send(b"second life")
                second, _ = await soon(station.receive())

                assert gone == first
                assert second.name == first.name
                assert second != first
                with pytest.raises(PeerUnreachable, match="spark3 has left"):
                    station.send(first, b"stale")
                station.send(second, b"fresh")
                assert await soon(node.receive()) == b"fresh"

            assert station.counters.unreachable == 1
            assert await soon(station.departed()) == second

    run(main())


def test_what_a_node_sends_last_is_handed_over(run: Run, pod: Pod) -> None:
    """A link that is closed at once after a goodbye first gives away what it took."""
    patient = LinkSettings(linger_us=5_000_000, heartbeat_timeout_us=30_000_000)
    count = 300

    async def main() -> None:
        async with pod.station_link() as station:
            async with pod.node_link(station.address, settings=patient) as node:
                for _ in range(count):
                    node.send(b"." * 32_000)
                node.send(b"goodbye")
            for _ in range(count):
                await soon(station.receive())

            assert (await soon(station.receive()))[1] == b"goodbye"

    run(main())


def test_a_reused_descriptor_does_not_hide_a_departure(run: Run, pod: Pod) -> None:
    """A departure nobody has read yet is told before its descriptor stands for the next node."""

    async def main() -> None:
        async with pod.station_link() as station:
            for task in asyncio.all_tasks():
                if task.get_name() == "station_link_watch":
                    task.cancel()  # events now wait until a message makes the link look
            async with pod.node_link(station.address) as node:
                node.send(b"first")
                first, _ = await soon(station.receive())
            async with pod.node_link(station.address) as node:
                node.send(b"second")
                await soon(station.receive())

                assert await soon(station.departed()) == first

    run(main())


def test_two_links_with_one_key_do_not_steal_from_each_other(run: Run, pod: Pod) -> None:
    """Handover is off: a second process with the same key is another peer, the first keeps its."""

    async def main() -> None:
        async with (
            pod.station_link() as station,
            pod.node_link(station.address) as one,
            pod.node_link(station.address) as two,
        ):
            one.send(b"one")
            first, _ = await soon(station.receive())
            two.send(b"two")
            second, _ = await soon(station.receive())
            station.send(first, b"for one")
            station.send(second, b"for two")

            assert await soon(one.receive()) == b"for one"
            assert await soon(two.receive()) == b"for two"

    run(main())


def test_bad_frames_are_dropped_and_counted(run: Run, pod: Pod) -> None:
    """Undecodable, multi-part and oversized frames are skipped; good ones still pass; one log."""

    async def main() -> None:
        async with pod.station_link() as station, pod.node_link(station.address) as node:
            node.send(b"\0bad")
            node.send(b"\0bad again")
            await node._socket.send_multipart([b"two", b"parts"])
            await node._socket.send(b"x" * (CALM.frame_bytes_max + 1))
            node.send(b"x" * CALM.frame_bytes_max)
            _, message = await soon(station.receive())

            assert len(message) == CALM.frame_bytes_max
            assert station.counters.malformed == 3
            assert station.counters.oversized == 1
            assert station.counters.received == 1

        refused = [entry for entry in pod.logs.entries if entry["event"] == "frame_refused"]

        assert [entry["node"] for entry in refused] == ["spark3"]

    run(main())


def test_a_huge_frame_ends_its_connection_only(run: Run, pod: Pod) -> None:
    """MAXMSGSIZE: a peer that announces more than a frame is cut off before it is stored."""

    async def main() -> None:
        async with pod.station_link() as station:
            async with pod.node_link(station.address) as node:
                await node._socket.send(b"x" * 10_000_000)
                await soon(node.disconnected.wait())
            async with pod.node_link(station.address) as node:
                node.send(b"still here")

                assert (await soon(station.receive()))[1] == b"still here"

    run(main())


def test_raw_bytes_on_the_port_harm_nobody(run: Run, pod: Pod) -> None:
    """S1: junk, half greetings and cut-off handshakes from strangers leave the Station serving."""
    rng = random.Random(11)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)

    async def main() -> None:
        async with pod.station_link() as station:
            host, port = "127.0.0.1", parse_address(station.address).port
            for index in range(100):
                start = greeting[: rng.randrange(65)] if index % 2 else b""
                with socket.create_connection((host, port)) as stranger:
                    stranger.sendall(start + rng.randbytes(rng.randrange(300)))
            async with pod.node_link(station.address) as node:
                node.send(b"still here")

                assert (await soon(station.receive()))[1] == b"still here"
            assert station.counters.received == 1

    run(main())


def test_an_oversized_message_is_not_sent(run: Run, pod: Pod) -> None:
    """Our own oversized message is a bug here, raised before it reaches the wire."""

    async def main() -> None:
        async with pod.station_link() as station, pod.node_link(station.address) as node:
            with pytest.raises(LocalProtocolError, match="65537 bytes"):
                node.send(b"x" * (CALM.frame_bytes_max + 1))

    run(main())


def test_a_taken_port_is_named(run: Run, pod: Pod) -> None:
    """D: AddressInUse names the address and the remedy."""

    async def main() -> None:
        async with pod.station_link() as station:
            with pytest.raises(ExceptionGroup) as raised:
                async with pod.station_link(station.address):
                    pytest.fail("two Stations on one port")
            error = only(raised.value)

            assert isinstance(error, AddressInUse)
            assert station.address in str(error)
            assert "another port" in str(error)

    run(main())


def test_a_frozen_node_is_noticed_by_heartbeats(run: Run, pod: Pod, tmp_path: Path) -> None:
    """Z9: a node stopped with SIGSTOP keeps its TCP connection, yet its departure is told."""
    script = tmp_path / "node.py"
    script.write_text(_NODE_PROGRAM)

    async def main() -> None:
        async with pod.station_link(settings=QUICK) as station:
            child = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                [
                    sys.executable,
                    str(script),
                    station.address,
                    pod.station.public,
                    str(tmp_path / "node" / "spark3.key_secret"),
                ],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            try:
                peer, _ = await soon(station.receive(), 10)
                os.kill(child.pid, signal.SIGSTOP)

                assert await soon(station.departed(), 5) == peer
            finally:
                child.kill()
                child.wait()

    run(main())


_NODE_PROGRAM = """
import asyncio, sys
from pathlib import Path
from shared.io import keys
from shared.io.link import LinkSettings, connect

async def main():
    address, station_key, secret = sys.argv[1:]
    settings = LinkSettings(heartbeat_interval_us=100_000, heartbeat_timeout_us=400_000)
    async with asyncio.TaskGroup() as tasks, connect(
        address, keys=keys.load_secret(Path(secret)), station_key=station_key,
        decode=bytes, encode=bytes, tasks=tasks, settings=settings,
    ) as link:
        link.send(b"hello")
        await link.receive()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("tcp://0.0.0.0:7703", "allow_remote"),
        ("tcp://[::]:7703", "allow_remote"),
        ("tcp://192.0.2.1:7703", "allow_remote"),
        ("tcp://*:7703", "numeric IP"),
        ("tcp://localhost:7703", "numeric IP"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:70000", "tcp://HOST:PORT"),
        ("ipc:///tmp/x", "tcp://HOST:PORT"),
        ("", "tcp://HOST:PORT"),
    ],
)
def test_addresses_that_may_not_be_listened_on(address: str, complaint: str) -> None:
    """S2: only a numeric loopback address is bound without an explicit wish."""
    with pytest.raises(ConfigError, match=complaint):
        check_listen_address(address, allow_remote=False)


def test_a_remote_address_needs_an_explicit_wish() -> None:
    """S2: with allow_remote the same address is accepted."""
    assert check_listen_address("tcp://0.0.0.0:7703", allow_remote=True).port == 7703
    assert check_listen_address("tcp://[::1]:7703", allow_remote=False).host == "::1"
    assert parse_address("tcp://station.lan:7703").host == "station.lan"


def test_an_address_of_another_host_is_a_config_error(run: Run, pod: Pod) -> None:
    """Binding what this host does not own names the address."""

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            async with (
                asyncio.TaskGroup() as tasks,
                listen(
                    "tcp://192.0.2.1:7703",
                    keys=pod.station,
                    allow_list={},
                    decode=decode,
                    encode=bytes,
                    tasks=tasks,
                    log=pod.log,
                    allow_remote=True,
                ),
            ):
                pytest.fail("bound a foreign address")

        assert isinstance(only(raised.value), ConfigError)
        assert "192.0.2.1" in str(only(raised.value))

    run(main())


def test_zap_refuses_what_is_not_a_curve_request() -> None:
    """The doorkeeper answers CURVE requests only; anything else is a bug in this process."""
    good = [b"1.0", b"7", b"k3", b"127.0.0.1", b"", b"CURVE", bytes(32)]

    assert zap.parse(good).request_id == b"7"
    for bad in (
        [],
        good[:6],
        [b"2.0", *good[1:]],
        [*good[:5], b"PLAIN", b"u", b"p"],
        [*good[:6], b"k"],
    ):
        with pytest.raises(LocalProtocolError):
            zap.parse(bad)


def test_the_doorkeeper_remembers_a_bounded_number_of_strangers() -> None:
    """A flood of fresh keys is counted whole but cannot fill memory or the journal."""
    capture = structlog.testing.LogCapture()
    door = zap.Doorkeeper({}, structlog.wrap_logger(None, processors=[capture]).bind())
    for index in range(1000):
        request = [b"1.0", b"1", b"k3", b"10.0.0.9", b"", b"CURVE", index.to_bytes(32, "little")]

        assert door.answer(request)[2] == b"400"

    assert door.refusals == 1000
    assert len(capture.entries) == 256

"""Which hosts a link reaches: IPv6 as well, and one that cannot be one is named."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from shared.core.errors import ConfigError
from shared.io import keys
from shared.io.link import connect, listen

NODE = "spark0"


def has_ipv6() -> bool:
    """Whether this machine has the IPv6 loopback address."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def test_ipv6_works_at_both_ends(tmp_path: Path) -> None:
    """A Station at `tcp://[::1]:PORT` is reached, and both directions carry messages."""
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback address")
    station, node = keys.create(tmp_path, "station"), keys.create(tmp_path, NODE)

    async def main() -> None:
        async with (
            asyncio.timeout(20),
            asyncio.TaskGroup() as tasks,
            listen(
                "tcp://[::1]:0",
                keys=station,
                allow_list={node.public: NODE},
                decode=bytes,
                encode=bytes,
                tasks=tasks,
                log=structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()]).bind(),
            ) as there,
            connect(
                there.address,
                keys=node,
                station_key=station.public,
                decode=bytes,
                encode=bytes,
                tasks=tasks,
            ) as here,
        ):
            assert there.address.startswith("tcp://[::1]:")
            here.send(b"question")
            peer, asked = await there.receive()
            there.send(peer, b"answer")
            assert (peer.name, asked, await here.receive()) == (NODE, b"question", b"answer")

    asyncio.run(main())


@pytest.mark.parametrize("host", ["foo_bar!", "*", "-"])
def test_a_host_that_cannot_be_one_is_named(tmp_path: Path, host: str) -> None:
    """One line with the address and the remedy, at once: waiting would not help."""
    station, node = keys.create(tmp_path, "station"), keys.create(tmp_path, NODE)

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            async with (
                asyncio.TaskGroup() as tasks,
                connect(
                    f"tcp://{host}:7703",
                    keys=node,
                    station_key=station.public,
                    decode=bytes,
                    encode=bytes,
                    tasks=tasks,
                ),
            ):
                pytest.fail("connected to nowhere")
        (error,) = raised.value.exceptions
        assert isinstance(error, ConfigError)
        assert f"cannot connect to tcp://{host}:7703" in str(error)

    asyncio.run(main())

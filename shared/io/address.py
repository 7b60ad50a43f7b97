"""Addresses of the control link: `tcp://HOST:PORT`, and which of them may be listened on.

Owns the rule "loopback unless remote peers are allowed on purpose". Pure: resolves no name and
opens no socket.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from shared.core.errors import ConfigError

_TCP: Final = re.compile(
    r"tcp://(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^:/\[\]\s]+)):(?P<port>\d{1,5})"
)


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A parsed address; port 0 asks the system for a free one (listening only)."""

    host: str
    port: int

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is a numeric IPv6 address."""
        return ":" in self.host


def parse_address(address: str) -> TcpAddress:
    """Parse `tcp://HOST:PORT` (an IPv6 host in brackets); ConfigError for anything else."""
    match = _TCP.fullmatch(address)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(f"address {address!r} is not understood: write tcp://HOST:PORT")
    return TcpAddress(match["six"] or match["host"], int(match["port"]))


def check_listen_address(
    address: str, *, allow_remote: bool, setting: str = "allow_remote_control"
) -> TcpAddress:
    """Parse an address to listen on: a numeric IP, and a loopback one unless `allow_remote`.

    Raises ConfigError otherwise, with `setting` as what allows it. A name or an interface is
    refused because what it stands for can change between the check and the bind.
    """
    parsed = parse_address(address)
    try:
        host = ipaddress.ip_address(parsed.host)
    except ValueError:
        raise ConfigError(
            f"cannot listen on {address!r}: give the numeric IP of this host, e.g. tcp://127.0.0.1:8381"
        ) from None
    if not host.is_loopback and not allow_remote:
        raise ConfigError(
            f"refusing to listen on {address}: other machines can reach it. Set {setting} = true "
            "if that is wanted, or use 127.0.0.1"
        )
    return parsed

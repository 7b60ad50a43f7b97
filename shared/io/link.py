"""The control link: a Station's ROUTER and its nodes' DEALERs over TCP, always authenticated.

`listen` opens the Station's end, `connect` a node's. Both are generic over an encode and a decode
callable and must not know what messages mean. CURVE and ZAP are always on, also on loopback.

One connection is one identity: a node that loses its connection opens a new link, and the Station
sees a new `Peer`. Nothing reconnects by itself, so no message of an old life can arrive in a new
one. Sending never blocks: a message is taken at once or refused with an error that names the peer.
Disconnects seen here are early hints; the lease is what decides that a node is lost.
"""

from __future__ import annotations

from shared.io.link_base import LinkCounters, LinkSettings, PeerUnreachable, StationUnreachable
from shared.io.link_node import NodeLink, Outcome, connect
from shared.io.link_station import Peer, StationLink, listen

__all__ = [
    "LinkCounters",
    "LinkSettings",
    "NodeLink",
    "Outcome",
    "Peer",
    "PeerUnreachable",
    "StationLink",
    "StationUnreachable",
    "connect",
    "listen",
]

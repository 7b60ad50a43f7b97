"""Where experts can be computed right now: the engine thread's view of placement and leases."""

from __future__ import annotations

from collections.abc import Mapping

from shared.core.placement import Placement
from station.channel import NodeChannel, NodeStats
from station.copies import Copies
from station.local_experts import LocalTier


class Places:
    """Holders of every expert, the Station's own tiers, and the channels of nodes that serve.

    Owned by the engine thread: leases reach it only as engine commands, so a layer never sees a
    channel change under it, except between two of its waits.
    """

    def __init__(self, placement: Placement, local: Mapping[int, LocalTier]) -> None:
        """`local` maps place indices of the Station's own tiers to their experts."""
        self.placement = placement
        self.copies = Copies(placement)
        self.local = dict(local)
        self.stats = [NodeStats() for _ in placement.nodes]
        self._channels: dict[int, NodeChannel] = {}
        self._note_serving()

    def channel(self, place: int) -> NodeChannel | None:
        """The channel of a node that serves, or None."""
        return self._channels.get(place)

    def is_open(self, channel: NodeChannel) -> bool:
        """Whether this very lease still serves."""
        return self._channels.get(channel.place) is channel

    def attach(self, channel: NodeChannel) -> None:
        """A lease was granted."""
        self.detach(channel.place)
        self._channels[channel.place] = channel
        self._note_serving()

    def detach(self, place: int) -> None:
        """A lease ended: fence its rings."""
        channel = self._channels.pop(place, None)
        if channel is not None:
            channel.close()
            self._note_serving()

    def name(self, place: int) -> str:
        """Node name of a place."""
        return self.placement.nodes[place].name

    def close(self) -> None:
        """Fence everything."""
        for place in list(self._channels):
            self.detach(place)

    def _note_serving(self) -> None:
        self.copies.serve([*self.local, *self._channels])

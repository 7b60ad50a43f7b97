"""The pod's status as a table. Pure: JSON in, rich objects out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from rich.table import Table

from services.pod.endpoint import PodRefused
from shared.core.loading import part_of

_GOOD: Final = frozenset({"serving", "local"})


class HopTimes(msgspec.Struct, frozen=True):
    """Quantiles of a node's hop, microseconds; None before the first."""

    p50: float | None = None
    p99: float | None = None


class LoadStatus(msgspec.Struct, frozen=True):
    """How far a node's bank is on its way to memory, or to the node's disk."""

    done_bytes: int
    total_bytes: int


class NodeStatus(msgspec.Struct, frozen=True):
    """One node of `/k3/status`, as far as the table shows it."""

    name: str
    tier: str
    state: str
    epoch: int
    experts: int
    rows: int
    cold_rows: int
    duplicates: int
    stale_rows: int
    corrupt_rows: int
    hop_us: HopTimes
    last_loss: str = ""
    loading: LoadStatus | None = None
    copy_rows: int = 0


class PodStatus(msgspec.Struct, frozen=True):
    """`/k3/status`, as far as the tools read it; the pod may say more."""

    model: str
    ready: bool
    state: str
    on_miss: str
    tokens: int
    requests: dict[str, int]
    decode: dict[str, float]
    nodes: tuple[NodeStatus, ...]


def parse(answer: Mapping[str, Any], *, url: str) -> PodStatus:
    """Check the shape of a status; PodRefused names what is missing."""
    try:
        return msgspec.convert(answer, PodStatus)
    except msgspec.ValidationError as error:
        raise PodRefused(
            f"the status of {url} is not understood ({error}): use the k3 of the pod's version"
        ) from error


def headline(status: PodStatus) -> Sequence[str]:
    """The pod as a whole, in two lines."""
    requests = status.requests
    word = "ready" if status.ready else "NOT READY"
    state = word if status.state == word else f"{word} ({status.state})"
    return (
        f"{status.model}: {state}, on a miss: {status.on_miss}",
        f"requests {requests.get('total', 0)}, open {requests.get('open', 0)}, "
        f"failed {requests.get('failed', 0)}, refused {requests.get('refused', 0)}; "
        f"tokens {status.tokens}",
    )


def node_table(status: PodStatus) -> Table:
    """One line per node; p50 and p99 are of its hop."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("node", "tier", "state"):
        table.add_column(name, no_wrap=True)
    for name in (
        "epoch", "experts", "rows", "copy", "cold", "dup", "stale", "corrupt", "p50 us", "p99 us",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for node in status.nodes:
        counts = (
            node.epoch,
            node.experts,
            node.rows,
            node.copy_rows,
            node.cold_rows,
            node.duplicates,
            node.stale_rows,
            node.corrupt_rows,
        )
        table.add_row(
            node.name,
            node.tier,
            _state(node),
            *map(str, counts),
            _us(node.hop_us.p50),
            _us(node.hop_us.p99),
            style=_style(node),
        )
    return table


def losses(status: PodStatus) -> Sequence[str]:
    """Why nodes that do not serve were lost, one line each."""
    return [
        f"{node.name} was lost: {node.last_loss}"
        for node in status.nodes
        if node.last_loss and node.state not in _GOOD
    ]


def _state(node: NodeStatus) -> str:
    """The word for a node, and how far it is while its bank is on the way."""
    load = node.loading
    if load is None or not load.total_bytes:
        return node.state
    percent = 100 * load.done_bytes // load.total_bytes
    return f"{node.state} {percent} % ({part_of(load.done_bytes, load.total_bytes)})"


def _style(node: NodeStatus) -> str | None:
    if node.state in _GOOD:
        return None
    return "yellow" if node.loading is not None else "bold red"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"

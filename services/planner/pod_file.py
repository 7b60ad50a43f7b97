"""Pod descriptions as TOML files: found by path or by name, read whole, checked whole.

Owns the file format and what a wrong file is told. Must not know what a pod is used for.
"""

from __future__ import annotations

import re
import tomllib
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from services.planner.pod import (
    Basis,
    Fabric,
    Feed,
    HopCost,
    Load,
    NodePower,
    Part,
    Pod,
    PodNode,
    Published,
    Reservation,
    Text,
    Title,
    TokenCost,
)
from shared.core.errors import PodError
from shared.core.placement import Tier

_SHIPPED: Final = resources.files("services.planner") / "pods"
_SUFFIX: Final = ".toml"
_BYTES_MAX: Final = 1 << 20  # of a description
_MEMORY_BYTES_MAX: Final = 1 << 50
_NODES_MAX: Final = 1024
_SIZE: Final = re.compile(r"^([0-9]+(?:\.[0-9]+)?) (B|MiB|GiB)\Z")
_UNITS: Final = {"B": 1, "MiB": 2**20, "GiB": 2**30}
_Size = Annotated[str, msgspec.Meta(pattern=_SIZE.pattern, max_length=40)]
_Table = TypeVar("_Table")


class _Reserved(Part, frozen=True, kw_only=True):
    what: Text
    size: _Size
    basis: Basis


class _Node(Part, frozen=True, kw_only=True):
    """`count` like nodes are named name0, name1, ...; a node without a count keeps its name."""

    name: str
    tier: Tier
    memory: _Size
    memory_basis: Basis
    cost: HopCost
    count: Annotated[int, msgspec.Meta(ge=1, le=_NODES_MAX)] | None = None
    reservations: tuple[_Reserved, ...] = ()
    ceiling: _Size | None = None
    layer_experts_max: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    power: NodePower | None = None

    def nodes(self) -> list[PodNode]:
        """The nodes it stands for; ValueError as PodNode and for a size that is too large."""
        names = [self.name]
        if self.count is not None:
            names = [f"{self.name}{index}" for index in range(self.count)]
        return [
            PodNode(
                name=name,
                tier=self.tier,
                memory_bytes=_bytes(self.memory),
                memory_basis=self.memory_basis,
                reservations=tuple(
                    Reservation(item.what, _bytes(item.size), item.basis)
                    for item in self.reservations
                ),
                ceiling_bytes=None if self.ceiling is None else _bytes(self.ceiling),
                layer_experts_max=self.layer_experts_max,
                cost=self.cost,
                power=self.power,
            )
            for name in names
        ]


class _Document(Part, frozen=True, kw_only=True):
    name: Title
    token: TokenCost
    nodes: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=_NODES_MAX)]
    fabric: Fabric | None = None
    feeds: tuple[Feed, ...] = ()
    loads: tuple[Load, ...] = ()
    published: Published | None = None


def shipped_pods() -> list[str]:
    """Names of the descriptions that come with the package."""
    return sorted(item.name for item in _SHIPPED.iterdir() if item.name.endswith(_SUFFIX))


def read_pod(name: str) -> Pod:
    """The pod of a file, or of a shipped description when no such file exists.

    PodError names the file, the key and the remedy.
    """
    path = Path(name)
    try:
        if path.exists():
            with path.open("rb") as file:
                data = file.read(_BYTES_MAX + 1)
        elif name in shipped_pods():
            data = (_SHIPPED / name).read_bytes()
        elif name + _SUFFIX in shipped_pods():
            data = (_SHIPPED / (name + _SUFFIX)).read_bytes()
        else:
            raise PodError(
                f"{name}: no such file, and no shipped pod of that name: give a path, or one of "
                f"{', '.join(shipped_pods())}"
            )
    except OSError as error:
        raise PodError(f"{name}: cannot read the pod: {error.strerror}; check the path") from error
    if len(data) > _BYTES_MAX:
        raise PodError(f"{name}: longer than {_BYTES_MAX} bytes: this is no pod description")
    return parse_pod(data, source=name)


def parse_pod(data: bytes, *, source: str) -> Pod:
    """The pod of a TOML text; PodError names `source`, the key and the remedy."""
    try:
        tables = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PodError(f"{source}: not valid TOML: {error}; correct that line") from error
    document = _convert(tables, _Document, source)
    nodes: list[PodNode] = []
    for index, table in enumerate(document.nodes):
        where = f"{source}: nodes[{index}] {table.get('name', '')!s}".rstrip()
        group = _convert(table, _Node, where)
        try:
            nodes += group.nodes()
            msgspec.convert(msgspec.to_builtins(nodes[-1]), PodNode)  # bounds of the names
        except (ValueError, msgspec.ValidationError) as error:
            raise PodError(f"{where}: {error}; correct that key") from error
        if len(nodes) > _NODES_MAX:
            raise PodError(f"{where}: more than {_NODES_MAX} nodes in all; lower a count")
    try:
        return Pod(
            name=document.name,
            nodes=tuple(nodes),
            token=document.token,
            fabric=document.fabric,
            feeds=document.feeds,
            loads=document.loads,
            published=document.published,
        )
    except ValueError as error:
        raise PodError(f"{source}: {error}; correct one of the two") from error


def _convert(table: dict[str, Any], kind: type[_Table], where: str) -> _Table:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise PodError(f"{where}: {error}; see docs/operator.md for the keys of a pod") from error


def _bytes(size: str) -> int:
    """Bytes of "446.03 GiB", rounded down; ValueError beyond a pebibyte."""
    match = _SIZE.match(size)
    assert match is not None, "the schema has the same pattern"
    number = int(Decimal(match[1]) * _UNITS[match[2]])
    if number > _MEMORY_BYTES_MAX:
        raise ValueError(f"{size} is more than {_MEMORY_BYTES_MAX} bytes")
    return number

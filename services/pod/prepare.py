"""Turns a checkpoint into a ready-to-start pod on one host: keys, placement, banks, settings.

Every file is written whole or not at all, and kept when it already fits: a second start with the
same model and options writes nothing. Must not start or stop anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from services.banks.builder import build
from services.banks.source import ExpertSource
from services.pod import toml
from services.pod.files import write_atomic
from services.pod.layout import (
    BANK_SERVICE_UNIT,
    LOCAL_TIER,
    STATION,
    PodLayout,
    PodNode,
    PodPaths,
    nodes_of,
    unit_of,
)
from shared.core import placement as placements
from shared.core.errors import BankError, ConfigError, KeyRefused, PlacementError
from shared.core.placement import PlacedNode, Placement, Tier
from shared.core.record import RecordOrder, can_interleave
from shared.core.shape import ModelShape
from shared.io import keys
from shared.io.bank_file import BankFile

_TITLE: Final = "written by k3; changes are kept until `k3` lays this pod out again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """What the operator chose."""

    checkpoint: Path
    sparks: int
    http_port: int
    control_port: int
    banks_port: int = 8382
    model_name: str
    policy: str = "balanced"
    on_miss: Literal["exact", "fail"] = "exact"
    dtype: Literal["float32", "bfloat16"] = "float32"
    spin_us: int = 0
    pin: bool = True


def prepare(
    paths: PodPaths,
    plan: PodPlan,
    *,
    source: ExpertSource,
    shape: ModelShape,
    say: Callable[[str], None],
) -> PodLayout:
    """Write whatever is missing or does not fit `plan`; `say` gets one line per slow step.

    Raises ConfigError (and PlacementError, BankError, KeyRefused below it); files that were already
    right stay, no file is ever half written.
    """
    placement = place(plan.policy, source.digest, shape, plan.sparks)
    remote = [node for node in placement.nodes if node.tier != LOCAL_TIER]
    _write_keys(paths, [STATION, *(node.name for node in remote)])
    built = tuple(node.name for node in remote if _write_bank(paths, source, placement, node, say))
    write_atomic(paths.placement, placements.encode(placement))
    station = _station_settings(paths, plan)
    write_atomic(paths.station_config, toml.dumps(station, title=_TITLE).encode())
    banks = _bank_service_settings(paths, plan)
    write_atomic(paths.banks_config, toml.dumps(banks, title=_TITLE).encode())
    nodes = []
    for node in remote:
        config = paths.node_config(node.name, node.tier)
        settings = _node_settings(paths, plan, node.name, node.tier)
        write_atomic(config, toml.dumps(settings, title=_TITLE).encode())
        nodes.append(PodNode(node.name, node.tier, config))
    return PodLayout(paths, tuple(nodes), built, placement.digest)


def place(policy: str, model_digest: str, shape: ModelShape, sparks: int) -> Placement:
    """A placement by the policy's name: `balanced`, `contiguous` or `shuffled:SEED`.

    PlacementError for an unknown policy and for one that leaves a node without experts.
    """
    nodes = nodes_of(sparks)
    match policy.split(":"):
        case ["balanced"]:
            placement = placements.balanced(model_digest, shape, nodes)
        case ["contiguous"]:
            placement = placements.contiguous(model_digest, shape, nodes)
        case ["shuffled", seed] if seed.isascii() and seed.isdigit():
            placement = placements.shuffled(model_digest, shape, nodes, seed=int(seed))
        case _:
            raise PlacementError(
                f"placement policy {policy!r} is unknown: use balanced, contiguous or shuffled:SEED"
            )
    for node in placement.nodes:
        if not node.bank_rows:
            raise PlacementError(
                f"policy {policy} leaves node {node.name} without experts: use fewer Sparks"
            )
    return placement


def _write_keys(paths: PodPaths, names: list[str]) -> None:
    """One key pair per process; the Station's allow-list names every node."""
    for folder in (paths.keys, paths.allow_list):
        _make_folder(folder)
    for name in names:
        public = paths.keys / f"{name}{keys.PUBLIC_SUFFIX}"
        if not public.exists():
            # a pair of which only the secret half was written is of no use to anybody
            (paths.keys / f"{name}{keys.SECRET_SUFFIX}").unlink(missing_ok=True)
            keys.create(paths.keys, name)
        if name != STATION:
            write_atomic(paths.allow_list / public.name, _read_key(public))


def _read_key(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyRefused(
            f"cannot read key file {path}: {error.strerror}; make it readable, or remove it and "
            "its secret half to get a new pair"
        ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make folder {folder}: {error.strerror}; make its parent writable or choose "
            "another"
        ) from error


def _write_bank(
    paths: PodPaths,
    source: ExpertSource,
    placement: Placement,
    node: PlacedNode,
    say: Callable[[str], None],
) -> bool:
    """Build the node's bank unless the one on disk is of this model, placement and order."""
    path = paths.bank(node.name)
    # a node of a one-host pod computes on the CPU, whatever its tier
    order: RecordOrder = "row-major"
    if can_interleave(placement.shape.expert):
        order = "interleaved-4"
    if _bank_fits(path, placement, node, order):
        return False
    _make_folder(paths.banks)
    say(f"building bank {path} ({len(node.bank_rows)} experts)")
    build(source, placement, node.name, path, layout=order, replace=True)
    return True


def _bank_fits(path: Path, placement: Placement, node: PlacedNode, order: RecordOrder) -> bool:
    if not path.exists():
        return False
    try:
        with BankFile.open(path) as bank:
            header = bank.header
    except BankError:
        return False  # it is built again, which is the remedy the error would name
    return (header.model_digest, header.placement_digest, header.node, header.layout) == (
        placement.model_digest,
        placement.digest,
        node.name,
        order,
    )


def _station_settings(paths: PodPaths, plan: PodPlan) -> Mapping[str, toml.Value]:
    return {
        "checkpoint": paths.seen(plan.checkpoint),
        "placement": paths.seen(paths.placement),
        "secret_key": paths.secret_key(STATION, "k3-station.service"),
        "allow_list": paths.seen(paths.allow_list),
        "state_directory": paths.seen(paths.station_state),
        "control_address": _control(plan),
        "http_port": plan.http_port,
        "model_name": plan.model_name,
        "on_miss": plan.on_miss,
        "dtype": plan.dtype,
        "spin_us": plan.spin_us,
    }


def _bank_service_settings(paths: PodPaths, plan: PodPlan) -> Mapping[str, toml.Value]:
    return {
        "address": f"tcp://127.0.0.1:{plan.banks_port}",
        "secret_key": paths.secret_key(STATION, BANK_SERVICE_UNIT),
        "allow_list": paths.seen(paths.allow_list),
        "folders": [paths.seen(paths.banks)],
        "checkpoint": paths.seen(plan.checkpoint),
    }


def _node_settings(
    paths: PodPaths, plan: PodPlan, name: str, tier: Tier
) -> Mapping[str, toml.Value]:
    return {
        "name": name,
        "tier": tier,
        "bank": paths.seen(paths.bank(name)),
        "station": _control(plan),
        "station_key": paths.seen(paths.keys / f"{STATION}{keys.PUBLIC_SUFFIX}"),
        "node_key": paths.secret_key(name, unit_of(name, tier)),
        "spin_us": plan.spin_us,
        "pin": plan.pin,
    }


def _control(plan: PodPlan) -> str:
    return f"tcp://127.0.0.1:{plan.control_port}"

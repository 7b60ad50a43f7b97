"""Laying out a pod: what is written, what is kept, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.bank_service import config as bank_service_configs
from services.banks.builder import build
from services.pod.children import children_of, environment
from services.pod.layout import PodLayout, PodPaths
from services.pod.prepare import PodPlan, place, prepare
from shared.core import placement as placements
from shared.core.errors import CheckpointError, ConfigError, KeyRefused, PlacementError
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape, ModelShape
from shared.io import keys
from shared.io.arena import load_arena
from shared.io.bank_file import BankFile
from shared.io.process import PARENT_VARIABLE
from spark_daemon import config as node_configs
from station import config as station_configs

SHAPE = ModelShape(
    layers=3, first_moe_layer=1, experts=24, top_k=4, expert=ExpertShape(latent=16, width=16)
)
LAYOUT = RecordLayout(SHAPE.expert)


class Model:
    """Expert records that say which expert they are."""

    layout = LAYOUT

    def __init__(self, digest: str = "a" * 64) -> None:
        self.digest = digest
        self.broken: tuple[int, int] | None = None

    def expert_record(self, layer: int, expert: int) -> bytes:
        """All zeros but the first weight byte of w1 and w3; zero scales are valid."""
        if (layer, expert) == self.broken:
            raise CheckpointError("shard 3 ends too early: fetch it again")
        record = np.zeros(LAYOUT.record_bytes, np.uint8)
        record[0], record[1] = layer, expert
        return record.tobytes()

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        """The same into a buffer."""
        buffer[:] = self.expert_record(layer, expert)

    def stored_hash(self, layer: int, expert: int) -> None:
        """Records are stored as they are."""

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        """All at one place: any order is as good as another."""
        return "", 0

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Nothing is cached."""


def plan(**changes: object) -> PodPlan:
    """A plan with defaults."""
    fields: dict[str, object] = {
        "checkpoint": Path("/models/demo"),
        "sparks": 2,
        "http_port": 8380,
        "control_port": 8381,
        "model_name": "k3-demo",
    }
    return PodPlan(**{**fields, **changes})  # type: ignore[arg-type]


def lay_out(root: Path, model: Model | None = None, **changes: object) -> PodLayout:
    """Prepare an embedded pod under `root`."""
    return prepare(
        PodPaths.embedded(root),
        plan(**changes),
        source=model or Model(),
        shape=SHAPE,
        say=lambda _line: None,
    )


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Identity and time of every file."""
    return {
        str(path.relative_to(root)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def test_every_setting_file_is_accepted_by_its_daemon(tmp_path: Path) -> None:
    """The daemons' own loaders read what was written, and the parts fit each other."""
    layout = lay_out(tmp_path, dtype="bfloat16", on_miss="fail", spin_us=7, control_port=4321)

    station = station_configs.load(layout.paths.station_config)
    assert station.checkpoint == "/models/demo"
    assert (station.http_port, station.model_name) == (8380, "k3-demo")
    assert (station.dtype, station.on_miss, station.spin_us) == ("bfloat16", "fail", 7)
    placement = placements.decode(Path(station.placement).read_bytes(), source="test")
    allowed = keys.load_allow_list(Path(station.allow_list))
    assert keys.load_secret(Path(station.secret_key)).name == "station"
    assert [node.name for node in layout.nodes] == ["grace", "rtx", "spark0", "spark1"]
    for node in layout.nodes:
        config = node_configs.load(node.tier, node.name, path=node.config, overrides={})
        assert (config.station, config.tier) == (station.control_address, node.tier)
        assert allowed[keys.load_secret(Path(config.node_key)).public] == node.name
        assert (
            keys.load_public(Path(config.station_key))
            == keys.load_secret(Path(station.secret_key)).public
        )
        with BankFile.open(Path(config.bank)) as bank:
            assert bank.header.rows == placement.node(node.name).rows
            assert bank.header.placement_digest == layout.placement_digest
            arena = load_arena(bank).records
        assert [(int(r[0]), int(r[1])) for r in arena] == list(bank.header.rows)


def test_secrets_are_private_and_nobody_else_is_admitted(tmp_path: Path) -> None:
    """Case S2: secret files have mode 0600; the Station itself is not on its allow-list."""
    layout = lay_out(tmp_path)

    for name in ("station", "grace", "rtx", "spark0", "spark1"):
        assert (layout.paths.keys / f"{name}.key_secret").stat().st_mode & 0o777 == 0o600
    assert sorted(keys.load_allow_list(layout.paths.allow_list).values()) == [
        "grace", "rtx", "spark0", "spark1",
    ]  # fmt: skip


def test_a_public_key_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    """Also where the tests run as root, who can read every file: it is a folder here."""
    (tmp_path / "keys" / "spark0.key").mkdir(parents=True)

    with pytest.raises(KeyRefused, match=r"cannot read key file .*spark0\.key: Is a directory"):
        lay_out(tmp_path)


def test_a_second_start_writes_nothing(tmp_path: Path) -> None:
    """Same model, same options: every file stays as it is."""
    first = lay_out(tmp_path)
    before = snapshot(tmp_path)

    second = lay_out(tmp_path)

    assert first.banks_built == ("grace", "rtx", "spark0", "spark1")
    assert second.banks_built == ()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "rebuilt"),
    [
        ({"policy": "contiguous"}, True),
        ({"policy": "shuffled:3"}, True),
        ({"sparks": 3}, True),
        ({"model": Model("b" * 64)}, True),
        ({"http_port": 9999, "control_port": 9998}, False),
    ],
)
def test_only_what_does_not_fit_is_made_again(
    tmp_path: Path, change: dict[str, object], rebuilt: bool
) -> None:
    """A new placement or model means new banks; keys are never renewed."""
    lay_out(tmp_path)
    before = snapshot(tmp_path)

    layout = lay_out(tmp_path, **change)

    built = tuple(node.name for node in layout.nodes) if rebuilt else ()
    assert layout.banks_built == built
    after = snapshot(tmp_path)
    kept = [name for name in before if name.startswith("keys/")]
    assert kept
    assert [after[name] for name in kept] == [before[name] for name in kept]


def test_banks_have_the_order_of_the_cpu_kernel(tmp_path: Path) -> None:
    """Every node of a one-host pod computes on the CPU: interleaved where the sizes allow it, and a
    bank in the other order is built again."""
    assert bank_orders(lay_out(tmp_path / "small")) == {"row-major"}
    wide = ModelShape(
        layers=2, first_moe_layer=1, experts=8, top_k=2, expert=ExpertShape(latent=256, width=128)
    )
    model = WideModel(wide.expert)

    def prepared() -> PodLayout:
        paths = PodPaths.embedded(tmp_path / "wide")
        return prepare(paths, plan(), source=model, shape=wide, say=lambda _line: None)

    layout = prepared()
    assert bank_orders(layout) == {"interleaved-4"}
    placement = placements.decode(layout.paths.placement.read_bytes(), source="test")
    build(model, placement, "rtx", layout.paths.bank("rtx"), layout="row-major", replace=True)
    assert prepared().banks_built == ("rtx",)
    assert bank_orders(layout) == {"interleaved-4"}
    assert prepared().banks_built == ()


class WideModel(Model):
    """Experts of another shape, all zeros."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.layout = RecordLayout(shape)

    def expert_record(self, layer: int, expert: int) -> bytes:
        return bytes(self.layout.record_bytes)


def bank_orders(layout: PodLayout) -> set[str]:
    """The orders of a pod's banks."""
    orders = set()
    for node in layout.nodes:
        with BankFile.open(layout.paths.bank(node.name)) as bank:
            orders.add(bank.header.layout)
    return orders


@pytest.mark.parametrize("damage", [b"", b"K3BANK\0\1 and then nothing", b"something else"])
def test_a_damaged_bank_is_built_again(tmp_path: Path, damage: bytes) -> None:
    """The remedy that the daemon's error would name is applied."""
    layout = lay_out(tmp_path)
    layout.paths.bank("rtx").write_bytes(damage)

    assert lay_out(tmp_path).banks_built == ("rtx",)


def test_a_failure_leaves_no_half_written_file(tmp_path: Path) -> None:
    """A record that cannot be read ends it; no bank under its final name, nothing partial."""
    model = Model()
    placement = place("balanced", model.digest, SHAPE, 2)
    model.broken = placement.node("rtx").rows[3]

    with pytest.raises(CheckpointError, match="shard 3"):
        lay_out(tmp_path, model)

    names = {path.name for path in tmp_path.rglob("*")}
    assert not {"rtx.k3bank", "spark0.k3bank", "station.toml", "placement.json"} & names
    assert not [name for name in names if "partial" in name]


@pytest.mark.parametrize(
    "policy", ["", "Balanced", "shuffled", "shuffled:", "shuffled:x", "shuffled:-1", "shuffled:1:2"]
)
def test_an_unknown_policy_is_refused(policy: str) -> None:
    """One error that lists the known ones."""
    with pytest.raises(PlacementError, match="use balanced, contiguous or shuffled:SEED"):
        place(policy, "d", SHAPE, 2)


def test_a_node_without_experts_is_refused() -> None:
    """A bank cannot be empty, so neither can a node."""
    few = ModelShape(
        layers=2, first_moe_layer=1, experts=4, top_k=2, expert=ExpertShape(latent=16, width=16)
    )

    with pytest.raises(PlacementError, match="without experts: use fewer Sparks"):
        place("balanced", "d", few, 8)


def test_no_sparks_is_a_pod_too(tmp_path: Path) -> None:
    """Grace and RTX alone."""
    assert [node.name for node in lay_out(tmp_path, sparks=0).nodes] == ["grace", "rtx"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file in the way is one clear error."""
    (tmp_path / "keys").touch()

    with pytest.raises(ConfigError, match="cannot make folder"):
        lay_out(tmp_path)


def test_a_pod_for_systemd_is_seen_from_its_own_root(tmp_path: Path) -> None:
    """`k3 pod init --root DIR`: files under DIR, settings that name them from /."""
    checkpoint = tmp_path / "srv" / "model"
    layout = prepare(
        PodPaths.system(tmp_path),
        plan(checkpoint=checkpoint),
        source=Model(),
        shape=SHAPE,
        say=lambda _line: None,
    )

    station = station_configs.load(tmp_path / "etc/k3/station.toml")
    assert station.checkpoint == "/srv/model"
    assert station.placement == "/etc/k3/placement.json"
    assert station.allow_list == "/etc/k3/keys/nodes"
    assert station.secret_key == "/run/credentials/k3-station.service/station.key_secret"
    assert station.state_directory == "/var/lib/k3/station"
    units = {"grace": "k3-grace", "rtx": "k3-rtx", "spark1": "k3-spark@spark1"}
    for node in layout.nodes:
        if node.name not in units:
            continue
        assert node.config == tmp_path / "etc/k3" / node.tier / f"{node.name}.toml"
        config = node_configs.load(node.tier, node.name, path=node.config, overrides={})
        assert config.bank == f"/var/lib/k3/banks/{node.name}.k3bank"
        assert (tmp_path / config.bank.lstrip("/")).is_file()
        unit = units[node.name]
        assert config.node_key == f"/run/credentials/{unit}.service/{node.name}.key_secret"
        assert config.pin
    outside = [path for path in tmp_path.iterdir() if path.name not in ("etc", "var")]
    assert outside == []


def test_the_bank_service_serves_what_was_built(tmp_path: Path) -> None:
    """Its own loader reads the settings: same key, nodes, banks and model as the Station's."""
    model = tmp_path / "model"
    model.mkdir()
    layout = lay_out(tmp_path / "pod", checkpoint=model, banks_port=4322)

    config = bank_service_configs.load(layout.paths.banks_config, {})

    station = station_configs.load(layout.paths.station_config)
    assert config.address == "tcp://127.0.0.1:4322"
    assert (config.secret_key, config.allow_list) == (station.secret_key, station.allow_list)
    assert config.checkpoint == station.checkpoint
    assert [Path(folder) for folder in config.folders] == [layout.paths.bank("rtx").parent]


def test_the_processes_of_a_pod(tmp_path: Path) -> None:
    """Station first; every process with its own settings file and one compute thread."""
    layout = lay_out(tmp_path)

    children = children_of(layout)
    environ = environment({"A": "1", "NOTIFY_SOCKET": "/s", "OMP_NUM_THREADS": "8"}, parent_pid=42)

    assert [child.name for child in children] == [
        "station", "grace", "rtx", "spark0", "spark1", "banks",
    ]  # fmt: skip
    assert [child.is_station for child in children] == [True, *[False] * 5]
    for child in children:
        assert Path(child.argv[-1]).is_file()
    assert children[-2].argv[2:4] == ("spark_daemon", "spark1")
    assert environ["OMP_NUM_THREADS"] == "1"
    assert environ[PARENT_VARIABLE] == "42"
    assert environ["A"] == "1"
    assert environ["PYTHONSAFEPATH"] == "1"
    # systemd talks to `k3 up`, not to its children
    assert "NOTIFY_SOCKET" not in environ


def test_banks_of_the_format_before_are_built_anew(tmp_path: Path) -> None:
    """Banks without goldens: the next start makes them again by itself, to the same bytes."""
    layout = lay_out(tmp_path)
    path = layout.paths.bank("spark0")
    before = path.read_bytes()
    path.write_bytes(before[:8] + (2).to_bytes(4, "little") + before[12:])

    assert lay_out(tmp_path).banks_built == ("spark0",)
    assert path.read_bytes() == before


def test_a_placement_of_the_format_before_is_made_anew(tmp_path: Path) -> None:
    """A pod that an older version laid out starts with this one: nothing is to be done by hand."""
    layout = lay_out(tmp_path)
    old = {"version": 1, "model_digest": "m", "shape": {}, "policy": "balanced", "nodes": []}
    layout.paths.placement.write_text(json.dumps(old))

    again = lay_out(tmp_path)
    data = again.paths.placement.read_bytes()
    assert placements.decode(data, source="test").digest == again.placement_digest

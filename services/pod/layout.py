"""Where the files of a one-host pod lie, and which nodes it has.

Owns names and paths only; nothing here touches a disk. Two layouts: the embedded pod keeps
everything under one state folder, a pod for systemd uses the system's folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.core.placement import Tier

MODEL_NAME: Final = "k3-demo"
STATION: Final = "station"
BANK_SERVICE: Final = "banks"
BANK_SERVICE_UNIT: Final = "k3-banks.service"
SPARKS_MAX: Final = 16
LOCAL_TIER: Final = "hbm"  # the Station computes it itself: no bank, no process
_WEIGHTS: Final[Mapping[Tier, float]] = {"hbm": 2, "grace": 2, "rtx": 1, "spark": 1}


def nodes_of(sparks: int) -> tuple[tuple[str, Tier, float], ...]:
    """(name, tier, weight) of all nodes of a pod with `sparks` Sparks, the Station's own first."""
    names: list[tuple[str, Tier]] = [("hbm", "hbm"), ("grace", "grace"), ("rtx", "rtx")]
    names += [(f"spark{index}", "spark") for index in range(sparks)]
    return tuple((name, tier, _WEIGHTS[tier]) for name, tier in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPaths:
    """Folders of a pod as this process writes them.

    `prefix` is what the services will not see: `/srv/root` when a system is laid out under
    `/srv/root` before it boots. `credentials` says that systemd hands over the secret keys.
    """

    config: Path
    keys: Path
    banks: Path
    placement: Path
    station_state: Path
    logs: Path
    prefix: Path
    credentials: bool

    @classmethod
    def embedded(cls, state_dir: Path) -> PodPaths:
        """Everything under one folder of the user's."""
        return cls(
            config=state_dir,
            keys=state_dir / "keys",
            banks=state_dir / "banks",
            placement=state_dir / "placement.json",
            station_state=state_dir / "station",
            logs=state_dir / "logs",
            prefix=Path("/"),
            credentials=False,
        )

    @classmethod
    def system(cls, root: Path) -> PodPaths:
        """The folders that the units in `systemd/` use, under `root`."""
        return cls(
            config=root / "etc/k3",
            keys=root / "etc/k3/keys",
            banks=root / "var/lib/k3/banks",
            placement=root / "etc/k3/placement.json",
            station_state=root / "var/lib/k3/station",
            logs=root / "var/log/k3",
            prefix=root,
            credentials=True,
        )

    @property
    def allow_list(self) -> Path:
        """Public keys of the admitted nodes."""
        return self.keys / "nodes"

    @property
    def station_config(self) -> Path:
        """The Station's settings file."""
        return self.config / "station.toml"

    @property
    def banks_config(self) -> Path:
        """The bank service's settings file."""
        return self.config / f"{BANK_SERVICE}.toml"

    def node_config(self, name: str, tier: Tier) -> Path:
        """A node's settings file."""
        return self.config / tier / f"{name}.toml"

    def bank(self, name: str) -> Path:
        """A node's bank."""
        return self.banks / f"{name}.k3bank"

    def secret_key(self, name: str, unit: str) -> str:
        """Where the service of `unit` will find the secret key of `name`."""
        if self.credentials:
            # systemd copies the key, which only root can read, into the service's own folder
            return f"/run/credentials/{unit}/{name}.key_secret"
        return self.seen(self.keys / f"{name}.key_secret")

    def seen(self, path: Path) -> str:
        """`path` as the services will see it."""
        if path.is_relative_to(self.prefix):
            return f"/{path.relative_to(self.prefix)}"
        return str(path)


def unit_of(name: str, tier: Tier) -> str:
    """The systemd unit that runs a node."""
    return f"k3-spark@{name}.service" if tier == "spark" else f"k3-{tier}.service"


@dataclass(frozen=True, slots=True)
class PodNode:
    """One node process: its name, tier and settings file."""

    name: str
    tier: Tier
    config: Path


@dataclass(frozen=True, slots=True)
class PodLayout:
    """A prepared pod: what there is to start."""

    paths: PodPaths
    nodes: tuple[PodNode, ...]
    banks_built: tuple[str, ...]
    placement_digest: str

"""Energy of the processor packages as Linux's powercap tells it (RAPL), in joules.

Owns the folder and its counters, which count the whole machine and start again at a range. Must not
know what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.core.errors import ConfigError

POWERCAP: Final = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Meter:
    """The package domains of a machine: (counter, microjoules at which it starts again)."""

    domains: tuple[tuple[Path, int], ...]

    @classmethod
    def open(cls, root: Path = POWERCAP) -> Meter:
        """ConfigError, with the reason, where there is nothing to read."""
        domains: list[tuple[Path, int]] = []
        for folder in sorted(root.glob("intel-rapl:*")):
            try:
                if (folder / "name").read_text(encoding="ascii").startswith("package"):
                    counter = folder / "energy_uj"
                    int(counter.read_text(encoding="ascii"))
                    most = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
                    domains.append((counter, most))
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{folder}: energy cannot be read: {error}: run as root"
                ) from error
        if not domains:
            raise ConfigError(f"{root} has no RAPL package: a virtual machine has none")
        return cls(tuple(domains))

    def read_uj(self) -> tuple[int, ...]:
        """Every counter, in microjoules."""
        return tuple(int(counter.read_text(encoding="ascii")) for counter, _ in self.domains)

    def joules(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """Between two readings less than one range apart."""
        spans = zip(before, after, self.domains, strict=True)
        return sum((end - begin) % (most + 1) for begin, end, (_, most) in spans) / 1e6

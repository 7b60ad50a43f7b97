"""The whole `k3 bench pod`: pods with different numbers of Sparks, one after the other."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.bench.machine import machine_facts
from services.bench.pod import measure
from services.bench.report import Figure, Report
from services.bench.running_pod import running_pod

HEADLINE_SPARKS: Final = 2  # what `k3 up` starts: its figures are the pod's


@dataclass(frozen=True, slots=True, kw_only=True)
class PodBench:
    """What to measure; with `url` a running pod, else pods with each of `sparks` Sparks."""

    url: str | None
    token: str | None
    sparks: tuple[int, ...]
    checkpoint: Path | None
    dtype: str
    tokens: int
    runs: int

    def run(self) -> Report:
        """Measure everything. Figures of the headline pod are called `pod.*`; with several pods
        each also has its own, `pod.sparks_N.*`."""
        machine = machine_facts()  # first: its load is that before the measurement
        figures: list[Figure] = []
        skipped: dict[str, str] = {}
        if self.url is not None:
            self._take(self.url, ["pod"], figures, skipped)
        else:
            for count in self.sparks:
                self._take_started(count, figures, skipped)
        return Report("pod", machine, tuple(figures), skipped)

    def _take_started(self, count: int, figures: list[Figure], skipped: dict[str, str]) -> None:
        headline = HEADLINE_SPARKS if HEADLINE_SPARKS in self.sparks else self.sparks[0]
        prefixes = [f"pod.sparks_{count}"] if len(self.sparks) > 1 else []
        prefixes += ["pod"] if count == headline else []
        options = ["--dtype", self.dtype, "--sparks", str(count)]
        if self.checkpoint is not None:
            options += ["--checkpoint", str(self.checkpoint)]
        with (
            tempfile.TemporaryDirectory(prefix="k3-bench-") as folder,
            running_pod(Path(folder), options) as url,
        ):
            self._take(url, prefixes, figures, skipped)

    def _take(
        self, url: str, prefixes: list[str], figures: list[Figure], skipped: dict[str, str]
    ) -> None:
        taken, missing = measure(url, self.token, tokens=self.tokens, runs=self.runs)
        for prefix in prefixes:
            figures += [Figure(f"{prefix}.{f.name}", f.value, f.unit) for f in taken]
            skipped |= {f"{prefix}.{name}": reason for name, reason in missing.items()}

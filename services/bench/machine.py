"""Facts about this machine that a figure is worth nothing without."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from services.bench.report import Facts


def machine_facts(proc: Path = Path("/proc")) -> Facts:
    """CPU, memory, kernel and versions; `load` says how quiet the machine was (1 minute mean)."""
    return {
        "cpu": _field(proc / "cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_kib(proc) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "load": round(os.getloadavg()[0], 2),
    }


def _memory_kib(proc: Path) -> int:
    text = _field(proc / "meminfo", "MemTotal").split()
    return int(text[0]) if text and text[0].isdigit() else 0


def _field(file: Path, name: str) -> str:
    """Value of the first `name : value` line, or nothing."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

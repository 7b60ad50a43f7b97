"""What the control groups of this process let it have: the limits of a unit or a container.

Owns the files of both versions of control groups. Must not know what the memory is wanted for.

/proc/meminfo knows nothing of these limits, and who exceeds one is killed without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SELF: Final = Path("/proc/self/cgroup")
ROOT: Final = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES: Final = 2**60  # version 1 writes "none" as the largest number of pages


@dataclass(frozen=True, slots=True)
class _Files:
    """The memory controller's files in one version of control groups."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]  # in memory.stat, of the group and all below it


# memory.high does not kill: a process above it is slowed down until it is as good as dead
_VERSION_2: Final = _Files(
    ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)
_VERSION_1: Final = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def limit_bytes(membership: Path = SELF, root: Path = ROOT) -> int | None:
    """The lowest memory limit of this process's groups; None when no group has one."""
    return min((limit for limit, _ in _limits(membership, root)), default=None)


def left_bytes(membership: Path = SELF, root: Path = ROOT) -> int | None:
    """Memory that this process's groups let it take still; None when no group has a limit.

    What the groups hold of the page cache counts as free: the kernel drops it first.
    """
    left = (max(0, limit - used) for limit, used in _limits(membership, root))
    return min(left, default=None)


def _limits(membership: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(limit, memory in use that cannot be dropped) of every group that has a limit."""
    folder, path, files = _home(membership, root)
    if ".." in path:  # a process that was put beside its namespace; what it sees is only the root
        path = ()
    group = folder.joinpath(*path)
    # up to the root, which in a container is the container's own group
    for each in (group, *list(group.parents)[: len(path)]):
        limit = min((_number(each / name) for name in files.limits), default=_NO_LIMIT_BYTES)
        if limit < _NO_LIMIT_BYTES:
            used = _number(each / files.used, otherwise=0)
            yield limit, max(0, used - _reclaimable(each, files))


def _home(membership: Path, root: Path) -> tuple[Path, tuple[str, ...], _Files]:
    """Where the groups of memory are, this process's path among them, and their files."""
    lines = [line.split(":", 2) for line in _text(membership).splitlines()]
    paths = {fields[1]: fields[2] for fields in lines if len(fields) == 3}
    for controllers, path in paths.items():
        if "memory" in controllers.split(","):
            return root / "memory", Path(path).parts[1:], _VERSION_1
    return root, Path(paths.get("", "/")).parts[1:], _VERSION_2


def _reclaimable(group: Path, files: _Files) -> int:
    lines = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
    return sum(
        int(value) for name, _, value in lines if name in files.reclaimable and value.isdecimal()
    )


def _number(file: Path, *, otherwise: int = _NO_LIMIT_BYTES) -> int:
    """The number in a file; `otherwise` where there is none, as in `max`."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else otherwise


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""

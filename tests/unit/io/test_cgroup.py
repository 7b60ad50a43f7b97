"""Memory limits of control groups: files as both versions lay them out (case B4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.io import cgroup

MIB = 2**20


class Groups:
    """A tree of control groups, and the file that says which one a process is in."""

    def __init__(self, root: Path) -> None:
        self.root = root / "cgroup"
        self.membership = root / "membership"

    def join(self, *lines: str) -> None:
        """What /proc/self/cgroup says."""
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: object) -> None:
        """Files of one group; `__` in a name is a dot."""
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    @property
    def limit(self) -> int | None:
        return cgroup.limit_bytes(self.membership, self.root)

    @property
    def left(self) -> int | None:
        return cgroup.left_bytes(self.membership, self.root)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    """No group yet."""
    return Groups(tmp_path)


def test_the_tightest_group_above_a_process_counts(groups: Groups) -> None:
    """A unit without a limit in a slice that has one; the page cache it holds can be dropped."""
    groups.join("0::/k3.slice/k3-spark@spark0.service")
    groups.group("k3.slice/k3-spark@spark0.service", memory__max="max", memory__current=30 * MIB)
    groups.group(
        "k3.slice",
        memory__max=100 * MIB,
        memory__high="max",
        memory__current=70 * MIB,
        memory__stat=f"anon 1\ninactive_file {4 * MIB}\nactive_file {MIB}\nfile {60 * MIB}",
    )
    assert (groups.limit, groups.left) == (100 * MIB, 35 * MIB)

    groups.group("k3.slice/k3-spark@spark0.service", memory__max=50 * MIB)
    assert (groups.limit, groups.left) == (50 * MIB, 20 * MIB)

    groups.group("k3.slice/k3-spark@spark0.service", memory__high=40 * MIB)
    assert (groups.limit, groups.left) == (40 * MIB, 10 * MIB), "above memory.high nothing moves"

    groups.group("k3.slice", memory__current=200 * MIB)
    assert groups.left == 0


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../../beside"])
def test_a_container_sees_its_own_limit_as_the_root(groups: Groups, path: str) -> None:
    """Whatever it believes to be its path."""
    groups.join(f"0::{path}")
    groups.group("", memory__max=8 * MIB, memory__current=3 * MIB)
    groups.group("../beside", memory__max=1, memory__current=0)

    assert (groups.limit, groups.left) == (8 * MIB, 5 * MIB)


def test_version_1_keeps_memory_in_a_tree_of_its_own(groups: Groups) -> None:
    """Its "no limit" is a number, and its page cache is counted with the groups below."""
    groups.join("9:name=systemd:/", "4:cpu,memory:/pod/node", "0::/elsewhere")
    groups.group("memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=2**40)
    groups.group("memory/pod", memory__limit_in_bytes=2**63 - 4096)
    assert (groups.limit, groups.left) == (None, None)

    groups.group(
        "memory/pod/node",
        memory__limit_in_bytes=64 * MIB,
        memory__usage_in_bytes=40 * MIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}",
    )
    assert (groups.limit, groups.left) == (64 * MIB, 26 * MIB)


def test_no_groups_are_no_limit(groups: Groups) -> None:
    """A kernel without them, a group without the controller, files that cannot be understood."""
    assert (groups.limit, groups.left) == (None, None)
    groups.join("0::/user.slice")
    groups.group("user.slice", memory__pressure="some avg10=0.00")
    assert (groups.limit, groups.left) == (None, None)
    groups.group("user.slice", memory__max="", memory__current="x")
    groups.join("nonsense", "0::/user.slice", "")
    assert (groups.limit, groups.left) == (None, None)

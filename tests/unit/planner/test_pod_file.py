"""Pod descriptions: what is shipped, how a file is found, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.planner.pod_file import parse_pod, read_pod, shipped_pods
from shared.core.errors import PodError

GOOD = """
name = "two"
[token]
serial_us = 400.0
serial_basis = "assumed"
rest_ms = 1.8
rest_basis = "assumed"
[[nodes]]
name = "hbm"
tier = "hbm"
memory = "1.5 GiB"
memory_basis = "measured"
reservations = [{ what = "weights", size = "512 MiB", basis = "measured" }]
cost = { fixed_us = 0.0, fixed_basis = "assumed", per_expert_us = 8, per_expert_basis = "assumed" }
[[nodes]]
name = "spark"
count = 2
tier = "spark"
memory = "100 B"
memory_basis = "measured"
layer_experts_max = 3
cost = { fixed_us = 184.5, fixed_basis = "measured", per_expert_us = 84.5, per_expert_basis = "measured" }
power = { feed = "strip", idle_w = 40, busy_w = 130, worst_w = 150, uncapped_w = 190, basis = "assumed" }
[[feeds]]
name = "strip"
continuous_w = 1440
basis = "measured"
"""  # noqa: E501


def test_the_shipped_pods_are_found_by_name_and_a_file_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--pod k3-home-pod.toml` works in any folder, unless that folder has such a file."""
    monkeypatch.chdir(tmp_path)
    assert shipped_pods() == ["embedded.toml", "k3-home-pod.toml"]
    home = read_pod("k3-home-pod.toml")
    assert [node.name for node in home.nodes] == [
        "hbm", "grace", "rtx", *(f"spark{index}" for index in range(8)),
    ]  # fmt: skip
    assert (home.serial_us, home.rest_ms) == (400.0, 1.8)
    assert read_pod("k3-home-pod") == home
    assert [node.name for node in read_pod("embedded").nodes][-1] == "spark1"

    (tmp_path / "k3-home-pod.toml").write_text(GOOD)
    assert read_pod("k3-home-pod.toml").name == "two"
    with pytest.raises(PodError, match=r"none\.toml.*embedded\.toml, k3-home-pod\.toml"):
        read_pod("none.toml")


def test_sizes_counts_and_marks_are_read_to_the_byte() -> None:
    """Units are exact, like nodes get numbers, marks stay with their figures."""
    pod = parse_pod(GOOD.encode(), source="two.toml")

    hbm, first, second = pod.nodes
    assert (hbm.memory_bytes, hbm.reserved_bytes, hbm.budget_bytes) == (3 * 2**29, 2**29, 2**30)
    assert [first.name, second.name] == ["spark0", "spark1"]
    assert (first.fixed_us, first.per_expert_us, first.cost.fixed_basis) == (
        184.5, 84.5, "measured",
    )  # fmt: skip
    assert first.power is not None
    assert first.power.limit_w == 150


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[token]", "colour = 1\n[token]", r"colour"),
        ("tier = \"hbm\"", "tier = \"hbm\"\ncolour = 1", r"nodes\[0\] hbm.*colour"),
        ("what = \"weights\"", "whats = \"weights\"", r"nodes\[0\] hbm.*whats"),
        ("count = 2", "count = 0", r"nodes\[1\] spark.*>= 1.*count"),
        ("count = 2", "count = 1025", r"nodes\[1\] spark.*<= 1024.*count"),
        ("count = 2", "count = 1024", r"nodes\[1\] spark: more than 1024 nodes in all"),
        ("512 MiB", "512 MB", r"nodes\[0\] hbm.*size"),
        ("512 MiB", "-1 MiB", r"nodes\[0\] hbm.*size"),
        ("512 MiB", "1600 MiB", r"nodes\[0\] hbm: reservations .* 67108864 more than the memory"),
        ("1.5 GiB", "9999999999 GiB", r"nodes\[0\] hbm.*more than"),
        ("fixed_us = 184.5", "fixed_us = -1", r"nodes\[1\] spark.*cost\.fixed_us"),
        ("fixed_us = 184.5", "fixed_us = nan", r"nodes\[1\] spark"),
        ("per_expert_us = 84.5", "per_expert_us = inf", r"nodes\[1\] spark.*per_expert_us"),
        (", per_expert_us = 84.5", "", r"nodes\[1\] spark.*per_expert_us"),
        ("fixed_basis = \"measured\"", "fixed_basis = \"sure\"", r"nodes\[1\] spark.*fixed_basis"),
        ("[[nodes]]\nname = \"spark\"", "[[nodes]]\nname = \"Spark 1\"", r"nodes\[1\].*name"),
        ("name = \"spark\"\ncount = 2", "name = \"hbm\"", r"2 nodes have the name 'hbm'"),
        ("feed = \"strip\"", "feed = \"wall\"", r"spark0 hangs on feed 'wall'"),
        ("worst_w = 150", "worst_w = 120", r"nodes\[1\] spark.*must not fall"),
        ("uncapped_w = 190", "uncapped_w = 140", r"nodes\[1\] spark.*below worst_w"),
        ("tier = \"hbm\"", "tier = \"hbm\"\nlayer_experts_max = 3", r"layer_experts_max is for"),
        ("serial_us = 400.0", "serial_us = -1.0", r"token\.serial_us"),
        ("serial_us = 400.0", "", r"serial_us"),
        ("name = \"two\"", "name = two", r"not valid TOML.*line 2"),
        ("name = \"two\"", "name = \"\"", r"length >= 1.*name"),
        ("name = \"two\"", "name = \"\\u001b[31mtwo\"", r"regex.*name"),
        ("what = \"weights\"", "what = \"a\\nb\"", r"nodes\[0\] hbm.*what"),
        ("[token]", "[published]\nsource = \"x\"\ntotal_gib = nan\n[token]", r"total_gib"),
    ],
)  # fmt: skip
def test_a_wrong_pod_is_one_error_that_names_file_and_key(old: str, new: str, said: str) -> None:
    """Unknown keys, negative, endless and inconsistent numbers, missing costs: PodError, 78."""
    assert GOOD.count(old) >= 1
    at = GOOD.rindex(old)
    text = GOOD[:at] + new + GOOD[at + len(old) :]

    with pytest.raises(PodError, match=said) as caught:
        parse_pod(text.encode(), source="two.toml")
    assert str(caught.value).startswith("two.toml: ")
    assert caught.value.code == "pod_invalid"
    assert caught.value.exit_status == 78


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A binary, a folder and a huge file get the same kind of error."""
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "huge.toml").write_bytes(b"#" * (2**20 + 1))
    for name in ("binary.toml", "huge.toml", "."):
        with pytest.raises(PodError):
            read_pod(str(tmp_path / name))

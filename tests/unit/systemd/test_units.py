"""The systemd units: accepted without a word, exposed to little, and in step with the code.

`systemd-analyze` is checked here; starting the units for real needs a booted systemd.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.pod.layout import PodPaths, unit_of
from shared.core.errors import EXIT_CONFIG, EXIT_TEMPFAIL
from shared.core.loading import WAIT_US
from spark_daemon.config import BANK_ROOT, CONFIG_ROOT

ROOT = Path(__file__).resolve().parents[3]
UNITS = ROOT / "systemd"
SERVICES = (
    "k3-spark@.service",
    "k3-grace.service",
    "k3-rtx.service",
    "k3-station.service",
    "k3-banks.service",
)
NODES = SERVICES[:3]
PINNING = SERVICES[:4]
EXPOSURE_MAX = 20  # tenths: 2.0 is "OK" in systemd's words
BIN = "/opt/k3/venv/bin/"

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and os.environ.get("CI") != "true",
    reason="systemd-analyze is not installed (Debian package `systemd`)",
)


class Unit(configparser.RawConfigParser):
    """A unit file; a setting given twice keeps the last value, which none of ours does."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=True, delimiters=("=",), comment_prefixes=("#",))
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string((UNITS / name).read_text())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units as they would be installed, over programs that exist."""
    folder = tmp_path_factory.mktemp("units")
    programs = folder / "bin"
    programs.mkdir()
    for unit in UNITS.glob("k3-*.*"):
        text = unit.read_text().replace(BIN, f"{programs}/")
        (folder / unit.name).write_text(text)
        for program in re.findall(rf"^ExecStart={programs}/(\S+)", text, re.MULTILINE):
            (programs / program).write_text("#!/bin/sh\n")
            (programs / program).chmod(0o755)
    return folder


def analyze(*arguments: str, units: Path) -> subprocess.CompletedProcess[str]:
    """`systemd-analyze ARGUMENTS` that finds our units first."""
    return subprocess.run(
        ["systemd-analyze", *arguments],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:", "SYSTEMD_COLORS": "0"},
        capture_output=True,
        text=True,
        timeout=50,
    )


@needs_analyze
@pytest.mark.parametrize("name", [*SERVICES, "k3-pod.target"])
def test_verify_prints_nothing(installed: Path, name: str) -> None:
    """verify exits 0 on unknown keys and bad values and only prints: any output is a failure."""
    answer = analyze("verify", "--man=no", str(installed / name), units=installed)

    assert (answer.stdout, answer.stderr, answer.returncode) == ("", "", 0)


@needs_analyze
def test_verify_would_notice(installed: Path, tmp_path: Path) -> None:
    """The check above can fail: an unknown key is reported."""
    text = (installed / "k3-grace.service").read_text()
    bad = tmp_path / "k3-bad.service"
    bad.write_text(text.replace("TasksMax=128", "TaskMax=128"))

    answer = analyze("verify", "--man=no", str(bad), units=installed)

    assert "TaskMax" in answer.stdout + answer.stderr


@needs_analyze
@pytest.mark.parametrize("name", SERVICES)
def test_exposure_is_small(installed: Path, name: str) -> None:
    """`systemd-analyze security` fails by its status when a unit is exposed more than 2.0."""
    answer = analyze(
        *("security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE_MAX}"),
        str(installed / name),
        units=installed,
    )

    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_a_refused_setting_is_not_retried(name: str) -> None:
    """Restart on failure, within bounds, but never on our own status for configuration."""
    unit = Unit(name)

    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["RestartPreventExitStatus"] == str(EXIT_CONFIG)
    assert int(unit["Unit"]["StartLimitBurst"]) >= 1
    assert int(unit["Unit"]["StartLimitIntervalSec"]) >= 10


@pytest.mark.parametrize("name", NODES)
def test_a_node_that_waits_for_memory_is_never_given_up(name: str) -> None:
    """Status 75 comes after a wait, and is tried again: that must not reach the start limit."""
    unit = Unit(name)
    starts = int(unit["Unit"]["StartLimitIntervalSec"]) / (WAIT_US / 1e6)

    assert starts < int(unit["Unit"]["StartLimitBurst"])
    assert str(EXIT_TEMPFAIL) not in unit["Service"]["RestartPreventExitStatus"].split()


@pytest.mark.parametrize("name", SERVICES)
def test_readiness_and_watchdog_are_the_daemons_own_word(name: str) -> None:
    """Case D3: the main process alone may notify, and a stuck one is noticed."""
    service = Unit(name)["Service"]

    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert int(service["WatchdogSec"]) > 0


@pytest.mark.parametrize("name", PINNING)
def test_who_locks_memory_may(name: str) -> None:
    """Banks and rings stay in memory."""
    assert Unit(name)["Service"]["LimitMEMLOCK"] == "infinity"


def test_the_bank_service_gives_way() -> None:
    """Serving banks must not take time, disk or memory from serving users."""
    service = Unit("k3-banks.service")["Service"]

    assert int(service["CPUWeight"]) <= 10  # the default is 100
    assert int(service["IOWeight"]) <= 10
    assert service["MemoryHigh"] == "2G"


@pytest.mark.parametrize("name", SERVICES)
def test_all_units_share_one_user(name: str) -> None:
    """The shm fabric opens /proc/PID/fd of its peers: same user, no user namespace of its own."""
    service = Unit(name)["Service"]

    assert (service["User"], service["Group"]) == ("k3", "k3")
    assert not {"PrivateUsers", "DynamicUser", "PrivatePIDs"} & set(service)
    assert "u k3 " in (UNITS / "sysusers.d" / "k3.conf").read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_runs_a_program_of_the_project(name: str) -> None:
    """The command is an entry point of pyproject.toml and its options exist."""
    import tomllib

    command = Unit(name)["Service"]["ExecStart"].removeprefix(BIN).split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, attribute = project["scripts"][command[0]].partition(":")

    entry = getattr(__import__(module, fromlist=[attribute]), attribute)
    options = {option for parameter in entry.params for option in parameter.opts}
    assert {word for word in command[1:] if word.startswith("--")} <= options


@pytest.mark.parametrize(
    ("unit", "name"), [("k3-spark@.service", "%i"), ("k3-grace.service", "grace"),
                       ("k3-rtx.service", "rtx"), ("k3-station.service", "station"),
                       ("k3-banks.service", "station")],
)  # fmt: skip
def test_the_key_is_handed_over_by_systemd(unit: str, name: str) -> None:
    """Only root reads the key file; each service gets a copy under the name the key has."""
    service = Unit(unit)["Service"]

    expected = f"{name}.key_secret:{CONFIG_ROOT}/keys/{name}.key_secret"
    assert service["LoadCredential"] == expected
    if unit in NODES:
        assert f"--node-key %d/{name}.key_secret" in service["ExecStart"]
    if unit == "k3-banks.service":
        assert f"--secret-key %d/{name}.key_secret" in service["ExecStart"]


def test_layout_and_units_mean_the_same_places() -> None:
    """`k3 pod init` writes where units and daemons look."""
    paths = PodPaths.system(Path("/"))

    assert paths.config == CONFIG_ROOT
    assert paths.banks == BANK_ROOT
    assert f"--config {paths.station_config}" in Unit("k3-station.service")["Service"]["ExecStart"]
    assert (
        paths.station_state
        == Path("/var/lib") / Unit("k3-station.service")["Service"]["StateDirectory"]
    )
    folders = re.findall(r"^d (\S+) ", (UNITS / "tmpfiles.d/k3.conf").read_text(), re.MULTILINE)
    assert {str(paths.config), str(paths.keys), str(paths.allow_list), str(paths.banks)} <= set(
        folders
    )
    assert unit_of("spark3", "spark") == "k3-spark@spark3.service"
    assert (UNITS / unit_of("grace", "grace")).is_file()
    assert (UNITS / unit_of("rtx", "rtx")).is_file()


@pytest.mark.parametrize("name", SERVICES)
def test_one_target_starts_and_stops_all(name: str) -> None:
    """Enabling a unit puts it under k3-pod.target, and stopping that stops it."""
    unit = Unit(name)

    assert unit["Install"]["WantedBy"] == "k3-pod.target"
    assert unit["Unit"]["PartOf"] == "k3-pod.target"


@pytest.mark.parametrize("name", NODES)
def test_a_node_may_write_the_bank_it_pulls(name: str) -> None:
    """The rest of the system is read-only for it, and the folder belongs to its user."""
    service = Unit(name)["Service"]

    assert service["ReadWritePaths"] == f"-{BANK_ROOT}"
    assert f"d {BANK_ROOT} 0755 k3 k3" in (UNITS / "tmpfiles.d" / "k3.conf").read_text()

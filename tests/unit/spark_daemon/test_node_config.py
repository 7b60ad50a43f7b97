"""Settings, pinning, offers and canaries: what a node refuses before it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.core import wire
from shared.core.errors import (
    BankError,
    ConfigError,
    DigestMismatch,
    KeyRefused,
    PlacementError,
    RemoteProtocolError,
)
from shared.core.ring_layout import RingShape
from spark_daemon import config, daemon
from spark_daemon.held_lease import check_offer
from spark_daemon.session import refusal
from tests.support.fake_station import RING, Home


def test_defaults_suffice_apart_from_keys() -> None:
    """Without any file the instance's name decides every path."""
    made = config.load("grace", "grace", path=None, overrides={"bank": None})

    assert (made.name, made.tier) == ("grace", "grace")
    assert made.bank == "/var/lib/k3/banks/grace.k3bank"
    assert made.station == "tcp://127.0.0.1:8381"
    assert made.node_key == "/etc/k3/keys/grace.key_secret"
    assert made.pin
    assert made.spin_us == 0
    assert made.canary_period_s == 300


def test_paths_in_the_file_count_from_its_folder(tmp_path: Path) -> None:
    """As in station.toml; what the command line says counts from the working directory."""
    file = tmp_path / "n.toml"
    file.write_text('bank = "banks/s0.k3bank"\nnode_key = "/keys/s0.key_secret"\n')

    made = config.load("spark", "s0", path=file, overrides={"station_key": "station.key"})

    assert made.bank == str(tmp_path / "banks/s0.k3bank")
    assert (made.node_key, made.station_key) == ("/keys/s0.key_secret", "station.key")


def test_options_win_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    """The usual order."""
    file = tmp_path / "n.toml"
    file.write_text('bank = "/a"\nspin_us = 7\n')

    made = config.load("spark", "s0", path=file, overrides={"bank": "/b", "kernel": None})

    assert (made.bank, made.spin_us, made.kernel) == ("/b", 7, "auto")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spin_us = -1", "spin_us"),
        ("spin_us = 1.5", "spin_us"),
        ('spin_us = ""', "spin_us"),
        ('kernel = "cuda"', "kernel"),
        ("kernel_threads = 0", "kernel_threads"),
        ("kernel_threads = 65", "kernel_threads"),
        ('colour = "red"', "colour"),
        ('bank = ""', "bank"),
        (r'bank = "a\u0000b"', "bank"),
        ('name = "../x"', "name"),
        ('name = "s1"', "its name is 's1', but node 's0' was asked for"),
        ("pin = 1", "pin"),
        ("canary_period_s = 0", "canary_period_s"),
        ("canary_period_s = nan", "canary_period_s"),
        ("canary_period_s = 1e9", "canary_period_s"),
        ('canary_period_s = "often"', "canary_period_s"),
        ("= 3", "not TOML"),
        ("spin_us = 1\nspin_us = 2", "not TOML"),
        ("x = '" + "a" * 70_000 + "'", "larger than"),
    ],
)
def test_a_bad_setting_names_file_and_field(tmp_path: Path, text: str, said: str) -> None:
    """One ConfigError: where, what, and the remedy."""
    file = tmp_path / "n.toml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=said) as caught:
        config.load("spark", "s0", path=file, overrides={})
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00"])
def test_files_that_are_no_text_are_refused(tmp_path: Path, content: bytes) -> None:
    """Never a traceback."""
    file = tmp_path / "n.toml"
    file.write_bytes(content)

    with pytest.raises(ConfigError):
        config.load("spark", "s0", path=file, overrides={})
    with pytest.raises(ConfigError, match="cannot read"):
        config.load("spark", "s0", path=tmp_path, overrides={})


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("bank", "/nonexistent/x.k3bank", "bank_invalid"),
        ("node_key", "/nonexistent/x.key_secret", "key_refused"),
        ("station_key", "/nonexistent/x.key", "key_refused"),
        ("station", "somewhere", "config_invalid"),
        ("kernel", "cuda", "config_invalid"),
        ("spin_us", -1, "config_invalid"),
        ("name", "a/b", "config_invalid"),
    ],
)
def test_bad_settings_end_in_one_line_and_status_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: object, code: str
) -> None:
    """What a person has to change is named once, without a traceback; nothing was started."""
    home = Home.make(tmp_path)
    overrides: dict[str, object] = {
        "bank": str(home.bank),
        "station": "tcp://127.0.0.1:1",
        "station_key": str(tmp_path / "station" / "station.key"),
        "node_key": str(tmp_path / "nodes" / "spark0.key_secret"),
        "pin": False,
    }

    status = daemon.main(
        "spark",
        "spark0",
        config_path=None,
        overrides=overrides | {option: value},
        environ={"K3_LOG": "json"},
    )

    lines = capsys.readouterr().err.splitlines()
    assert status == 78
    assert len(lines) == 1
    said = json.loads(lines[0])
    assert (said["event"], said["code"]) == ("node_failed", code)
    assert str(value) in said["error"] or f"$.{option}" in said["error"]


def test_an_unknown_log_form_is_said_without_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """The log itself cannot be made: plain words and 78."""
    status = daemon.main("rtx", "rtx", config_path=None, overrides={}, environ={"K3_LOG": "stone"})

    assert status == 78
    assert "k3-rtx: config_invalid: K3_LOG" in capsys.readouterr().err


def test_refusals_have_the_class_of_their_code() -> None:
    """The Station's code decides what this process reports."""
    for kind in (BankError, DigestMismatch, KeyRefused, PlacementError):
        assert type(refusal(kind.code, "x")) is kind
    unknown = refusal("remote_protocol_error", "install the same version")
    assert type(unknown) is ConfigError
    assert "remote_protocol_error" in str(unknown)


def offered(**changes: Any) -> wire.LeaseOffer:
    fields: dict[str, Any] = {
        "sender": "station",
        "incarnation": 1,
        "epoch": 1,
        "ring": RING,
        "reply_ring": wire.RegionDescriptor("shm", "a", "b", RING.reply_ring_bytes, 1),
        "canary_bank_row": 0,
        "canary_seed": 1,
        "heartbeat_us": 1,
        "ttl_us": 1,
    }
    return wire.LeaseOffer(**(fields | changes))


HUGE = RingShape(slots=64, max_tokens=65535, max_rows=65535, latent=2**16)


@pytest.mark.parametrize(
    ("changes", "latent", "said"),
    [
        ({}, 64, "latent"),
        ({"canary_bank_row": 4}, RING.latent, "canary of bank row 4"),
        ({"reply_ring": wire.RegionDescriptor("shm", "a", "b", 64, 1)}, RING.latent, "64 bytes"),
        (
            {
                "ring": HUGE,
                "reply_ring": wire.RegionDescriptor("shm", "a", "b", HUGE.reply_ring_bytes, 1),
            },
            HUGE.latent,
            "more than",
        ),
    ],
    ids=["latent", "canary", "reply ring", "size"],
)
def test_offers_are_checked_before_anything_is_allocated(
    changes: dict[str, Any], latent: int, said: str
) -> None:
    """A peer's numbers decide no allocation and no index unchecked."""
    check_offer(offered(), latent=RING.latent, bank_rows=4)
    with pytest.raises(RemoteProtocolError, match=said):
        check_offer(offered(**changes), latent=latent, bank_rows=4)


def test_the_command_has_help_with_an_example() -> None:
    """`k3-spark --help` tells usage, an example and the statuses."""
    done = subprocess.run(
        [sys.executable, "-m", "spark_daemon", "--help"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )

    for part in ("NAME", "Example: k3-spark", "78", "--no-pin"):
        assert part in done.stdout

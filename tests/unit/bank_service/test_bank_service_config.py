"""The bank service's settings: what is accepted, what is refused, and how clearly."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.bank_service import config
from shared.core.errors import ConfigError


def load(folder: Path, text: str, **overrides: object | None) -> config.BankServiceConfig:
    """Settings from a text."""
    path = folder / "banks.toml"
    path.write_text(text)
    return config.load(path, overrides)


def test_defaults_suffice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The installed file may be missing; one that was named may not."""
    monkeypatch.setattr(config, "CONFIG_FILE", tmp_path / "none.toml")

    settings = config.load(None, {})

    assert settings == config.BankServiceConfig()
    assert settings.folders == ("/var/lib/k3/banks",)
    assert settings.secret_key == "/etc/k3/keys/station.key_secret"
    with pytest.raises(ConfigError, match=r"none\.toml does not exist: correct --config"):
        config.load(tmp_path / "none.toml", {})


def test_paths_are_relative_to_the_file_and_options_win(tmp_path: Path) -> None:
    """Paths of the command line stay as they were given."""
    (tmp_path / "model").mkdir()
    text = 'folders = ["banks", "/srv/banks"]\ncheckpoint = "model"\nsecret_key = "s.key_secret"\n'

    settings = load(tmp_path, text, secret_key="own", address=None)

    assert settings.folders == (str(tmp_path / "banks"), "/srv/banks")
    assert settings.checkpoint == str(tmp_path / "model")
    assert settings.secret_key == "own"
    assert settings.allow_list == "/etc/k3/keys/nodes"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "not TOML"),
        ("unknown = 1", "unknown"),
        ("folders = []", "folders"),
        ("rate_bytes_per_s = -1", "rate_bytes_per_s"),
        ("rate_bytes_per_s = 1000", "use 0 for no limit, or at least 1048576"),
        ('address = "nonsense"', "write tcp://HOST:PORT"),
        ('address = "tcp://0.0.0.0:8382"', "Set allow_remote = true"),
        ('checkpoint = "none"', "is not a folder: name the folder that holds config.json"),
        ('secret_key = ""', "secret_key"),
        (r'folders = ["a\u0000b"]', "folders"),
        (r'checkpoint = "a\u0000b"', "checkpoint"),
        ("# " + "x" * 70_000, "larger than 65536 bytes"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, words: str) -> None:
    """One line with the file or field and what to do."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_remote_peers_only_on_purpose(tmp_path: Path) -> None:
    """The switch opens the address that was refused without it."""
    text = 'address = "tcp://0.0.0.0:8382"\nallow_remote = true\nrate_bytes_per_s = 200000000\n'

    assert load(tmp_path, text).allow_remote

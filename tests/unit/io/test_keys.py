"""Key files: made private, read strictly, refused with the path and the remedy."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import pytest
import zmq.auth

from shared.core.errors import ConfigError, KeyRefused
from shared.io import keys


def test_a_created_pair_can_be_loaded_by_us_and_by_pyzmq(tmp_path: Path) -> None:
    """The files are zmq.auth certificates; the public file holds no secret."""
    made = keys.create(tmp_path / "keys", "spark3")
    secret_file = tmp_path / "keys" / "spark3.key_secret"
    public_file = tmp_path / "keys" / "spark3.key"

    assert keys.load_secret(secret_file) == made
    assert keys.load_public(public_file) == made.public
    assert zmq.auth.load_certificate(secret_file) == (made.public.encode(), made.secret.encode())
    assert zmq.auth.load_certificate(public_file) == (made.public.encode(), None)
    assert made.secret not in public_file.read_text()


def test_a_secret_file_is_private_from_its_first_moment(tmp_path: Path) -> None:
    """Mode 0600 whatever the umask; a new folder is 0700."""
    old = os.umask(0)
    try:
        keys.create(tmp_path / "keys", "spark3")
    finally:
        os.umask(old)

    assert stat.S_IMODE((tmp_path / "keys" / "spark3.key_secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_an_identity_is_never_replaced(tmp_path: Path) -> None:
    """Creating a name twice names the file and leaves the first pair as it was."""
    made = keys.create(tmp_path, "spark3")

    with pytest.raises(ConfigError, match=r"spark3\.key_secret already exists"):
        keys.create(tmp_path, "spark3")
    assert keys.load_secret(tmp_path / "spark3.key_secret") == made


@pytest.mark.parametrize("name", ["", "../x", "a/b", "Spark", ".hidden", "a..b", "x" * 65, "a\n"])
def test_a_name_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    """Names are limited to [a-z0-9][a-z0-9_.-]{0,63}."""
    with pytest.raises(ConfigError, match="name"):
        keys.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_secret_does_not_show_in_repr(tmp_path: Path) -> None:
    """A key pair in an exception or a log line keeps its secret."""
    made = keys.create(tmp_path, "spark3")

    assert made.secret not in repr(made)
    assert made.public in repr(made)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o666, 0o601])
def test_a_secret_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    """The error names the path, the mode and the command that cures it."""
    keys.create(tmp_path, "spark3")
    path = tmp_path / "spark3.key_secret"
    path.chmod(mode)

    with pytest.raises(ConfigError) as raised:
        keys.load_secret(path)
    assert f"{mode:04o}" in str(raised.value)
    assert f"chmod 600 {path}" in str(raised.value)


def _acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NOBODY = 0xFFFFFFFF
OWNER, GROUP, MASK, OTHER = (
    (0x01, 4, NOBODY),
    (0x04, 0, NOBODY),
    (0x10, 4, NOBODY),
    (0x20, 0, NOBODY),
)


@pytest.mark.parametrize(
    ("acl", "refused"),
    [
        (_acl(OWNER, (0x02, 4, 990), GROUP, MASK, OTHER), False),  # what LoadCredential= makes
        (_acl(OWNER, (0x02, 4, 991), GROUP, MASK, OTHER), True),
        (_acl(OWNER, (0x02, 4, 990), (0x04, 4, NOBODY), MASK, OTHER), True),
        (_acl(OWNER, GROUP, (0x08, 4, 5), MASK, OTHER), True),
        (_acl(OWNER, (0x02, 4, 990), GROUP, MASK, (0x20, 4, NOBODY)), True),
    ],
)
def test_a_credential_of_systemd_counts_as_private(acl: bytes, refused: bool) -> None:
    """With an ACL the mode shows 0440, yet only the service's user may read: judged by entries."""
    assert keys.others_may_read(0o440, acl, user_id=990) is refused


def test_an_acl_on_a_real_file_is_judged(tmp_path: Path) -> None:
    """A reader that was let in by ACL alone is noticed."""
    keys.create(tmp_path, "spark3")
    path = tmp_path / "spark3.key_secret"
    acl = _acl((0x01, 6, NOBODY), (0x02, 4, os.geteuid() + 1), GROUP, MASK, OTHER)
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"no ACLs on this file system: {error}")

    with pytest.raises(KeyRefused, match="may be read by others"):
        keys.load_secret(path)


def _edited(path: Path, old: str, new: str) -> Path:
    text = path.read_text()

    assert old in text

    path.write_text(text.replace(old, new))
    return path


def test_malformed_secret_files_are_refused_by_name(tmp_path: Path) -> None:
    """Missing, empty, huge, binary, keyless, mistyped, mismatched: KeyRefused naming the path."""
    other = keys.create(tmp_path, "other")
    path = tmp_path / "spark3.key_secret"

    def refused() -> str:
        with pytest.raises(KeyRefused) as raised:
            keys.load_secret(path)
        assert str(path) in str(raised.value)
        return str(raised.value)

    assert "No such file" in refused()
    for content in (b"", b"\xff\x00" * 50, b"metadata\ncurve\n"):
        path.write_bytes(content)
        path.chmod(0o600)
        assert "not a key file" in refused()
    path.write_bytes(b"#" * 5000)
    assert "4096" in refused()
    path.unlink()
    made = keys.create(tmp_path, "spark3")
    _edited(path, made.secret, made.secret[:-1])
    assert "40 characters" in refused()
    _edited(path, made.secret[:-1], other.secret)
    assert "does not belong" in refused()
    path.write_text((tmp_path / "spark3.key").read_text())
    assert "no secret key" in refused()


def test_a_folder_in_place_of_a_key_is_refused(tmp_path: Path) -> None:
    """A path that is no file gets the same clear error."""
    with pytest.raises(KeyRefused, match="Is a directory"):
        keys.load_secret(tmp_path)


def test_the_allow_list_binds_keys_to_names(tmp_path: Path) -> None:
    """Every NODE.key counts, nothing else; the result cannot be changed."""
    made = {name: keys.create(tmp_path / "made", name) for name in ("spark1", "spark2")}
    (tmp_path / "allow").mkdir()
    for name in made:
        (tmp_path / "allow" / f"{name}.key").write_bytes(
            (tmp_path / "made" / f"{name}.key").read_bytes()
        )
    (tmp_path / "allow" / "README").write_text("not a key")
    allowed = keys.load_allow_list(tmp_path / "allow")

    assert dict(allowed) == {pair.public: name for name, pair in made.items()}
    with pytest.raises(TypeError):
        allowed["x"] = "y"  # type: ignore[index]


def test_an_empty_allow_list_admits_nobody(tmp_path: Path) -> None:
    """An empty folder is valid and empty; a missing one is an error that names it."""
    assert dict(keys.load_allow_list(tmp_path)) == {}
    with pytest.raises(ConfigError, match="nowhere"):
        keys.load_allow_list(tmp_path / "nowhere")


def test_a_broken_allow_list_is_refused(tmp_path: Path) -> None:
    """A secret in the list, one key under two names and a bad name are each named."""
    keys.create(tmp_path / "made", "spark1")
    public = (tmp_path / "made" / "spark1.key").read_bytes()
    secret = (tmp_path / "made" / "spark1.key_secret").read_bytes()

    def refused(**files: bytes) -> str:
        folder = tmp_path / "-".join(files)
        folder.mkdir()
        for name, content in files.items():
            (folder / f"{name}.key").write_bytes(content)
        with pytest.raises(ConfigError) as raised:
            keys.load_allow_list(folder)
        return str(raised.value)

    assert "secret" in refused(spark1=secret)
    assert "'spark2' and 'spark1'" in refused(spark1=public, spark2=public)
    assert "'Spark1'" in refused(Spark1=public)
    assert "broken.key" in refused(broken=b"junk")


def test_a_full_disk_leaves_no_half_of_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty key file would be refused by every later start, and `create` never replaces one."""
    real = os.open

    def full(path: Path, flags: int, mode: int) -> int:
        """The public file can be made, and holds nothing."""
        os.close(real(path, flags, mode))
        return real("/dev/full" if path.suffix == ".key" else path, os.O_WRONLY)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(ConfigError, match="No space left on device"):
            keys.create(tmp_path, "spark3")

    assert os.listdir(tmp_path) == []
    made = keys.create(tmp_path, "spark3")
    assert keys.load_public(tmp_path / "spark3.key") == made.public

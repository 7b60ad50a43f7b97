"""CURVE key pairs as files: who a Station or a node is, and whom a Station admits.

Owns the file format (the certificate files of `zmq.auth`: `NAME.key` holds the public half,
`NAME.key_secret` both) and the rule that a secret file is readable by its owner only. Must not know
what the keys are used for. A key is text in Z85 (ZeroMQ RFC 32), 40 characters for 32 bytes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

import zmq

from shared.core.errors import ConfigError, KeyRefused
from shared.core.names import checked_name

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - a file name, not a secret
_FILE_BYTES_MAX: Final = 4096
_KEY_LINE: Final = re.compile(r"^\s*(public|secret)-key\s*=\s*\"([^\"\s]*)\"\s*$", re.MULTILINE)
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")

_ACL_XATTR: Final = "system.posix_acl_access"
_ACL_USER, _ACL_GROUP_OBJ, _ACL_GROUP, _ACL_OTHER = 0x02, 0x04, 0x08, 0x20


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One identity. The secret half is left out of `repr`, so it cannot reach a log that way."""

    name: str
    public: str
    secret: str = field(repr=False)


def create(directory: Path, name: str) -> KeyPair:
    """Make a new key pair and write `NAME.key` and `NAME.key_secret` (mode 0600) to `directory`.

    The folder is made with mode 0700 when missing. Raises ConfigError for a bad name, for files
    that already exist (an identity is never replaced by accident) and for a folder that cannot be
    written.
    """
    checked_name(name, kind="key")
    public_file = directory / f"{name}{PUBLIC_SUFFIX}"
    secret_file = directory / f"{name}{SECRET_SUFFIX}"
    public, secret = (half.decode("ascii") for half in zmq.curve_keypair())
    secret_text = _render(f"secret key of {name}: never copy this file", public, secret)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as undo:  # half a pair, or half a file, would stop every later start
            _write_new(secret_file, secret_text, undo, mode=0o600)
            _write_new(public_file, _render(f"public key of {name}", public), undo)
            undo.pop_all()
    except FileExistsError as error:
        raise ConfigError(
            f"key file {error.filename} already exists: remove it first if {name!r} shall get a "
            "new identity (every allow-list that names it must then be renewed)"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write a key to {directory}: {error.strerror}: make the folder writable and "
            "free some space"
        ) from error
    return KeyPair(name, public, secret)


def load_secret(path: Path) -> KeyPair:
    """Read a secret file. Its name is the file's name without the suffix.

    Raises KeyRefused (a ConfigError) naming the path when the file is missing, malformed, readable
    by anyone but this process's user, or when its halves do not belong together.
    """
    text = _read(path, secret=True)
    halves = _halves(text, path)
    if "secret" not in halves:
        raise KeyRefused(
            f"{path} holds no secret key: give the file ending in {SECRET_SUFFIX}, "
            f"not the public {PUBLIC_SUFFIX}"
        )
    derived = zmq.curve_public(halves["secret"].encode("ascii")).decode("ascii")
    if derived != halves["public"]:
        raise KeyRefused(
            f"{path}: the public key does not belong to the secret key: make a new pair"
        )
    name = path.name.removesuffix(SECRET_SUFFIX)
    return KeyPair(checked_name(name, kind="key"), halves["public"], halves["secret"])


def load_public(path: Path) -> str:
    """Read the public key (Z85) of a public file; errors as in `load_secret`."""
    halves = _halves(_read(path, secret=False), path)
    if "secret" in halves:
        raise KeyRefused(
            f"{path} holds a secret key where a public one is wanted: "
            f"replace it by the {PUBLIC_SUFFIX} file and make a new pair if it was shared"
        )
    return halves["public"]


def load_allow_list(directory: Path) -> Mapping[str, str]:
    """Read every `NODE.key` in `directory`: public key (Z85) -> node name, read-only.

    An empty folder is an empty list: nobody is admitted. Raises ConfigError for a missing folder,
    a bad node name or one key under two names, KeyRefused for an unreadable key.
    """
    try:
        paths = sorted(directory.glob(f"*{PUBLIC_SUFFIX}"), key=lambda path: path.name)
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
    except OSError as error:
        raise ConfigError(
            f"allow-list folder {directory}: {error.strerror}: create it and put one "
            f"NODE{PUBLIC_SUFFIX} file per admitted node into it"
        ) from error
    allowed: dict[str, str] = {}
    for path in paths:
        node = checked_name(path.name.removesuffix(PUBLIC_SUFFIX), kind="node")
        public = load_public(path)
        if public in allowed:
            raise ConfigError(
                f"allow-list {directory}: {node!r} and {allowed[public]!r} have the same key: "
                "give every node its own"
            )
        allowed[public] = node
    return MappingProxyType(allowed)


def others_may_read(mode: int, acl: bytes | None, *, user_id: int) -> bool:
    """Whether anyone but the owner and `user_id` has any right on a file of this mode and ACL.

    `acl` is the raw `system.posix_acl_access` attribute or None. With an ACL the group bits of the
    mode are only its mask: systemd's LoadCredential= shows 0440 for a file that one user may read.
    """
    if acl is None:
        return bool(mode & 0o077)
    return any(
        permissions and (tag in (_ACL_GROUP_OBJ, _ACL_GROUP, _ACL_OTHER) or who != user_id)
        for tag, permissions, who in _acl_entries(acl)
        if tag in (_ACL_USER, _ACL_GROUP_OBJ, _ACL_GROUP, _ACL_OTHER)
    )


def _acl_entries(acl: bytes) -> Iterator[tuple[int, int, int]]:
    """(tag, permissions, id) of each entry; layout of linux/posix_acl_xattr.h, little endian."""
    return struct.iter_unpack("<HHI", acl[4:])


def _render(title: str, public: str, secret: str | None = None) -> str:
    lines = [f"# {title}", "metadata", "curve", f'    public-key = "{public}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret}"')
    return "\n".join([*lines, ""])


def _write_new(path: Path, text: str, undo: ExitStack, mode: int = 0o644) -> None:
    """Make a file that was not there; `undo` removes it again."""
    # The mode is given at creation: a secret is never readable by others, not even for a moment.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    undo.callback(path.unlink, missing_ok=True)
    with open(descriptor, "w", encoding="ascii") as stream:
        stream.write(text)


def _read(path: Path, *, secret: bool) -> str:
    try:
        with path.open("rb") as stream:
            if secret:
                _check_private(stream.fileno(), path)
            data = stream.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeyRefused(
            f"cannot read key file {path}: {error.strerror}: make the key pair first or correct "
            "the path"
        ) from error
    if len(data) > _FILE_BYTES_MAX:
        raise KeyRefused(f"{path} is not a key file: larger than {_FILE_BYTES_MAX} bytes")
    return data.decode("ascii", "replace")


def _check_private(descriptor: int, path: Path) -> None:
    """Check the opened file, not the path: nobody can swap the file in between."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    try:
        acl = os.getxattr(descriptor, _ACL_XATTR)
    except OSError:  # no ACL, or a file system without them: the mode says it all
        acl = None
    if others_may_read(mode, acl, user_id=os.geteuid()):
        raise KeyRefused(
            f"secret key file {path} has mode {mode:04o} and may be read by others: "
            f"run `chmod 600 {path}`"
        )


def _halves(text: str, path: Path) -> dict[str, str]:
    found = _KEY_LINE.findall(text)
    halves = dict(found)
    if "public" not in halves or len(halves) != len(found):
        raise KeyRefused(
            f'{path} is not a key file: it needs one line `public-key = "..."`, make a new pair'
        )
    for kind, value in halves.items():
        if not _Z85.fullmatch(value):
            raise KeyRefused(f"{path}: the {kind} key is not 40 characters of Z85: make a new pair")
    return halves

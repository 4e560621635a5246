"""A key in a file: one line that says what it is, readable by its owner alone."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat

from relight.errors import ConfigError
from relight.format.cipher import KEY_BYTES, Secret

HEAD = "relight-key-1:"
_FILE_BYTES_MAX = 4096


def write_key_file(path: str) -> None:
    """A new key, 32 random bytes, in a new file. ``ConfigError`` if it is there. Durable."""
    write_secret(path, f"{HEAD}{base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}\n")


def write_secret(path: str, text: str) -> None:
    """A new file that its owner alone can read. ``ConfigError`` if it is there. Durable."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError("this file is there, and no key is ever overwritten", where=path) from None
    except OSError as error:
        raise ConfigError(f"no key can be written here: {error.strerror}", where=path) from None
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_small_file(path: str) -> Secret:
    """What lies in a file of secrets, without the end of its last line. ``ConfigError`` if others may read it."""
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the key cannot be read: {error.strerror}", where=path) from None
    with os.fdopen(fd, "rb") as file:
        seen = os.fstat(file.fileno())
        if stat.S_ISREG(seen.st_mode) and seen.st_mode & 0o077:
            raise ConfigError("others may read this key", where=path, hint=f"chmod 600 {path}")
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise ConfigError("too long for a key", where=path)
    return Secret(data.rstrip(b"\r\n"))


def parse_key(text: Secret, where: str) -> Secret:
    """The key in a line of text: ``relight-key-1:`` and base64, or base64 or 64 hexadecimal digits alone."""
    data = text.reveal().strip().removeprefix(HEAD.encode())
    for decode in (bytes.fromhex if len(data) == 2 * KEY_BYTES else None, base64.b64decode):
        try:
            key = b"" if decode is None else decode(data.decode("ascii"))
        except (ValueError, binascii.Error):
            continue
        if len(key) == KEY_BYTES:
            return Secret(key)
    raise ConfigError("this is no key of 32 bytes", where=where, hint="relight keys new FILE writes one")

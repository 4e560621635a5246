"""Read and write key files: one line with a prefix and the key, readable only by the owner."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import shlex
import stat

from relight.errors import ConfigError
from relight.format.cipher import KEY_BYTES, Secret

HEAD = "relight-key-1:"
_FILE_BYTES_MAX = 4096


def write_key_file(path: str) -> None:
    """Write a new key of 32 random bytes to a new file, durably. Raise ``ConfigError`` if the file exists."""
    write_secret(path, f"{HEAD}{base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}\n")


def write_secret(path: str, text: str) -> None:
    """Write a new file that only its owner can read, durably. Raise ``ConfigError`` if the file exists."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError("this file exists, and a key is never overwritten", where=path) from None
    except OSError as error:
        raise ConfigError(f"writing the key failed: {error.strerror}", where=path) from None
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_small_file(path: str) -> Secret:
    """Return the content of a secret's file without its final newline. Raise ``ConfigError`` if other users may read the file."""
    try:
        fd = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the key cannot be read: {error.strerror}", where=path) from None
    with os.fdopen(fd, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            raise ConfigError(
                "other users may read this key", where=path, hint=f"chmod 600 {shlex.quote(os.path.expanduser(path))}"
            )
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise ConfigError("the file is too long for a key", where=path)
    return Secret(data.rstrip(b"\r\n"))


def parse_key(text: Secret, where: str) -> Secret:
    """Parse a key: ``relight-key-1:`` and base64, or only base64, or only 64 hexadecimal digits."""
    data = text.reveal().strip().removeprefix(HEAD.encode())
    for decode in (bytes.fromhex if len(data) == 2 * KEY_BYTES else None, base64.b64decode):
        try:
            key = b"" if decode is None else decode(data.decode("ascii"))
        except (ValueError, binascii.Error):
            continue
        if len(key) == KEY_BYTES:
            return Secret(key)
    raise ConfigError("this is not a key of 32 bytes", where=where, hint="relight keys new FILE writes one")

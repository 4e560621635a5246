"""Unix sockets between processes of one user: in a directory that only this user may enter, with a secret that both ends prove.

An abstract name belongs to the network namespace: any process in it may take the name or connect, another user's and another container's
too. A path in a private directory belongs to the mount namespace and the user. The secret is a file in that directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

SECRET_BYTES = 32
NAME = r"[0-9a-f]{8}-[0-9a-f]{40}"
"""The form of a socket's name: the boot of the machine, then a digest of what the socket is for."""
_FILE = re.compile(NAME + r"\.(?:sock|codecs)")
"""Sockets, and what agents note about codecs (``commit.plugin_codecs``)."""
_PATH_BYTES_MAX = 107
"""Longest socket address in bytes (``sun_path``), without the zero byte at its end."""
_LOCK_S = 5.0
_STALE_S = 3600.0
"""Seconds after which a socket file without a listener is removed; a younger one may be between ``bind`` and ``listen``."""
_SWEPT_MAX = 200
_WRITABLE_BY_OTHERS, _OTHERS = 0o022, 0o077


class NotPrivate(OSError):
    """Error: no directory was found that only this user may enter. The message has the reason for each candidate."""


class LocalDirectory:
    """The directory of this user's sockets on this machine, held open. A context manager. Cost: about twenty system calls.

    Every directory on its path belongs to the superuser or this user, is no link, and lets no other user exchange what is in it. It is on a
    file system that can be written, and has the secret.
    """

    def __init__(self, path: str | None = None, *, without: Sequence[str] = ()) -> None:
        """Open the first usable candidate, or ``path``, which another process chose and which is checked again.

        ``without``: paths of candidates in which a process could not listen. ``NotPrivate`` if there is no candidate left; another
        ``OSError`` if there is no descriptor left.
        """
        reasons: list[str] = []
        for top in _tops() if path is None else [_top_of(path)]:
            try:
                self.path, self.fd = _open(top)
            except OSError as error:
                _note(error, reasons)
                continue
            try:
                if self.path in without:
                    raise OSError(errno.ENOSPC, f"no local socket can be made in {self.path}")
                if os.fstatvfs(self.fd).f_flag & os.ST_RDONLY:
                    raise OSError(errno.EROFS, f"{self.path} is on a file system that is mounted read-only")
                self.secret()
                return
            except OSError as error:
                os.close(self.fd)
                _note(error, reasons)
            except BaseException:
                os.close(self.fd)
                raise
        raise NotPrivate(errno.EACCES, "; ".join(reasons))

    def __enter__(self) -> LocalDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def secret(self) -> bytes:
        """Return the secret of this user's processes on this machine. The first process that asks makes it.

        ``OSError`` with the reason if it cannot be read or made.
        """
        try:
            if (secret := self._read_secret()) is not None:
                return secret
            with self._locked():
                if (secret := self._read_secret()) is not None:  # another process was quicker
                    return secret
                self._make_secret()
            secret = self._read_secret()
        except NotPrivate:
            raise
        except OSError as error:
            raise OSError(
                error.errno, f"{self.path}/secret cannot be read or made ({os.strerror(error.errno or 0)})"
            ) from error
        if secret is None:
            raise NotPrivate(errno.EACCES, f"{self.path}/secret was removed right after it was made")
        return secret

    def connect(self, name: str, timeout_s: float | None) -> socket.socket:
        """Connect to the listener of that name. ``OSError`` if there is none, or it is another user's. ``timeout_s`` None: do not block."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s or 0)
            connection.connect(self._at(name))
            if peer_of(connection)[1] != os.geteuid():
                raise PermissionError(errno.EACCES, f"the listener at {self.path}/{name} is another user's process")
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, name: str, backlog: int) -> Listener:
        """Listen under that name, in place of a dead listener. ``OSError``, ``EADDRINUSE``, if a process listens there."""
        with self._locked():
            self._sweep()
            if self._has_listener(name):
                raise OSError(errno.EADDRINUSE, f"another process listens at {self.path}/{name}")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{name}.sock", dir_fd=self.fd)
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                bound.bind(self._at(name))
                bound.listen(backlog)
                return Listener(bound, self, name)
            except BaseException:
                bound.close()
                raise

    def has_ended(self, name: str) -> bool:
        """Return whether a process of this user listened under that name here, and none does now.

        The file of a listener that was killed, or that called ``leave``, proves that. Without the file nothing is
        known.
        """
        with self._locked():  # otherwise a listener may be between ``bind`` and ``listen``
            try:
                status = os.stat(f"{name}.sock", dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() and not self._has_listener(name)

    # -- inside

    def _at(self, name: str) -> str:
        """Return the socket's address. The whole path, so that cleanup tools see the file in use; by the descriptor if
        the path is too long."""
        if re.fullmatch(NAME, name) is None:
            raise ValueError(f"{name!r} is not a name of a local socket")
        path = f"{self.path}/{name}.sock"
        return path if len(os.fsencode(path)) <= _PATH_BYTES_MAX else f"/proc/self/fd/{self.fd}/{name}.sock"

    def _has_listener(self, name: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self._at(name))
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except OSError:  # a full backlog, or an unknown reason: do not replace a listener that may live
                return True
        return True

    def _sweep(self) -> None:
        """Remove files that killed listeners of this boot left."""
        own = [name for name in os.listdir(self.fd) if _FILE.fullmatch(name) and name.startswith(boot_digits())]
        if len(own) > _SWEPT_MAX:  # a random sample, so that all of them get their turn
            own = secrets.SystemRandom().sample(own, _SWEPT_MAX)
        for name in own:
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                old = (
                    (stat.S_ISSOCK(status.st_mode) or stat.S_ISREG(status.st_mode))
                    and status.st_uid == os.geteuid()
                    and time.time() - status.st_mtime > _STALE_S
                )
                if old and not self._has_listener(name.partition(".")[0]):
                    os.unlink(name, dir_fd=self.fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time replace a socket. ``TimeoutError`` if another one holds the lock for ``_LOCK_S``."""
        ends = time.monotonic() + _LOCK_S
        while (fd := self._try_lock()) is None:
            if time.monotonic() > ends:
                raise TimeoutError(errno.ETIMEDOUT, f"another process holds {self.path}/lock")
            time.sleep(0.005)
        try:
            yield
        finally:
            os.close(fd)

    def _try_lock(self) -> int | None:
        fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:  # otherwise the file was removed, and the next process locks another file
                return fd
        os.close(fd)
        return None

    def _read_secret(self) -> bytes | None:
        """Return the secret; None if there is none, or the file has another length: a power loss may leave an empty one."""
        try:
            fd = os.open("secret", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
                raise NotPrivate(errno.EACCES, f"{self.path}/secret is not a file that only this user may read")
            data = os.read(fd, SECRET_BYTES + 1)
        finally:
            os.close(fd)
        return data if len(data) == SECRET_BYTES else None

    def _make_secret(self) -> None:
        """Create the secret, in place of none or of an invalid one. The caller holds the lock.

        A rename, not a link: it replaces, and some file systems have no links. After a power loss there is the whole
        secret or none.
        """
        own = f"secret-{secrets.token_hex(8)}"
        fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            if os.write(fd, secrets.token_bytes(SECRET_BYTES)) != SECRET_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
            os.rename(own, "secret", src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(own, dir_fd=self.fd)
            raise
        finally:
            os.close(fd)


class Listener:
    """A listening socket and its file. ``close`` removes the file, ``leave`` does not. A forked child changes no file."""

    def __init__(self, bound: socket.socket, directory: LocalDirectory, name: str) -> None:
        self.socket, self.name = bound, name
        self._path, self._pid = directory.path, os.getpid()
        self._file = _identity(os.stat(f"{name}.sock", dir_fd=directory.fd, follow_symlinks=False))

    def close(self) -> None:
        """Stop listening. The file goes first: while it is there a process listens, so no other process replaces it meanwhile."""
        if self.socket.fileno() >= 0 and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _identity(os.stat(f"{self.name}.sock", dir_fd=fd, follow_symlinks=False)) == self._file:
                        os.unlink(f"{self.name}.sock", dir_fd=fd)
                finally:
                    os.close(fd)
        self.socket.close()

    def is_found(self) -> bool:
        """Return whether the file is still there. A cleaner of old files may have removed it: then no process can connect."""
        try:
            return _identity(os.lstat(f"{self._path}/{self.name}.sock")) == self._file
        except OSError:
            return False

    def leave(self) -> None:
        """Stop listening, and leave the file, which proves to ``has_ended`` that this listener has ended. It is swept an hour later."""
        if self.socket.fileno() >= 0 and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.utime(f"{self._path}/{self.name}.sock", follow_symlinks=False)
        self.socket.close()


def name_of(*words: str) -> str:
    """Return the name of the socket for the purpose in ``words``. It differs between boots and network namespaces of a
    machine."""
    return f"{boot_digits()}-{hashlib.sha256(chr(0).join((_network(), *words)).encode(errors='surrogateescape')).hexdigest()[:40]}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end, from the kernel. The process is 0 if it is in another process namespace."""
    pid, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid, user & 0xFFFFFFFF


def _tops() -> list[str]:
    """Return the directories that may contain this user's. The first two do not depend on the login session, which
    ends before a detached job does.

    Each is the same in every working directory. ``tempfile.gettempdir()`` is not: it may be the working directory, or
    relative to it.
    """
    variables = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    given = [top for top in variables if os.path.isabs(top)][:1]
    tops = ("/tmp", *given, "/dev/shm", f"/run/user/{os.geteuid()}", "/var/tmp")  # noqa: S108 (what is made there is checked)
    return list(dict.fromkeys(map(os.path.realpath, tops)))


def _top_of(path: str) -> str:
    """Return the candidate that a directory of sockets is in. ``NotPrivate`` if its path has another form."""
    top = path.removesuffix(f"/relight-{os.geteuid()}/sockets")
    if top == path or (top and os.path.realpath(top) != top):
        raise NotPrivate(errno.EACCES, f"{path} is not a directory of this user's sockets")
    return top or "/"


def _note(error: OSError, reasons: list[str]) -> None:
    """Record why a candidate is unusable. Raise if the cause is the process or the machine: the next candidate would
    fail, too."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error
    reasons.append(error.strerror or str(error))


def _open(top: str) -> tuple[str, int]:
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    path = ""
    try:
        trusted = {
            0,
            os.geteuid(),
            os.fstat(fd).st_uid,
        }  # in a user namespace the superuser's files may have another number
        for part in Path(top).parts[1:]:
            fd, path = _enter(fd, path, part)
            status = os.fstat(fd)
            exchangeable = status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX
            if status.st_uid not in trusted or exchangeable:
                raise NotPrivate(errno.EACCES, f"{path} belongs to another user, or others may rename in it")
        for part, forbidden in ((f"relight-{os.geteuid()}", _WRITABLE_BY_OTHERS), ("sockets", _OTHERS)):
            target = f"{path}/{part}"
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
            except OSError as error:
                raise OSError(error.errno, f"{target} cannot be made ({os.strerror(error.errno or 0)})") from error
            fd, path = _enter(fd, path, part, os.O_RDONLY if part == "sockets" else os.O_PATH)
            status = os.fstat(fd)
            if status.st_uid != os.geteuid():
                raise NotPrivate(errno.EACCES, f"{path} belongs to another user ({status.st_uid})")
            if status.st_mode & forbidden:
                raise NotPrivate(errno.EACCES, f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):o})")
        return path, fd
    except BaseException:
        os.close(fd)
        raise


def _enter(fd: int, path: str, part: str, flags: int = os.O_PATH) -> tuple[int, str]:
    """Open a directory inside the open directory ``fd``, which is closed. Never follows a link."""
    target = f"{path}/{part}"
    try:
        opened = os.open(part, flags | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            raise NotPrivate(errno.EACCES, f"{target} is a link, or not a directory") from error
        raise OSError(error.errno, f"{target} cannot be opened ({os.strerror(error.errno or 0)})") from error
    os.close(fd)
    return opened, target


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@functools.cache
def boot_digits() -> str:
    """Eight digits of this boot: a directory on a disk outlives it, one on a network is another machine's too."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return hashlib.sha256(text.encode() or socket.gethostname().encode()).hexdigest()[:8]


def _network() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""

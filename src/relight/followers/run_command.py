"""Run a command for a checkpoint, without a shell, and take its result: the numbers that it prints or writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import shlex
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from relight.errors import ConfigError
from relight.format.records import Metric
from relight.observe.masking import mask_arguments
from relight.run_records.results import check_result_metrics
from relight.units import duration_text

RESULT_VARIABLE = "RELIGHT_RESULT"
"""Variable that names the file into which the command may write its result."""
GRACE_S = 10.0
"""Seconds between SIGINT and SIGKILL for a command that must end."""
LINE_BYTES_MAX = 1 << 20
"""Longest line that can be a result."""
_POLL_S = 0.05
_LEFT_S = 1.0
"""Seconds for which output of an ended command is read at most: a process that it left may keep the pipe."""
_FIELD = re.compile(r"\{(checkpoint|step|id|run)\}")


class CommandEnd(NamedTuple):
    """How a command ended. ``failed``: why it failed; empty if it succeeded."""

    metrics: Mapping[str, Metric]
    failed: str = ""


def words_of(command: str) -> list[str]:
    """Return the words of a command line. Raise ``ConfigError`` if there are none, or a quote is not closed."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--run cannot be split into words: {error}", where="--run") from None
    if not words:
        raise ConfigError("--run is empty", where="--run", hint='--run "python eval.py {checkpoint}"')
    return words


def filled(words: Sequence[str], fields: Mapping[str, str]) -> list[str]:
    """Return the words with ``{checkpoint}``, ``{step}``, ``{id}`` and ``{run}`` replaced. Other braces stay."""
    return [_FIELD.sub(lambda match: fields[match[1]], word) for word in words]


def run_command(
    words: Sequence[str], output: BinaryIO, *, timeout_s: float | None = None, grace_s: float = GRACE_S
) -> CommandEnd:
    """Run a command, copy what it prints to ``output``, and return how it ended.

    The command has a process group of its own. If this process is interrupted, or the time is over, the group gets SIGINT and, after
    ``grace_s``, SIGKILL. Raise ``ConfigError`` if the command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="relight-follow-", ignore_cleanup_errors=True) as folder:
        file = os.path.join(folder, "result.json")
        environment = {**os.environ, RESULT_VARIABLE: file}
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(
                f"the command cannot be started: {error.strerror}",
                where=shlex.join(mask_arguments(words)),
                hint="check --run",
            ) from error
        running = _Running(process, output)
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            in_time = running.wait(ends)
            if not in_time:
                running.end(grace_s)
        except BaseException:
            running.end(grace_s)
            raise
        finally:
            running.close()
        code = process.returncode
        if not in_time:
            return CommandEnd({}, f"no end within {duration_text(timeout_s)}")
        if code:
            return CommandEnd({}, f"exit code {code}" if code > 0 else f"ended by {_signal_name(-code)}")
        if running.is_too_long and not os.path.lexists(file):
            return CommandEnd({}, f"its last printed JSON object is longer than {LINE_BYTES_MAX} bytes")
        return _result_of(file, running.result)


class _Running:
    """A started command: its output, and its end."""

    def __init__(self, process: subprocess.Popen[bytes], output: BinaryIO) -> None:
        assert process.stdout is not None
        self._process, self._output, self._pipe = process, output, process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._poll: select.poll | None = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        self._line = b""
        self.result: dict[str, Any] | None = None
        """The last line that is a JSON object."""
        self.is_too_long = False
        """Whether a later line, perhaps a JSON object, was longer than ``LINE_BYTES_MAX``."""

    def wait(self, ends: float | None) -> bool:
        """Copy output until the command has ended, which is then a zombie. Return False if it has not by ``ends``."""
        while True:
            self._copy(_POLL_S)
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            if ends is not None and time.monotonic() >= ends:
                return False

    def end(self, grace_s: float) -> None:
        """End the group: SIGINT, and SIGKILL at the end of the grace period, or when this process is interrupted again."""
        with contextlib.suppress(KeyboardInterrupt):
            self._signal(signal.SIGINT)
            self.wait(time.monotonic() + grace_s)

    def close(self) -> None:
        """Read the rest of the output, and end what is left of the group."""
        try:
            ends = time.monotonic() + _LEFT_S
            while self._copy(0) and time.monotonic() < ends:
                pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()  # only now: until then, no other process gets its id
            self._pipe.close()
            self._take(b"\n")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _copy(self, wait_s: float) -> bool:
        """Copy what the command has printed. Return False if there was nothing."""
        if self._poll is None:
            time.sleep(wait_s)
            return False
        if not self._poll.poll(wait_s * 1000):
            return False
        data = os.read(self._pipe.fileno(), 1 << 16)
        if not data:
            self._poll = None
            return False
        self._output.write(data)
        self._output.flush()
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[: LINE_BYTES_MAX + 1]
        for line in lines:
            is_long = len(line) > LINE_BYTES_MAX
            value = None if is_long else _object_in(line)
            if value is not None or (is_long and line.startswith(b"{")):
                self.result, self.is_too_long = value, is_long


def _object_in(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that ``text`` is; None if it is none."""
    if not text.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _result_of(file: str, printed: dict[str, Any] | None) -> CommandEnd:
    """Return the result in the file, if the command has written one, else the printed one."""
    result = printed or {}
    try:
        text = _read_regular(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        return CommandEnd({}, f"its result in {RESULT_VARIABLE} cannot be read: {error.strerror}")
    else:
        written = _object_in(text) if len(text) <= LINE_BYTES_MAX else None
        if written is None:
            return CommandEnd({}, f"its result in {RESULT_VARIABLE} is not a JSON object")
        result = written
    numbers = {
        name: value for name, value in result.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    try:
        return CommandEnd(check_result_metrics(numbers))
    except ConfigError as error:
        return CommandEnd({}, error.what)


def _read_regular(path: str) -> bytes:
    """Return the beginning of a file. Raise ``OSError`` for anything else: opening a FIFO would wait for its writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read(LINE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"

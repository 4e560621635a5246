"""Progress bar of bytes on stderr, for commands and for library calls that take long.

One line of text, drawn by the threads that report bytes. A notebook shows stderr as text: it follows carriage returns, and no cursor moves.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from relight.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_S = 2.0
"""Seconds of work before a bar appears. With ``RELIGHT_PROGRESS=1`` it appears at once."""
REDRAW_S = 0.1
WIDTH_MIN, WIDTH_MAX = 24, 100
"""Columns of the line, within the terminal's."""
_COLOURS = {
    "bar.complete": "cyan",
    "progress.data.speed": "dim",
    "progress.download": "none",
    "progress.remaining": "dim",
}
_shown: list[Meter] = []
"""The meter of this process that may draw: stderr has one line for it, and lines of events must not end up in a bar."""
_shown_lock = threading.Lock()
"""Held while ``_shown`` is changed. A forked child makes its own."""


def _in_child() -> None:
    """Forget the bar of the parent, to which the line belongs."""
    global _shown_lock
    _shown_lock = threading.Lock()
    _shown.clear()


os.register_at_fork(after_in_child=_in_child)


class Meter:
    """Counts the bytes of some work, and draws a bar of them if the work takes long. Thread-safe."""

    def __init__(self, label: str, total: int, delay_s: float | None) -> None:
        self.draws = delay_s is not None
        """Whether a bar may be drawn."""
        self._label, self._total, self._done = label, total, 0
        self._lock = threading.RLock()  # a signal handler may emit an event while this thread draws
        self._next_s = time.monotonic() + (delay_s or 0.0)
        self._bar: Progress | None = None
        self._columns = 0
        """Columns of the line that is on the screen; 0 if there is none."""

    def __call__(self, count: int) -> None:
        """Add ``count`` bytes."""
        if self.draws:
            with self._lock:
                self._done += count
                self._draw_if_due()

    def at(self, done: float) -> None:
        """Set the number of bytes that are done."""
        if self.draws:
            with self._lock:
                self._done = int(done)
                self._draw_if_due()

    def print(self, line: str) -> None:
        """Print a line on stdout, above the bar."""
        with self._lock:
            self.hide()
            print(line, flush=self.draws)

    def hide(self) -> None:
        """Remove the line from the screen, unless another thread draws it now. The next bytes draw it again."""
        if self._columns and self._lock.acquire(blocking=False):
            try:
                self._write(f"\r{' ' * self._columns}\r")
                self._columns = 0
            finally:
                self._lock.release()

    def end(self) -> None:
        """Remove the line, and draw no more."""
        with self._lock:
            self.draws = False
            self.hide()

    def _draw_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_s or not self.draws:
            return
        self._next_s = now + REDRAW_S
        done = min(self._done, self._total)
        if self._bar is None:
            self._bar = _bar_of(self._label, self._total)
        self._bar.update(self._bar.task_ids[0], completed=done)
        line, columns = _rendered(self._bar)
        self._write(f"\r{line}")
        self._columns = columns

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # closed, full or replaced
            self.draws = False


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, leads: bool = True) -> Iterator[Meter]:
    """Show a bar of ``total`` bytes on stderr once the work has taken ``DELAY_S``. Not shown: within the block of another bar, on ranks
    that do not lead (``leads``: False on ranks other than 0), and where neither ``RELIGHT_PROGRESS`` nor a terminal or notebook wants one.
    """
    with _shown_lock:
        meter = Meter(label, total, _delay() if leads and total > 0 and not _shown else None)
        if meter.draws:
            _shown.append(meter)
    try:
        yield meter
    finally:
        if meter in _shown:
            meter.end()
            _shown.remove(meter)


def hide_bar() -> None:
    """Remove the bar from the screen, because another line follows on stderr."""
    for meter in _shown[:1]:
        meter.hide()


def _delay() -> float | None:
    """Return the seconds of work before this process shows a bar; None: it never does."""
    from relight.settings.environment import environment  # here, for a fast start of commands
    from relight.settings.kinds import NOT_SET

    choice = NOT_SET
    with contextlib.suppress(ConfigError):  # an invalid value must not fail a restore
        choice = environment().progress
    if sys.stderr is None or choice is False or os.environ.get("RANK", "0") not in ("", "0"):
        return None
    try:
        return 0.0 if choice is True else DELAY_S if sys.stderr.isatty() or _is_notebook() else None
    except ValueError:  # stderr was closed
        return None


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows stderr as text."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _bar_of(label: str, total: int) -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Column

    def whole() -> Column:
        return Column(no_wrap=True)

    bar = Progress(
        TextColumn("{task.description}", markup=False, table_column=whole()),
        BarColumn(None, table_column=Column(ratio=1)),
        DownloadColumn(table_column=whole()),
        TransferSpeedColumn(table_column=whole()),
        TimeRemainingColumn(table_column=whole()),
        expand=True,
        auto_refresh=False,
    )
    bar.add_task(label, total=total)
    return bar


def _rendered(bar: Progress) -> tuple[str, int]:
    """Return the bar as a line for stderr, with colours on a terminal, and its number of columns."""
    from rich.console import Console
    from rich.theme import Theme

    # Not elsewhere, although a notebook asks for colours: it overwrites a line by the number of its characters, codes included.
    has_colours = sys.stderr.isatty()
    console = Console(
        file=sys.stderr, force_terminal=has_colours, force_jupyter=False, highlight=False, theme=Theme(_COLOURS)
    )
    console.width = max(WIDTH_MIN, min(console.width - 1, WIDTH_MAX))
    with console.capture() as captured:
        console.print(bar.make_tasks_table(bar.tasks))
    return captured.get().partition("\n")[0], console.width

"""Event streams for open pages: each page has one, which reports changes. The page then loads again what it shows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from relight.run_names import dir_of
from relight.serve.scope import ANONYMOUS, in_scope, reaches, scope_now

STREAMS_MAX = 2000
STREAMS_OF_ONE_MAX = 1200
STREAMS_OF_STRANGER_MAX = 32
"""Streams of one address without credentials."""
TOGETHER_S = 0.25
"""Seconds within which changes are merged into one event."""
TOKEN_CHECK_S = 0.5
"""Seconds between checks of a stream's token: revoking the token ends the stream within a second."""
PING_S = 15.0
_NO_STORE = "\0"
"""A name that no store has: only streams that listen to all stores are woken."""


@dataclass(eq=False)
class Stream:
    """One open event stream. ``store`` and ``run`` select the changes that it reports; empty for all."""

    store: str
    run: str
    asker: str
    scope: str = ""
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Hub:
    """All open event streams. Any thread may call ``changed``; the rest belongs to the server's event loop."""

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._news: list[tuple[str, set[str], bool]] = []
        self._ending = False
        self.most = STREAMS_MAX
        """Maximum number of open streams; fewer where the process may open few files."""
        self.of_one = self.most
        """Maximum number of open streams of one caller."""

    @property
    def count(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    def changed(self, store: str = "", runs: set[str] | None = None, *, on_all_pages: bool = False) -> None:
        """Report a change in these runs of a store, or, without a store, anywhere.

        ``on_all_pages``: pages of other runs show it, too, if the caller's scope allows.
        """
        with self._lock:
            loop = self._loop
            if loop is None or loop.is_closed():
                return  # no stream was ever opened
            self._news.append((store, runs or set(), on_all_pages))
            first = len(self._news) == 1
        if first:
            loop.call_soon_threadsafe(lambda: loop.call_later(TOGETHER_S, self._publish))

    def progressed(self) -> None:
        """Report that a job advances: pages that show all stores load again. Any thread may call it."""
        self.changed(_NO_STORE)

    def close(self) -> None:
        """End all streams."""
        self._ending = True
        for stream in self._streams:
            stream.woken.set()

    def _publish(self) -> None:
        with self._lock:
            news, self._news = self._news, []
        for stream in self._streams:
            if any(
                in_scope(stream.scope, store, runs)
                and (
                    on_all_pages
                    or not stream.store
                    or not store
                    or (store == stream.store and (not stream.run or not runs or stream.run in runs))
                )
                for store, runs, on_all_pages in news
            ):
                stream.woken.set()

    def full(self, asker: str) -> bool:
        """Return whether the caller has too many streams to open another. Clients without credentials together have at most half."""
        own_streams = sum(stream.asker == asker for stream in self._streams)
        if asker.startswith(ANONYMOUS):
            strangers = sum(stream.asker.startswith(ANONYMOUS) for stream in self._streams)
            if own_streams >= STREAMS_OF_STRANGER_MAX or strangers >= self.most // 2:
                return True
        return len(self._streams) >= self.most or own_streams >= min(STREAMS_OF_ONE_MAX, self.of_one)

    async def listen(
        self, store: str, run: str, asker: str, may_stay: Callable[[], bool]
    ) -> AsyncIterator[dict[str, str]]:
        """Yield events until the client leaves, the server ends, or the client's token ends.

        Changes outside the token's scope are left out.
        """
        self._loop = asyncio.get_running_loop()
        stream, number = Stream(store, dir_of(run) if run else "", asker, scope_now()), 0
        self._streams.add(stream)
        try:
            yield {"event": "hello", "data": "0"}
            while not self._ending and may_stay():
                try:
                    await asyncio.wait_for(stream.woken.wait(), TOKEN_CHECK_S)
                except TimeoutError:
                    continue
                stream.woken.clear()
                if not self._ending and may_stay() and (not store or reaches(store, run)):
                    number += 1
                    yield {"event": "changed", "data": str(number)}
        finally:
            self._streams.discard(stream)

"""Saves where rank 0 writes for all ranks: each rank's replacement for ``Attempt`` and ``Background``.

Rank 0 has subclasses of the usual classes, which also send the outcome to other ranks. Other ranks send the requested
bytes and receive the outcome: at once for a save that rank 0 makes itself, later, from the published outcomes, for a
save that its agent makes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from relight.agent import Request, SaveOutcome
from relight.agent.messages import SaveResult, words_of
from relight.capture import Captured
from relight.catalog.tiers import Further, open_further
from relight.checkpointer.background import Background
from relight.checkpointer.best_so_far import BestSoFar
from relight.checkpointer.calls import refuse_unconnected
from relight.checkpointer.frozen_params import FrozenParams
from relight.checkpointer.options import ONE, check_writer
from relight.checkpointer.save_writer import SaveWriter
from relight.comm import Communicator, RankTimeout, late, new_threads
from relight.commit import Attempt, CommitTarget, SaveReport, SaveRequest
from relight.commit.multi_rank import abort_part
from relight.decode import from_msgpack
from relight.errors import ConfigError, RelightError, known
from relight.keys import StoreSecurity
from relight.log import History
from relight.policy import Keep, Limits, Tiers
from relight.ranks.collective_errors import begin_attempt_on_all
from relight.ranks.group import RankGroup, SingleRank
from relight.ranks.one_writer import OneWriter
from relight.ranks.remote_errors import decode_error, encode_error, error_from
from relight.ranks.several import SeveralRanks
from relight.store import ByteStore, open_bytes
from relight.store.paced import paced
from relight.store.wrapper import guard_of

BACKGROUND, FOREGROUND, FAILED, MADE = b"b", b"f", b"-", b"+"
"""First byte of rank 0's reply after the gathering: b = passed to its agent, f = rank 0 makes the save in the
foreground,
- = failed (the error follows), + = committed (the report follows)."""
POLL_S = 0.02
SIGN_S = 10.0
"""Most seconds between two signs of rank 0, to ranks that wait for it, that a save continues."""
KEPT = 64
"""Number of outcomes that stay published."""
GRACE_S = 5.0
"""Seconds that rank 0 waits in ``close()`` until the other ranks have read the last outcome."""


def ranks_of(
    world: Communicator, per_rank: Sequence[str], timeout_s: float, writer: str, settings: Mapping[str, object]
) -> RankGroup:
    """Return this process's side of the group of ranks.

    Collective. Raise ``ConfigError`` if ``writer`` or a setting in ``settings`` differs between ranks: these settings
    decide which exchanges follow.
    """
    check_writer(writer)
    if world.size == 1:
        refuse_unconnected()
        return SingleRank(world)
    own_settings = {"writer": writer, **settings}
    answers = [
        msgspec.json.decode(answer) for answer in world.gather(msgspec.json.encode(own_settings), "comparing settings")
    ]
    for name in own_settings:
        for rank, answer in enumerate(answers):
            if answer[name] != answers[0][name]:
                raise ConfigError(
                    f"{name}= is {answers[0][name]!r} on rank 0, and {answer[name]!r} on rank {rank}",
                    hint="pass the same value on every rank",
                )
    return (OneWriter if writer == ONE else SeveralRanks)(world, per_rank, timeout_s)


def open_for(
    ranks: RankGroup,
    url: str,
    tiers: Tiers | None,
    wants_background: bool,
    guard: StoreSecurity,
    limits: Limits,
    run: str,
) -> tuple[ByteStore, Sequence[Further], bool]:
    """Open the store and its further tiers. Return them, and whether saves are made in the background, which needs a
    local store. ``limits`` bound the writes to the store and the reads from all of them."""
    read_bound = limits.read_bytes_per_second

    def open_all() -> tuple[ByteStore, Sequence[Further]]:
        store = open_bytes(url, guard=guard)
        purpose, further = f"{store.url}/{run}", open_further(tiers, guard_of(store))
        slowed = [(name, paced(tier, purpose, None, read_bound), tier_run) for name, tier, tier_run in further]
        return paced(store, purpose, limits.bytes_per_second, read_bound), slowed

    if not isinstance(ranks, OneWriter):
        store, further = open_all()
        return store, further, wants_background and store.properties().shared
    opened: list[tuple[ByteStore, Sequence[Further]]] = []

    def open_it() -> bytes:
        opened.append(open_all())
        return b"1" if wants_background and opened[0][0].properties().shared else b""

    in_background = bool(ranks.run_on_rank0(open_it, "opening the store"))
    return *(opened[0] if opened else (Elsewhere(url), ())), in_background


def begin(
    ranks: RankGroup, store: ByteStore, run: str, reason: str, best: BestSoFar, check: Callable[[History], None]
) -> Attempt:
    """Begin one attempt for all ranks: this process, or rank 0, takes over the run, unless ``check`` raises."""
    attempt = begin_attempt_on_all(ranks, store, run, reason, check)
    if not isinstance(ranks, OneWriter):
        return attempt

    def learn() -> bytes:
        best.learn_from(attempt.history())
        return msgspec.json.encode(best.durable)

    best.durable = msgspec.json.decode(ranks.run_on_rank0(learn, "beginning an attempt"))
    return (AttemptForAll if ranks.leads else AttemptElsewhere)(ranks, attempt.place)


def background_of(
    ranks: RankGroup,
    attempt: Attempt,
    components: Mapping[str, object],
    keep: Keep,
    limits: Limits,
    on_done: Callable[[SaveOutcome], None],
    on_sealed: Callable[[int, float], None],
    trusted: FrozenParams,
) -> SaveWriter:
    """Return this rank's background saves."""
    if not isinstance(ranks, OneWriter):
        return Background(
            attempt, components, keep, limits, on_done, on_sealed, ranks.world.rank, ranks.world.size, trusted
        )
    if ranks.leads:
        return BackgroundForAll(ranks, attempt, components, keep, limits, on_done, on_sealed)
    return BackgroundElsewhere(ranks, attempt.place, on_done, on_sealed)


def abort_save(ranks: RankGroup, place: CommitTarget, step: int, error: Exception) -> None:
    """Abort the save that the ranks have agreed on, if this rank has not started it, so that no other rank waits for this
    rank's part."""
    if not ranks.owes_part or ranks.lost:
        return
    ranks.owes_part = False
    if not isinstance(ranks, OneWriter):
        assert ranks.seat is not None
        with contextlib.suppress(RelightError, OSError):  # without a store, the other ranks wait for the deadline
            abort_part(place, step, ranks.id_of(place), ranks.seat, known(error))
        return
    with contextlib.suppress(RankTimeout):
        if ranks.leads:
            ranks.end(FAILED + encode_error(error))
            return
        while ranks.refuse(error)[:1] == FOREGROUND:  # rank 0 gathers once more
            pass


def sign_s(ranks: OneWriter) -> float:
    """Return the seconds between two signs of rank 0 that a save continues: several within the deadline."""
    return min(SIGN_S, ranks.timeout_s / 4)


def sign_name(place: CommitTarget) -> str:
    """Return the name under which rank 0 publishes that its agent still writes saves of this attempt."""
    return f"{place.run_id}/{place.epoch}/writes"


class Elsewhere:
    """Placeholder for the store on ranks that do not open it: every operation raises."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"only rank 0 opens this store ({name})", where=self.url, hint="a bug: please report it")


class AttemptForAll(Attempt):
    """Rank 0's attempt. The other ranks wait for each save's outcome, which this class sends."""

    def __init__(self, ranks: OneWriter, place: CommitTarget) -> None:
        super().__init__(place)
        self._ranks = ranks

    def save(self, request: SaveRequest) -> SaveReport:
        """See ``Attempt``."""
        try:
            with self._ranks.desk.keep_waiting(sign_s(self._ranks)):
                report = super().save(request)
        except BaseException as error:
            with contextlib.suppress(RankTimeout):
                self._ranks.end(FAILED + encode_error(error))
            raise
        with contextlib.suppress(RankTimeout):  # the save is committed anyway
            self._ranks.end(MADE + msgspec.msgpack.encode(report))
        return report


class AttemptElsewhere(Attempt):
    """The attempt of a rank other than 0. Its saves send bytes to rank 0."""

    def __init__(self, ranks: OneWriter, place: CommitTarget) -> None:
        super().__init__(place)
        self._ranks = ranks

    def history(self) -> History:
        """Return an empty history: only rank 0 knows it."""
        return History()

    def save(self, request: SaveRequest) -> SaveReport:
        """Send the requested bytes. Return rank 0's report, or raise its error."""
        reply = self._ranks.serve()
        if reply[:1] == MADE:
            return from_msgpack(reply[1:], SaveReport)
        raise decode_error(reply[1:])


class BackgroundForAll(Background):
    """Rank 0's background saves. Each outcome is published for the other ranks."""

    begins_with_one = False  # ranks agree on free slots

    def __init__(
        self,
        ranks: OneWriter,
        attempt: Attempt,
        components: Mapping[str, object],
        keep: Keep,
        limits: Limits,
        on_done: Callable[[SaveOutcome], None],
        on_sealed: Callable[[int, float], None],
    ) -> None:
        super().__init__(attempt, components, keep, limits, self._and_all, on_sealed)
        self._ranks, self._here = ranks, on_done
        self._published: deque[str] = deque()
        self._signs, self._next_sign = 0, 0.0

    def save(
        self, state: Captured, request: Callable[[int, str, bytes], Request], checkpoint_id: str = ""
    ) -> int | None:
        """See ``Background``. When it returns, all ranks' bytes are gathered."""
        try:
            with self._ranks.desk.keep_waiting(sign_s(self._ranks)):
                number = super().save(state, request, checkpoint_id)
        except BaseException as error:
            with contextlib.suppress(RankTimeout):
                self._ranks.end(FAILED + encode_error(error))
            raise
        if number is not None:
            with contextlib.suppress(RankTimeout):  # the agent makes the save anyway
                self._ranks.end(BACKGROUND)
            return number
        self._ranks.interrupt(FOREGROUND)
        return None

    def close(self, polite: bool = True) -> None:
        """See ``Background``. Published outcomes end with this process, so wait until the other ranks have read the
        last one."""
        super().close(polite)
        ends = time.monotonic() + self.bound(GRACE_S)
        names = (
            [f"{self._published[-1]}/{rank}" for rank in range(1, self._ranks.world.size)] if self._published else []
        )
        self._published.clear()
        with contextlib.suppress(RankTimeout):
            while time.monotonic() < ends and any(self._ranks.world.lookup(name) is None for name in names):
                time.sleep(POLL_S)

    def _still_writes(self) -> None:
        """See ``Background``. Other ranks wait for the outcome as long as this sign changes."""
        if time.monotonic() < self._next_sign:
            return
        self._signs, self._next_sign = self._signs + 1, time.monotonic() + sign_s(self._ranks)
        with contextlib.suppress(RankTimeout):
            self._ranks.world.publish(sign_name(self.place), str(self._signs).encode())

    def _and_all(self, done: SaveOutcome) -> None:
        report = msgspec.structs.replace(done.report, error=None if done.error is None else words_of(done.error))
        with contextlib.suppress(RankTimeout):
            self._ranks.world.publish(report.id, msgspec.msgpack.encode(report))
            self._published.append(report.id)
            if len(self._published) > KEPT:
                self._take_down(self._published.popleft())
        self._here(done)

    def _take_down(self, checkpoint_id: str) -> None:
        for name in (checkpoint_id, *(f"{checkpoint_id}/{rank}" for rank in range(1, self._ranks.world.size))):
            self._ranks.world.unpublish(name)


class BackgroundElsewhere:
    """Background saves of a rank other than 0: ``save`` sends the requested bytes, and a thread polls for the
    outcome."""

    warmed = True
    pack_bytes = 0
    agent_words = "rank 0's agent writes it"
    free_slots: int | None = None
    """None: this rank needs no slots."""

    def __init__(
        self,
        ranks: OneWriter,
        place: CommitTarget,
        on_done: Callable[[SaveOutcome], None],
        on_sealed: Callable[[int, float], None],
    ) -> None:
        self.place = place
        self.bound: Callable[[float], float] = lambda seconds: seconds
        self._ranks, self._on_done, self._on_sealed = ranks, on_done, on_sealed
        self._number = 0
        self._waiting: deque[tuple[SaveResult, float]] = deque()
        """Saves without a known outcome, each with the time since when it waits."""
        self._sign: bytes | None = None
        """Rank 0's last sign that its agent writes."""
        self._sign_since = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def save(self, state: Captured, request: Callable[[int, str, bytes], Request], checkpoint_id: str) -> int | None:
        """See ``Background``."""
        self._number += 1
        request(self._number, checkpoint_id, b"")
        report = SaveResult(self._number, checkpoint_id)
        started = time.perf_counter()
        try:
            reply = self._ranks.serve()
        except RankTimeout as error:
            self._on_done(SaveOutcome(report, error))
            return self._number
        if reply[:1] == FOREGROUND:
            self._ranks.owes_part = True  # rank 0 gathers once more
            return None
        if reply[:1] == FAILED:
            raise decode_error(reply[1:])
        self._on_sealed(self._number, time.perf_counter() - started)
        with self._changed:
            self._waiting.append((report, time.monotonic()))
            self._changed.notify_all()
        if self._thread is None:
            thread = threading.Thread(target=self._poll, name="relight-outcomes", daemon=True)
            self._thread = thread if new_threads.start(thread) else None
        if self._thread is None:  # this thread waits for the outcome instead
            while self._waiting:
                self._poll_once(*self._waiting[0])
        return self._number

    def hurry(self) -> None:
        """Do nothing: rank 0 hurries its agent."""

    def progress_of(self, number: int) -> tuple[float, float]:
        """Return 1.0 copied, as ``save`` has sent all bytes, and 0.0 written, as this rank does not know it."""
        return 1.0, 0.0

    def free_slot(self, wait_s: float = 0.0, hurry: bool = False, yields: Callable[[int], bool] | None = None) -> bool:
        """Return True: this rank needs no slot."""
        return True

    def barrier(self) -> None:
        """Do nothing: ``save`` has copied all bytes when it returns."""

    def interval(self, seconds: float) -> None:
        """Do nothing: this rank makes no choice that depends on it."""

    def began(self, blocked_s: float) -> None:
        """Do nothing: this rank makes no choice that depends on it."""

    def warm_up(self, state: Captured) -> None:
        """Do nothing: this rank has no agent and no slots."""

    def close(self, polite: bool = True) -> None:
        """Stop polling for outcomes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self.bound(self._ranks.timeout_s))

    def _poll(self) -> None:
        """Poll for outcomes until ``close()``. Runs in a thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                report, since = self._waiting[0]
            self._poll_once(report, since)

    def _poll_once(self, report: SaveResult, since: float) -> None:
        """Report the outcome of the first waiting save, if it is known, or rank 0 is silent; else sleep ``POLL_S``."""
        try:
            encoded = self._ranks.world.lookup(report.id)
            waited = time.monotonic() - max(since, self._sign_since)
            if encoded is None and waited > self._ranks.timeout_s / 2:  # rarely: each costs the store a request
                sign = self._ranks.world.lookup(sign_name(self.place))
                if sign != self._sign:
                    self._sign, self._sign_since, waited = sign, time.monotonic(), 0.0
            if encoded is not None:
                self._ranks.world.publish(f"{report.id}/{self._ranks.world.rank}", b"read")
        except RankTimeout as error:
            self._waiting.popleft()
            self._on_done(SaveOutcome(report, error))
            return
        if encoded is None and waited <= self._ranks.timeout_s:
            time.sleep(POLL_S)
            return
        self._waiting.popleft()
        if encoded is None:
            self._on_done(SaveOutcome(report, late([0], "reporting a save's outcome", waited)))
            return
        outcome = msgspec.structs.replace(from_msgpack(encoded, SaveResult), number=report.number)
        self._on_done(SaveOutcome(outcome, None if outcome.error is None else error_from(*outcome.error)))

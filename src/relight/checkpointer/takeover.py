"""Take over a run, but not from a process that still trains it.

Two signs of life are read. On the same node a Checkpointer in charge of a run listens at a socket in this user's private directory. Its
name follows from store, run and epoch. When the process dies, however it dies, the kernel refuses connections; one that ends its attempt
leaves the socket's file as the proof. A process of this host without that proof may still train, so a start is refused. Of a process on
another host only the log is known: a checkpoint that was committed seconds ago. So this process waits for another record.

Clocks of other hosts decide only whether to wait. The log guarantees safety: a superseded attempt cannot commit, whatever is detected here.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from relight.checkpointer.best_so_far import BestSoFar
from relight.checkpointer.closed import Closed
from relight.checkpointer.launcher_job import LauncherJob, job_of, with_agents
from relight.checkpointer.options import RunOptions
from relight.checkpointer.rank_0 import begin
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.unreachable_writer import may_live
from relight.comm import Communicator
from relight.comm.local_sockets import Listener, LocalDirectory, name_of, peer_of
from relight.commit import Attempt
from relight.errors import ConfigError, Fenced, LeaseHeld, RelightError
from relight.format import Record, decode_record
from relight.format.names import LOG_DIR
from relight.format.records import CommitBody, FenceBody
from relight.format.strict import SEALED_BYTES_MAX
from relight.format.topics import RUN_ENDED
from relight.heartbeat import heartbeat
from relight.log import FRESH, History
from relight.log.identity import seconds_since_epoch
from relight.log.listing import newest_records
from relight.log.superseded import process_of, superseded
from relight.observe import emit
from relight.ranks.group import RankGroup
from relight.settings.kinds import TakeoverChoice, choices
from relight.store import ByteStore
from relight.units import age_text, duration_text

WAIT_MAX_S = 60.0
"""Maximum seconds since the last record after which a process on another host counts as gone."""
WAIT_MIN_S = 10.0
GOING_S = 1.0
"""Seconds to wait for a process of this node that may be ending just now."""
EXITING_S = 10.0
"""Seconds to wait for a process that the kernel is tearing down: a killed process releases its memory first, then its sockets."""
POLL_S = 2.0
RECORDS_READ = 64
"""Records that are read at most to find the FENCE of the attempt in charge."""
ALIVE_MAX_S = 3600.0
"""Seconds since the last record within which a live process of this host may still train: old sockets are swept after that time."""
FOUND_S = 10.0
"""Seconds between checks that the socket's file is still there."""
_BACKLOG = 64
_SUPERSEDED = b"superseded"
_PF_EXITING = 0x4
_POD_NAME = re.compile(r"(.+)-[bcdfghjklmnpqrstvwxz2456789]{5}")
"""Name of a pod of a Job or a Deployment. (StatefulSets end names with an ordinal, which is the same for a recreated pod.)"""
_BY_TRAINERS = (FRESH, "restored")
"""Reasons of the FENCEs that Checkpointers write.

Tools write other reasons, and no longer use the run when they return.
"""

_holding: weakref.WeakSet[Takeover] = weakref.WeakSet()
"""Takeovers of this process that are in charge of a run."""


class Sign(NamedTuple):
    """A sign of life of the attempt in charge. ``certain``: its process exists now, on this node."""

    epoch: int
    seq: int
    """Number of the record that shows it."""
    address: str
    host: str
    pid: int
    age_s: float
    """Seconds since that record, by the clocks of two hosts."""
    certain: bool
    window_s: float = WAIT_MAX_S
    """The age from which the process counts as gone, if it is on another host."""
    alive: bool = False
    """A process of this host that may have written the record lives, and nothing proves that its attempt has ended."""

    @property
    def shown(self) -> str:
        """Description of the process, with the age of its last record."""
        host = f"this host ({self.host})" if self.certain or self.alive else f"host {self.host}"
        return f"process {self.pid} on {host}, last record {age_text(self.age_s)},"


def check_takeover(option: str | None) -> str | None:
    """Return the option if it is one of ``TakeoverChoice`` or None."""
    if option is not None and option not in choices(TakeoverChoice):
        raise ConfigError(f'takeover= is "ask", "refuse" or "take", not {option!r}')
    return option


def restarts(sign: Sign) -> bool:
    """Return whether a launcher has restarted the job of ``sign``, so that this process takes its place without a question.

    A first start is refused: it may be a second submission of a job that trains well. So is another job's restart, because its first start
    was refused, and its launcher only tried again. Of a process on another host the job is unknown. A restart by ``relight run``, which
    does not restart what was refused, and a requeue by Slurm then count as restarts of that job; a restart by torchrun waits for a record.
    """
    own_job = job_of(os.environ)
    if sign.certain or sign.alive:
        other_job = _job_of_process(sign.pid)
        return bool(own_job.elastic or own_job.slurm) if other_job is None else own_job.restarts(other_job)
    return bool(own_job.slurm or (own_job.elastic and heartbeat().has_reader)) or _replaces_pod(sign.host)


def _job_of_process(pid: int) -> LauncherJob | None:
    """Return the launcher's job of another process of this host; None if its environment cannot be read."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        parent = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return None
    job = job_of({name: value for name, _, value in (word.partition("=") for word in words)})
    # a spare of the same agent is started before its variables are known
    if int(parent) == os.getppid() and not job.has_agent:
        return with_agents(job, job_of(os.environ).names)
    return job


def _replaces_pod(host: str) -> bool:
    """Return whether this process is in a Kubernetes pod that replaces pod ``host``: both names end in random letters."""
    own_host = _host()
    if not os.environ.get("KUBERNETES_SERVICE_HOST") or _has_terminal() or host == own_host:
        return False
    match, own_match = _POD_NAME.fullmatch(host), _POD_NAME.fullmatch(own_host)
    return match is not None and own_match is not None and match[1] == own_match[1]


class HeldSession(Protocol):
    """The parts of a ``RunSession`` that a takeover needs."""

    run: str
    store: ByteStore
    ranks: RankGroup
    world: Communicator
    attempt: Attempt | None

    @property
    def location(self) -> str:
        """See ``RunSession``."""


class Draining(Protocol):
    """The part of a ``SaveLoop`` that a takeover needs."""

    def drain(self, *, quiet: bool = False) -> None:
        """See ``SaveLoop``."""


class RunHolder(Protocol):
    """The parts of a Checkpointer that a takeover needs."""

    _closed: Closed | None
    _options: RunOptions
    _progress: RunProgress

    @property
    def _session(self) -> HeldSession: ...

    @property
    def _saves(self) -> Draining: ...

    def _finish(self, closed: Closed) -> None: ...


class Takeover:
    """Takes charge of the run for one Checkpointer, and notices when another process has taken it over."""

    def __init__(self, option: str | None, owner: RunHolder) -> None:
        self._option, self._owner = check_takeover(option), weakref.ref(owner)
        self._listener: Listener | None = None
        self._found_at = 0.0
        self._address = ""
        self._thread = threading.current_thread()
        self._known = -1
        """The epoch of the attempt that was reported already, or found to be gone."""
        self._superseded: Fenced | None = None

    def before_restore(self, *, whole: bool) -> None:
        """Check whether another process still trains the run. Raise ``LeaseHeld`` if the run is refused.

        ``whole``: the caller restores the newest state, to train on. Otherwise it may only read, so this method only warns.
        """
        owner = self._checkpointer
        for other in self._own_others():
            if other._thread is threading.current_thread() and (ckpt := other._owner()) is not None:
                ckpt._saves.drain(quiet=True)  # what it saved last is the newest there is
        if not owner._session.ranks.several:
            self._check(only_warn=not whole)
        elif whole:
            owner._session.ranks.run_on_rank0(self._check_first, "checking for another job of this run")

    def begin(self, reason: str, best: BestSoFar, refuse: Callable[[History], None]) -> Attempt:
        """Take charge of the run, with one attempt for all ranks, unless ``refuse`` raises.

        Raise ``LeaseHeld`` if another process keeps the run.
        """
        owner = self._checkpointer
        checked: list[bool] = []

        def check(history: History) -> None:
            refuse(history)
            if not checked:  # once: the log may have moved, and then this is called again
                checked.append(True)
                self._end_own_others()
                self._check(begins=True)

        attempt = begin(owner._session.ranks, owner._session.store, owner._session.run, reason, best, check)
        self._end_own_others()  # of ranks other than 0
        place = attempt.place
        where = _identity(place.store, place.log.run)
        self._address, self._thread = _address(place.run_id, where, place.epoch), threading.current_thread()
        if owner._session.world.rank == 0:
            self._listen()
            for epoch in range(max(1, place.epoch - 4), place.epoch):
                _notify(_address(place.run_id, where, epoch))
        _holding.add(self)
        return attempt

    def notice(self) -> None:
        """Raise ``Fenced`` if another process of this node has taken the run over. Cost: one system call, two every ``FOUND_S``."""
        if self._superseded is not None:
            raise self._superseded
        if self._listener is None:
            return
        if time.monotonic() - self._found_at > FOUND_S:
            self._found_at = time.monotonic()
            if not self._listener.is_found():
                self._listener.leave()
                self._listen()
        while self._listener is not None:
            try:
                connection, _ = self._listener.socket.accept()
            except OSError:  # no process has connected
                return
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                if connection.recv(len(_SUPERSEDED)) == _SUPERSEDED:
                    self._read_fence()

    def release(self) -> None:
        """Withdraw the sign that this process has the run."""
        _holding.discard(self)
        if self._listener is not None:
            self._listener.leave()
            self._listener = None

    # -- inside

    @property
    def _checkpointer(self) -> RunHolder:
        owner = self._owner()
        assert owner is not None, "its owner calls it"
        return owner

    def _own_others(self) -> list[Takeover]:
        """Return the takeovers of this process's other Checkpointers of the same run and rank.

        Ranks may be threads of one process.
        """
        own_ckpt = self._checkpointer
        others = []
        for other in list(_holding):
            other_ckpt = other._owner()
            if other is self or other_ckpt is None or other_ckpt._session.world.rank != own_ckpt._session.world.rank:
                continue
            if (other_ckpt._session.store.url, other_ckpt._session.run) == (
                own_ckpt._session.store.url,
                own_ckpt._session.run,
            ):
                others.append(other)
        return others

    def _end_own_others(self) -> None:
        for other in self._own_others():
            other._hand_over()

    def _hand_over(self) -> None:
        """Give the run to another Checkpointer of this process."""
        ckpt = self._owner()
        self.release()
        if ckpt is None or ckpt._closed is not None:
            return
        closed = Closed.now(
            "another Checkpointer of this process took the run over", ckpt._progress.step, superseded=True
        )
        step = "no step yet" if ckpt._progress.step is None else f"step {ckpt._progress.step}"
        emit(
            "takeover.taken",
            f"run {ckpt._session.run!r}: a second Checkpointer of this process takes the run over; the first, at {step}, "
            "can save nothing more",
            run=ckpt._session.run,
            pid=os.getpid(),
            host=_host(),
            age_s=0.0,
        )
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            ckpt._finish(closed)
        else:  # another thread may be using it at this moment: its next call raises
            ckpt._closed = closed

    def _check_first(self) -> bytes:
        self._check()
        return b""

    def _check(self, *, only_warn: bool = False, begins: bool = False) -> None:
        owner = self._checkpointer
        try:
            sign = sign_of_life(owner._session.store, owner._session.run)
        except (RelightError, OSError):  # what reads or writes next reports it
            return
        if sign is None or sign.epoch == self._known:
            return
        if sign.certain and sign.pid == os.getpid():  # another Checkpointer of this process, under another URL
            for other in [
                candidate
                for candidate in list(_holding)
                if begins and candidate is not self and candidate._address == sign.address
            ]:
                other._hand_over()
            return
        way = self._option or ("take" if restarts(sign) else "refuse")
        if only_warn:
            _warn(owner, sign, "this process only reads here; its first step() would have to take the run over")
            return
        if (sign.certain or sign.alive) and _goes(sign, 0.0 if way == "take" else GOING_S):
            return
        asked = way == "ask"
        if asked:
            way = "take" if _has_terminal() and _ask(owner, sign) else "refuse"
        elif not (sign.certain or sign.alive) and way != "take":
            shown = self._wait(owner, sign)
            if shown is None:
                return
            sign, way = shown, "refuse"
        if way == "refuse":
            raise _refusal(owner, sign, reads=not begins)
        when = "step" if sign.certain else "save"
        if begins or asked:
            self._known = sign.epoch
        if begins:
            _warn(owner, sign, f"this process takes it over; the other one fails with Fenced at its next {when}")
        else:
            consequence = f"takes the run over; the other one then fails with Fenced at its next {when}"
            _warn(owner, sign, f"this process only reads until its first step() or save(), which {consequence}")

    def _wait(self, owner: RunHolder, sign: Sign) -> Sign | None:
        """Wait until the process of another host counts as gone. Return its new sign of life if there is one before."""
        longest = sign.window_s - (sign.age_s or 0.0)
        longest = max(0.0, min(longest, owner._options.limits.deadline_s / 2))
        where = f"{owner._session.location}"
        emit(
            "takeover.waiting",
            f"{sign.shown} may still train {where}: waiting up to {duration_text(longest)} for another record of it"
            ' (takeover="take" skips the wait)',
            run=owner._session.run,
            host=sign.host,
            pid=sign.pid,
            age_s=sign.age_s,
        )
        ends = time.monotonic() + longest
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))
            try:
                now = sign_of_life(owner._session.store, owner._session.run)
            except (RelightError, OSError):
                continue
            if now is None:  # it ended meanwhile, and left a record of that
                return None
            if now.seq > sign.seq:
                return now._replace(age_s=0.0)
        self._known = sign.epoch
        _warn(
            owner,
            sign,
            "no further record came: this process may take the run over; if the other one lives, it then fails with Fenced",
        )
        return None

    def _listen(self) -> None:
        """Listen at the attempt's socket, to show that this process has the run.

        Without a free descriptor, train without the sign.
        """
        self._listener, self._found_at = None, time.monotonic()
        with contextlib.suppress(OSError), LocalDirectory() as directory:
            self._listener = directory.listen(self._address, _BACKLOG)
            self._listener.socket.setblocking(False)
            weakref.finalize(self, self._listener.leave)

    def _read_fence(self) -> None:
        owner = self._checkpointer
        attempt = owner._session.attempt
        # other ranks would wait for this one: the next save raises on all of them
        if attempt is None or owner._session.ranks.several:
            return
        with contextlib.suppress(RelightError, OSError):
            history = attempt.history()
            if history.epoch > attempt.epoch:
                self._superseded = superseded(history, attempt.epoch, owner._session.run)
        if self._superseded is not None:
            raise self._superseded


def sign_of_life(store: ByteStore, run: str) -> Sign | None:
    """Return a sign of life of the attempt in charge of ``run``; None if its process has ended, or none is seen.

    Cost: a listing, and in most cases one to three small reads.
    """
    newest: Record | None = None
    seen: list[Record] = []
    """Records of the epoch that a trainer wrote, newest first."""
    for seq, key in newest_records(store, run, RECORDS_READ):
        try:
            record = decode_record(store.get(key, SEALED_BYTES_MAX), seq, key)
        except RelightError:  # a damaged record shows nothing
            continue
        if newest is None:
            newest = record
            pid = _listener(address := _address(record.run, _identity(store, run), record.epoch))
            if pid is not None:
                return Sign(
                    record.epoch, seq, address, _host(), pid or process_of(record.writer)[1], _age(record), certain=True
                )
        body = record.body
        if record.epoch != newest.epoch:
            break
        if not seen and RUN_ENDED.read(body) is not None:
            return None
        if isinstance(body, FenceBody) or (isinstance(body, CommitBody) and not body.origin and not body.home):
            if not seen and (_ended(record) or _age(record) > ALIVE_MAX_S):
                return None
            seen.append(record)
        if isinstance(body, FenceBody):
            if body.reason not in _BY_TRAINERS:
                return None
            break
    # copies: no attempt took charge
    if newest is None or not seen or (newest.epoch == 0 and not isinstance(seen[-1].body, FenceBody)):
        return None
    host, pid = process_of(seen[-1].writer)  # of the FENCE: a COMMIT may be the copy of a tool that still runs
    window_s, age_s = _window(seen), _age(seen[0])
    is_gone = _is_gone(seen[-1], address)
    alive = host == _host() and not is_gone
    if not alive and (is_gone or age_s > min(window_s, WAIT_MAX_S)):
        return None
    return Sign(newest.epoch, seen[0].seq, address, host, pid, age_s, certain=False, window_s=window_s, alive=alive)


def _is_gone(record: Record, address: str) -> bool:
    """Return whether the record's writer was on this host and is proved to have ended. No process of this user listens at ``address``."""
    host, pid = process_of(record.writer)
    recorded_s = seconds_since_epoch(record.time)
    return host == _host() and not may_live(pid, time.time() if recorded_s is None else recorded_s, address)


def _ended(record: Record) -> bool:
    """Return whether a process ends after this record: a save at its end, on a signal, or after an exception."""
    body = record.body
    return isinstance(body, CommitBody) and body.save_reason.is_final


def _age(record: Record) -> float:
    recorded_s = seconds_since_epoch(record.time)
    return WAIT_MAX_S + 1 if recorded_s is None else max(0.0, time.time() - recorded_s)


def _window(seen: list[Record]) -> float:
    """Return the seconds within which a process that still saves at the recorded rate would have written another record."""
    times = [recorded_s for record in seen[:5] if (recorded_s := seconds_since_epoch(record.time)) is not None]
    gaps = [later - earlier for later, earlier in pairwise(times)]
    return min(WAIT_MAX_S, max(WAIT_MIN_S, 2 * max(gaps) + 5)) if gaps else WAIT_MAX_S


def _identity(store: ByteStore, run: str) -> str:
    """Return what distinguishes a run's directory from a copy of it: its device and inode, or the URL of a remote store."""
    try:
        status = os.stat(f"{store.url}/{run}/{LOG_DIR}")
    except (OSError, ValueError):
        return f"{store.url}/{run}"
    return f"{status.st_dev}:{status.st_ino}"


def _address(run_id: str, where: str, epoch: int) -> str:
    """Return the name of an attempt's socket."""
    return name_of("attempt", run_id, where, str(epoch))


def _listener(address: str) -> int | None:
    """Return the id of the process that listens there: 0 if it is unknown, None if no process of this user does."""
    try:
        with LocalDirectory() as directory, directory.connect(address, None) as probe:
            pid, _ = peer_of(probe)
    except BlockingIOError:  # its backlog is full: it has not made a step for long
        return 0
    except OSError:
        return None
    if pid and _state(pid) in ("gone", "Z", "X"):  # a child of it holds the descriptor
        return None
    return pid


def _state(pid: int) -> str:
    """Return a process's state in one letter; ``exiting`` if the kernel is tearing it down, ``gone`` if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "exiting" if fields[0] not in "ZX" and int(fields[6]) & _PF_EXITING else fields[0]
    except (OSError, ValueError, IndexError):
        pass
    try:
        os.kill(pid, 0)  # /proc may hide the processes of other users
    except ProcessLookupError:
        return "gone"
    except OSError:
        pass
    return "R"


def _goes(sign: Sign, patience_s: float) -> bool:
    """Wait for a process of this node that is ending. Return whether it has."""
    started = time.monotonic()
    while True:
        if _listener(sign.address) is None and not may_live(sign.pid, time.time(), sign.address):
            return True
        if time.monotonic() - started > (EXITING_S if _state(sign.pid) == "exiting" else patience_s):
            return False
        time.sleep(0.05)


def _notify(address: str) -> None:
    """Make an older attempt on this node check the log at its next step."""
    if any(takeover._address == address for takeover in list(_holding)):
        return
    with contextlib.suppress(OSError), LocalDirectory() as directory, directory.connect(address, None) as line:
        line.send(_SUPERSEDED)


def _refusal(owner: RunHolder, sign: Sign, *, reads: bool) -> LeaseHeld:
    """Return the error for a run that another process trains. ``reads``: the call was a restore, which may be meant to read only."""
    read = 'to read only: restore(only=["model/*"]), restore(STEP) or relight.load(); to train: ' if reads else ""
    remedies = f'stop it (kill {sign.pid}), or give this process another run name, or take the run over: Checkpointer(…, takeover="take")'
    where, hint = f"{owner._session.location}", f"{read}{remedies}; that process then fails with Fenced"
    state = "may still train" if sign.alive else "still trains"
    return LeaseHeld(f"{sign.shown} {state} this run", where=where, hint=hint)


def _warn(owner: RunHolder, sign: Sign, then: str) -> None:
    state = "still trains" if sign.certain else "may still train"
    emit(
        "takeover.taken",
        f"{sign.shown} {state} {owner._session.location}: {then}",
        run=owner._session.run,
        host=sign.host,
        pid=sign.pid,
        age_s=sign.age_s,
    )


def _ask(owner: RunHolder, sign: Sign) -> bool:
    state = "still trains" if sign.certain else "may still train"
    print(
        f"relight: {sign.shown} {state} {owner._session.location}. Take it over? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _has_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except (AttributeError, ValueError):  # no stdin, or a closed one
        return False


def _host() -> str:
    """Return this host's name as records have it."""
    return socket.gethostname()[:64]


def _in_child() -> None:
    """Release all runs in a forked child: its copy of a socket would outlive the trainer."""
    for takeover in list(_holding):
        takeover.release()


os.register_at_fork(after_in_child=_in_child)

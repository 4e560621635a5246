"""A short life of a run, and the invariants that must hold wherever it is cut off.

A scenario is a generator of *facts*. An acknowledgement is yielded after its call has returned, so the facts are what
the caller knows to be durable. ``examine`` compares a store with the facts; ``resume`` continues the run; ``check``
does both.
"""

from __future__ import annotations

import contextlib
import functools
import random
import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import relight.commit.save as save_module
import relight.log.log as chain_module
import relight.log.truncated as truncated_module
import relight.reader.opened as opened_module
from relight.catalog.run import Run
from relight.commit import Attempt, SaveInfo, SaveRequest, plan_save
from relight.errors import CheckpointNotFound, Fenced, RelightError
from relight.format import Leaf, decode_record, decode_root, encode_tree
from relight.format.names import LOG_DIR, STORE_FILE, is_written_file, parse_record_file, parse_summary_file
from relight.layout import Bytes, Item
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.policy import Compact, keep
from relight.policy.compact import Experience
from relight.reader import open_checkpoint, read_tensors
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep
from relight.store import ByteStore

Fact: TypeAlias = tuple[str, ...]
RUN = "run"
PACK_BYTES_MAX = 9000
"""Small, so that a state of a few tensors fills several packs."""

LARGE_BYTES = (1 << 20) + 4 * 1111
"""Large enough for direct I/O, and not a multiple of a page."""


@dataclass(frozen=True)
class SavedState:
    """A state to save: tensors by name as ``(dtype, shape, role, trainable, bytes)``, and the tree that names them."""

    tensors: dict[str, tuple[str, tuple[int, ...], str, bool, bytes]]
    tree: bytes

    @property
    def items(self) -> list[Item]:
        """Return the items of a save."""
        return [
            Item(n, dtype, shape, role, Bytes(data), None, train)
            for n, (dtype, shape, role, train, data) in self.tensors.items()
        ]


@functools.lru_cache(maxsize=4096)
def state_of(key: str) -> SavedState:
    """Return the state of ``key``; equal keys give equal bytes. A few tensors, several chunks, mostly two packs."""
    rng = random.Random(key)
    tensors: dict[str, tuple[str, tuple[int, ...], str, bool, bytes]] = {}

    def add(
        name: str,
        dtype: str,
        itemsize: int,
        shape: tuple[int, ...],
        role: str,
        trainable: bool,
        of: random.Random = rng,
    ) -> None:
        count = 1
        for extent in shape:
            count *= extent
        tensors[name] = (dtype, shape, role, trainable, of.randbytes(count * itemsize))

    add("model/w", "float32", 4, (rng.randrange(1, 1500),), "param", True)
    add("model/b", "bfloat16", 2, (3, rng.randrange(1, 40)), "param", True)
    # equal in all saves of a life
    add("model/frozen", "float32", 4, (300,), "param", False, random.Random(key.partition("/")[0]))
    add("optim/m", "float32", 4, (rng.randrange(1, 1500),), "optim", False)
    add("optim/step", "int64", 8, (), "optim", False)
    add("rng/state", "uint8", 1, (rng.randrange(1, 5000),), "rng", False)
    add("model/empty", "float16", 2, (0, 4), "buffer", False)
    if key.endswith("/large"):
        add("model/large", "float32", 4, (LARGE_BYTES // 4,), "param", True)
    leaves = {name: Leaf("tensor", (index,)) for index, name in enumerate(tensors)}
    return SavedState(tensors, encode_tree({"state": leaves, "key": key, "lr": rng.random()}))


@dataclass
class KnownFacts:
    """State that the facts so far establish. Checkpoints in ``retiring`` may have been retired or not."""

    saving: set[str] = field(default_factory=set)
    saved: dict[str, str] = field(default_factory=dict)
    retiring: set[str] = field(default_factory=set)
    retired: set[str] = field(default_factory=set)
    tagging: dict[str, set[str]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_facts(cls, acknowledged: Iterable[Fact]) -> KnownFacts:
        """Gather it from facts."""
        known_facts = cls()
        for kind, *rest in acknowledged:
            if kind == "saving":
                known_facts.saving.add(rest[0])
            elif kind == "saved":
                known_facts.saved[rest[0]] = rest[1]
            elif kind == "retiring":
                known_facts.retiring.update(rest)
            elif kind == "retired":
                known_facts.retired.update(rest)
            elif kind == "tagging":
                known_facts.tagging.setdefault(rest[0], set()).add(rest[1])
            elif kind == "tagged":
                known_facts.tags[rest[0]] = rest[1]
                known_facts.tagging[rest[0]] = {rest[1]}
        return known_facts


def save(attempt: Attempt, key: str, step: int) -> Iterator[Fact]:
    """Save the state of ``key``. Yield a fact before the save, and another when it is durable."""
    yield ("saving", key)
    state = state_of(key)
    report = attempt.save(
        SaveRequest(
            SaveInfo(step=step, user={"key": key}, metrics={"loss": 1.0 / (step + 1)}),
            tree=state.tree,
            items=state.items,
        )
    )
    yield ("saved", report.id, key)


def prune(store: ByteStore, rules: dict[str, int], epoch: int | None) -> Iterator[Fact]:
    """Prune: yield what the plan retires, execute the plan, yield what was retired."""
    plan = plan_prune(store, RUN, keep(**rules), verified={})  # type: ignore[arg-type]
    yield ("retiring", *plan.going)
    report = execute(plan, store, epoch=epoch)
    yield ("retired", *report.retired)


def sweep(store: ByteStore) -> Iterator[Fact]:
    """Sweep the run."""
    report = execute_sweep(plan_sweep(store, RUN), store)
    yield ("swept", *report.deleted)


def life(store: ByteStore, seed: int) -> Generator[Fact]:
    """Run two attempts: saves, a tag, retention, a second attempt that fences the first, a sweep, more saves.

    Varies with ``seed``.
    """
    rng = random.Random(f"life {seed}")
    step = 0
    first = _begin(store, seed, "first")
    yield ("begun", str(first.epoch))
    for _ in range(rng.randrange(1, 4)):
        step += rng.randrange(1, 5)
        yield from save(first, f"{seed}/first/{step}", step)
    if rng.random() < 0.6:
        checkpoint = first.history().live[0].id
        yield ("tagging", "gold", checkpoint)
        Run(store, RUN).tag("gold", checkpoint)
        yield ("tagged", "gold", checkpoint)
    if rng.random() < 0.5:
        yield from prune(store, {"last": rng.randrange(1, 3)}, first.epoch)
    second = _begin(store, seed, "second")
    yield ("begun", str(second.epoch))
    try:
        yield from save(first, f"{seed}/fenced/{step}", step)
        raise AssertionError("an attempt that was superseded has committed")
    except Fenced:
        pass
    yield from sweep(store)
    for _ in range(rng.randrange(1, 3)):
        step += 1
        yield from save(second, f"{seed}/second/{step}", step)
        yield from prune(store, {"last": rng.randrange(1, 3), "best": 1}, rng.choice((second.epoch, None)))


def _begin(store: ByteStore, seed: int, reason: str) -> Attempt:
    """Begin an attempt. For odd seeds its saves share unchanged chunks, from the second save on, and use codecs."""
    attempt = Attempt.begin(store, RUN, reason=reason)
    if seed % 2:
        attempt.make_smaller(Compact(codecs="always"), Experience(equal=1.0))
    return attempt


def resume(store: ByteStore, seed: int) -> Iterator[Fact]:
    """Do what a restarted job does: begin an attempt, sweep, save."""
    attempt = _begin(store, seed, "resume")
    yield ("begun", str(attempt.epoch))
    yield from sweep(store)
    live = attempt.history().live
    step = live[-1].step + 1 if live else 0
    yield from save(attempt, f"{seed}/resume/{attempt.epoch}/{step}", step)


def read_state(store: ByteStore, view: LogView, checkpoint: Checkpoint) -> tuple[str, SavedState]:
    """Return the key and the state of a stored checkpoint. Verifies every byte."""
    opened = open_checkpoint(store, RUN, checkpoint, store_id=view.store_id, run_id=view.run_id)
    (part,) = opened.parts
    buffers = {index: bytearray(tensor.length) for index, tensor in enumerate(part.tensors)}
    read_tensors(opened, part, {index: Bytes(buffer) for index, buffer in buffers.items()})
    key = str(opened.root.user.get("key"))
    expected = state_of(key).tensors
    tensors = {
        t.name: (t.dtype, t.shape, t.role, expected[t.name][3] if t.name in expected else False, bytes(buffers[i]))
        for i, t in enumerate(part.tensors)
    }
    return key, SavedState(tensors, part.tree)


def check_history(log: Log, acknowledged: Sequence[Fact]) -> list[str]:
    """Return what is wrong with the history before anything is changed; empty if nothing is."""
    facts = KnownFacts.from_facts(acknowledged)
    try:
        view = log.read()
    except CheckpointNotFound:
        return ["I1: the run is gone"] if any(kind == "begun" for kind, *_ in acknowledged) else []
    except RelightError as error:
        return [f"I5: the log cannot be read: {error.what}"]
    problems = [f"I12: record {fault.seq} counts for nothing: {fault.reason}" for fault in view.faults]
    history = fold(view)
    return problems + _compare(history, facts)


def _compare(history: History, facts: KnownFacts) -> list[str]:
    problems = []
    live = {checkpoint.id for checkpoint in history.live}
    for checkpoint_id, key in facts.saved.items():
        if checkpoint_id not in live and checkpoint_id not in facts.retiring:
            problems.append(f"I1: checkpoint {checkpoint_id} ({key}) was acknowledged and is gone")
    for checkpoint_id in sorted(facts.retired & live):
        problems.append(f"I12: checkpoint {checkpoint_id} was retired and is back")
    newest = max(
        (checkpoint for checkpoint in (*history.live, *history.retired.values())),
        key=lambda checkpoint: checkpoint.seq,
        default=None,
    )
    if newest and newest.id in history.retired:
        problems.append(f"I7: the newest checkpoint {newest.id} was retired")
    for name, checkpoint_id in facts.tags.items():
        if history.tags.get(name) not in facts.tagging[name] | {checkpoint_id}:
            problems.append(f"I1: tag {name} was acknowledged and is gone")
    return problems


def examine(store: ByteStore, log: Log, acknowledged: Sequence[Fact]) -> list[str]:
    """Restore every byte of each live checkpoint. Return what is wrong with them, and what the history lacks."""
    facts = KnownFacts.from_facts(acknowledged)
    try:
        view = log.read()
    except RelightError as error:
        return [f"I5: the log cannot be read: {error.what}"]
    problems = [f"I12: record {fault.seq} counts for nothing: {fault.reason}" for fault in view.faults]
    history = fold(view)
    problems += _compare(history, facts)
    for checkpoint in history.live:
        problems += check_restore(store, view, checkpoint, facts, "I2: a live")
    return problems


def check_restore(store: ByteStore, view: LogView, checkpoint: Checkpoint, facts: KnownFacts, which: str) -> list[str]:
    """Restore a checkpoint. Return what is wrong with it; ``which`` begins each message."""
    try:
        key, state = read_state(store, view, checkpoint)
    except RelightError as error:
        return [f"{which} checkpoint {checkpoint.id} at step {checkpoint.step} does not restore: {error}"]
    expected = facts.saved.get(checkpoint.id, key)
    if key != expected or key not in facts.saving or state != state_of(key):
        return [f"{which} checkpoint {checkpoint.id} at step {checkpoint.step} restores as something else"]
    return []


def log_files(store: ByteStore, prefix: str = f"{RUN}/{LOG_DIR}") -> list[str]:
    """Keys of all files of the run's log, those in its folders included."""
    keys: list[str] = []
    for entry in list(store.list(prefix)):
        keys += log_files(store, f"{prefix}/{entry.name}") if entry.is_dir else [f"{prefix}/{entry.name}"]
    return sorted(keys)


def _is_logs(name: str) -> bool:
    return parse_record_file(name) is not None or parse_summary_file(name) is not None


def leftovers(store: ByteStore, log: Log) -> list[str]:
    """Return files and directories that belong to neither a live checkpoint nor the log.

    Call it after a new attempt has swept.
    """
    live = {checkpoint.body.dir for checkpoint in fold(log.read()).live}
    names = [entry.name for entry in store.list("") if entry.name not in (STORE_FILE, RUN)]
    for entry in store.list(RUN):
        if entry.name == LOG_DIR:
            names += [key.removeprefix(f"{RUN}/") for key in log_files(store) if not _is_logs(key.rpartition("/")[2])]
        elif entry.name in live:
            files = store.list(f"{RUN}/{entry.name}")
            names += [f"{entry.name}/{file.name}" for file in files if file.is_dir or not is_written_file(file.name)]
        else:
            names.append(entry.name)
    return [f"I10: not removed: {name}" for name in names]


def check(store: ByteStore, acknowledged: Sequence[Fact], seed: int) -> list[str]:
    """Check the history, resume the run, restore every checkpoint, search for leftovers.

    Return what is wrong; empty if nothing is.
    """
    log = Log(store, RUN)
    problems = check_history(log, acknowledged)
    more = list(acknowledged)
    try:
        for fact in resume(store, seed):
            more.append(fact)
    except RelightError as error:
        problems.append(f"I4: the run does not resume: {type(error).__name__}: {error}")
    problems += examine(store, log, more)
    with contextlib.suppress(RelightError):
        problems += leftovers(store, log)
    return list(dict.fromkeys(problems))


def perform(facts: Iterable[Fact], acknowledged: list[Fact]) -> None:
    """Exhaust ``facts`` and append each to ``acknowledged``."""
    for fact in facts:
        acknowledged.append(fact)


class Names:
    """Source of the product's random names. It is seeded, so that a replay has identical bytes."""

    def __init__(self) -> None:
        self._rng = random.Random()

    def token_hex(self, nbytes: int | None = None) -> str:
        """Replace ``secrets.token_hex``."""
        return self._rng.randbytes(nbytes or 32).hex()

    def choice(self, among: Sequence[Any]) -> Any:
        """Replace ``secrets.choice``."""
        return among[self._rng.randrange(len(among))]

    def seed(self, seed: object) -> None:
        """Seed the names."""
        self._rng.seed(f"names {seed}")

    @contextlib.contextmanager
    def apart(self, seed: object) -> Iterator[None]:
        """Within the block, draw other names, as another process would. Restore the state afterwards."""
        state = self._rng.getstate()
        self.seed(seed)
        try:
            yield
        finally:
            self._rng.setstate(state)


@contextlib.contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, each ``(owner, name, value)``, for the duration of the block."""
    old_values = [(where, name, getattr(where, name)) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in old_values:
            setattr(where, name, value)


def no_rereads() -> contextlib.AbstractContextManager[None]:
    """Within the block, a log that lacks records is not read again after a pause: a simulated disk does not change."""
    return patched((chain_module, "MISSING_PAUSES_S", ()), (truncated_module, "PAUSES_S", ()))


@contextlib.contextmanager
def prepared() -> Iterator[Names]:
    """Within the block: small packs, cached decoding for speed, seeded names, and ``no_rereads``."""
    names = Names()
    changes: tuple[tuple[Any, str, Any], ...] = (
        (secrets, "token_hex", names.token_hex),
        (secrets, "choice", names.choice),
        (save_module, "plan_save", functools.partial(plan_save, pack_bytes_max=PACK_BYTES_MAX)),
        (chain_module, "decode_record", functools.lru_cache(maxsize=1 << 14)(decode_record)),
        (opened_module, "decode_root", functools.lru_cache(maxsize=1 << 12)(decode_root)),
    )
    with no_rereads(), patched(*changes):
        yield names

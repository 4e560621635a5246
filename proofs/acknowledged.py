"""What a run was acknowledged as durable, and whether a store still has it. Shared by the engines that cut the power.

``live_on`` is a run that never ends. It is a generator of facts, as in ``scenario``: each intent is yielded before
its call, each acknowledgement after its call has returned. A state's name is a digest of its bytes, computed without
the product's code. The bytes are drawn from a seed, but a check needs only the digest. ``check`` compares a store
with the facts and resumes the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue

from relight.catalog.run import Run
from relight.commit import Attempt, SaveInfo, SaveReport, SaveRequest, plan_save
from relight.commit.save import Participant, new_id
from relight.errors import Fenced, RelightError
from relight.format import Leaf, encode_tree
from relight.format.names import READY_DIR
from relight.layout import Bytes, Item
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.policy import Keep, keep
from relight.reader import open_checkpoint, read_tensors
from relight.reclaim import execute, plan_prune, recall
from relight.store import ByteStore
from relight.testing.scenario import RUN, Fact, KnownFacts, check_history, leftovers, perform, sweep

ACKNOWLEDGEMENTS = ("begun", "saved", "tagged", "retired", "recalled")
"""The kinds of fact that promise something."""
CHECKED = "acknowledgements checked"
"""Name of a count: an acknowledgement counts again at each later check of its store."""
TAGS = ("gold", "silver")
PACK_BYTES_MAX = (9_000, 300_000, 64 << 30)
LARGE_BYTES = (1 << 20, (1 << 20) + 4 * 1111, (5 << 19) + 12)
"""The size from which packs are written with direct I/O, and two larger ones.

The larger ones are not multiples of a page.
"""


def count_acknowledged(acknowledged: Iterable[Fact]) -> Counter[str]:
    """Return the number of acknowledgements by kind. A retirement counts once for each of its checkpoints."""
    counts: Counter[str] = Counter()
    for kind, *details in acknowledged:
        if kind in ACKNOWLEDGEMENTS:
            counts[kind] += len(details) if kind == "retired" else 1
    return +counts


def draw_state(rng: random.Random, rank: int = 0) -> tuple[list[Item], bytes, str]:
    """Draw a state for a rank to save: ``(items, tree, digest)``. Mostly small, sometimes large."""
    sizes = [4 * rng.randrange(1, rng.choice((20, 1500, 40_000))) for _ in range(rng.randrange(2, 7))]
    if rng.random() < 0.2:
        sizes.append(rng.choice(LARGE_BYTES))
    items = []
    for index, size in enumerate(sizes):
        role, data, trainable = rng.choice(("param", "optim")), Bytes(rng.randbytes(size)), rng.random() < 0.5
        items.append(Item(f"model{rank}/{index}", "float32", (size // 4,), role, data, None, trainable))
    tree = encode_tree(
        {"state": {item.name: Leaf("tensor", (index,)) for index, item in enumerate(items)}, "lr": rng.random()}
    )
    return (
        items,
        tree,
        digest_of([(drawn.name, drawn.dtype, drawn.shape, drawn.role, drawn.source.view()) for drawn in items], tree),
    )


def digest_of(tensors: Iterable[tuple[str, str, tuple[int, ...], str, bytearray | memoryview]], tree: bytes) -> str:
    """Return the digest of a state: of the tree, and of every tensor's name, dtype, shape, role and bytes."""
    hasher = hashlib.blake2b(tree, digest_size=16)
    for name, dtype, shape, role, data in sorted(tensors, key=lambda tensor: tensor[0]):
        hasher.update(repr((name, dtype, tuple(shape), role, len(data))).encode())
        hasher.update(data)
    return hasher.hexdigest()


def save_drawn(attempt: Attempt, rng: random.Random, step: int) -> Iterator[Fact]:
    """Draw a state and save it. Yield a fact before the save, and another when it is durable."""
    items, tree, digest = draw_state(rng)
    yield ("saving", digest)
    checkpoint_id = new_id()
    plan = plan_save(items, id=checkpoint_id, pack_bytes_max=rng.choice(PACK_BYTES_MAX))
    report = attempt.save(
        SaveRequest(
            SaveInfo(step=step, metrics={"loss": rng.random()}), tree=tree, items=items, id=checkpoint_id, plan=plan
        )
    )
    yield ("saved", report.id, digest)


def save_as_two(attempt: Attempt, rng: random.Random, step: int) -> Iterator[Fact]:
    """Save one checkpoint from two ranks, which are threads. It is durable as soon as either rank's save returns."""
    states = [draw_state(rng, rank) for rank in range(2)]
    digest = "+".join(state[2] for state in states)
    yield ("saving", digest)
    checkpoint_id = new_id()
    done: SimpleQueue[SaveReport | BaseException] = SimpleQueue()

    def work(rank: int) -> None:
        own_place = attempt.place._replace(log=Log(attempt.store, RUN))
        items, tree, _ = states[rank]
        seat = Participant(rank, 2, "0" * 16, timeout_s=20.0)
        try:
            done.put(
                Attempt(own_place).save(
                    SaveRequest(SaveInfo(step=step), tree=tree, items=items, id=checkpoint_id, seat=seat)
                )
            )
        except BaseException as error:
            done.put(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    try:
        for nth in range(2):
            report = done.get()
            if isinstance(report, BaseException):
                raise report
            if not nth:
                yield ("saved", report.id, digest)
    finally:
        for thread in threads:
            thread.join()


def live_on(store: ByteStore, seed: int) -> Iterator[Fact]:
    """Save, tag, prune, recall, sweep and take over a run, endlessly. Varies with ``seed``."""
    rng = random.Random(f"live on {seed}")
    attempt = Attempt.begin(store, RUN, reason="first")
    yield ("begun", str(attempt.epoch))
    live = attempt.history().live
    step = live[-1].step if live else 0
    while True:
        draw = rng.random()
        if draw < 0.5:
            step += rng.randrange(1, 4)
            yield from (save_as_two if rng.random() < 0.2 else save_drawn)(attempt, rng, step)
        elif draw < 0.62:
            live = attempt.history().live
            if live:
                name, chosen = rng.choice(TAGS), rng.choice(live[-3:]).id
                yield ("tagging", name, chosen)
                Run(store, RUN).tag(name, chosen)
                yield ("tagged", name, chosen)
        elif draw < 0.8:
            undo_s = rng.choice((0.0, 0.0, 0.02, 1.0))
            rules = keep(last=rng.randrange(1, 4), best=1 if rng.random() < 0.5 else None, undo_window=undo_s or None)
            yield from _prune(store, rules, attempt.epoch)
        elif draw < 0.85:
            recallable = list(attempt.history().recallable)
            if recallable:
                chosen = rng.choice(recallable)
                yield ("recalling", chosen)
                recall(store, RUN, [chosen])
                yield ("recalled", chosen)
        elif draw < 0.9:
            yield from sweep(store)
        else:
            superseded, attempt = attempt, Attempt.begin(store, RUN, reason="next")
            yield ("begun", str(attempt.epoch))
            if rng.random() < 0.5:
                yield from _refused(superseded, rng, step)


def _prune(store: ByteStore, rules: Keep, epoch: int) -> Iterator[Fact]:
    plan = plan_prune(store, RUN, rules, verified={})
    yield ("retiring", *plan.going)
    report = execute(plan, store, epoch=epoch)
    yield ("retired", *report.retired)


def _refused(superseded: Attempt, rng: random.Random, step: int) -> Iterator[Fact]:
    try:
        for fact in save_drawn(superseded, rng, step):
            if fact[0] == "saving":  # not yielded, so that a check reports this state if a checkpoint holds it
                continue
            raise AssertionError("an attempt that was superseded has committed")
    except Fenced:
        yield ("refused", str(superseded.epoch))


def resume(store: ByteStore, seed: int) -> Iterator[Fact]:
    """Do what a restarted job does: begin an attempt, sweep, save."""
    rng = random.Random(f"resume {seed}")
    attempt = Attempt.begin(store, RUN, reason="resume")
    yield ("begun", str(attempt.epoch))
    yield from sweep(store)
    live = attempt.history().live
    yield from save_drawn(attempt, rng, live[-1].step + 1 if live else 0)


def check(store: ByteStore, acknowledged: Sequence[Fact], seed: int) -> tuple[list[str], list[Fact]]:
    """Check a store after a power cut. Return what is wrong (empty if nothing is), and the facts that are now known.

    In this order: check the unchanged log, resume the run (a new attempt, a sweep, a save), read every byte of each
    checkpoint that is live or recallable, search for leftovers.
    """
    try:
        return _check(store, _without_recalled(acknowledged), seed)
    except Exception as error:
        return [f"I4: no error of ours: {error!r}"], list(acknowledged)


def _check(store: ByteStore, acknowledged: list[Fact], seed: int) -> tuple[list[str], list[Fact]]:
    log = Log(store, RUN)
    problems = check_history(log, acknowledged)
    more = list(acknowledged)
    try:
        perform(resume(store, seed), more)
    except RelightError as error:
        problems.append(f"I4: the run does not resume: {type(error).__name__}: {error}")
    try:
        view = log.read()
    except RelightError as error:
        return list(dict.fromkeys([*problems, f"I5: the log cannot be read: {error.what}"])), more
    problems += check_history(log, more)
    history = fold(view)
    problems += _fences(history, acknowledged)
    known, digests = KnownFacts.from_facts(more), dict[str, str]()
    recallable = [history.retired[checkpoint] for checkpoint in history.recallable]
    for checkpoint in (*history.live, *recallable):
        problems += _restore(store, view, checkpoint, known, digests)
    with contextlib.suppress(RelightError):
        # Recallable checkpoints still have their bytes. The ranks' ready files may also be left: deleting them is best
        # effort.
        allowed = (*(f": {checkpoint.body.dir}" for checkpoint in recallable), f"/{READY_DIR}")
        problems += [leftover for leftover in leftovers(store, log) if not leftover.endswith(allowed)]
    return list(dict.fromkeys(problems)), known_facts(history, digests)


def _without_recalled(acknowledged: Sequence[Fact]) -> list[Fact]:
    """Return the facts without recalled retirements. A recall that was not acknowledged may have happened or not."""
    remaining: list[Fact] = []
    for fact in acknowledged:
        if fact[0] in ("recalling", "recalled"):
            undone = ("retired", "retiring") if fact[0] == "recalled" else ("retired",)
            remaining = [
                (earlier[0], *(checkpoint_id for checkpoint_id in earlier[1:] if checkpoint_id not in fact[1:]))
                if earlier[0] in undone
                else earlier
                for earlier in remaining
            ]
        remaining.append(fact)
    return remaining


def _fences(history: History, acknowledged: Sequence[Fact]) -> list[str]:
    """Check that each attempt has its FENCE and its own number. Two attempts with one number could both commit."""
    fenced = [fence.epoch for fence in history.fences]
    begun = [int(fact[1]) for fact in acknowledged if fact[0] == "begun"]
    problems = [f"I8: attempt {epoch} was begun and its FENCE is gone" for epoch in begun if epoch not in fenced]
    if len(set(fenced)) < len(fenced) or len(set(begun)) < len(begun):
        problems.append(f"I8: two attempts of one number: FENCEs {fenced}, begun {begun}")
    return problems


def _restore(
    store: ByteStore, view: LogView, checkpoint: Checkpoint, known: KnownFacts, digests: dict[str, str]
) -> list[str]:
    label = f"I2: checkpoint {checkpoint.id} at step {checkpoint.step}"
    try:
        digest = digests[checkpoint.id] = read_digest(store, view, checkpoint)
    except RelightError as error:
        return [f"{label} does not restore: {error}"]
    if digest not in known.saving or digest != known.saved.get(checkpoint.id, digest):
        return [f"{label} restores as something else"]
    return []


def read_digest(store: ByteStore, view: LogView, checkpoint: Checkpoint) -> str:
    """Return the digest of a stored checkpoint. Reads and verifies every byte."""
    opened = open_checkpoint(store, RUN, checkpoint, store_id=view.store_id, run_id=view.run_id)
    digests = []
    for part in opened.parts:
        buffers = [bytearray(tensor.length) for tensor in part.tensors]
        read_tensors(opened, part, {index: Bytes(buffer) for index, buffer in enumerate(buffers)})
        digests.append(
            digest_of(
                [
                    (stored.name, stored.dtype, stored.shape, stored.role, buffers[position])
                    for position, stored in enumerate(part.tensors)
                ],
                part.tree,
            )
        )
    return "+".join(digests)


def known_facts(history: History, digests: dict[str, str]) -> list[Fact]:
    """Return what a check has established, as facts. Every intent is now known to have happened or not."""
    facts: list[Fact] = [("begun", str(fence.epoch)) for fence in history.fences]
    for checkpoint in (*history.live, *history.retired.values()):
        if checkpoint.id in digests:
            facts += [("saving", digests[checkpoint.id]), ("saved", checkpoint.id, digests[checkpoint.id])]
    if history.retired:
        facts += [("retiring", *history.retired), ("retired", *history.retired)]
    facts += [("tagged", name, checkpoint_id) for name, checkpoint_id in history.tags.items()]
    return facts

"""Several nodes copy one checkpoint to a further tier: every order of their calls comes from a seed, and nodes die at every call."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.commit.thread_ranks import Ranks
from tests.drain.test_two_copies import Turns

from relight.catalog import Run
from relight.commit.attempt import take_over
from relight.errors import CorruptCheckpoint, Fenced, RelightError, StoreUnavailable
from relight.format.names import parse_dir
from relight.log import Log
from relight.reader import verify_checkpoint
from relight.store import ByteStore, Entry, LocalStore, MemoryStore, Reader, Writer, open_bytes
from relight.store.wrapper import StoreWrapper
from relight.transfer.copying import copy_one
from relight.transfer.shared_copy import GivenUp, Shared, copy_together

PARTS = 5


class Died(BaseException):
    """A node has died: none of its later calls has an effect."""


class Node(StoreWrapper):
    """The far store as one node sees it. Each call waits for the node's turn. The node dies at its ``dies``-th call, or before its effect
    is known."""

    def __init__(self, inner: ByteStore, wait: Callable[[], None], dies: int = -1, after: bool = False) -> None:
        super().__init__(inner)
        self._wait, self._dies, self._after = wait, dies, after
        self.calls, self.dead = 0, False
        self.written: list[str] = []

    def _call(self, action: Callable[[], Any]) -> Any:
        self._wait()
        if self.dead:
            raise Died
        self.calls += 1
        self.dead = self.calls - 1 == self._dies
        if self.dead and not self._after:
            raise Died
        result = action()
        if self.dead:
            raise Died
        return result

    def put_once(self, key: str, data: bytes) -> bool:
        return bool(self._call(lambda: self.inner.put_once(key, data)))

    def write(self, key: str, size: int) -> Writer:
        self.written.append(key)
        return Slow(self._call(lambda: self.inner.write(key, size)), self)

    def rewrite(self, key: str, size: int) -> Writer:
        self.written.append(key)
        return Slow(self._call(lambda: super(Node, self).rewrite(key, size)), self)

    def open(self, key: str) -> Reader:
        reader: Reader = self._call(lambda: self.inner.open(key))
        return reader

    def get(self, key: str, limit: int) -> bytes:
        return bytes(self._call(lambda: self.inner.get(key, limit)))

    def list(self, prefix: str) -> Iterator[Entry]:
        return iter(self._call(lambda: list(self.inner.list(prefix))))

    def delete(self, key: str) -> None:
        self._call(lambda: self.inner.delete(key))


class Slow:
    """A writer of a node."""

    def __init__(self, inner: Writer, node: Node) -> None:
        self._inner, self._node, self.align = inner, node, inner.align

    def write_at(self, offset: int, data: memoryview) -> None:
        self._node._call(lambda: self._inner.write_at(offset, data))

    def finish(self, size: int | None = None) -> None:
        self._node._call(lambda: self._inner.finish(size))

    def abort(self) -> None:
        if not self._node.dead:
            self._inner.abort()


class Scene:
    """A checkpoint of ``PARTS`` ranks in a near store, and a far store that ``nodes`` copy it to."""

    def __init__(self, folder: Path, far: ByteStore | None = None) -> None:
        ranks = Ranks(folder / "near", PARTS)
        self.id = ranks.save(7)[0].id
        self.near = Run(LocalStore(folder / "near"), "run")
        self.attempt = self.near.history().attempts[-1]
        self.clock_runs = True
        """Whether waiting takes time. If not, no node takes over from another."""
        self.fresh(far)

    def fresh(self, far: ByteStore | None = None) -> None:
        """Use a new far store, which the attempt takes over."""
        self.far: ByteStore = far if far is not None else MemoryStore()
        log = Log(self.far, "run")
        log.start()
        self.charge = take_over(log, self.attempt, [])

    def copy(
        self,
        seed: int,
        nodes: int,
        dying: dict[int, tuple[int, bool]] | None = None,
        others: dict[str, Callable[[ByteStore], Any]] | None = None,
        near: Callable[[int], Run] | None = None,
    ) -> dict[str, Any]:
        """Copy by all nodes at once. Return each one's result or error; ``calls`` has each one's calls. ``dying``: at which call, and whether
        after its effect. ``others``: further actions on the far store, with their names."""
        names = [*map(str, range(nodes)), *(others or {})]
        turns, results = Turns(seed, names), dict[str, Any]()
        now, lock = [0.0], threading.Lock()

        def pause(seconds: float) -> None:
            with lock:
                now[0] += seconds / nodes if self.clock_runs else 0.0

        def act(name: str) -> None:
            try:
                if others and name in others:
                    store: ByteStore = Node(self.far, lambda: turns.wait(name))
                    results[name] = others[name](store)
                    return
                number = int(name)
                dies, after = (dying or {}).get(number, (-1, False))
                node = Node(self.far, lambda: turns.wait(name), dies, after)
                self.nodes[number] = node
                run = near(number) if near else self.near
                checkpoint = run.history().live[-1]
                results[name] = copy_together(
                    run.open(checkpoint), node, Log(node, "run"), self.charge,
                    own=frozenset({number}), pause=lambda seconds: (turns.wait(name), pause(seconds))[1], clock=lambda: now[0],
                )  # fmt: skip
            except BaseException as error:
                results[name] = error
            finally:
                turns.over(name)

        self.nodes: dict[int, Node] = {}
        threads = [threading.Thread(target=act, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return results

    def check(self) -> None:
        """The tier has the checkpoint once, whole, and nothing is left of the copying but what dead nodes left."""
        run = Run(self.far, "run")
        (copied,) = [checkpoint for checkpoint in run.history().live if checkpoint.original_id == self.id]
        assert not verify_checkpoint(self.far, run.view(), copied)
        assert (copied.step, len(run.open(copied).parts)) == (7, PARTS)

    def directories(self) -> list[str]:
        return [entry.name for entry in self.far.list("run") if parse_dir(entry.name) is not None]


def test_each_part_is_copied_once_in_any_order(tmp_path: Path) -> None:
    """Three nodes, 100 orders: every file is written once, one node commits, and no file of the protocol is left."""
    scene = Scene(tmp_path)
    scene.clock_runs = False
    for seed in range(100):
        scene.fresh()
        results = scene.copy(seed, 3)
        assert all(isinstance(result, Shared) for result in results.values()), results
        assert sum(result.parts for result in results.values()) == PARTS
        assert sum(result.committed for result in results.values()) == 1
        written = [key for node in scene.nodes.values() for key in node.written if "/log/" not in key]
        assert len(written) == len(set(written)) == 2 * PARTS, "a pack and a part for each rank"
        scene.check()
        (directory,) = scene.directories()
        names = {entry.name for entry in scene.far.list(f"run/{directory}")}
        assert "ready" not in names, names


def test_a_node_takes_its_own_parts_first(tmp_path: Path) -> None:
    """With one node for each rank, and none late, each copies its own part."""
    scene = Scene(tmp_path)
    scene.copy(1, PARTS)
    own = sum(f"part-{number:05d}.msgpack" in key for number, node in scene.nodes.items() for key in node.written)
    assert own >= PARTS - 1, "the first to finish may have taken a part of a node that had not begun"


@pytest.mark.parametrize("after", [False, True], ids=["before its effect", "after its effect"])
def test_a_node_dies_at_each_call(tmp_path: Path, after: bool) -> None:
    """Node 0 of three dies at each of its calls. The others finish: the checkpoint is there once. Then nothing is left to copy."""
    scene = Scene(tmp_path)
    scene.copy(0, 3)
    calls = scene.nodes[0].calls
    assert calls > 40
    for number in range(calls):
        scene.fresh()
        results = scene.copy(number, 3, {0: (number, after)})
        assert isinstance(results["0"], (Died, Shared)), results
        assert all(isinstance(results[name], Shared) for name in "12"), (number, results)
        scene.check()
        assert isinstance(scene.copy(number, 1)["0"], Shared) and not scene.nodes[0].written


def test_all_nodes_die_and_the_next_ones_continue(tmp_path: Path) -> None:
    """At 100 seeded points of all nodes. The next processes continue what is there: no part that was there is written again."""
    scene = Scene(tmp_path)
    again = 0
    for seed in range(100):
        rng = random.Random(seed)
        scene.fresh()
        scene.copy(seed, 3, {node: (rng.randrange(60), rng.random() < 0.5) for node in range(3)})
        copied = {
            entry.name for directory in scene.directories() for entry in scene.far.list(f"run/{directory}/ready") if "copied" in entry.name
        }  # fmt: skip
        results = scene.copy(seed, 2)
        assert all(isinstance(result, Shared) for result in results.values()), results
        scene.check()
        parts = [key for node in scene.nodes.values() for key in node.written if "/part-" in key]
        assert len(parts) <= PARTS - len(copied) or len(scene.directories()) > 1
        again += bool(copied)
    assert again > 30, "copies were continued"


def test_an_attempt_that_is_superseded_commits_nothing_and_deletes_no_checkpoint(tmp_path: Path) -> None:
    """Another attempt takes the tier over at any moment, in 100 orders: either the copy was committed before, or it never is."""
    scene = Scene(tmp_path)
    made = 0
    for seed in range(100):
        scene.fresh()
        wait = random.Random(seed).randrange(120)

        def supersede(store: ByteStore, wait: int = wait) -> int:
            for _ in range(wait):
                list(store.list("run"))
            return take_over(Log(store, "run"), "another")

        results = scene.copy(seed, 3, others={"fence": supersede})
        nodes = [results[name] for name in "012"]
        assert all(isinstance(result, (Shared, Fenced)) for result in nodes), results
        if any(isinstance(result, Shared) for result in nodes):
            scene.check()
            made += 1
        elif Run(scene.far, "run").history().live:
            scene.check()
    assert 5 < made < 95


def test_a_command_that_copies_at_the_same_time_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """``relight cp`` to the same run, in 60 orders: no directory is written by both. The nodes' copy or the command's is kept, or both."""
    scene = Scene(tmp_path)
    for seed in range(60):
        scene.fresh()

        def command(store: ByteStore) -> str:
            return copy_one(scene.near.open(scene.near.history().live[-1]), store, Log(store, "run"), None)

        results = scene.copy(seed, 2, others={"cp": command})
        assert all(isinstance(results[name], Shared) for name in "01") and isinstance(results["cp"], str), results
        run = Run(scene.far, "run")
        for checkpoint in run.history().live:
            assert checkpoint.original_id == scene.id or checkpoint.id == results["cp"]
            assert not verify_checkpoint(scene.far, run.view(), checkpoint)


def test_damage_in_the_nearest_tier_ends_the_copy_on_all_nodes(tmp_path: Path) -> None:
    """The node that finds it makes the copy void. The others do not wait, and nothing but the void root is left. A later copy, of the
    repaired checkpoint, has the next name."""
    scene = Scene(tmp_path)
    (pack,) = (tmp_path / "near" / "run").glob("*/pack-00003-000.safetensors")
    whole = pack.read_bytes()
    for seed in range(20):
        pack.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        scene.fresh()
        results = scene.copy(seed, 3)
        assert all(isinstance(result, (CorruptCheckpoint, StoreUnavailable)) for result in results.values()), results
        for directory in scene.directories():
            assert {entry.name for entry in scene.far.list(f"run/{directory}")} <= {"root.json", "ready"}
        pack.write_bytes(whole)
        assert all(isinstance(result, Shared) for result in scene.copy(seed, 3).values())
        scene.check()


def test_a_creation_with_a_lost_answer_counts(tmp_path: Path) -> None:
    """A store loses an answer, repeats the request, and then finds the file. The node recognises its own name in it, and does not
    wait for itself."""
    scene = Scene(tmp_path)

    class Repeating(StoreWrapper):
        def put_once(self, key: str, data: bytes) -> bool:
            return super().put_once(key, data) and "/taken-" not in key

    store = Repeating(scene.far)
    opened = scene.near.open(scene.near.history().live[-1])
    waits: list[float] = []
    done = copy_together(opened, store, Log(store, "run"), scene.charge, pause=waits.append)
    assert done.committed and done.parts == PARTS and not waits


def test_a_store_that_fails_once_is_tried_again_without_waiting(tmp_path: Path) -> None:
    """A node frees a part if its write fails. Its next call continues with the next attempt."""
    scene = Scene(tmp_path)

    class Failing(StoreWrapper):
        fails = True

        def write(self, key: str, size: int) -> Writer:
            if "pack-00002" in key and self.fails:
                self.fails = False
                raise StoreUnavailable("no answer", where=key)
            return super().write(key, size)

    store = Failing(scene.far)
    opened = scene.near.open(scene.near.history().live[-1])
    waits: list[float] = []
    with pytest.raises(StoreUnavailable, match="no answer"):
        copy_together(opened, store, Log(store, "run"), scene.charge, pause=waits.append)
    done = copy_together(opened, store, Log(store, "run"), scene.charge, pause=waits.append)
    assert done.committed and 0 < done.parts <= PARTS and sum(waits) <= 0.5, (
        "only for the other nodes' files, at the end"
    )
    scene.check()


def test_on_a_server(tmp_path: Path, s3: str) -> None:
    """On an object store, with a node that dies in the middle."""
    for seed in range(3):
        scene = Scene(tmp_path / str(seed), open_bytes(f"{s3}/shared{seed}"))
        results = scene.copy(seed, 3, {1: (20 + 7 * seed, False)})
        assert all(isinstance(results[name], Shared) for name in "02"), results
        scene.check()


def test_a_draft_with_a_retired_donor_is_left(tmp_path: Path) -> None:
    """A directory that can never be committed is not used: the copy has the next name."""
    scene = Scene(tmp_path)
    opened = scene.near.open(scene.near.history().live[-1])
    directory = f"run/{opened.root.step:010d}-{opened.root.id}-e{scene.charge}"
    scene.far.put_once(
        f"{directory}/draft.json", b'{"origin":"%s","donor":"0123456789","coded":true,"parents":[]}' % scene.id.encode()
    )
    done = copy_together(opened, scene.far, Log(scene.far, "run"), scene.charge)
    assert done.committed and len(scene.directories()) == 2
    scene.check()
    assert issubclass(GivenUp, RelightError)


@pytest.mark.parametrize("data", [b"{", b'{"reason":"of ranks that saved"}', b"\xff"])
def test_a_draft_of_another_kind_is_left(tmp_path: Path, data: bytes) -> None:
    """A damaged draft, or that of ranks that saved, is no error: the copy has the next name."""
    scene = Scene(tmp_path)
    opened = scene.near.open(scene.near.history().live[-1])
    scene.far.put_once(f"run/{opened.root.step:010d}-{opened.root.id}-e{scene.charge}/draft.json", data)
    assert copy_together(opened, scene.far, Log(scene.far, "run"), scene.charge).committed
    scene.check()

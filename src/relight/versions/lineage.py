"""Where checkpoints come from: all runs of a store as one graph, as text and as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relight.catalog.branches import PREFIX
from relight.catalog.run import Run, list_runs
from relight.errors import RelightError
from relight.log import Checkpoint, History
from relight.store import ByteStore


@dataclass(slots=True)
class Node:
    """A checkpoint that is there. Of one that several runs have, ``run`` is where it lies."""

    checkpoint: Checkpoint
    run: str
    tags: list[str] = field(default_factory=list)
    """``run:tag`` for tags of other runs that have it, too."""
    begins: list[str] = field(default_factory=list)
    """Runs that branched off here."""
    set_aside: bool = False
    parents: list[tuple[str, bool]] = field(default_factory=list)
    """The nearest ancestors that are there, and whether others were between, which are not."""

    @property
    def id(self) -> str:
        """The checkpoint's."""
        return self.checkpoint.id

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        body = self.checkpoint.body
        return {
            "id": self.id, "run": self.run, "step": body.step, "created": self.checkpoint.time, "reason": body.reason,
            "metrics": body.metrics, "tags": self.tags, "begins": self.begins, "set_aside": self.set_aside,
            "parents": [{"id": one, "direct": not between} for one, between in self.parents],
        }  # fmt: skip


class GraphLine(NamedTuple):
    """A line of the drawing: the graph, and the checkpoint that stands behind it, if any."""

    graph: str
    node: Node | None = None


def lineage(store: ByteStore, only: str | None = None) -> tuple[list[Node], list[tuple[str, RelightError]]]:
    """All checkpoints of a store, newest first, children before their parents; of run ``only``, that run's and where those come from.
    And the runs whose logs cannot be read, with the reason."""
    histories: dict[str, History] = {}
    silent: list[tuple[str, RelightError]] = []
    for name in list_runs(store):
        try:
            histories[name] = Run(store, name).history()
        except RelightError as error:
            silent.append((name, error))
    nodes: dict[str, Node] = {}
    for name, history in histories.items():
        for one in history.live:
            home = one.body.home or name
            node = nodes.get(one.id)
            if node is None or node.checkpoint.body.home:  # better as its own run has it
                held = node.tags if node is not None else []
                begins = node.begins if node is not None else []
                node = nodes[one.id] = Node(one, home, held, begins)
            node.set_aside |= name == home and one.id in history.rolled_back_ids
            own = [tag for tag in history.tags_of(one.id) if not tag.startswith(PREFIX)]
            node.tags += own if name == home else [f"{name}:{tag}" for tag in own]
            if one.body.home:
                node.begins.append(name)
    gone = {one.id: one for history in histories.values() for one in history.retired.values()}
    for node in nodes.values():
        node.parents = _ancestors(node.checkpoint, nodes, gone)
    if only is not None:
        nodes = _reachable(nodes, [one.id for one in histories[only].live] if only in histories else [])
    return _in_order(nodes), silent


def draw(nodes: Sequence[Node]) -> list[GraphLine]:
    """The graph, a column for each line of descent: ``*`` a checkpoint, ``:`` where others were between that are gone."""
    lines: list[GraphLine] = []
    columns: list[tuple[str, bool]] = []  # what each column goes down to, and whether something is left out on the way
    for node in nodes:
        here = [number for number, (awaited, _) in enumerate(columns) if awaited == node.id]
        if not here:
            columns.append((node.id, False))
            here = [len(columns) - 1]
        for number in reversed(here[1:]):  # lines that meet here
            lines.append(GraphLine(_meeting(columns, here[0], number)))
            del columns[number]
        at = here[0]
        lines.append(GraphLine(" ".join("*" if number == at else _bar(column) for number, column in enumerate(columns)), node))
        ahead = [parent for parent in node.parents if parent[0] != node.id]
        if not ahead:
            del columns[at]
            continue
        columns[at] = ahead[0]
        for parent in ahead[1:]:
            columns.insert(at + 1, parent)
            ahead_of, behind = [_bar(one) for one in columns[: at + 1]], [_bar(one) for one in columns[at + 2 :]]
            lines.append(GraphLine(" ".join(ahead_of) + "\\" + "".join(f" {bar}" for bar in behind)))
    return lines


def _bar(column: tuple[str, bool]) -> str:
    return ":" if column[1] else "|"


def _meeting(columns: Sequence[tuple[str, bool]], to: int, number: int) -> str:
    """Column ``number`` turns into column ``to``."""
    text = [character for column in columns for character in (_bar(column), " ")][:-1]
    text[2 * number] = " "
    text[2 * number - 1] = "/"
    for between in range(2 * to + 1, 2 * number - 1):
        if text[between] == " ":
            text[between] = "_"
    return "".join(text).rstrip()


def _ancestors(one: Checkpoint, nodes: dict[str, Node], gone: dict[str, Checkpoint]) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for parent in one.body.parents:
        at, between, seen = parent, False, set[str]()
        while at not in nodes and at in gone and at not in seen:
            seen.add(at)
            further = gone[at].body.parents
            at, between = (further[0] if further else ""), True
        if at in nodes and at not in [known for known, _ in found]:
            found.append((at, between))
    return found


def _reachable(nodes: dict[str, Node], ids: Iterable[str]) -> dict[str, Node]:
    wanted, todo = set[str](), [one for one in ids if one in nodes]
    while todo:
        one = todo.pop()
        if one not in wanted:
            wanted.add(one)
            todo += [parent for parent, _ in nodes[one].parents]
    return {one: node for one, node in nodes.items() if one in wanted}


def _in_order(nodes: dict[str, Node]) -> list[Node]:
    """Newest first, and no parent before a child, whatever the clocks said."""
    waiting = dict.fromkeys(nodes, 0)
    for node in nodes.values():
        for parent, _ in node.parents:
            waiting[parent] += parent in waiting
    order: list[Node] = []
    ready = [node for one, node in nodes.items() if not waiting[one]]
    while ready:
        ready.sort(key=lambda node: (node.checkpoint.time, node.run, node.checkpoint.seq))
        node = ready.pop()
        order.append(node)
        for parent, _ in node.parents:
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(nodes[parent])
    return order

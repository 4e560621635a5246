"""Lineage of checkpoints: all runs of a store as one graph, as text and as data."""

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
    """A live checkpoint. If several runs have it, ``run`` is the run that stores it."""

    checkpoint: Checkpoint
    run: str
    tags: list[str] = field(default_factory=list)
    """Its tags; ``run:tag`` for tags of other runs that have it."""
    begins: list[str] = field(default_factory=list)
    """Runs that branched off here."""
    set_aside: bool = False
    parents: list[tuple[str, bool]] = field(default_factory=list)
    """The nearest live ancestors, and whether retired checkpoints are in between."""

    @property
    def id(self) -> str:
        """The checkpoint's id."""
        return self.checkpoint.id

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        body = self.checkpoint.body
        return {
            "id": self.id, "run": self.run, "step": body.step, "created": self.checkpoint.time, "reason": body.reason,
            "metrics": self.checkpoint.metrics, "tags": self.tags, "begins": self.begins, "set_aside": self.set_aside,
            "parents": [{"id": parent, "direct": not between} for parent, between in self.parents],
        }  # fmt: skip


class GraphLine(NamedTuple):
    """A line of the drawing: the graph, and the checkpoint on that line, if any."""

    graph: str
    node: Node | None = None


def lineage(store: ByteStore, only: str | None = None) -> tuple[list[Node], list[tuple[str, RelightError]]]:
    """Return all checkpoints of a store, newest first, children before their parents, and the unreadable runs with their errors.

    ``only``: only that run's checkpoints and their ancestors.
    """
    histories: dict[str, History] = {}
    silent: list[tuple[str, RelightError]] = []
    for name in list_runs(store):
        try:
            histories[name] = Run(store, name).history()
        except RelightError as error:
            silent.append((name, error))
    nodes: dict[str, Node] = {}
    for name, history in histories.items():
        for checkpoint in history.live:
            home = checkpoint.body.home or name
            node = nodes.get(checkpoint.id)
            if node is None or node.checkpoint.body.home:  # prefer the entry of the run that stores it
                tags = node.tags if node is not None else []
                begins = node.begins if node is not None else []
                node = nodes[checkpoint.id] = Node(checkpoint, home, tags, begins)
            node.set_aside |= name == home and checkpoint.id in history.rolled_back_ids
            own = [tag for tag in history.tags_of(checkpoint.id) if not tag.startswith(PREFIX)]
            node.tags += own if name == home else [f"{name}:{tag}" for tag in own]
            if checkpoint.body.home:
                node.begins.append(name)
    gone = {checkpoint.id: checkpoint for history in histories.values() for checkpoint in history.retired.values()}
    for node in nodes.values():
        node.parents = _ancestors(node.checkpoint, nodes, gone)
    if only is not None:
        nodes = _reachable(nodes, [checkpoint.id for checkpoint in histories[only].live] if only in histories else [])
    return _in_order(nodes), silent


def draw(nodes: Sequence[Node]) -> list[GraphLine]:
    """Draw the graph, a column for each line of descent: ``*`` is a checkpoint, ``:`` stands for retired checkpoints in between."""
    lines: list[GraphLine] = []
    # the next checkpoint of each column, and whether checkpoints are left out before it
    columns: list[tuple[str, bool]] = []
    for node in nodes:
        here = [number for number, (awaited, _) in enumerate(columns) if awaited == node.id]
        if not here:
            columns.append((node.id, False))
            here = [len(columns) - 1]
        for number in reversed(here[1:]):  # lines that meet here
            lines.append(GraphLine(_meeting(columns, here[0], number)))
            del columns[number]
        place = here[0]
        lines.append(
            GraphLine(" ".join("*" if number == place else _bar(column) for number, column in enumerate(columns)), node)
        )
        ahead = [parent for parent in node.parents if parent[0] != node.id]
        if not ahead:
            del columns[place]
            continue
        columns[place] = ahead[0]
        for parent in ahead[1:]:
            columns.insert(place + 1, parent)
            left, right = (
                [_bar(column) for column in columns[: place + 1]],
                [_bar(column) for column in columns[place + 2 :]],
            )
            lines.append(GraphLine(" ".join(left) + "\\" + "".join(f" {bar}" for bar in right)))
    return lines


def _bar(column: tuple[str, bool]) -> str:
    return ":" if column[1] else "|"


def _meeting(columns: Sequence[tuple[str, bool]], to: int, number: int) -> str:
    """Draw the line on which column ``number`` joins column ``to``."""
    text = [character for column in columns for character in (_bar(column), " ")][:-1]
    text[2 * number] = " "
    text[2 * number - 1] = "/"
    for between in range(2 * to + 1, 2 * number - 1):
        if text[between] == " ":
            text[between] = "_"
    return "".join(text).rstrip()


def _ancestors(one: Checkpoint, nodes: dict[str, Node], gone: dict[str, Checkpoint]) -> list[tuple[str, bool]]:
    ancestors: list[tuple[str, bool]] = []
    for parent in one.body.parents:
        ancestor, between, seen = parent, False, set[str]()
        while ancestor not in nodes and ancestor in gone and ancestor not in seen:
            seen.add(ancestor)
            further = gone[ancestor].body.parents
            ancestor, between = (further[0] if further else ""), True
        if ancestor in nodes and ancestor not in [known for known, _ in ancestors]:
            ancestors.append((ancestor, between))
    return ancestors


def _reachable(nodes: dict[str, Node], ids: Iterable[str]) -> dict[str, Node]:
    wanted, todo = set[str](), [node_id for node_id in ids if node_id in nodes]
    while todo:
        node_id = todo.pop()
        if node_id not in wanted:
            wanted.add(node_id)
            todo += [parent for parent, _ in nodes[node_id].parents]
    return {node_id: node for node_id, node in nodes.items() if node_id in wanted}


def _in_order(nodes: dict[str, Node]) -> list[Node]:
    """Sort newest first, with no parent before a child, even if clocks were wrong."""
    waiting = dict.fromkeys(nodes, 0)
    for node in nodes.values():
        for parent, _ in node.parents:
            waiting[parent] += parent in waiting
    order: list[Node] = []
    ready = [node for node_id, node in nodes.items() if not waiting[node_id]]
    while ready:
        ready.sort(key=lambda node: (node.checkpoint.time, node.run, node.checkpoint.seq))
        node = ready.pop()
        order.append(node)
        for parent, _ in node.parents:
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(nodes[parent])
    return order

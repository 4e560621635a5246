"""Checks that compare nodes. Pure. They find nothing if only one node was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from relight.doctor.facts import DoctorFacts, NodeFacts
from relight.doctor.finding import CheckHit, check
from relight.settings.file import FILE
from relight.units import duration_text, size_text

APART_S = 10.0
"""Difference of clocks, in seconds, beyond which a reader cannot order events of several nodes by their times."""
_ALIKE = 0.9
"""Smallest ratio of the memory of two machines of one kind."""
_SHOWN = 4
_AGAIN = "relight doctor --nodes"


def _names(nodes: list[NodeFacts]) -> str:
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return ", ".join(f"node {node.rank}" + (f" ({node.host})" if node.host else "") for node in nodes[:_SHOWN]) + more


def _answering(facts: DoctorFacts) -> list[NodeFacts]:
    return [node for node in facts.nodes if node.there]


def _parted(nodes: list[NodeFacts], value: Callable[[NodeFacts], str]) -> tuple[str, str]:
    """Return the nodes that differ from the largest group, and the values of all groups; both "" if no node differs."""
    groups: dict[str, list[NodeFacts]] = {}
    for node in nodes:
        groups.setdefault(value(node), []).append(node)
    if len(groups) < 2:
        return "", ""
    order = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0].rank))
    others = [node for _, members in order[1:] for node in members]
    return _names(others), "; ".join(f"{text or 'none'} on {_names(members)}" for text, members in order[:_SHOWN])


def _differing(
    nodes: list[NodeFacts], table: Callable[[NodeFacts], Mapping[str, str]]
) -> Iterator[tuple[str, str, str]]:
    for name in sorted({name for node in nodes for name in table(node)}):
        where, seen = _parted(nodes, lambda node, name=name: table(node).get(name, ""))  # type: ignore[misc]
        if where:
            yield name, where, seen


@check("node-missing", "error", "nodes", "a node did not answer within the time limit")
def _missing(facts: DoctorFacts) -> Iterator[CheckHit]:
    missing = [node for node in facts.nodes if not node.there]
    if missing:
        yield CheckHit(
            f"{len(missing)} of {len(facts.nodes)} nodes did not answer",
            _names(missing),
            f"no answer from {_names(missing)}",
            "a job over these nodes does not start, or waits for them",
            "check that node, its network and firewall, and try again",
            f"{_AGAIN} --within 120",
        )


@check("node-versions", "error", "nodes", "nodes have different versions of Python, Relight or a package")
def _versions(facts: DoctorFacts) -> Iterator[CheckHit]:
    for name, where, seen in _differing(_answering(facts), lambda node: node.versions):
        yield CheckHit(
            f"nodes have different versions of {name}",
            where,
            seen,
            "ranks may fail to communicate, or train differently",
            "install the same version on all nodes",
            "relight --version",
        )


@check("node-settings", "warning", "nodes", "a setting, or `relight.toml`, differs between nodes")
def _settings(facts: DoctorFacts) -> Iterator[CheckHit]:
    for name, where, _ in _differing(_answering(facts), lambda node: node.settings):
        _, seen = _parted(_answering(facts), lambda node, name=name: "set" if node.settings.get(name) else "")  # type: ignore[misc]
        yield CheckHit(
            f"{name} is not the same on all nodes",
            where,
            seen or "set on all nodes, with different values (nodes do not exchange values)",
            "ranks behave differently where they must behave the same",
            "copy the file to all nodes" if name == FILE else f"set {name} to the same value on all nodes",
            f"env | grep {name}" if name != FILE else f"sha256sum {FILE}",
        )


@check("node-store", "error", "nodes", "a node does not see a file that another node has written into the store")
def _store(facts: DoctorFacts) -> Iterator[CheckHit]:
    blind = [node for node in _answering(facts) if node.sees is False]
    if blind:
        yield CheckHit(
            "nodes do not have the same store at this path",
            _names(blind),
            "a file that node 0 has written does not exist there",
            "each node would write its own run, or none: saves never become checkpoints",
            "name a path that all nodes share; to use each node's own disk, use relight.Tiers with peers",
            "df -h",
        )


@check("node-mounts", "warning", "nodes", "the store is mounted differently on some nodes")
def _mounts(facts: DoctorFacts) -> Iterator[CheckHit]:
    def how(node: NodeFacts) -> str:
        return f"{node.mount.type} ({','.join(sorted(node.mount.options))})" if node.mount is not None else ""

    where, seen = _parted(_answering(facts), how)
    if where:
        yield CheckHit(
            "the store is not mounted the same way on all nodes",
            where,
            seen[:300],
            "durability, and when other nodes see a write, may differ by node",
            "mount it with the same options everywhere",
            "findmnt",
        )


@check("node-clocks", "warning", "nodes", "clocks of nodes are more than 10 seconds apart")
def _clocks(facts: DoctorFacts) -> Iterator[CheckHit]:
    known = [node for node in _answering(facts) if node.ahead_s is not None]
    ahead = sorted(known, key=lambda node: node.ahead_s or 0.0)
    if len(ahead) > 1 and (apart_s := (ahead[-1].ahead_s or 0.0) - (ahead[0].ahead_s or 0.0)) > APART_S:
        where, seen = (
            _names([ahead[0], ahead[-1]]),
            f"{_names([ahead[-1]])} is {duration_text(apart_s)} ahead of {_names([ahead[0]])}",
        )
        yield CheckHit(
            "the nodes' clocks differ",
            where,
            seen,
            "events and incidents of several nodes cannot be ordered, and ages are wrong",
            "synchronize all nodes with NTP",
            "timedatectl",
        )


def accelerators_text(accelerators: Mapping[str, int]) -> str:
    """Return a machine's accelerators as a text, such as "8 NVIDIA"."""
    return ", ".join(f"{count} {name}" for name, count in sorted(accelerators.items())) or "none"


@check("node-machines", "note", "nodes", "nodes differ in accelerators, limits, or in memory by more than a tenth")
def _machines(facts: DoctorFacts) -> Iterator[CheckHit]:
    nodes = _answering(facts)
    limits = list(_differing(nodes, lambda node: {name: str(limit) for name, limit in node.limits.items()}))
    where, seen = _parted(nodes, lambda node: accelerators_text(node.accelerators))
    findings = [("accelerators", where, seen)] if where else []
    memory = sorted((node for node in nodes if node.memory_bytes), key=lambda node: node.memory_bytes or 0)
    if len(memory) > 1 and (memory[0].memory_bytes or 0) < _ALIKE * (memory[-1].memory_bytes or 0):
        least, most = memory[0], memory[-1]
        seen = f"{size_text(least.memory_bytes or 0)} on {_names([least])}, {size_text(most.memory_bytes or 0)} on {_names([most])}"
        findings.append(("available memory", _names([least]), seen))
    for what, where, seen in [*findings, *((f"limit of {name}", where, seen) for name, where, seen in limits)]:
        yield CheckHit(
            f"nodes differ: {what}",
            where,
            seen,
            "the weakest node limits the job",
            "check whether this is intended",
            "",
        )

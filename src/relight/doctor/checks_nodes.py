"""What can be wrong between nodes. Pure. Nothing is found where only one was looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from relight.doctor.facts import DoctorFacts, NodeFacts
from relight.doctor.finding import CheckHit, check, gb, span
from relight.settings.file import FILE

APART_S = 10.0
"""So far clocks may be apart before events of nodes cannot be put in order by eye."""
_ALIKE = 0.9
"""Memory of machines of one kind differs by less."""
_SHOWN = 4
_AGAIN = "relight doctor --nodes"


def _names(nodes: list[NodeFacts]) -> str:
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return ", ".join(f"node {node.rank}" + (f" ({node.host})" if node.host else "") for node in nodes[:_SHOWN]) + more


def _there(facts: DoctorFacts) -> list[NodeFacts]:
    return [node for node in facts.nodes if node.there]


def _parted(nodes: list[NodeFacts], value: Callable[[NodeFacts], str]) -> tuple[str, str]:
    """Who differs from most, and what they have; both empty if nobody does."""
    kinds: dict[str, list[NodeFacts]] = {}
    for node in nodes:
        kinds.setdefault(value(node), []).append(node)
    if len(kinds) < 2:
        return "", ""
    order = sorted(kinds.items(), key=lambda kind: (-len(kind[1]), kind[1][0].rank))
    others = [node for _, group in order[1:] for node in group]
    return _names(others), "; ".join(f"{what or 'none'} on {_names(group)}" for what, group in order[:_SHOWN])


def _differing(nodes: list[NodeFacts], table: Callable[[NodeFacts], Mapping[str, str]]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({name for node in nodes for name in table(node)}):
        where, seen = _parted(nodes, lambda one, name=name: table(one).get(name, ""))  # type: ignore[misc]
        if where:
            yield name, where, seen


@check("node-missing", "error", "nodes", "a node did not come to be compared within the time there was")
def _missing(facts: DoctorFacts) -> Iterator[CheckHit]:
    gone = [node for node in facts.nodes if not node.there]
    if gone:
        yield CheckHit(
            f"{len(gone)} of {len(facts.nodes)} nodes did not come", _names(gone), f"nothing was heard of {_names(gone)}",
            "a job over these nodes does not begin, or waits for them", "look at that node, its network and firewall, and ask again",
            f"{_AGAIN} --within 120",
        )  # fmt: skip


@check("node-versions", "error", "nodes", "nodes have other versions of Python, Relight or a package")
def _versions(facts: DoctorFacts) -> Iterator[CheckHit]:
    for name, where, seen in _differing(_there(facts), lambda one: one.versions):
        yield CheckHit(
            f"nodes have different versions of {name}", where, seen,
            "ranks may not understand each other, or train differently", "install the same on all nodes", "relight version",
        )  # fmt: skip


@check("node-settings", "warning", "nodes", "a setting, or `relight.toml`, is another on some nodes")
def _settings(facts: DoctorFacts) -> Iterator[CheckHit]:
    for name, where, _ in _differing(_there(facts), lambda one: one.settings):
        _, seen = _parted(_there(facts), lambda one, name=name: "set" if one.settings.get(name) else "")  # type: ignore[misc]
        yield CheckHit(
            f"{name} is not the same on all nodes", where, seen or "set on all, and not to the same; values are not exchanged",
            "ranks do different things, where they should do one",
            "copy the file to all nodes" if name == FILE else f"set {name} alike on all",
            f"env | grep {name}" if name != FILE else f"sha256sum {FILE}",
        )  # fmt: skip


@check("node-store", "error", "nodes", "what one node writes into the store, another does not see there")
def _store(facts: DoctorFacts) -> Iterator[CheckHit]:
    blind = [node for node in _there(facts) if node.sees is False]
    if blind:
        yield CheckHit(
            "nodes do not have the same store at this path", _names(blind), "a file that node 0 has written is not there",
            "each would write a run of its own, or none: saves never become checkpoints",
            "name a place that all nodes share; disks of their own are for relight.Tiers with peers", "df -h",
        )  # fmt: skip


@check("node-mounts", "warning", "nodes", "the store is mounted in another way on some nodes")
def _mounts(facts: DoctorFacts) -> Iterator[CheckHit]:
    def how(one: NodeFacts) -> str:
        return f"{one.mount.type} ({','.join(sorted(one.mount.options))})" if one.mount is not None else ""

    where, seen = _parted(_there(facts), how)
    if where:
        yield CheckHit(
            "the store is not mounted alike on all nodes", where, seen[:300],
            "what is durable, and what others see of it, may differ by node", "mount it with the same options everywhere", "findmnt",
        )  # fmt: skip


@check("node-clocks", "warning", "nodes", "clocks of nodes are more than 10 seconds apart")
def _clocks(facts: DoctorFacts) -> Iterator[CheckHit]:
    known = [node for node in _there(facts) if node.ahead_s is not None]
    ahead = sorted(known, key=lambda one: one.ahead_s or 0.0)
    if len(ahead) > 1 and (apart_s := (ahead[-1].ahead_s or 0.0) - (ahead[0].ahead_s or 0.0)) > APART_S:
        where, seen = _names([ahead[0], ahead[-1]]), f"{_names([ahead[-1]])} is {span(apart_s)} ahead of {_names([ahead[0]])}"
        yield CheckHit(
            "clocks of nodes are apart", where, seen,
            "events and incidents of nodes cannot be put in order, and ages are wrong", "have all follow one time server", "timedatectl",
        )  # fmt: skip


@check("node-machines", "note", "nodes", "nodes differ in accelerators, limits, or in memory by more than a tenth")
def _machines(facts: DoctorFacts) -> Iterator[CheckHit]:
    nodes = _there(facts)
    limits = [(name, where, seen) for name, where, seen in _differing(nodes, lambda one: {k: str(v) for k, v in one.limits.items()})]
    where, seen = _parted(nodes, lambda one: str(one.accelerators))
    findings = [("accelerators", where, seen)] if where else []
    memory = sorted((node for node in nodes if node.memory_bytes), key=lambda node: node.memory_bytes or 0)
    if len(memory) > 1 and (memory[0].memory_bytes or 0) < _ALIKE * (memory[-1].memory_bytes or 0):
        least, most = memory[0], memory[-1]
        seen = f"{gb(least.memory_bytes or 0)} on {_names([least])}, {gb(most.memory_bytes or 0)} on {_names([most])}"
        findings.append(("available memory", _names([least]), seen))
    for what, where, seen in [*findings, *((f"limit of {name}", where, seen) for name, where, seen in limits)]:
        yield CheckHit(f"nodes differ: {what}", where, seen, "the weakest sets what the job can do", "see whether that is meant", "")

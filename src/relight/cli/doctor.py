"""``relight doctor``: diagnose machine, store, run and settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from shlex import quote
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from relight.catalog.locate import locate
from relight.cli.common import confirmed, json_option
from relight.cli.output import Styled, emit_json, escape, paint, table
from relight.doctor import (
    Coverage,
    DoctorFacts,
    Explained,
    Finding,
    FixPlan,
    FixReport,
    collect,
    coverage,
    execute_fix,
    explain,
    judge,
    plan_fix,
)
from relight.doctor.bounded import QUICK
from relight.doctor.coverage import by_reason
from relight.doctor.explain import read_log
from relight.doctor.facts import NodeFacts
from relight.errors import CheckpointNotFound, ConfigError, RelightError, StoreUnavailable
from relight.store import ByteStore
from relight.units import count_text

if TYPE_CHECKING:
    from relight.supervise.node_exchange import NodeAddress

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_WIDTH = 84
_INDENT = " " * 9
_PAGE = "docs/troubleshooting.md"


@click.command("doctor")
@click.argument("path", default="runs")
@click.option("--quick", is_flag=True, help="Skip slow checks: rates, names, the kernel's log, older checkpoints.")
@click.option("--fix", is_flag=True, help="Remove leftovers that no process can need; shows them, and asks.")
@click.option("-y", "--yes", is_flag=True, help="With --fix: do not ask.")
@click.option("--error", metavar="TEXT", help="Explain this error text, and check nothing.")
@click.option("--nodes", is_flag=True, help="Also compare all nodes of a job: run it on each node, at the same time.")
@click.option(
    "--meet",
    metavar="HOST:PORT",
    default="",
    help="Rendezvous address: a free port of node 0. Under torchrun, by default its own.",
)
@click.option(
    "--node",
    metavar="I/N",
    default="",
    help="Number of this node, from 0 on, of N. Under torchrun, by default its own.",
)
@click.option(
    "--within",
    type=click.FloatRange(1, 600),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Seconds to wait for other nodes.",
)
@click.option("--log", metavar="FILE", help="Explain why the job that wrote this log failed, and check nothing.")
@json_option
def command(
    path: str,
    quick: bool,
    fix: bool,
    yes: bool,
    error: str | None,
    nodes: bool,
    meet: str,
    node: str,
    within: float,
    log: str | None,
    as_json: bool,
) -> int:
    """Check this machine, the store or run at PATH, and the settings, and report what is wrong and what to do.

    PATH need not exist yet. Nothing is changed, except for small files that are written as a test and removed again. Exit code 1 for an
    error or a warning; 0 for notes alone. docs/doctor.md lists the checks.

    \b
    Examples:
      relight doctor runs/demo
      relight doctor runs --fix
      relight doctor --error "OSError: [Errno 28] No space left on device"
      relight doctor --log train.log
      relight doctor runs/demo --nodes --meet node-0:29400 --node 0/2
    """
    if error is not None or log is not None:
        if error is not None and log is not None:
            raise ConfigError("--error and --log exclude each other", hint="give one of them")
        return _explain(explain(error if error is not None else read_log(str(log))), as_json)
    if not nodes and (meet or node):
        raise ConfigError(
            "--meet and --node are for --nodes", hint="relight doctor --nodes --meet HOST:PORT --node I/N"
        )
    seat = _seat(meet, node) if nodes else None
    with status() as on_stage:
        facts = collect(path, quick=quick, on_stage=on_stage)
        if seat is not None:
            facts = _with_nodes(facts, seat, within, on_stage)
    findings = judge(facts)
    plan, report = FixPlan((), ()), None
    if fix:
        store = locate(path).store if facts.runs else None
        plan = plan_fix(store, findings, [run.name for run in facts.runs])
        report = _fix(plan, store, yes, as_json)
        if report is not None:  # check again: the report must show the present state
            with status() as on_stage:
                facts = replace(collect(path, quick=quick, on_stage=on_stage), nodes=facts.nodes)
            findings = judge(facts)
    if as_json:
        emit_json(_to_dict(path, facts, findings, plan if fix else None, report))
    else:
        _show(path, facts, findings, fix)
    return 1 if any(finding.severity != "note" for finding in findings) else 0


def _seat(meet: str, node: str) -> NodeAddress:
    """Return where nodes meet. Called first, so that mistakes in the options are reported before any check."""
    try:
        from relight.supervise.node_exchange import seat_of
    except ImportError:  # pragma: no cover - torch is part of the package's extras
        raise ConfigError(
            "nodes meet through torch.distributed, and torch is not installed", hint="pip install torch"
        ) from None
    return seat_of(meet, node)


def _with_nodes(facts: DoctorFacts, seat: NodeAddress, within_s: float, on_stage: Callable[[str], None]) -> DoctorFacts:
    """Return ``facts`` with what other nodes report about themselves. A probe that hangs is abandoned."""
    from relight.doctor.bounded import BoundedProbe
    from relight.doctor.facts_nodes import STEP_S, collect_nodes
    from relight.supervise.node_exchange import Meeting

    failed: list[RelightError] = []

    def meet() -> tuple[NodeFacts, ...]:
        try:
            return collect_nodes(facts, seat.rank, seat.nodes, Meeting(seat, within_s), within_s, on_stage)
        except RelightError as error:
            failed.append(error)
            return ()

    probe = BoundedProbe(2 * within_s + 6 * STEP_S)
    no_nodes: tuple[NodeFacts, ...] = ()
    compared = probe.at("nodes", meet, no_nodes)
    if failed:
        raise failed[0]
    if probe.unseen:
        raise StoreUnavailable(
            f"nodes could not be compared: {probe.unseen['nodes']}", where=f"{seat.host}:{seat.port}"
        )
    return replace(facts, nodes=compared)


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Show the check in progress, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("checking") as shown:
        yield lambda what: shown.update(f"checking: {escape(what)}")


def _show(path: str, facts: DoctorFacts, findings: list[Finding], fix: bool) -> None:
    for finding in findings:
        name = paint(finding.severity.ljust(7), _COLOURS[finding.severity])
        click.echo(f"{name}  {paint(escape(finding.what), 'bold')}  ({finding.name})")
        for head, text in (
            ("where", finding.where),
            ("seen", finding.evidence),
            ("hurts", finding.hurts),
            ("do", finding.do),
        ):
            _print_line(head, text)
        if finding.command:
            _print_line("run", finding.command)
        if finding.section:
            _print_line("see", f"{_PAGE}: {finding.section}")
        if finding.fix and not fix:
            _print_line("fix", f"relight doctor {quote(path)} --fix")
        click.echo()
    for what, why in [(what, why) for what, why in facts.unseen.items() if why != QUICK][:8]:
        click.echo(f"could not be seen: {escape(what)}: {escape(why)[:200]}")
    counts = [
        count_text(count, severity)
        for severity in _COLOURS
        if (count := sum(finding.severity == severity for finding in findings))
    ]
    made = coverage(facts)
    missing = len(facts.unseen) - sum(why == QUICK for why in facts.unseen.values())
    unseen = f", {count_text(missing, 'thing')} could not be seen" if missing else ""
    summary = ", ".join(counts) if counts else paint("nothing wrong", "green")
    compared = (
        f", {sum(node.there for node in facts.nodes)} of {count_text(len(facts.nodes), 'node')} compared"
        if facts.nodes
        else ""
    )
    click.echo(
        f"{escape(path)}: {summary}; {len(made.made)} of {count_text(made.known, 'check')} made{_not_made(made)}{compared}{unseen}"
    )


def _not_made(made: Coverage) -> str:
    """Return the checks that were not made, with the reasons."""
    parts = [f"{', '.join(names)}: {why}" for why, names in by_reason(made.left_out)]
    parts += [f"{', '.join(names)} in part: {why}" for why, names in by_reason(made.in_part)]
    parts += [f"{len(made.idle)} had nothing to examine"] if made.idle else []
    return "".join(f"; {escape(part)}" for part in parts)


def _print_line(head: str, text: str) -> None:
    """Print a line of a finding. Commands are never wrapped."""
    if not text:
        return
    lines = (
        [text]
        if head == "run"
        else wrap(escape(text), _WIDTH - len(_INDENT) - 7, break_long_words=False, break_on_hyphens=False) or [""]
    )
    click.echo(f"{_INDENT}{head:5}  {escape(lines[0])}")
    for line in lines[1:]:
        click.echo(f"{_INDENT}{'':5}  {escape(line)}")


def _fix(plan: FixPlan, store: ByteStore | None, yes: bool, as_json: bool) -> FixReport | None:
    """Show the plan, ask, and execute it. Return None if nothing was done."""
    if not plan.rows:
        if not as_json:
            click.echo("there is nothing that can be fixed automatically\n")
        return None
    if not as_json:
        table(
            ["leftover", "fate", "because"],
            [[what, Styled("goes", "red"), why] for what, why in plan.rows],
            wrap=("leftover", "because"),
        )
    if not confirmed("Remove them?", "removes leftovers", yes, as_json, "; without --fix nothing is removed"):
        return None
    report = execute_fix(plan, store)
    if not as_json:
        click.echo(f"removed {count_text(len(report.removed), 'leftover')}; checking again\n")
        for name in report.left:
            click.echo(f"{escape(name)} could not be removed yet")
    return report


def _to_dict(
    path: str, facts: DoctorFacts, findings: list[Finding], plan: FixPlan | None, report: FixReport | None
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "path": path, "ok": all(finding.severity == "note" for finding in findings),
        "findings": [finding.to_dict() for finding in findings],
        **coverage(facts).to_dict(), "unseen": facts.unseen,
    }  # fmt: skip
    if facts.nodes:
        result["nodes"] = [
            {
                "node": node.rank,
                "there": node.there,
                "host": node.host,
                "sees_store": node.sees,
                "ahead_s": node.ahead_s,
            }
            for node in facts.nodes
        ]
    if plan is not None:
        result["fix"] = {
            "plan": plan.to_dict(),
            "removed": list(report.removed) if report else [],
            "left": list(report.left) if report else [],
        }
    return result


def _explain(explained: Explained, as_json: bool) -> int:
    """Print the meaning of an error text. Raise ``CheckpointNotFound`` (exit code 1) if it is unknown."""
    if as_json:
        emit_json(explained.to_dict())
        return 0 if explained.known else 1
    if not explained.known:
        raise CheckpointNotFound(
            "no known error is in this text",
            where=explained.line[:80],
            hint="give more of the log: relight doctor --log FILE; or run it under relight run",
        )
    if explained.kind != "unknown":  # a symptom without an error class has its meaning below
        click.echo(f"{paint(explained.kind, 'bold')}: {escape(explained.kind_means)}")
    for head, text in (
        ("line", explained.line),
        ("means", explained.means),
        ("do", explained.do),
        ("run", explained.command),
    ):
        _print_line(head, text)
    if explained.section:
        _print_line("see", f"{_PAGE}: {explained.section}")
    return 0

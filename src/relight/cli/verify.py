"""``relight verify``: check every byte against what was committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click

from relight.catalog.locate import locate
from relight.catalog.run import list_runs
from relight.cli.common import OpenedRun, engine_of, engine_options, json_option, keep_events, open_run_at, read_run
from relight.cli.output import emit_json, escape, hanging, paint
from relight.errors import CheckpointNotFound, RelightError, WrongKey
from relight.log import Checkpoint, read_store
from relight.log.known_damage import was_removed
from relight.observe import emit
from relight.observe.progress_bar import progress_bar
from relight.reader import VerifyFinding, verify_checkpoint, verify_checkpoints, verify_log
from relight.run_records.proofs import VERIFIED, Proof, Verified, remember_proof
from relight.run_records.verification import record_checked
from relight.units import count_text, size_text


@click.command("verify")
@click.argument("path")
@click.argument("which", nargs=-1)
@click.option("--quick", is_flag=True, help="Check only records, roots, parts and file sizes.")
@engine_options()
@json_option
def command(path: str, which: tuple[str, ...], quick: bool, engine: str | None, jobs: int | None, as_json: bool) -> int:
    """Check every byte of a run, of a whole store, or of some checkpoints, against what was committed.

    WHICH is an id, a step, a tag, 'latest', 'best' or 'best:METRIC'; without one, all are checked. Exit code 1 for damage, which is listed
    by file, chunk and tensor. Checkpoints that retention removes meanwhile are left out. The result is recorded with the run, if it can
    be written, for relight doctor --ready.

    \b
    Examples:
      relight verify runs/demo
      relight verify runs/demo latest --json
      relight verify runs/demo --repair
    """
    place = locate(path)
    whole = place.run is None and place.which is None and not which
    log_findings: list[VerifyFinding] = []
    runs: list[OpenedRun] = []
    if whole:
        for name in list_runs(place.store):
            try:
                runs.append(read_run(place, name, warnings=False))
            except WrongKey:  # a wrong key is no result about the bytes
                raise
            except RelightError as error:
                log_findings.append(VerifyFinding(error.kind, error.where or name, "", error.what))
        try:
            read_store(place.store)
        except RelightError as error:
            log_findings.append(VerifyFinding(error.kind, "relight.json", "", error.what))
    else:
        runs.append(open_run_at(path, warnings=False))
    wanted = [(opened, checkpoint) for opened in runs for checkpoint in _chosen(opened, which)]
    for opened in runs:
        of_log = verify_log(opened.run.store, opened.view, whole=not quick and not which)
        log_findings += [finding for finding in of_log if finding not in log_findings]
    width = max((len(_label(opened, checkpoint, runs)) for opened, checkpoint in wanted), default=0)
    results: list[tuple[OpenedRun, Checkpoint, list[VerifyFinding]]] = []
    removed: list[str] = []
    length = 0 if quick else sum(checkpoint.body.stored_bytes for _, checkpoint in wanted)
    with engine_of(engine, jobs) as workers, progress_bar("verifying", length) as meter:
        targets = [(opened.run.store, opened.view, checkpoint) for opened, checkpoint in wanted]
        verified: Iterator[list[VerifyFinding]]
        if quick:
            verified = (verify_checkpoint(*target, data=False) for target in targets)
        else:
            verified = verify_checkpoints(targets, workers, progress=meter)
        for (opened, checkpoint), findings in zip(wanted, verified, strict=True):
            if findings and was_removed(opened.run.store, opened.run.name, checkpoint.id):
                if which or opened.which is not None:
                    raise CheckpointNotFound(
                        f"checkpoint {checkpoint.id} was removed while it was verified", where=opened.run.name
                    )
                removed.append(checkpoint.id)
                if not as_json:
                    meter.print(f"{_label(opened, checkpoint, runs).ljust(width)}  removed meanwhile")
                continue
            results.append((opened, checkpoint, findings))
            _emit_findings(
                opened, checkpoint, [finding for finding in findings if not finding.is_unknown], quick or bool(findings)
            )
            if not as_json:
                _print_findings(meter.print, _label(opened, checkpoint, runs).ljust(width), checkpoint, findings)
    ok = not log_findings and not any(findings for _, _, findings in results)
    if not quick:
        for opened in runs:
            _remember(opened, [(checkpoint, findings) for run, checkpoint, findings in results if run is opened])
    if as_json:
        emit_json(
            {
                "ok": ok,
                "checkpoints": [_to_dict(*result) for result in results],
                "log": [finding.to_dict() for finding in log_findings],
                "removed": removed,
            }
        )
        return 0 if ok else 1
    for finding in log_findings:
        click.echo(f"{paint('DAMAGED', 'red')}  {escape(finding.file)}: {escape(finding.detail)}")
    damaged = sum(any(not finding.is_unknown for finding in findings) for _, _, findings in results)
    unread = sum(any(finding.is_unknown for finding in findings) for _, _, findings in results)
    if ok:
        checked = "by metadata and sizes only (--quick)" if quick else "to the byte"
        total = size_text(sum(checkpoint.body.stored_bytes for _, checkpoint, _ in results))
        click.echo(f"{count_text(len(results), 'checkpoint')}, {total}: as committed, {checked}")
    else:
        wrong = [f"{damaged} of {count_text(len(results), 'checkpoint')} damaged"] if damaged else []
        wrong += [f"{unread} of {count_text(len(results), 'checkpoint')} could not be read"] if unread else []
        wrong += [f"{count_text(len(log_findings), 'fault')} in the log"] if log_findings else []
        click.echo(", ".join(wrong))
    return 0 if ok else 1


def _emit_findings(opened: OpenedRun, checkpoint: Checkpoint, findings: list[VerifyFinding], partly: bool) -> None:
    """Emit the result of a checkpoint, so that monitors of the run receive it."""
    keep_events(opened.run.store.url, opened.run.name)
    if findings:
        first, more = findings[0], f", and {len(findings) - 1} more" if len(findings) > 1 else ""
        message = f"checkpoint {checkpoint.id} (step {checkpoint.step}) is damaged: {first.file}: {first.detail}{more}"
        emit(
            "verify.damaged",
            message,
            id=checkpoint.id,
            step=checkpoint.step,
            kind=first.kind,
            file=first.file,
            detail=first.detail,
        )
    elif not partly:
        emit(
            "verify.done",
            f"checkpoint {checkpoint.id} (step {checkpoint.step}) is as committed, to the byte",
            id=checkpoint.id,
            step=checkpoint.step,
        )


def _remember(opened: OpenedRun, results: list[tuple[Checkpoint, list[VerifyFinding]]]) -> None:
    """Record the results with the run, if it can be written. A checkpoint that could not be read is skipped: it may be undamaged."""
    read = [
        (checkpoint, findings)
        for checkpoint, findings in results
        if not any(finding.is_unknown for finding in findings)
    ]
    record_checked(
        opened.run.store, opened.run.name, {checkpoint.id: _first(bad) for checkpoint, bad in read}, "relight verify"
    )
    rows = tuple(Verified(checkpoint.id, checkpoint.step, _first(bad)) for checkpoint, bad in read)
    if rows:
        wrong = sum(bool(row.damage) for row in rows)
        message = f"{count_text(len(rows), 'checkpoint')} read to the byte, {wrong or 'none'} damaged"
        with contextlib.suppress(RelightError):
            remember_proof(opened.run.store, opened.run.name, Proof(VERIFIED, not wrong, message, checkpoints=rows))


def _first(findings: list[VerifyFinding]) -> str:
    return f"{findings[0].file}: {findings[0].detail}" if findings else ""


def _chosen(opened: OpenedRun, which: tuple[str, ...]) -> list[Checkpoint]:
    wanted = which or ((opened.which,) if opened.which else ())
    chosen = [opened.choose(selector) for selector in wanted] if wanted else opened.history.live
    return list({checkpoint.id: checkpoint for checkpoint in chosen}.values())


def _label(opened: OpenedRun, checkpoint: Checkpoint, runs: list[OpenedRun]) -> str:
    return (
        f"{opened.run.name}/{checkpoint.id}  step {checkpoint.step}"
        if len(runs) > 1
        else f"{checkpoint.id}  step {checkpoint.step}"
    )


def _print_findings(
    write: Callable[[str], None], label: str, checkpoint: Checkpoint, findings: list[VerifyFinding]
) -> None:
    unread = findings and all(finding.is_unknown for finding in findings)
    state = paint("UNREAD", "yellow") if unread else paint("DAMAGED", "red") if findings else paint("ok", "green")
    write(f"{label}  {size_text(checkpoint.body.stored_bytes):>9}  {state}")
    for finding in findings:
        affected = f"; it holds {escape(finding.tensor)}" if finding.tensor else ""
        write(f"    {escape(finding.file)}")
        write(hanging(f"{escape(finding.detail)}{affected}", 6))


def _to_dict(opened: OpenedRun, checkpoint: Checkpoint, findings: list[VerifyFinding]) -> dict[str, Any]:
    errors = [finding.to_dict() for finding in findings]
    return {"id": checkpoint.id, "ok": not findings, "errors": errors, "step": checkpoint.step, "run": opened.run.name}

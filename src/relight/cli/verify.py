"""``relight verify``."""

from __future__ import annotations

import click

from relight.catalog import verify_checkpoint, verify_log
from relight.catalog.find import resolve
from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, progress, size


@click.command("verify")
@click.argument("path")
@click.argument("which", nargs=-1)
@click.option("--quick", is_flag=True, help="Only records, roots, parts and sizes: not the tensors' bytes.")
@json_option
def command(path: str, which: tuple[str, ...], quick: bool, as_json: bool) -> int:
    """Check every byte against what was committed. Exit code 1 if anything is wrong, named by file, chunk and tensor.

    \b
    relight verify runs/demo
    relight verify runs/demo latest --json
    """
    run, view, history, place = open_run_at(path)
    wanted = which or ((place.which,) if place.which else ())
    chosen = [resolve(history, one) for one in wanted] if wanted else list(history.live)
    log_findings = verify_log(run.store, view)
    results = []
    with progress("verifying", 0 if quick else sum(one.body.stored_bytes for one in chosen)) as advance:
        for one in chosen:
            findings = verify_checkpoint(run.store, view, one, data=not quick, progress=advance)
            results.append((one, findings))
            if not as_json:
                state = "ok" if not findings else "DAMAGED"
                click.echo(f"{one.id}  step {one.step:>8}  {size(one.body.stored_bytes):>9}  {state}")
                for finding in findings:
                    held = f" (holds {escape(finding.tensor)})" if finding.tensor else ""
                    click.echo(f"    {escape(finding.file)}: {escape(finding.detail)}{held}")
    ok = not log_findings and not any(findings for _, findings in results)
    if as_json:
        emit_json(
            {
                "ok": ok,
                "checkpoints": [
                    {"id": one.id, "ok": not findings, "errors": [finding.to_dict() for finding in findings]} for one, findings in results
                ],
                "log": [finding.to_dict() for finding in log_findings],
            }
        )
        return 0 if ok else 1
    for finding in log_findings:
        click.echo(f"{escape(finding.file)}: {escape(finding.detail)}")
    damaged = sum(bool(findings) for _, findings in results)
    checked = "metadata" if quick else "every byte"
    if ok:
        click.echo(f"{len(results)} checkpoints, {checked} is what was committed")
    else:
        click.echo(f"{damaged} of {len(results)} checkpoints are damaged, {len(log_findings)} findings in the log")
    return 0 if ok else 1

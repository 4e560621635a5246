"""``relight rekey``: encrypt anew what a leaked key could open, or what is not encrypted."""

from __future__ import annotations

import click

from relight.cli.common import json_option
from relight.cli.keys import key_option, keychain_of, store_at
from relight.cli.output import emit_json, plural, progress, size
from relight.errors import ConfigError
from relight.keys import Keychain
from relight.transfer.keys import rekey


@click.command("rekey")
@click.argument("path")
@click.option("--leaked", default="", metavar="KEY", help="An id or a label, also of one that was revoked: what it could open.")
@click.option("--all", "everything", is_flag=True, help="Everything is encrypted anew.")
@click.option("--keep", "kept", multiple=True, metavar="SPEC", help="A key that is to open it from then on. Those at hand, if none.")
@click.option("--plain", is_flag=True, help="Encrypt also what lies in the clear in an encrypted store: to end what was interrupted.")
@click.option("--dry-run", is_flag=True, help="Only say how much it would be.")
@key_option
@json_option
def command(
    path: str, leaked: str, everything: bool, kept: tuple[str, ...], plain: bool, dry_run: bool, specs: tuple[str, ...], as_json: bool
) -> int:
    """Encrypt a store anew, where it lies: after a leak what the leaked key could open; without --leaked or --all what is not encrypted.

    Each file is replaced as a whole: what is interrupted is gone on with by the same command. Stop what saves to the store first; a
    process that goes on with the old key is noticed, and the command then says so and exits with 1.

    \b
    Examples:
      relight rekey runs
      relight rekey runs --leaked 7203f59e --keep file:new.key
    """
    if leaked and everything:
        raise ConfigError("--leaked and --all: one of them")
    inner, chain = store_at(path), keychain_of(specs)
    keep = Keychain.from_specs(list(kept)) if kept else None
    what = "*" if everything else leaked
    plan = rekey(inner, chain, leaked=what, keep=keep, plan_only=True, encrypt_plain=plain)
    if dry_run:
        report = plan
    else:
        with progress("encrypting", plan.bytes) as meter:
            report = rekey(inner, chain, leaked=what, keep=keep, progress=meter, encrypt_plain=plain)
    if as_json:
        emit_json({"files": report.files, "bytes": report.bytes, "left": report.left, "generation": report.generation, "dry_run": dry_run,
                   "plain": report.plain, "damaged": report.damaged})  # fmt: skip
    else:
        verb = "would be encrypted" if dry_run else "encrypted"
        click.echo(f"{plural(report.files, 'file')}, {size(report.bytes)}, {verb} anew" if report.files else "nothing to do")
        if report.left:
            click.echo(f"{plural(report.left, 'file')} came meanwhile, of a process that has the old key: stop it, and do this again")
        if report.plain:
            click.echo(f"{plural(report.plain, 'file')} in the clear, which nothing takes: somebody put them there, or a rekey")
            click.echo("was interrupted, which --plain goes on with")
        if report.damaged:
            click.echo(f"{plural(report.damaged, 'file')} damaged: relight verify says which")
    return 1 if report.left or report.plain or report.damaged else 0

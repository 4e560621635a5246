"""``relight keys rekey``: encrypt again what a leaked key could open, or what is not encrypted."""

from __future__ import annotations

import shlex

import click

from relight.cli.common import engine_of, engine_options, json_option
from relight.cli.keys import key_option, keychain_of, store_at
from relight.cli.output import emit_json, escape
from relight.errors import ConfigError
from relight.keys import Keychain
from relight.keys.chain import SETTING
from relight.observe.progress_bar import progress_bar
from relight.transfer.keys import rekey
from relight.units import count_text, size_text

FILES_SHOWN = 20
"""Damaged files that are printed. ``--json`` has all of them."""


@click.command("keys rekey")
@click.argument("path")
@click.option(
    "--leaked", default="", metavar="KEY", help="Id or label of the leaked key, which may be revoked already."
)
@click.option("--all", "everything", is_flag=True, help="Encrypt everything again.")
@click.option(
    "--keep",
    "kept",
    multiple=True,
    metavar="SPEC",
    help="A key that must open the store afterwards; by default those given.",
)
@click.option("--plain", is_flag=True, help="Also encrypt plain files in an encrypted store, after an interruption.")
@click.option("--dry-run", is_flag=True, help="Only show how much would be encrypted.")
@engine_options()
@key_option
@json_option
def command(
    path: str,
    leaked: str,
    everything: bool,
    kept: tuple[str, ...],
    plain: bool,
    dry_run: bool,
    engine: str | None,
    jobs: int | None,
    specs: tuple[str, ...],
    as_json: bool,
) -> int:
    """Encrypt a store again, in place: after a leak what the leaked key could open; without --leaked or --all what is not encrypted.

    A key that is not kept does not open the store any more, such as a recovery key: the command names it.
    Each file is replaced atomically: after an interruption, repeat the command to continue. Stop jobs that save to the store first. If a
    process still writes with the old key, the command reports that and exits with 1.

    \b
    Examples:
      relight keys rekey runs
      relight keys rekey runs --leaked 7203f59e \\
          --keep file:new.key --keep file:recovery.key
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
        with engine_of(engine, jobs) as workers, progress_bar("encrypting", plan.bytes) as meter:
            report = rekey(inner, chain, leaked=what, keep=keep, progress=meter, encrypt_plain=plain, engine=workers)
    if as_json:
        emit_json({"files": report.files, "bytes": report.bytes, "left": report.left, "generation": report.generation, "dry_run": dry_run,
                   "plain": report.plain, "damaged": len(report.damaged), "damaged_files": report.damaged, "dropped": report.dropped,
                   "slots_left": report.slots_left, "needed": report.needed})  # fmt: skip
    else:
        verb = "would be encrypted" if dry_run else "encrypted"
        click.echo(
            f"{count_text(report.files, 'file')}, {size_text(report.bytes)}, {verb} again"
            if report.files
            else "nothing to do"
        )
        for name in report.dropped:
            verb = "would not open" if dry_run else "does not open"
            click.echo(
                f"{escape(name)} {verb} the store any more; relight keys add {escape(shlex.quote(path))} SPEC adds a key"
            )
        if report.left:
            click.echo(
                f"{count_text(report.left, 'file')} written meanwhile by a process with the old key: stop it, and repeat the command"
            )
        if report.plain:
            click.echo(
                f"{count_text(report.plain, 'file')} not encrypted, and ignored: another program put them there, or a rekey"
            )
            click.echo("was interrupted; then --plain continues it")
        if report.damaged:
            click.echo(f"{count_text(len(report.damaged), 'file')} damaged:")
            for file in report.damaged[:FILES_SHOWN]:
                click.echo(f"  {escape(file)}")
        for name in report.slots_left:
            click.echo(f"{escape(name)} keeps its slot: damaged files may need it")
        if report.slots_left:
            click.echo(
                "repair them (relight verify RUN --repair), or delete their checkpoints. Then repeat the command,"
            )
            click.echo("with the key's id if several have its label now (relight keys status)")
        if report.needed:
            click.echo(f"Until then, give the old key, too, in {SETTING}, after the new one")
    return 1 if report.left or report.plain or report.damaged else 0

"""``relight keys``: who can open an encrypted store: new, status, add, rotate, revoke."""

from __future__ import annotations

import os

import click

from relight.catalog.locate import locate
from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, escape, table
from relight.errors import ConfigError
from relight.keys import Keychain, keychain_from_settings, resolve, write_key_file
from relight.keys.chain import SETTING
from relight.keys.signing import write_signing_key
from relight.store import ByteStore
from relight.store.wrapper import unwrap
from relight.transfer.keys import Changed, add, age_days, revoke, rotate, status

key_option = click.option(
    "--key", "specs", multiple=True, metavar="SPEC", help=f"A key at hand, instead of {SETTING}: file:PATH, env:NAME …; more than once."
)
label_option = click.option("--label", default="", help="What people call the new key.")


@click.group("keys")
def command() -> None:
    """Keys of an encrypted store: who can open it.

    A key is named by a spec, never written out: file:PATH, env:NAME, passphrase:env:NAME, passphrase:file:PATH, keyring:SERVICE/USER,
    kms:KEY, vault:MOUNT/KEY. RELIGHT_KEY holds those at hand, parted by spaces; the first encrypts what is new.

    \b
    Examples:
      relight keys new ~/relight.key
      relight keys status runs --key file:relight.key
      relight keys rotate runs 7203f59e file:new.key
    """


@command.command("new")
@click.argument("file")
@click.option("--signing", is_flag=True, help="One to sign with, Ed25519; its public half is printed.")
def new(file: str, signing: bool) -> None:
    """Write a new key, 32 random bytes, into a new FILE that only you can read. Keep a copy elsewhere: nothing opens a store without."""
    if signing:
        public = write_signing_key(os.path.expanduser(file))
        click.echo(f"a new key to sign with is in {escape(file)}")
        click.echo(f"  sign:    export RELIGHT_SIGN=ed25519:file:{escape(os.path.abspath(os.path.expanduser(file)))}")
        click.echo(f"  believe: export RELIGHT_TRUST={public}")
        return
    write_key_file(os.path.expanduser(file))
    click.echo(f"a new key is in {escape(file)}; a copy of it belongs somewhere safe: what it encrypts is lost without it")
    click.echo(f"  use it: export {SETTING}=file:{escape(os.path.abspath(os.path.expanduser(file)))}")


@command.command("status")
@click.argument("path")
@key_option
@click.option("--max-age", type=float, metavar="DAYS", help="Exit code 1 if a key has been in use for longer.")
@json_option
def show_status(path: str, specs: tuple[str, ...], max_age: float | None, as_json: bool) -> int:
    """Show which keys open a store, generation by generation, and which did. Exit code 1 if those at hand don't open all of it."""
    inner = store_at(path)
    rows = status(inner, _at_hand(specs))
    live = [row for row in rows if not row.revoked]
    opened = {row.generation for row in live if row.opens} >= {row.generation for row in live}
    old = max_age is not None and any(age_days(row.created) > max_age for row in live)
    if as_json:
        emit_json({"ok": opened and not old and bool(live), "slots": [row.to_dict() for row in rows]})
    elif not rows:
        click.echo("no key: this store is not encrypted")
    else:
        cells = [
            [row.generation, row.kek, row.kind, row.label, row.created[:10], _state(row.revoked, row.opens)] for row in rows
        ]  # fmt: skip
        table(["generation", "id", "kind", "label", "since", ""], cells)
        if not opened:
            given = specs or os.environ.get(SETTING)
            click.echo("the keys at hand don't open all of it" if given else f"no key at hand: {SETTING} names none")
        if old:
            click.echo(f"a key is older than {max_age:g} days: relight keys rotate")
    return 0 if opened and not old and live else 1


@command.command("add")
@click.argument("path")
@click.argument("new_spec", metavar="NEW")
@label_option
@key_option
@json_option
def add_key(path: str, new_spec: str, label: str, specs: tuple[str, ...], as_json: bool) -> None:
    """Have the key that NEW names open the store, too: one for recovery, or another team's."""
    inner = store_at(path)
    _print_change(add(inner, keychain_of(specs), resolve(new_spec), label), as_json)


@command.command("rotate")
@click.argument("path")
@click.argument("old")
@click.argument("new_spec", metavar="NEW")
@label_option
@click.option("--older-than", type=float, metavar="DAYS", help="Only if OLD has been in use for longer: for a schedule.")
@key_option
@json_option
def rotate_key(path: str, old: str, new_spec: str, label: str, older_than: float | None, specs: tuple[str, ...], as_json: bool) -> None:
    """Exchange a key: NEW opens what OLD (an id or a label) opened, and OLD nothing more. No data is written anew.

    If OLD leaked, whoever has it may have kept a copy of the store as it was: relight rekey encrypts anew what it could open.
    """
    inner = store_at(path)
    if older_than is not None:
        ages = [age_days(row.created) for row in status(inner, None) if not row.revoked and (row.label == old or row.kek.startswith(old))]
        if ages and max(ages) <= older_than:
            _print_change(Changed(), as_json)
            return
    _print_change(rotate(inner, keychain_of(specs), old, resolve(new_spec), label), as_json)


@command.command("revoke")
@click.argument("path")
@click.argument("old")
@key_option
@json_option
def revoke_key(path: str, old: str, specs: tuple[str, ...], as_json: bool) -> None:
    """Have OLD, an id or a label, open nothing more. Refused if the keys at hand would then open less than now."""
    inner = store_at(path)
    _print_change(revoke(inner, keychain_of(specs), old), as_json)


def store_at(path: str) -> ByteStore:
    """The store that ``path`` leads to, as it lies there."""
    return unwrap(locate(path).store)


def keychain_of(specs: tuple[str, ...]) -> Keychain:
    """The keys at hand."""
    chain = _at_hand(specs)
    if chain is None:
        raise ConfigError("no key at hand", hint=f"{SETTING}=file:PATH, or --key file:PATH")
    return chain


def _at_hand(specs: tuple[str, ...]) -> Keychain | None:
    return Keychain.from_specs(list(specs)) if specs else keychain_from_settings()


def _print_change(changed: Changed, as_json: bool) -> None:
    if as_json:
        emit_json({"added": changed.added, "revoked": changed.revoked})
        return
    for word, what in [("added", one) for one in changed.added] + [("revoked", one) for one in changed.revoked]:
        click.echo(f"{word}  {escape(what)}")
    if not changed.added and not changed.revoked:
        click.echo("nothing to do")


def _state(revoked: str, opens: bool) -> object:
    if revoked:
        return Styled(f"revoked {revoked[:10]}", "yellow")
    return Styled("opened by a key at hand", "green") if opens else ""

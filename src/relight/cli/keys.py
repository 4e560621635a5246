"""``relight keys``: manage an encrypted store's keys: new, status, add, rotate, revoke."""

from __future__ import annotations

import os
import shlex

import click

from relight.catalog.locate import locate
from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, escape, table
from relight.errors import ConfigError
from relight.keys import Keychain, keychain_from_settings, resolve, write_key_file
from relight.keys.chain import SETTING
from relight.keys.signing import write_signing_key
from relight.settings.environment import environment
from relight.store import ByteStore
from relight.store.wrapper import unwrap
from relight.transfer.keys import Changed, add, age_days, revoke, rotate, status

key_option = click.option(
    "--key",
    "specs",
    multiple=True,
    metavar="SPEC",
    help=f"Use this key instead of {SETTING}: file:PATH, env:NAME …. Repeatable.",
)
label_option = click.option("--label", default="", help="Name of the new key, for people.")


@click.group("keys")
def command() -> None:
    """Manage the keys of an encrypted store.

    A key is given by a spec, never by its value: file:PATH, env:NAME, passphrase:env:NAME, passphrase:file:PATH, keyring:SERVICE/USER,
    kms:KEY (AWS), vault:MOUNT/KEY, gcpkms:projects/…/cryptoKeys/KEY (Google Cloud), azurekeyvault:NAME.vault.azure.net/keys/KEY.
    RELIGHT_KEY has the specs to use, separated by spaces; the first encrypts new data.

    \b
    Examples:
      relight keys new ~/relight.key
      relight keys status runs --key file:relight.key
      relight keys rotate runs 7203f59e file:new.key
    """


@command.command("new")
@click.argument("file")
@click.option("--signing", is_flag=True, help="Write a signing key (Ed25519), and print its public half.")
def new(file: str, signing: bool) -> None:
    """Write a new key, 32 random bytes, to a new FILE that only you can read. Keep a copy elsewhere: without it the data are lost."""
    path = os.path.abspath(os.path.expanduser(file))
    if signing:
        public = write_signing_key(os.path.expanduser(file))
        click.echo(f"a new key to sign with is in {escape(file)}")
        spec = shlex.quote(f"ed25519:file:{path}")
        click.echo(f"  sign:    export RELIGHT_SIGN={escape(spec)}")
        click.echo(f"  believe: export RELIGHT_TRUST={public}")
        return
    write_key_file(os.path.expanduser(file))
    click.echo(
        f"a new key is in {escape(file)}; a copy of it belongs somewhere safe: what it encrypts is lost without it"
    )
    click.echo(f"  use it: export {SETTING}={escape(shlex.quote(f'file:{path}'))}")
    if path.split() != [path]:
        click.echo(f"  {SETTING} separates keys by spaces: first move the file to a path without spaces")


@command.command("status")
@click.argument("path")
@key_option
@click.option("--max-age", type=float, metavar="DAYS", help="Exit code 1 if a key has been in use for longer.")
@json_option
def show_status(path: str, specs: tuple[str, ...], max_age: float | None, as_json: bool) -> int:
    """Show which keys open a store, by generation, and revoked ones. Exit code 1 if the given keys do not open all of it."""
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
            given = specs or environment().key
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
    """Add a key: NEW then opens the store, too, for recovery or for another team."""
    inner = store_at(path)
    _print_change(add(inner, keychain_of(specs), resolve(new_spec), label), as_json)


@command.command("rotate")
@click.argument("path")
@click.argument("old")
@click.argument("new_spec", metavar="NEW")
@label_option
@click.option(
    "--older-than", type=float, metavar="DAYS", help="Only if OLD has been in use for longer: for a schedule."
)
@key_option
@json_option
def rotate_key(
    path: str, old: str, new_spec: str, label: str, older_than: float | None, specs: tuple[str, ...], as_json: bool
) -> None:
    """Replace a key: NEW opens what OLD (an id or a label) opened, and OLD opens nothing. No data is encrypted again.

    If OLD leaked, its finder may have a copy of the store's key slots: relight keys rekey encrypts again what OLD could open.
    """
    inner = store_at(path)
    if older_than is not None:
        ages = [
            age_days(row.created)
            for row in status(inner, None)
            if not row.revoked and (row.label == old or row.kek.startswith(old))
        ]
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
    """Revoke OLD, an id or a label. Refused if the given keys would then open less than now."""
    inner = store_at(path)
    _print_change(revoke(inner, keychain_of(specs), old), as_json)


def store_at(path: str) -> ByteStore:
    """Return the store at ``path`` without its decryption layer."""
    return unwrap(locate(path).store)


def keychain_of(specs: tuple[str, ...]) -> Keychain:
    """Return the keys given by ``--key`` or the setting. Raise ``ConfigError`` without any."""
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
    for word, what in [("added", slot) for slot in changed.added] + [("revoked", slot) for slot in changed.revoked]:
        click.echo(f"{word}  {escape(what)}")
    if not changed.added and not changed.revoked:
        click.echo("nothing to do")


def _state(revoked: str, opens: bool) -> object:
    if revoked:
        return Styled(f"revoked {revoked[:10]}", "yellow")
    return Styled("opened by a key at hand", "green") if opens else ""

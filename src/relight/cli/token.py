"""``relight token``: manage access tokens of relight serve."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from relight.audit import recorded
from relight.audit.facts import ActionFacts
from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, escape, table
from relight.settings.amounts import seconds_of

if TYPE_CHECKING:
    from relight.serve.state import TokenFile

ROLES = ("viewer", "operator", "admin")
state_option = click.option(
    "--state",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The server's file, if it has another than the usual.",
)


def _state(path: Path | None) -> TokenFile:
    from relight.serve.state import TokenFile

    return TokenFile(path)


@click.group("token")
def command() -> None:
    """Manage access tokens of relight serve.

    A viewer reads; an operator also tags, branches, pins and verifies; an admin also promotes, prunes and revokes. A token is shown once,
    when it is made, and stored only as a hash. A revoked token is refused from the next request on.

    \b
    Examples:
      relight token new anna --role operator --expires 30d
      relight token new wall --role viewer --scope runs/demo
      relight token revoke k3v0q9x2ab
    """


@command.command("new")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="viewer", show_default=True, help="What the token allows.")
@click.option(
    "--scope", default="", metavar="STORE[/RUN]", help="Only for this store or run, by its name in relight serve."
)
@click.option("--expires", metavar="TIME", help="Lifetime: 12h, 30d; by default unlimited.")
@state_option
@json_option
def new(name: str, role: str, scope: str, expires: str | None, path: Path | None, as_json: bool) -> None:
    """Make a token for NAME, and show it this one time."""
    lasts_s = seconds_of(expires, "--expires") if expires is not None else None
    facts = ActionFacts(given={"name": name, "role": role, "scope": scope, "expires": expires or ""})
    with recorded("token new", f"{name} {role} {scope}".strip(), facts) as outcome:
        token_id, token = _state(path).new_token(name, role, scope, lasts_s)
        outcome.append(f"token {token_id}")
    if as_json:
        emit_json({"id": token_id, "token": token, "name": name, "role": role, "scope": scope})
        return
    click.echo(token)
    log_in = "log in with it at the address that relight serve prints, or send it as Authorization: Bearer …"
    click.echo(f"it is not shown again: {log_in}", err=True)


@command.command("list")
@state_option
@json_option
def listed(path: Path | None, as_json: bool) -> None:
    """List tokens, without their secrets."""
    rows = _state(path).tokens()
    if as_json:
        emit_json([msgspec.to_builtins(token) for token in rows])
    elif not rows:
        click.echo("no token yet: relight token new NAME --role viewer")
    else:
        cells = [
            [
                token.id,
                token.name,
                token.role,
                token.scope or "everything",
                _day(token.made_at),
                _day(token.ends_at) or "never",
                _state_cell(token.state),
            ]
            for token in rows
        ]
        table(["id", "name", "role", "scope", "made", "ends", ""], cells, wrap=("name",))


@command.command("revoke")
@click.argument("token_id", metavar="ID")
@state_option
@json_option
def revoke(token_id: str, path: Path | None, as_json: bool) -> None:
    """Revoke a token, and the sessions that were begun with it."""
    # a whole token may have been pasted: its secret goes nowhere
    token_id = token_id.removeprefix("rl_").partition(".")[0]
    state = _state(path)
    before = next((token.state for token in state.tokens() if token.id == token_id), "")
    with recorded("token revoke", token_id, ActionFacts(before=before, after="revoked", given={"id": token_id})):
        revoked = state.revoke(token_id)
    if as_json:
        emit_json({"id": revoked.id, "name": revoked.name, "state": "revoked"})
    else:
        click.echo(f"{revoked.id} ({escape(revoked.name)}, {revoked.role}) opens nothing any more")


def _day(moment: float | str | None) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d") if isinstance(moment, float) else ""


def _state_cell(state: str) -> Styled:
    return Styled(state, "green" if state == "valid" else "red")

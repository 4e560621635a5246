"""``relight serve``: serve a dashboard and an API for the runs of stores."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import ipaddress
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relight.cli.output import escape
from relight.errors import ConfigError, extra_hint

if TYPE_CHECKING:
    from relight.serve.auth_middleware import AccessRules

SWITCH_S = 0.0005
"""Seconds after which a busy thread yields to the event loop: a tenth of Python's default, which adds up at each of the loop's calls."""
COLLECT = (20_000, 20, 200)
"""Thresholds of the garbage collector: a full collection stops the event loop while it walks all kept rows, so it must be rare."""
_NEEDED = ("fastapi", "uvicorn", "jinja2", "sse_starlette")


@click.command("serve")
@click.argument("stores", metavar="STORE…", nargs=-1, required=True)
@click.option(
    "--listen", default="127.0.0.1:8484", show_default=True, metavar="HOST:PORT", help="Address to listen on."
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A host name that browsers use, in addition to localhost. Repeatable.",
)
@click.option(
    "--tls-cert", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="The certificate with its chain."
)
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Its key.")
@click.option("--plain", is_flag=True, help="Listen for other machines without TLS: a proxy terminates TLS.")
@click.option(
    "--public", default="", metavar="https://NAME", help="The public address, if a TLS proxy forwards to this server."
)
@click.option("--open", "opens", is_flag=True, help="Open the pages in a browser, logged in.")
@click.option("--state", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="File of the tokens.")
@click.option("--audit", default="", metavar="STORE", help="Store of the audit log.")
@click.option(
    "--settings",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With [alerts], in place of ./relight.toml.",
)
@click.option("--anonymous-read", is_flag=True, help="Allow reading without a token; actions still need one.")
@click.option("--proxy-header", default="", metavar="NAME", help="The header in which a proxy sends the user's name.")
@click.option(
    "--proxy-from",
    multiple=True,
    metavar="CIDR",
    help="The proxy's address or network: only its X-Forwarded-For and --proxy-header are trusted.",
)
@click.option(
    "--proxy-role",
    type=click.Choice(["viewer", "operator", "admin"]),
    default="viewer",
    show_default=True,
    help="The role of users whom the proxy names.",
)
def command(
    stores: tuple[str, ...],
    listen: str,
    hosts: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    plain: bool,
    public: str,
    opens: bool,
    state: Path | None,
    audit: str,
    settings: Path | None,
    anonymous_read: bool,
    proxy_header: str,
    proxy_from: tuple[str, ...],
    proxy_role: str,
) -> int:
    """Serve the runs of one or more stores as web pages and an API, until interrupted.

    All data are read from the stores. By default it is reachable only from this machine. At a terminal, it prints a login link that works
    once, within ten minutes. Other users need a token: relight token new.

    \b
    Examples:
      relight serve runs --open
      relight token new me --role viewer
      relight serve runs s3://team/runs --listen 0.0.0.0:443 --host relight.lab \\
          --tls-cert cert.pem --tls-key key.pem
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"relight serve needs {', '.join(missing)}", hint=extra_hint("serve"))
    host, port = _address(listen)
    if bool(tls_cert) != bool(tls_key):
        raise ConfigError("TLS needs both: --tls-cert and --tls-key")
    if not (tls_cert or plain or _is_here(host)):
        raise ConfigError(
            f"{host} is not this machine alone, and there is no TLS",
            hint="--tls-cert and --tls-key; or --plain, if a proxy terminates TLS",
        )
    if proxy_header and not proxy_from:
        raise ConfigError("a proxy's word needs both: --proxy-header and --proxy-from")
    from relight.serve.app import ServerSettings, create_app
    from relight.serve.auth_middleware import AccessRules
    from relight.serve.login_links import open_in_browser
    from relight.serve.proxies import check_proxies, public_origin

    check_proxies(proxy_from)

    rules = AccessRules(
        hosts=tuple(name.lower() for name in hosts),
        anonymous_read=anonymous_read,
        secure=bool(tls_cert),
        public=public_origin(public) if public else "",
        proxy_header=proxy_header,
        proxy_from=proxy_from,
        proxy_role=proxy_role,
    )
    app = create_app(ServerSettings(stores, state, audit, rules, alerts=settings))
    shown = f"[{host}]" if ":" in host else host
    reached = rules.public or f"{'https' if tls_cert else 'http'}://{shown}:{port}"
    shown_at = f"{reached}/  ({', '.join(escape(store) for store in stores)}; end it with Ctrl-C)"
    # only for the user at this machine: not if others reach the server, and not into a log
    has_link = _is_here(host) and not (public or proxy_header) and (opens or sys.stderr.isatty())
    if opens and not has_link:
        raise ConfigError("--open is for a server that only this machine reaches", hint="leave out --open")
    has_token = any(token.state == "valid" for token in app.state.store.tokens())
    if not (has_token or anonymous_read or proxy_header or has_link):
        where = f" --state {escape(shlex.quote(str(state)))}" if state is not None else ""
        click.echo(
            f"there is no token yet, so no user has access: relight token new NAME --role admin{where}", err=True
        )

    def ready() -> None:
        click.echo(shown_at, err=True)
        if has_link:
            links = [f"{reached}/login?once={app.state.links.new()}" for _ in range(2)]
            if sys.stderr.isatty():
                click.echo(f"log in once, within ten minutes:\n{links[0]}", err=True)
            if opens and not open_in_browser(links[1], app.state.store.path.parent):
                click.echo("no browser could be started", err=True)

    _serve(app, rules, host, port, tls_cert, tls_key, proxy_from, ready)
    return 0


def _serve(
    app: Any,
    rules: AccessRules,
    host: str,
    port: int,
    tls_cert: str | None,
    tls_key: str | None,
    proxy_from: tuple[str, ...],
    ready: Callable[[], None],
) -> None:
    """Serve until interrupted. ``ready`` is called once connections are accepted."""
    import uvicorn

    from relight.serve.gate import Gate, raise_descriptors
    from relight.serve.probes import ProbeResponder
    from relight.serve.proxies import Proxies

    gate = Gate(raise_descriptors(), Proxies(proxy_from).trusts)
    if not tls_cert:  # an encrypted probe cannot be read before the TLS handshake
        gate.answers_probe = ProbeResponder(rules).respond
    app.state.hub.most, app.state.hub.of_one = gate.bounds.streams, max(1, gate.bounds.streams * 3 // 5)
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*COLLECT)
    config = uvicorn.Config(
        app,
        loop="asyncio",  # the gate is the listening socket of this loop
        http=gate.protocol(),
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
        server_header=False,
        access_log=False,
        log_level="warning",
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=10,
        h11_max_incomplete_event_size=32 << 10,
    )
    try:
        listening = gate.listen((host, port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen there: {error.strerror or error}", where=f"{host}:{port}", hint="--listen HOST:PORT"
        ) from None
    ready()
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=list(listening))


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port[:6]) < 65536:
        raise ConfigError(f"{text!r} is no HOST:PORT", hint="such as 127.0.0.1:8484")
    return host.strip("[]") or "127.0.0.1", int(port)


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

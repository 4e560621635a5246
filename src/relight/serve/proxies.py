"""The public address of the server, and the client's address as a trusted proxy forwards it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from relight.errors import ConfigError

HOPS_MAX = 16
"""Entries of ``X-Forwarded-For`` that are read, from the right."""
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\Z")
_HOP = re.compile(r"\[([0-9a-f:.]+(?:%[^\]]*)?)\](?::[0-9]{1,5})?|([0-9.]+)(?::[0-9]{1,5})?", re.IGNORECASE)
"""An address as proxies forward it with a port, which some do: ``[2001:db8::1]:443``, ``1.2.3.4:5555``."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def public_origin(text: str) -> str:
    """Return ``https://NAME[:PORT]`` as browsers send it in ``Origin``. ``ConfigError`` for anything else."""
    hint = "give the address that people type, such as https://relight.lab"
    try:
        parts = urlsplit(text.strip().lower())
        port = parts.port
        name = (parts.hostname or "").removesuffix(".").encode("idna").decode()
    except (ValueError, UnicodeError):
        raise ConfigError(f"{text[:80]!r} is not an https address", hint=hint) from None
    if parts.scheme == "http":
        raise ConfigError(
            "--public needs https: without TLS, cookies can be read on the network", hint=f"--host {name or 'NAME'}"
        )
    bare = not (parts.username or parts.password or parts.query or parts.fragment) and parts.path in ("", "/")
    if parts.scheme != "https" or not bare or not (_NAME.match(name) or _is_address(name)):
        raise ConfigError(f"{text[:80]!r} is not https://NAME", hint=hint)
    shown = f"[{name}]" if ":" in name else name
    return f"https://{shown}" if port in (None, 443) else f"https://{shown}:{port}"


def host_of(origin: str) -> str:
    """Return an origin's host name, without brackets; empty for no origin."""
    return urlsplit(origin).hostname or "" if origin else ""


class Proxies:
    """The trusted proxies, as addresses and networks in CIDR notation: their headers are used."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self._exact = set(trusted)
        self._networks: list[Network] = []
        for entry in trusted:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                continue  # a name instead of an address, as test clients have

    def trusts(self, peer: str) -> bool:
        """Return whether this peer is one of the proxies."""
        if peer in self._exact:
            return True
        try:
            address = unmapped(peer)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def client_of(self, peer: str, forwarded: Sequence[str]) -> str:
        """Return the address of the client: the right-most one in ``X-Forwarded-For`` that is not a trusted proxy.

        Each proxy appends the address of its own peer. Entries to the left of the first untrusted address were written by that client,
        so they are not read. From an untrusted peer the header is ignored.
        """
        if not self.trusts(peer):
            return peer
        client = peer
        for hop in reversed(",".join(forwarded).rsplit(",", HOPS_MAX)[-HOPS_MAX:]):
            try:
                client = str(unmapped(_address_of(hop.strip())))
            except ValueError:
                break  # not an address: the last valid hop counts
            if not self.trusts(client):
                break
        return client


def _address_of(hop: str) -> str:
    """Return an entry of ``X-Forwarded-For`` without brackets and port."""
    match = _HOP.fullmatch(hop)
    return hop if match is None else match[1] or match[2]


def check_proxies(trusted: Sequence[str]) -> None:
    """Raise ``ConfigError`` for an entry of ``--proxy-from`` that is neither an address nor a network."""
    for entry in trusted:
        try:
            network = ipaddress.ip_network(entry, strict=False)
        except ValueError:
            raise ConfigError(
                f"--proxy-from: {entry[:80]!r} is not an address or network", hint="such as 10.0.0.7 or 10.0.0.0/24"
            ) from None
        if network.prefixlen == 0:
            raise ConfigError("--proxy-from: every client would be trusted", hint="name the proxy's own address")


def asker_of(address: str) -> str:
    """Return the rate-limit key of a client: its IPv4 address, or its /64 network, as one IPv6 client chooses its addresses there."""
    try:
        ip = unmapped(address)
    except ValueError:
        return address
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((int(ip), 64), strict=False))


def unmapped(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address; an IPv4-mapped IPv6 address (``::ffff:1.2.3.4``) as IPv4. Raise ``ValueError`` if it is invalid."""
    ip = ipaddress.ip_address(text.partition("%")[0])
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

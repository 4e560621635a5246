"""TLS 1.3 between processes of different nodes, without a certificate authority.

The process that listens makes a certificate. The SHA-256 fingerprint of the certificate travels with its address, over
a channel that the callers already trust. A caller compares the fingerprint before it sends anything of its own. The
caller itself has no certificate: it proves a secret inside the channel (``peers.wire``). There are no session tickets,
so recorded bytes of an earlier connection open nothing.

The connection is an ``SSLObject`` between two buffers, and not an ``SSLSocket``: that one sends in the clear once
another thread has shut it down, and uses the number of its descriptor after another thread has closed it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from relight.errors import ConfigError, extra_hint

PIECE_BYTES = 256 << 10
"""Bytes that are encrypted, or received, at a time."""
_ALWAYS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Validity of certificates: only the fingerprint counts, and clocks of nodes may differ."""
T = TypeVar("T")


class TlsRefused(ConnectionError):
    """The other end does not use TLS 1.3, or has another certificate than it should."""


class TlsIdentity:
    """A listener's certificate and private key, made at construction. The key is only in this process's memory.

    Raise ``ConfigError`` if the library that makes them is missing.
    """

    def __init__(self) -> None:
        certificate, files = _new_certificate()
        self.fingerprint = hashlib.sha256(certificate).hexdigest()
        self.context = _context(ssl.PROTOCOL_TLS_SERVER)
        self.context.num_tickets = 0
        fd = os.memfd_create("relight-tls", os.MFD_CLOEXEC)  # ssl reads a key from a file only
        try:
            os.write(fd, files)
            self.context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)


class TlsConnection:
    """An encrypted connection with those methods of a socket that ``peers.wire`` uses.

    One thread sends and receives. Any thread may call ``shutdown`` and ``close``. Nothing is sent before ``handshake``.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, called: bool) -> None:
        self.raw = raw
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=called)
        self._ends = 0.0

    @property
    def has_input(self) -> bool:
        """Return whether bytes have been received that no call has read."""
        return bool(self._received.pending or self._tls.pending())

    def handshake(self, ends: float) -> str:
        """Complete the handshake before ``ends`` (``time.monotonic``). Return the fingerprint of the other end's
        certificate, or an empty text if it has none.

        ``TlsRefused`` if the other end does not use TLS 1.3; another ``OSError`` if it is gone or too slow.
        """
        self._ends = ends
        try:
            self._run(self._tls.do_handshake)
        except ssl.SSLError as error:
            raise TlsRefused(f"the other end does not use TLS 1.3 ({error.reason or error})") from error
        self._flush()
        certificate = self._tls.getpeercert(binary_form=True)
        return hashlib.sha256(certificate).hexdigest() if certificate else ""

    def settimeout(self, seconds: float) -> None:
        """Limit the next call, from now on. Bytes that arrive slowly do not extend the limit."""
        self._ends = time.monotonic() + seconds

    def recv_into(self, room: memoryview) -> int:
        """Fill the beginning of ``room``. Return the number of bytes."""
        return self._run(lambda: self._tls.read(len(room), room))  # type: ignore[arg-type,return-value] # typeshed: bytearray

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send the first bytes of ``parts``. Return their number: all, or at least ``PIECE_BYTES``."""
        sent = 0
        for part in parts:
            while len(part) and sent < PIECE_BYTES:
                count = self._tls.write(part[: PIECE_BYTES - sent])
                sent, part = sent + count, part[count:]
        self._flush()
        return sent

    def sendall(self, data: bytes) -> None:
        """Send all bytes."""
        left = memoryview(data)
        while len(left):
            left = left[self.sendmsg([left]) :]

    def shutdown(self, how: int) -> None:
        """End the connection. A thread that waits in another call is woken."""
        self.raw.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self.raw.close()

    def _run(self, step: Callable[[], T]) -> T:
        """Return the result of ``step``, and receive what it needs."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._flush()
                self._limit()
                data = self.raw.recv(PIECE_BYTES)
                if not data:
                    raise ConnectionResetError("closed") from None
                self._received.write(data)

    def _flush(self) -> None:
        if self._to_send.pending:
            self._limit()
            self.raw.sendall(self._to_send.read())

    def _limit(self) -> None:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("too slow")
        self.raw.settimeout(left)


def answer_tls(raw: socket.socket, identity: TlsIdentity, ends: float) -> TlsConnection:
    """Return an encrypted connection with a caller, which has shown nothing of itself yet.

    After an error the caller of this function must close ``raw``.
    """
    connection = TlsConnection(raw, identity.context, called=True)
    connection.handshake(ends)
    return connection


def call_tls(raw: socket.socket, fingerprint: str, ends: float) -> TlsConnection:
    """Return an encrypted connection with the listener that has that certificate; ``TlsRefused`` if it has another.

    After an error the caller of this function must close ``raw``.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint is compared instead
    connection = TlsConnection(raw, context, called=False)
    if connection.handshake(ends) != fingerprint:
        raise TlsRefused("its certificate is not the one that was announced with its address")
    return connection


def need_tls_library() -> None:
    """Raise ``ConfigError`` with the package to install if no certificate can be made."""
    try:
        import cryptography.x509  # noqa: F401
    except ImportError:
        raise ConfigError("TLS between nodes needs the library cryptography", hint=extra_hint("encryption")) from None


def _context(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _new_certificate() -> tuple[bytes, bytes]:
    """Return a new certificate as DER, and its private key and itself as PEM."""
    need_tls_library()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(_ALWAYS[0])
    certificate = builder.not_valid_after(_ALWAYS[1]).sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    encoding = serialization.Encoding
    return certificate.public_bytes(encoding.DER), private + certificate.public_bytes(encoding.PEM)

"""Agents protect each other's checkpoints in memory, by copies or parity over TCP or RDMA, so that the loss of a node
loses no checkpoint.

Always holds: a piece of parity is offered only if all segments in it were complete and unchanged; no bytes are added to
it twice, even after a broken connection; bytes read from a slot count only if the slot is unchanged afterwards. The
bytes that are read may still be wrong, and are checked like every other byte. Every wait has a deadline, and a caller
without the token gets no answer. May import: ``arena``, ``store`` (readers and buffers), ``format`` (checksums),
``comm``, ``observe``, ``errors``. Never torch, nor the log: the caller decides which checkpoints count.
"""

from relight.peers.parts import HeldPartFile
from relight.peers.protecting import PeerService, is_loopback
from relight.peers.rdma import TCP, plane_here
from relight.peers.reading import Remote
from relight.peers.rings import FailureGroup, Peer, PeerRing, Rings, rings
from relight.peers.wire import TOKEN_BYTES

__all__ = [
    "TCP",
    "TOKEN_BYTES",
    "FailureGroup",
    "HeldPartFile",
    "Peer",
    "PeerRing",
    "PeerService",
    "Remote",
    "Rings",
    "is_loopback",
    "plane_here",
    "rings",
]

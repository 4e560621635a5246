"""Agents protect each other's checkpoints in memory, by copies or parity over TCP: a node may be lost, and its memory with it.

Always holds: a piece of parity is shown only if all it was made of was whole, and the same all the time; nothing is added to it twice,
whatever breaks; bytes read from a slot count only if the slot is unchanged after. What is read may still be wrong, and is checked like
every other byte. Nobody waits without a deadline, and no stranger is heard. May import: ``arena``, ``store`` (readers and buffers),
``format.digest``, ``observe``, ``errors``. Never torch, nor the log: what counts, others say.
"""

from relight.peers.parts import HeldPartFile
from relight.peers.protecting import PeerService
from relight.peers.reading import Remote
from relight.peers.rings import FailureGroup, Peer, PeerRing, Rings, rings
from relight.peers.wire import TOKEN_BYTES

__all__ = ["TOKEN_BYTES", "FailureGroup", "HeldPartFile", "Peer", "PeerRing", "PeerService", "Remote", "Rings", "rings"]

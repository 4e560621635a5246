"""A caller without the token learns nothing and costs little.

A caller with it that sends invalid messages is disconnected.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from neighbours import Neighbour, Nursery, content, expected

from relight.errors import ConfigError
from relight.peers import PeerService, Remote, wire
from relight.peers.messages import (
    Contribute,
    Data,
    Going,
    PeerRefusal,
    ReadRequest,
    Segment,
    SegmentEnd,
    SegmentPiece,
    StatusRequest,
    Void,
)
from relight.peers.server import HANDSHAKE_S, UNPROVED_MAX
from relight.peers.wire import PeerLost, Stream, call, split_address

TOKEN = b"t" * 32
MB = 1_000_000


@pytest.fixture
def agent(nursery: Nursery, tls: bool) -> Iterator[Neighbour]:
    """Start an agent with an unprotected part of 1 MB."""
    agent = nursery.agent(TOKEN, tls=tls)
    agent.call("fill", "c1", 1, [(0, MB)])
    agent.call("offer")
    yield agent
    agent.close()


def connect(agent: Neighbour) -> socket.socket:
    return socket.create_connection(split_address(agent.address), 10)


def serves(agent: Neighbour) -> None:
    """Check that a caller with the token is served at once."""
    began = time.monotonic()
    with contextlib.closing(Remote([agent.address], TOKEN, 10.0)) as remote:
        reader = remote.reader("c1", 0, 1)
        assert reader is not None
        room = bytearray(reader.size)
        reader.read_into(0, memoryview(room))
        assert room == expected("c1", 0, MB)[1]
    assert time.monotonic() - began < 10.0


def until_closed(connection: Stream, seconds: float) -> bytes:
    """Return the bytes that arrive until the other end disconnects, at most ``seconds`` later."""
    ends, received, room = time.monotonic() + seconds, b"", bytearray(65536)
    with contextlib.suppress(ConnectionError):
        while True:
            connection.settimeout(max(0.01, ends - time.monotonic()))
            count = connection.recv_into(memoryview(room))
            if not count:
                break
            received += room[:count]
    return received


def test_strangers_learn_nothing_and_are_gone_in_time(agent: Neighbour, tls: bool) -> None:
    """A caller without the token receives a greeting and 32 random bytes, with TLS nothing, and is disconnected within the
    handshake's deadline. The agent reports the first one.

    Single bytes now and then do not extend the deadline.
    """
    messages = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), os.urandom(1 << 20), b"\xff" * 64, b"\0" * 63]
    began = time.monotonic()
    strangers = [connect(agent) for _ in messages]
    for stranger, message in zip(strangers, messages):
        with contextlib.suppress(ConnectionError):
            stranger.sendall(message)
    with connect(agent) as slow, contextlib.suppress(ConnectionError):
        while time.monotonic() - began < HANDSHAKE_S + 10:
            slow.sendall(b"x")
            time.sleep(0.2)
    assert time.monotonic() - began < HANDSHAKE_S + 8
    for stranger in strangers:
        received = until_closed(stranger, 5)
        assert len(received) in ((0,) if tls else (0, 48)) and received[:14] == b"relight-peers-"[: len(received)]
        stranger.close()
    serves(agent)
    assert [name for name, _ in agent.call("events")] == ["peers.refused"]


def test_the_wrong_token_is_found_out_by_either_side(agent: Neighbour, tls: bool) -> None:
    """A caller without the token gets no answer, a listener without it is refused, and a proof cannot be replayed."""
    with pytest.raises(PeerLost):
        call(agent.address, b"u" * 32, 10.0)
    proofs: list[object] = []
    with contextlib.closing(Remote([agent.address], b"u" * 32, 10.0)) as remote:
        assert remote.answered == () and remote.has("c1", 0) is None
    with socket.create_server(("127.0.0.1", 0)) as fake:
        fake.settimeout(10)
        with socket.create_connection(fake.getsockname()), fake.accept()[0]:
            pass

        def answer() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.sendall(b"relight-peers-1\n" + bytes(32))
                proofs.append(connection.recv(64, socket.MSG_WAITALL))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerLost, match="token"):
            call(f"127.0.0.1:{fake.getsockname()[1]}", TOKEN, 10.0)
        thread.join()
    with connect(agent) as again:
        again.sendall(proofs[0])  # type: ignore[arg-type]
        assert len(until_closed(again, HANDSHAKE_S + 10)) == (0 if tls else 48)
    serves(agent)


def test_many_strangers_keep_no_friend_out_and_cost_little(agent: Neighbour) -> None:
    """Idle strangers, three times the limit, do not delay a caller with the token.

    Memory does not grow, and all are disconnected in time.
    """
    before = agent.call("memory")
    strangers = [connect(agent) for _ in range(3 * UNPROVED_MAX)]
    try:
        serves(agent)
        assert agent.call("memory")["RssAnon"] - before["RssAnon"] < 32 * MB
        began = time.monotonic()
        for stranger in strangers:
            until_closed(stranger, HANDSHAKE_S + 20)
        assert time.monotonic() - began < HANDSHAKE_S + 20
    finally:
        for stranger in strangers:
            stranger.close()
    serves(agent)


def test_many_friends_do_not_keep_each_other_out(agent: Neighbour, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as many ranks as may prove themselves at once restore from one agent, over a network with a delay: each
    of them is answered.

    Symptom: of more than 64 callers, the agent disconnected those that were about to prove themselves, and they left it
    out for the whole restore.
    """
    count = 3 * UNPROVED_MAX
    answered: list[tuple[str, ...]] = []
    give = wire._give

    def far(*words: Any) -> None:
        time.sleep(0.05)
        give(*words)

    monkeypatch.setattr(wire, "_give", far)

    def restore() -> None:
        with contextlib.closing(Remote([agent.address], TOKEN, 30.0)) as remote:
            answered.append(remote.answered)

    ranks = [threading.Thread(target=restore) for _ in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert answered == [(agent.address,)] * count


SEGMENT = Segment("nobody", 0, 0, 0, 100, (4096,), (400,))


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x01\x00\x10\x00", b"\x03\x00\x00\x00abc", b"\x02\x00\x00\x00\x91\xc0", b"\x00\x00\x00\x00",
     (100_000).to_bytes(4, "little") + b"\x91" * 100_000, msgspec.msgpack.encode(StatusRequest())],
    ids=["4 GiB", "more than allowed", "no msgpack", "no request", "empty", "nested", "no length"],
)  # fmt: skip
def test_a_friend_that_makes_no_sense_is_hung_up_on(agent: Neighbour, data: bytes) -> None:
    """Excessive lengths and invalid messages end the connection at once, without memory for them."""
    before = agent.call("memory")
    wire = call(agent.address, TOKEN, 10.0)
    wire._socket.sendall(data)
    if data == msgspec.msgpack.encode(StatusRequest()):
        with contextlib.suppress(OSError):  # disconnected already
            wire._socket.shutdown(socket.SHUT_WR)
    assert until_closed(wire._socket, 20.0) == b""
    wire.close()
    assert agent.call("memory")["RssAnon"] - before["RssAnon"] < 4 * MB
    serves(agent)


@pytest.mark.parametrize(
    "messages",
    [
        [SegmentPiece(0, 100)],
        [SegmentEnd()],
        [Void()],
        [ReadRequest("c1", 0, 0, 1 << 30)],
        [Contribute("c", 1, 0, b"x" * 16, 0, 0, b"l" * 8, SEGMENT), SegmentPiece(0, 10)],
    ],
    ids=["bytes unasked", "whole of nothing", "void of nothing", "1 GiB at once", "bytes after a refusal"],
)
def test_a_request_out_of_turn_is_the_end(agent: Neighbour, messages: list[object]) -> None:
    """An invalid request ends the connection."""
    wire = call(agent.address, TOKEN, 10.0)
    with pytest.raises(PeerLost):
        for message in messages:
            wire.send(message)  # type: ignore[arg-type]
        for _ in range(2):
            answer = wire.receive()
            assert isinstance(answer, PeerRefusal) and not isinstance(answer, Going)
    wire.close()
    serves(agent)


def test_what_is_not_there_is_refused_and_the_connection_stays(agent: Neighbour) -> None:
    """Requests for unknown parts, bytes beyond the end and missing pieces are refused in order.

    The next request is answered.
    """
    wire = call(agent.address, TOKEN, 10.0)
    asked = [
        ReadRequest("c2", 0, 0, 1),
        ReadRequest("c1", 1, 0, 1),
        ReadRequest("c1", 0, 1 << 40, 1),
        ReadRequest("c1", 0, MB, 1 << 20),
        ReadRequest("c1", 0, 0, 1, b"", 0, 0, 1),
    ]
    for request in asked:
        wire.send(request)
    for _ in asked:
        assert isinstance(wire.receive(), PeerRefusal)
    wire.send(ReadRequest("c1", 0, 4096, 16))
    answer = wire.receive()
    assert isinstance(answer, Data) and answer.length == 16
    room = memoryview(bytearray(17))
    wire.receive_into(room)
    slot = content("c1", 0, 4096 + sum(-(-len(pack) // 4096) * 4096 for pack in expected("c1", 0, MB)))
    assert bytes(room) == slot[8192:][:16] + b"\1"
    wire.close()


def test_a_new_token_shuts_the_old_one_out(tls: bool) -> None:
    """After ``set_token`` callers with the old token are disconnected and refused. An invalid token is refused."""
    peers = PeerService("127.0.0.1", token=TOKEN, memory=None, notify=lambda *_: None, tls=tls)
    wire = call(peers.address, TOKEN, 10.0)
    new = secrets.token_bytes(32)
    peers.set_token(new)
    assert until_closed(wire._socket, 10.0) == b""
    wire.close()
    with pytest.raises(PeerLost):
        call(peers.address, TOKEN, 10.0)
    call(peers.address, new, 10.0).close()
    for bad in (b"", b"x" * 31, "x" * 32):
        with pytest.raises(ConfigError):
            peers.set_token(bad)  # type: ignore[arg-type]
    peers.close()
    with pytest.raises(PeerLost):
        call(peers.address, new, 10.0)

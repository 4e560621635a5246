"""Processes that can write to the rendezvous execute no code and redirect no rank."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous import registry as torch_registry

from relight.comm.children import child_command
from relight.errors import ConfigError, InternalError
from relight.supervise.job_secret import VARIABLE, Seal, job_secret
from relight.supervise.rendezvous import Forged, Meetings, OneNode, SealedStore, loopback_store
from relight.supervise.rendezvous_port import OWN_STORE
from relight.supervise.rendezvous_thread import Joining

SECRET = bytes(range(32))


class Attack:
    """A pickle that runs an attacker's code when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def head() -> TCPStore:
    """Make a rendezvous store, in which any process may write."""
    return loopback_store()


def parameters(head: TCPStore, least: int = 1) -> RendezvousParameters:
    """Return the parameters of a job that meets at ``head``: two nodes, or ``least`` after a second."""
    where = f"127.0.0.1:{head.port}"
    return RendezvousParameters(
        "c10d", where, "job", least, 2, local_addr="127.0.0.1", is_host=False, last_call_timeout=1, read_timeout=5
    )


def put_state(head: TCPStore, state: bytes) -> None:
    """Write a state as an attacker does, with a client of the same store."""
    client = TCPStore("127.0.0.1", head.port, None, False, timeout=timedelta(seconds=5), wait_for_workers=False)
    client.set("torch.rendezvous.job", base64.b64encode(state).decode())


def test_torchs_own_rendezvous_executes_the_pickle(head: TCPStore, tmp_path: Path) -> None:
    """The attack works against torch's own handler: its next poll loads the pickle."""
    handler = torch_registry.get_rendezvous_handler(parameters(head))
    put_state(head, pickle.dumps(Attack(tmp_path / "mark")))
    with pytest.raises(AttributeError):
        handler.num_nodes_waiting()
    assert (tmp_path / "mark").exists()


def test_a_pickle_in_the_rendezvous_is_not_executed(
    head: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training nodes continue and log why no other node can join. A starting node ends with the reason."""
    monkeypatch.setenv(OWN_STORE, "1")
    meetings = Meetings(parameters(head), SECRET)
    joining = Joining(meetings.handler, 0.0, meetings.seen)
    assert joining.next_rendezvous().world_size == 1
    put_state(head, pickle.dumps(Attack(tmp_path / "mark")))
    time.sleep(1.1)  # torch keeps a state for a second
    assert joining.num_nodes_waiting() == 0
    with pytest.raises(Forged, match="not written with this job's secret"):
        joining.next_rendezvous()
    with pytest.raises(Forged, match=VARIABLE):
        Meetings(parameters(head), SECRET).handler()
    assert not (tmp_path / "mark").exists()
    joining._inner._stop_heartbeats()  # type: ignore[attr-defined]


@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "none"])
def test_two_nodes_meet(head: TCPStore, monkeypatch: pytest.MonkeyPatch, secret: bytes) -> None:
    """With and without a secret two nodes exchange the state with every field."""
    monkeypatch.setenv(OWN_STORE, "1")
    monkeypatch.setattr(dynamic_rendezvous, "pickle", None)
    infos: dict[int, RendezvousInfo] = {}

    def join() -> None:
        meetings = Meetings(parameters(head, 2), secret)
        handler = meetings.handler()
        info = meetings.seen(handler.next_rendezvous())
        infos[info.rank] = info
        info.store.set(f"told/{info.rank}", "{}")
        assert info.store.multi_get(["told/0", "told/1"]) == [b"{}", b"{}"]
        handler._stop_heartbeats()  # type: ignore[attr-defined]

    nodes = [threading.Thread(target=join) for _ in range(2)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(30)
    assert sorted(infos) == [0, 1]
    addresses = [info.bootstrap_store_info for info in infos.values()]
    assert (
        addresses[0] is not None
        and addresses[1] is not None
        and addresses[0].master_port == addresses[1].master_port
        and addresses[0].master_addr == "127.0.0.1"
    )


def test_a_node_with_another_secret_ends_at_once(head: TCPStore) -> None:
    """A node with another secret does not wait for the other nodes."""
    handler = Meetings(parameters(head), SECRET).handler()
    handler.set_closed()  # type: ignore[no-untyped-call]
    for other in (SECRET[::-1], b""):
        with pytest.raises(Forged, match="the state in the rendezvous"):
            Meetings(parameters(head), other).handler()
    assert Meetings(parameters(head), SECRET).handler().is_closed()


def test_an_earlier_state_that_is_put_back_is_noticed(head: TCPStore) -> None:
    """An earlier state has a valid seal, but an old version."""
    handler = Meetings(parameters(head), SECRET).handler()
    states = []
    for number in (1, 2):
        holder: Any = handler._state_holder  # type: ignore[attr-defined]
        holder.state.round = number
        holder.mark_dirty()
        assert holder.sync() is True
        states.append(base64.b64decode(head.get("torch.rendezvous.job")))
    put_state(head, states[0])
    holder._last_sync_time = -1
    with pytest.raises(Forged, match="an earlier state"):
        holder.sync()


def test_values_that_nodes_exchange_are_bound_to_job_round_and_name() -> None:
    """An address that an attacker writes or copies from another key redirects no rank."""
    raw: Any = HashStore()
    store = SealedStore(PrefixStore("job", raw), Seal(SECRET, "job"), "round 3")
    store.set("relight/port", "29000 10.0.0.1")
    assert store.get("relight/port") == b"29000 10.0.0.1"
    sealed = raw.get("job/relight/port")
    raw.set("job/relight/other", sealed)
    raw.set("job/relight/forged", b"29000 6.6.6.6")
    for key in ("relight/other", "relight/forged"):
        with pytest.raises(Forged):
            store.get(key)
    for other in (
        SealedStore(PrefixStore("job", raw), Seal(SECRET, "job"), "round 4"),
        SealedStore(PrefixStore("job", raw), Seal(SECRET, "b"), "round 3"),
    ):
        with pytest.raises(Forged):
            other.multi_get(["relight/port"])


def test_the_address_of_rank_0_is_taken_from_its_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes ``MASTER_ADDR`` without a seal, so its value is not used."""
    monkeypatch.setenv(OWN_STORE, "1")
    made = RendezvousParameters("c10d", "127.0.0.1:1", "job", 1, 2, local_addr="10.0.0.1")
    own = (
        Meetings(made, SECRET)
        .seen(RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("6.6.6.6", 666)))
        .bootstrap_store_info
    )
    assert own is not None and own.master_addr == "10.0.0.1" and own.master_port != 666


def test_several_nodes_need_a_secret_or_the_word_none(tmp_path: Path) -> None:
    """The error has a hint. A variable with the secret itself is removed from the ranks' environment."""
    assert job_secret(1, {}) == b"" and job_secret(2, {VARIABLE: "none"}) == b""
    for wrong in ({}, {VARIABLE: "hunter2"}, {VARIABLE: "env:MISSING"}):
        with pytest.raises(ConfigError) as error:
            job_secret(2, dict(wrong))
        assert "hunter2" not in str(error.value)
    file = tmp_path / "secret"
    file.write_text(SECRET.hex())
    file.chmod(0o600)
    assert job_secret(2, {VARIABLE: f"file:{file}"}) == SECRET
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read"):
        job_secret(2, {VARIABLE: f"file:{file}"})


def listening(pid: int) -> Iterator[str]:
    """Yield the addresses that a process listens at, in the kernel's notation."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(path))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                yield words[1].partition(":")[0]


def test_one_node_meets_in_memory_and_its_ranks_at_the_loopback_address() -> None:
    """On one node no other process takes part.

    Each incarnation has its own store, at the user's port if there is one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    before = list(listening(os.getpid()))
    for given in (0, free):
        made = RendezvousParameters("static" if given else "c10d", f"anywhere:{given}", "job", 1, 1, rank=0)
        meetings = Meetings(made, b"")
        handler = meetings.handler()
        assert isinstance(handler, OneNode) and handler.use_agent_store and handler.num_nodes_waiting() == 0
        first = meetings.seen(handler.next_rendezvous())
        first.store.set("a", "1")
        second = meetings.seen(handler.next_rendezvous())
        assert not second.store.check(["a"]) and second.world_size == 1
        address = second.bootstrap_store_info
        assert (
            address is not None
            and address.master_addr == "127.0.0.1"
            and address.master_port == (given or address.master_port)
        )
        assert sorted(listening(os.getpid())) == sorted([*before, "0100007F"])
        assert handler.shutdown() and handler.is_closed()


def test_a_port_that_is_taken_is_named() -> None:
    """If another process listens at the port first, the job ends with the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1: Address already in use"):
            OneNode("job", port).next_rendezvous()


def test_a_back_end_of_another_package_gets_the_codec_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement works for any backend of torch's dynamic handler.

    A torch version that pickles elsewhere is refused.
    """
    made = RendezvousParameters("theirs", "", "job", 1, 2)

    def theirs(parameters: RendezvousParameters) -> Any:
        backend: Any = SimpleNamespace(name="theirs", get_state=lambda: (pickle.dumps(1), b""))
        return dynamic_rendezvous.create_handler(HashStore(), backend, parameters)

    monkeypatch.setattr(torch_registry, "get_rendezvous_handler", theirs)
    with pytest.raises(Forged):
        Meetings(made, SECRET).handler()
    monkeypatch.setattr(torch_registry, "get_rendezvous_handler", lambda parameters: SimpleNamespace())
    with pytest.raises(InternalError):
        Meetings(RendezvousParameters("c10d", "", "job", 1, 2), SECRET).handler()


SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[2])
from tests.supervise.test_rendezvous_attacked import listening
import torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
store.add("met", 1)
dist.barrier()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        print(*listening(os.getppid()), file=file)
        print(os.environ["MASTER_ADDR"], int(store.add("met", 0)), file=file)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_a_job_of_one_node_opens_no_port_to_others(tmp_path: Path) -> None:
    """``relight run`` with two ranks that form a group: its one socket listens at 127.0.0.1.

    Nothing in the working directory is executed.
    """
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("torch", "json", "relight", "typing", "numpy"):
        (trap / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write(__name__)\n")
    (trap / "relight.toml").write_text("[supervise]\nspares = false\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = (
        "--nproc-per-node",
        "2",
        str(tmp_path / "train.py"),
        str(tmp_path / "found"),
        str(Path(__file__).parents[2]),
    )
    done = subprocess.run(
        child_command("relight", "run", *arguments), cwd=trap, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "found").read_text().splitlines() == ["0100007F", "127.0.0.1 2"] and not (
        tmp_path / "mark"
    ).exists()

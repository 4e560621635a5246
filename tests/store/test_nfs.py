"""Runs on NFS: two client machines with their own kernels and caches, and a server that is killed.

``make nfs``; each test prints its results.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.nfs_lab import GRACE_S, Lab, Machine, Wire, lab, missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "all there"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def nfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server and two client machines that have mounted its export at ``/mnt/x``."""
    with lab(tmp_path_factory.mktemp("nfs")) as made:
        for _ in range(2):
            made.machine().mount("x")
        yield made


@pytest.fixture
def store(nfs: Lab, request: pytest.FixtureRequest) -> str:
    """The name of a new directory below the export."""
    return re.sub(r"\W+", "-", request.node.name)


SAVES = 150
"""As many as take longer than the server stays up."""


def report(what: str) -> None:
    """Print a line for the user of the test."""
    print(f"\n  {what}", end="", flush=True)


@pytest.mark.parametrize(("version", "buffered"), [("4.2", False), ("4.2", True), ("4.1", False), ("4.0", True)])
def test_the_shipped_suite(nfs: Lab, version: str, buffered: bool) -> None:
    """Every guarantee of a store holds on a mount of each version, by the shipped suite."""
    machine = nfs.machines[0]
    path = machine.mount(f"v{version}", f"vers={version},hard")
    suite = f"tests/store/test_store_conformance.py::TestLocal{'Buffered' if buffered else ''}"
    lines = machine.run(
        sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--basetemp={path}/suite", suite
    )
    report(f"NFS {version}{', through the page cache' if buffered else ''}: {lines[-1].strip('= ')}")
    passed = re.search(r"(\d+) passed", lines[-1])
    assert passed and int(passed[1]) >= 20 and "skipped" not in lines[-1]


def test_one_winner_among_machines(nfs: Lab, store: str) -> None:
    """Two machines create a name at the same moment: exactly one gets True, and both then read its bytes. 500 names."""
    jobs = [machine.job("race", f"/mnt/x/{store}", me) for me, machine in enumerate(nfs.machines)]
    assert [job.receive() for job in jobs] == [["ready"]] * 2
    wins, refused = Counter[int](), 0
    for n in range(500):
        for job in jobs:
            job.send(f"{n}")
        answers = [job.receive() for job in jobs]
        won = [me for me, (_, outcome, *_) in enumerate(answers) if outcome is True]
        assert len(won) == 1 and answers[1 - won[0]][1] is False, answers
        wins[won[0]] += 1
        refused += sum(tries for _, _, tries, *_ in answers)
        assert {contents for *_, contents in answers} == {answers[won[0]][3]}, answers
    assert [job.end() for job in jobs] == [0, 0]
    report(f"500 names, won {wins[0]} : {wins[1]}; the server failed {refused} times")
    assert min(wins.values()) >= 25, "that was no race"


def test_saved_here_restored_there_at_once(nfs: Lab, store: str) -> None:
    """A checkpoint that one machine committed restores at once on another that read a moment ago, whatever its caches hold."""
    a, b = nfs.machines
    saver = a.job("saves", f"/mnt/x/{store}", "large", 0)
    assert saver.receive()[0] == "begun" and saver.receive() == ["ready"]
    restorer = b.job("restores", f"/mnt/x/{store}")
    assert restorer.receive() == ["ready"] and restorer.ask() == ["none"]
    late = []
    for _ in range(25):
        saving, saved = saver.ask(), saver.receive()
        assert (saving[0], saved[0]) == ("saving", "saved")
        began = time.monotonic()
        assert restorer.ask() == ["restored", *saved[1:]]
        late.append(time.monotonic() - began)
    assert [saver.end(), restorer.end()] == [0, 0]
    report(f"25 saves, each restored on the other machine within {max(late):.2f} s")


def test_what_was_not_there_a_moment_ago_is_there(nfs: Lab, store: str) -> None:
    """A name that a client has cached as absent is requested again before it counts as absent.

    The client's own cache lasts half a minute.
    """
    a, b = (machine.job("hold", f"/mnt/x/{store}") for machine in nfs.machines)
    assert [a.receive(), b.receive()] == [["ready"]] * 2
    a.ask("put", "dir/first")
    wrong_by_itself = 0
    for n in range(20):
        for _ in range(2):
            assert b.ask("there", f"dir/{n}")[0] is False
        a.ask("put", f"dir/{n}")
        by_itself, by_us = b.ask("there", f"dir/{n}")
        wrong_by_itself += not by_itself
        assert by_us == "x"
    for n in range(10):  # directories too, and not even their parent is visible
        assert b.ask("there", f"new{n}/deep/er/file")[0] is False
        a.ask("put", f"new{n}/deep/er/file")
        by_itself, by_us = b.ask("there", f"new{n}/deep/er/file")
        wrong_by_itself += not by_itself
        assert by_us == "x"
    assert [a.end(), b.end()] == [0, 0]
    report(
        f"30 names were asked for, made elsewhere, and asked for again: {wrong_by_itself} were absent for the kernel by itself, none for Relight"
    )
    assert wrong_by_itself, "no cache was in the way: nothing was shown"


def test_two_attempts_on_two_machines(nfs: Lab, store: str) -> None:
    """An attempt that begins on one machine fences the one that runs on the other.

    Its next save fails, and it never commits again.
    """
    facts = []
    saver = nfs.machines[0].job("saves", f"/mnt/x/{store}", "first", 0)
    facts += [saver.receive()]
    assert saver.receive() == ["ready"]
    for turn in range(1, 9):
        facts += [saver.ask(), saver.receive()]
        assert facts[-1][0] == "saved"
        other = nfs.machines[turn % 2].job("saves", f"/mnt/x/{store}", f"turn{turn}", 0)
        facts += [other.receive()]
        assert other.receive() == ["ready"]
        facts += [saver.ask()]
        assert saver.receive() == ["fenced"], "an attempt that was superseded has committed"
        assert saver.end() == 0
        saver = other
    assert saver.end() == 0
    assert _check(nfs, store, facts) == []
    report("8 times an attempt on one machine superseded the other's, and the other's next save was refused")


def _check(nfs: Lab, store: str, facts: list[list[str]], machine: Machine | None = None) -> list[str]:
    """Return what is wrong with the run, given its facts."""
    path = nfs.server.folder / f"{store}.facts"
    path.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    job = (machine or nfs.machines[1]).job("check", f"/mnt/x/{store}", path)
    wrong = job.receive()
    job.end()
    return wrong


def test_deleting_what_another_machine_reads(nfs: Lab, store: str) -> None:
    """Retention on one machine while two others restore: each gets whole checkpoints, or an error that names what vanished. Nothing is left over."""
    a, b = nfs.machines
    churn = a.job("churn", f"/mnt/x/{store}", 25)
    assert churn.receive() == ["ready"]
    time.sleep(1)
    restorers = [machine.job("look", f"/mnt/x/{store}", 22) for machine in (a, b)]
    assert [restorer.receive() for restorer in restorers] == [["ready"]] * 2
    results = [restorer.receive()[1] for restorer in restorers]
    done = churn.receive()[1]
    assert [process.end() for process in (churn, *restorers)] == [0, 0, 0]
    report(f"saved {done['saved']}, meanwhile restored: {results}")
    for result in results:
        assert result.get("restored", 0) > 5
        assert not result.get("wrong") and not result.get("odd names")
        assert {kind.split(":")[0] for kind in result} <= {"restored", "none", "corrupt", "not_found", "store"}
    assert _check(nfs, store, [["saving", f"churn/{n}/large"] for n in range(1, done["saved"] + 1)]) == []


def test_files_deleted_while_they_are_open(nfs: Lab, store: str) -> None:
    """Files that NFS renames out of the way are in no listing.

    Their directory stays until the file is closed, which is reported, and is deleted then.
    """
    path = f"/mnt/x/{store}"
    (job,) = (nfs.machines[0].job("hold", path),)
    assert job.receive() == ["ready"]
    job.ask("put", "dir/file")
    reader = nfs.machines[0].start(
        "python3", "-c", f"import os; fd = os.open('{path}/dir/file', 0); print('open', flush=True); input()"
    )
    reader.until("open")
    job.ask("delete", "dir/file")
    kernels, ours = job.ask("list", "dir")
    assert len(kernels) == 1 and kernels[0].startswith(".nfs") and ours == []
    assert job.ask("delete_dir", "dir") == [False]
    reader.send()
    reader.end()
    assert job.ask("delete_dir", "dir") == [True]
    assert job.end() == 0
    report(f"{kernels[0]} was in no listing of ours; its directory went when it was closed")


@pytest.mark.parametrize("version", ["4.2", "4.0"])
def test_reply_to_a_creation_is_lost(nfs: Lab, store: str, version: str) -> None:
    """If the server dies between creating a name and its reply, the creator gets True and the others False."""
    wire = Wire(nfs.network)
    machine = nfs.machines[0]
    path = machine.mount(f"wire{version}", f"vers={version},hard", port=wire.port)
    outcomes = []
    try:
        for n, taken in enumerate((False, True, False)):
            if taken:
                other = nfs.machines[1].job("race", f"/mnt/x/{store}", "other")
                other.receive()
                assert other.ask(f"name{n}")[1] is True, "the name is free"
                other.end()
            job = machine.job("race", f"{path}/{store}", "mine")
            assert job.receive() == ["ready"]
            wire.catch(f"name{n}")
            job.send(f"name{n}")
            assert taken or wire.caught.wait(20), "no creation was seen on the wire"
            wire.caught.wait(1)
            time.sleep(0.3)
            nfs.server.kill()
            wire.release()
            nfs.server.start()
            _, outcome, _, mine, contents = job.receive()
            outcomes.append(outcome)
            assert outcome is not taken, f"answered {outcome} for a name that was {'taken' if taken else 'free'}"
            assert (mine == contents) is outcome
            assert job.end() == 0
    finally:
        wire.close()
        machine.unmount(f"wire{version}")
    report(f"NFS {version}: {outcomes}")


OUTAGES = 5
"""No more of them in a test: a client waits longer each time before it connects again, and would never meet a server that is hardly ever there."""


def _outages(
    nfs: Lab, stop: threading.Event, down_s: Callable[[], float], up_s: Callable[[], float]
) -> threading.Thread:
    def go() -> None:
        for _ in range(OUTAGES):
            if stop.wait(up_s()):
                return
            nfs.server.kill()
            stop.wait(down_s())
            nfs.server.start()

    thread = threading.Thread(target=go)
    thread.start()
    return thread


def test_server_is_killed_again_and_again(nfs: Lab, store: str) -> None:
    """On hard mounts a server that is killed and comes back costs time and nothing else: no save fails, no restore, none is lost."""
    a, b = nfs.machines
    rng, stop = random.Random(5), threading.Event()
    started = nfs.server.starts
    facts: list[list[str]] = []
    saver = a.job("saves", f"/mnt/x/{store}", "large", SAVES)
    facts.append(saver.receive())
    restorer = b.job("restores", f"/mnt/x/{store}")
    assert restorer.receive() == ["ready"]
    outages = _outages(nfs, stop, lambda: rng.random() * 2, lambda: GRACE_S + rng.random() * 4)
    try:
        restored = []

        def restore() -> None:
            while not stop.is_set():
                restored.append(restorer.ask())

        thread = threading.Thread(target=restore)
        thread.start()
        while saver.code is None:
            line = saver.line()
            if line:
                facts.append(json.loads(line))
    finally:
        stop.set()
        outages.join()
    thread.join()
    assert (saver.code, restorer.end()) == (0, 0)
    assert Counter(fact[0] for fact in facts) == {"begun": 1, "saving": SAVES, "saved": SAVES}
    assert {outcome[0] for outcome in restored} <= {"none", "restored"} and len(restored) > 5
    assert _check(nfs, store, facts) == []
    assert nfs.server.starts - started >= 2, "it was over before the server was killed"
    report(
        f"{SAVES} saves and {len(restored)} restores while the server was killed {nfs.server.starts - started} times"
    )


def test_many_creations_while_the_server_is_killed(nfs: Lab, store: str) -> None:
    """Two machines create the same names in turn while the server is killed: no name has two winners, and each winner's bytes are there."""
    rng, stop = random.Random(6), threading.Event()
    started, count = nfs.server.starts, 3000
    jobs = [machine.job("many", f"/mnt/x/{store}", me, count) for me, machine in enumerate(nfs.machines)]
    outages = _outages(nfs, stop, rng.random, lambda: GRACE_S + 2 + rng.random() * 3)
    try:
        answers = [job.rest() for job in jobs]
    finally:
        stop.set()
        outages.join()
    assert [job.code for job in jobs] == [0, 0], answers
    reader = nfs.machines[0].job("read_all", f"/mnt/x/{store}", "many")
    (contents,) = reader.receive()
    reader.end()
    outcomes = Counter[str]()
    for ours, theirs in zip(*answers):
        (n, first, mine), (_, second, others) = json.loads(ours), json.loads(theirs)
        outcomes[f"{first}/{second}"] += 1
        assert [first, second].count("True") == 1, (ours, theirs)
        assert contents[str(n)] == (mine if first == "True" else others), (ours, theirs)
    assert not any(name.startswith(".tmp") for name in contents)
    report(f"{count} names while the server was killed {nfs.server.starts - started} times: {dict(outcomes)}")


def test_soft_mounts_give_errors_of_ours(nfs: Lab, store: str) -> None:
    """A server that is silent for a while is an error of ours or a pause. Acknowledged saves exist, and doubt is
    reported as such."""
    machine = nfs.machines[0]
    path = machine.mount("soft", "vers=4.2,soft,timeo=10,retrans=1")
    saver = machine.job("saves", f"{path}/{store}", "soft", 0)
    facts = [saver.receive()]
    assert saver.receive() == ["ready"]
    failed, slowest = Counter[str](), 0.0
    rng = random.Random(3)
    for turn in range(8):
        if turn % 2:
            quiet = threading.Timer(rng.random() * 0.15, nfs.server.signal, (signal.SIGSTOP,))
            # some calls of NFSv4 wait for it, soft mount or not
            back = threading.Timer(12, nfs.server.signal, (signal.SIGCONT,))
            quiet.start()
            back.start()
        began = time.monotonic()
        outcome = ["saving"]
        while outcome[0] == "saving":
            outcome = saver.ask() if outcome == ["saving"] else saver.receive()
            facts.append(outcome)
        slowest = max(slowest, time.monotonic() - began)
        if outcome[0] == "failed":
            failed[f"{outcome[1]}: {outcome[2]}"] += 1
        if turn % 2:
            quiet.join()
            back.join()
    assert saver.end() == 0
    assert {kind.split(":")[0] for kind in failed} <= {"store", "uncertain"}
    assert [fact[0] for fact in facts].count("saved") >= 4, "the saves between the silences"
    assert _check(nfs, store, [fact for fact in facts if fact[0] != "failed"]) == []
    machine.unmount("soft")
    report(f"{Counter(f[0] for f in facts)}, the slowest after {slowest:.1f} s: {dict(failed)}")


@pytest.mark.parametrize(
    ("call", "n"), [("link", 3), ("unlink", 3), ("open_dir", 5), ("fsync", 7), ("link", 5), ("open_dir", 7)]
)
def test_client_process_is_killed(nfs: Lab, store: str, call: str, n: int) -> None:
    """SIGKILL of a saver before, at and after its commit, also between link and fsync: the other machine finds the run whole and resumes it."""
    job = nfs.machines[0].job("dying", f"/mnt/x/{store}", "dying", call, n)
    facts = [json.loads(line) for line in job.rest() if line.startswith("[")]
    assert job.code == -signal.SIGKILL
    assert _check(nfs, store, facts) == []
    report(f"killed before {call} {n}, after {[fact[0] for fact in facts]}")


def test_client_machine_loses_its_power(nfs: Lab, store: str, tmp_path: Path) -> None:
    """A client machine that dies in the middle of saves loses nothing that it acknowledged: its kernel's memory is not where checkpoints are."""
    saved = 0
    for turn in range(3):
        machine = nfs.machine()
        machine.mount("x")
        job = machine.job("saves", f"/mnt/x/{store}{turn}", "large", 100)
        facts: list[list[str]] = []
        while sum(fact[0] == "saved" for fact in facts) < 4 + turn:
            facts.append(job.receive())
        time.sleep(0.05 * turn)
        machine.kill()
        nfs.machines.remove(machine)
        begun = sum(fact[0] == "saving" for fact in facts)
        saved += sum(fact[0] == "saved" for fact in facts)
        # what it may have reported without our receiving it
        facts += [["saving", f"large/{begun + more}/large"] for more in range(1, 4)]
        assert _check(nfs, f"{store}{turn}", facts) == []
    report(f"3 machines died; all {saved} checkpoints that they had acknowledged are there")


def test_wire_is_cut(nfs: Lab, store: str) -> None:
    """A machine that is cut off and superseded meanwhile cannot commit when it is back. Its earlier saves are not
    lost."""
    a, b = nfs.machines
    saver = a.job("saves", f"/mnt/x/{store}", "cut", 0)
    facts = [saver.receive()]
    assert saver.receive() == ["ready"]
    facts += [saver.ask(), saver.receive()]
    nfs.network.switch(a.link, False)
    try:
        other = b.job("saves", f"/mnt/x/{store}", "other", 2)
        facts += [json.loads(line) for line in other.rest() if line.startswith("[")]
        assert other.code == 0 and [fact[0] for fact in facts].count("saved") == 3
    finally:
        nfs.network.switch(a.link, True)
    facts += [saver.ask()]
    assert saver.receive() == ["fenced"]
    assert saver.end() == 0
    assert _check(nfs, store, facts) == []
    report("cut off, superseded, and refused when it was back")

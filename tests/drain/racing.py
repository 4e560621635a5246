"""Many processes on one run of two tiers, killed at random, with wrong clocks. ``make racing``; a short race is in the suite.

The processes save (superseding each other), restore, tag, drain, prune, sweep and verify without a pause. Each is killed
and restarted again and again, with a clock that is wrong by up to years. These must hold at all times: every listed
checkpoint restores bit-exactly, in both tiers. No acknowledged checkpoint is missing unless retention retired it. Each
tier has what its log lists and, after a last sweep, nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import relight.log.identity as identity
from relight.catalog.run import Run
from relight.catalog.tiers import announce
from relight.commit import Attempt
from relight.commit.attempt import take_over
from relight.drain import drain
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError
from relight.log import Log, fold
from relight.policy import Tiers, keep, tier
from relight.reader.verify import verify_checkpoint
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep
from relight.store import ByteStore, open_bytes
from relight.testing.scenario import RUN, KnownFacts, check_history, examine, leftovers, read_state, save, state_of

ROLES = ("save", "save", "save", "restore", "restore far", "tag", "drain", "drain", "prune", "sweep", "verify")


def tiers_at(near: str, far: str) -> Tiers:
    return Tiers(near=f"{near}/{RUN}", far=tier(f"{far}/{RUN}", keep=keep(last=4, every=5)))


class Worker:
    """A process with one role. It writes facts to its own file, one JSON list a line, before and after each action."""

    def __init__(self, role: str, near: str, far: str, facts_file_path: Path, seed: int) -> None:
        self._role, self._near, self._far = role, open_bytes(near), open_bytes(far)
        self._tiers, self._facts_out, self._rng = tiers_at(near, far), open(facts_file_path, "a"), random.Random(seed)
        self._seed, self._turn, self._attempt = seed, 0, None

    def record(self, *fact: str) -> None:
        self._facts_out.write(json.dumps(fact) + "\n")
        self._facts_out.flush()

    def run(self) -> None:
        """Repeat the action for ever."""
        act = getattr(self, f"_{self._role.replace(' ', '_')}")
        while True:
            self._turn += 1
            try:
                act()
            except RelightError as error:
                self.record("error", self._role, type(error).__name__, str(error)[:200])
                self._attempt = None if self._role == "save" else self._attempt
            except Exception as error:
                self.record("wrong", f"{self._role}: {type(error).__name__}: {error}")
                raise
            time.sleep(self._rng.random() * 0.05)

    def _save(self) -> None:
        if self._attempt is None or self._rng.random() < 0.05:
            self._attempt = Attempt.begin(self._near, RUN, reason="race")
        step = self._attempt.history().live
        for fact in save(self._attempt, f"{self._seed}/{self._turn}", step[-1].step + 1 if step else 0):
            self.record(*fact)

    def _check_restore(self, store: ByteStore) -> None:
        log = Log(store, RUN)
        view = log.read()
        live = fold(view).live
        if not live:
            return
        checkpoint = self._rng.choice((live[-1], self._rng.choice(live)))
        try:
            key, state = read_state(store, view, checkpoint)
        except (CheckpointNotFound, CorruptCheckpoint) as error:
            if fold(log.read()).find(checkpoint.id) is not None:
                self.record("wrong", f"live checkpoint {checkpoint.id} does not restore: {error}")
            return
        if state != state_of(key):
            self.record("wrong", f"checkpoint {checkpoint.id} restores as something else")

    def _restore(self) -> None:
        self._check_restore(self._near)

    def _restore_far(self) -> None:
        with contextlib.suppress(CheckpointNotFound):
            self._check_restore(self._far)

    def _tag(self) -> None:
        run = Run(self._near, RUN)
        live = run.history().live
        if live:
            run.tag(f"t{self._rng.randrange(3)}", self._rng.choice(live).id)

    def _drain(self) -> None:
        drain(self._near, RUN)

    def _prune(self) -> None:
        plan = plan_prune(self._near, RUN, keep(last=self._rng.randrange(1, 5), every=7), verified={})
        self.record("retiring", *plan.going)
        execute(plan, self._near)

    def _sweep(self) -> None:
        for store in (self._near, self._far):
            with contextlib.suppress(CheckpointNotFound):
                execute_sweep(plan_sweep(store, RUN), store)

    def _verify(self) -> None:
        view = Log(self._near, RUN).read()
        live = fold(view).live
        if live:
            checkpoint = self._rng.choice(live)
            findings = verify_checkpoint(self._near, view, checkpoint)
            if findings and fold(Log(self._near, RUN).read()).find(checkpoint.id) is not None:
                self.record("wrong", f"live checkpoint {checkpoint.id} does not verify: {findings[0].detail}")


def off_by(days: float) -> None:
    """Shift the clock with which this process dates records by ``days``."""

    class Skewed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(days=days)

    identity.datetime = Skewed  # type: ignore[misc]


def race(near: str, far: str, folder: Path, *, seconds: float, seed: int) -> dict[str, Any]:
    """Run the race. Return violations and counts."""
    rng = random.Random(f"race {seed}")
    attempt = Attempt.begin(open_bytes(near), RUN)
    announce(attempt.place.log, tiers_at(near, far).tiers, attempt.epoch)
    children: dict[int, subprocess.Popen[bytes]] = {}
    started, kills, lives = time.monotonic(), 0, 0
    while time.monotonic() - started < seconds:
        for number, role in enumerate(ROLES):
            child = children.get(number)
            if child is None or child.poll() is not None:
                lives += 1
                facts_file = folder / f"{number}-{lives}.jsonl"
                command = [
                    sys.executable,
                    str(Path(__file__).resolve()),
                    "worker",
                    role,
                    near,
                    far,
                    str(facts_file),
                    str(rng.getrandbits(30)),
                    str(rng.uniform(-900, 900)),
                ]
                children[number] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.1, 0.8))
        victim = children[rng.randrange(len(ROLES))]
        if victim.poll() is None and time.monotonic() - started > 3:
            victim.send_signal(rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
            kills += 1
            for stopped in [child for child in children.values() if rng.random() < 0.3]:
                stopped.send_signal(signal.SIGCONT)
    for child in children.values():
        child.kill()
        child.wait()
    facts = [
        tuple(json.loads(line))
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
        if line.endswith("]")
    ]
    errors = sorted({f"{fact[1]}: {fact[2]}" for fact in facts if fact[0] == "error"})
    wrong = [str(fact[1]) for fact in facts if fact[0] == "wrong"] + settle(
        near, far, [fact for fact in facts if fact[0] not in ("error", "wrong")]
    )
    history = fold(Log(open_bytes(near), RUN).read())
    return {
        "wrong": wrong, "kills": kills, "lives": lives, "saved": sum(fact[0] == "saved" for fact in facts), "attempts": history.epoch,
        "retired": len(history.retired), "drained": len(fold(Log(open_bytes(far), RUN).read()).committed_ids), "errors": errors,
    }  # fmt: skip


def settle(near: str, far: str, facts: list[tuple[str, ...]]) -> list[str]:
    """Let a last attempt take over both tiers, drain and sweep. Return violations."""
    store, other = open_bytes(near), open_bytes(far)
    wrong = [problem for problem in check_history(Log(store, RUN), facts) if "tag" not in problem]
    attempt = Attempt.begin(store, RUN)
    execute_sweep(plan_sweep(store, RUN), store)
    report = drain(store, RUN)
    wrong += [f"draining failed: {error}" for error in report.errors.values()]
    name = attempt.history().fences[-1].body.attempt  # type: ignore[union-attr]
    take_over(Log(other, RUN), name)
    execute_sweep(plan_sweep(other, RUN), other)
    saving = [("saving", key) for key in KnownFacts.from_facts(facts).saving]
    for place, known in ((store, facts), (other, saving)):
        log = Log(place, RUN)
        wrong += [problem for problem in examine(place, log, known) if "tag" not in problem] + leftovers(place, log)
    newest = fold(Log(store, RUN).read()).live[-1:]
    if newest and newest[0].id not in {
        checkpoint.body.origin or checkpoint.id for checkpoint in fold(Log(other, RUN).read()).live
    }:
        wrong.append("the newest checkpoint is not in the further tier")
    return wrong


def main() -> None:
    """Run a race, or one of its workers."""
    if sys.argv[1:2] == ["worker"]:
        role, near, far, facts_file_path, seed, days = sys.argv[2:]
        off_by(float(days))
        Worker(role, near, far, Path(facts_file_path), int(seed)).run()
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "facts").mkdir()
        result = race(
            f"{place}/near", f"{place}/far", Path(place) / "facts", seconds=options.seconds, seed=options.seed
        )
    print(json.dumps(result, indent=1))
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()

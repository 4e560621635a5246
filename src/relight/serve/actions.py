"""What can be done from a page or the API: each the very calls that the command of that name makes. Planned, shown, then executed.

Executing writes the audit log before and after; where it cannot be written, nothing is done.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relight.audit import AuditLog
from relight.audit.effects import ACTIONS as EFFECTS_OF
from relight.audit.facts import ActionFacts
from relight.catalog.branches import check_free
from relight.catalog.holds import hold, holds_of, release
from relight.catalog.run import Run
from relight.catalog.save_requests import LOOK_S, WHO_MAX, ask_for_save
from relight.errors import CheckpointNotFound, ConfigError, Fenced, RelightError
from relight.format.names import check_run_name
from relight.log import Checkpoint
from relight.log.identity import seconds_since_epoch
from relight.observe import emit
from relight.policy import keep
from relight.policy.best_by import is_best
from relight.reclaim import PrunePlan, execute, plan_prune
from relight.run_names import dir_of, run_name
from relight.serve.index import Index
from relight.serve.pages_actions import ActionOutcome, Planned
from relight.serve.pages_views import ACTIONS
from relight.serve.scope import Caller, everything, require
from relight.serve.state import TokenFile
from relight.serve.tasks import Tasks
from relight.serve.tasks_work import drill, verify, wait_for
from relight.supervise.goodput import Account
from relight.versions.branching import branch
from relight.versions.stages import STAGES, promote

FIELDS = {
    "tag": ("store", "run", "which", "name"),
    "branch": ("store", "run", "which", "to", "why"),
    "pin": ("store", "run", "which", "why"),
    "verify": ("store", "run", "which"),
    "save": ("store", "run", "why"),
    "drill": ("store", "run"),
    "prune": ("store", "run", "keep_last", "keep_every", "keep_best", "undo_window"),
    "promote": ("store", "run", "which", "stage", "why"),
    "revoke": ("id",),
}
"""What each takes; anything else is refused."""
SAVE_S = 600.0
"""How long a save that was asked for is waited for."""
WATCHED_S = 180.0
"""``relight run`` writes down once a minute where the time went: when that is older, it is likely not there any more."""
RECORDED_S = 60.0
assert FIELDS.keys() == ACTIONS.keys()
Prepared = tuple[Planned, Callable[[], ActionOutcome], ActionFacts]


class Actions:
    """Plans and executes for whoever is asking. ``done`` is called when a store was changed, with its id."""

    def __init__(self, index: Index, state: TokenFile, book: AuditLog, tasks: Tasks, done: Callable[[str], None] = lambda _: None) -> None:
        self._index, self._state, self._book, self._tasks, self._done = index, state, book, tasks, done
        self._recorded: dict[tuple[str, str], float] = {}
        """When a refusal by role was recorded last, by token and action."""

    def plan(self, verb: str, fields: Mapping[str, str], who: Caller) -> Planned:
        """What it would do; changes nothing. A plan that is refused is recorded: it shows what a caller tried."""
        try:
            return self._prepared(verb, fields, who)[0]
        except (ConfigError, CheckpointNotFound) as error:
            self._record(verb, fields, who, f"planned only: {type(error).__name__}: {error}")
            raise

    def refused(self, verb: str, who: Caller, reason: str) -> None:
        """Record that the role of ``who`` did not suffice, once every ``RECORDED_S`` for a token and action. Nothing is raised."""
        verb, now = verb if verb in FIELDS else "another action", time.monotonic()
        if now - self._recorded.get((who.token, verb), -RECORDED_S) >= RECORDED_S:
            self._recorded[who.token, verb] = now
            self._record(verb, {}, who, reason)

    def _record(self, verb: str, fields: Mapping[str, str], who: Caller, reason: str) -> None:
        """Add a refusal to the audit log. A failure of that is an event: nothing was done that would have to be in it."""
        try:
            seq = self._book.begin(who.name, verb, self._on(fields), who.role, token=who.token, facts=_given(verb, fields))
            self._book.end(seq, "refused", reason)
        except (RelightError, OSError) as unwritten:
            emit("audit.failed", f"a refused request to {verb} is not in the audit log: {unwritten}", error=str(unwritten)[:500])

    def execute(self, verb: str, fields: Mapping[str, str], who: Caller, digest: str = "") -> ActionOutcome:
        """Do it. With ``digest``: only if it is still what that plan said, else ``Fenced``."""
        on = self._on(fields)
        if not who.may(ACTIONS.get(verb, "admin")):
            raise ConfigError(f"{verb[:20]!r} takes the role {ACTIONS.get(verb, 'admin')}")
        prepared, refused, facts = None, None, _given(verb, fields)
        try:
            prepared = self._prepared(verb, fields, who)  # changes nothing; the first record has what it found
            found = prepared[2]
            facts = replace(facts, checkpoint=found.checkpoint, before=found.before, after=found.after)
        except (RelightError, OSError) as error:
            refused = error
        seq = self._book.begin(who.name, verb, on, who.role, token=who.token, facts=facts)
        try:
            if prepared is None:
                raise refused or Fenced("the action could not be prepared")
            planned, do, _ = prepared
            if digest and planned.digest != digest:
                raise Fenced("this is not what was shown: something has changed since", hint="look at the plan again")
            done = do()
        except BaseException as error:
            self._book.end(
                seq,
                "refused" if isinstance(error, ConfigError | Fenced | CheckpointNotFound) else "failed",
                f"{type(error).__name__}: {error}",
            )
            raise
        if done.task:
            self._tasks.get(done.task).when_over(lambda ended: self._over(seq, fields, ended))
        else:
            self._over(seq, fields, done)
        return done

    def _over(self, seq: int, fields: Mapping[str, str], done: ActionOutcome) -> None:
        self._book.end(seq, "ok" if done.ok else "failed", done.says)
        self._done(fields.get("store", ""))

    def _on(self, fields: Mapping[str, str]) -> str:
        if "store" not in fields:
            return fields.get("id", "").removeprefix("rl_").partition(".")[0][:80]  # never the token's secret
        which = fields.get("which", "")
        run = dir_of(fields.get("run", ""))  # the name may hold @, which ends the run here
        return f"{fields['store']}/{run}"[:300] + (f"@{which[:80]}" if which else "")

    def _prepared(self, verb: str, fields: Mapping[str, str], who: Caller) -> Prepared:
        if verb not in FIELDS:
            raise ConfigError(f"there is no action {verb[:40]!r}", hint=f"there are {', '.join(FIELDS)}")
        odd = [name for name in fields if name not in FIELDS[verb]]
        if odd:
            raise ConfigError(f"{verb} takes no {odd[0][:40]!r}", hint=f"it takes {', '.join(FIELDS[verb])}")
        if any(not value.isprintable() or len(value) > 400 for value in fields.values()):
            raise ConfigError("a field is at most 400 letters long, all of which can be printed")
        if verb == "revoke":
            require("revoke token", who)
            return self._revoke(fields)
        for effect in EFFECTS_OF[verb]:
            require(effect, who, fields.get("store", ""), fields.get("to" if effect == "create run" else "run", ""))
        planned, do, facts = {
            "tag": self._tag,
            "branch": self._branch,
            "pin": self._pin,
            "verify": self._verify,
            "save": self._save,
            "drill": self._drill,
            "prune": self._prune,
            "promote": self._promote,
        }[verb](fields, who)
        if is_best(fields.get("which", "")):
            chosen = self._index.choose(fields["store"], fields["run"], fields["which"])
            planned = planned._replace(says=f"{planned.says} It is {chosen.explanation}.")
        return planned, do, facts

    def _run(self, fields: Mapping[str, str]) -> Run:
        store, name = fields.get("store", ""), fields.get("run", "")
        self._index.state(store, name)  # what whoever is asking may not see is not there
        return Run(self._index.reader(store).store, name)

    def _one(self, fields: Mapping[str, str]) -> tuple[Run, Checkpoint]:
        run = self._run(fields)
        return run, self._index.find(fields["store"], fields["run"], fields.get("which", "") or "latest")

    def _tag(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, one = self._one(fields)
        name = check_free(fields.get("name", ""))
        before = run.history().tags.get(name)
        says = f"The tag {name} will name checkpoint {one.id} (step {one.step})" + (
            f" instead of {before}." if before not in (None, one.id) else "."
        )

        def do() -> ActionOutcome:
            run.tag(name, one.id, by=who.name)
            return ActionOutcome(True, f"{name} names {one.id} (step {one.step})")

        facts = ActionFacts(checkpoint=one.id, before=before or "", after=one.id)
        return _planned("Tag", says, f"relight tag {_at(fields)} {name} {one.id}", (one.id, name, before)), do, facts

    def _branch(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, one = self._one(fields)
        to = check_run_name(fields.get("to", ""))

        def do() -> ActionOutcome:
            made = branch(run, one, to, by=who.name, why=fields.get("why", ""))
            return ActionOutcome(True, f"{made.name} goes on from {one.id} (step {one.step})" + ("" if made.made else ", as before"))

        return (
            _planned(
                "Branch",
                f"A run {to} will go on from checkpoint {one.id} (step {one.step}).",
                f"relight branch {_at(fields)}@{one.id} {to}",
                (one.id, to),
            ),
            do,
            ActionFacts(checkpoint=one.id, after=to),
        )

    def _pin(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, one = self._one(fields)
        held = holds_of(run.history()).get(one.id)

        def words(reason: str | None) -> str:
            return "" if reason is None else f"held: {reason}"

        why = fields.get("why", "") or f"pinned by {who.name}"

        def do() -> ActionOutcome:
            if held is None:
                hold(run.store, run.name, one.id, why)
            else:
                release(run.store, run.name, one.id, why)
            return ActionOutcome(True, f"{one.id} (step {one.step}) is {'on hold' if held is None else 'released'}")

        says = (
            f"Checkpoint {one.id} (step {one.step}) will be kept whatever the rules say."
            if held is None
            else f"Its hold ({held}) will be released: the rules decide again."
        )
        return (
            _planned(
                "Pin" if held is None else "Release",
                says,
                f"relight hold {_at(fields)} {one.id}" + (" --release" if held is not None else ""),
                (one.id, held),
            ),
            do,
            ActionFacts(checkpoint=one.id, before=words(held), after="" if held is not None else words(why)),
        )

    def _verify(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, one = self._one(fields)
        store = fields["store"]

        def verified(ok: bool) -> None:
            if ok:
                self._index.verified[store, run.name, one.id] = time.time()

        def do() -> ActionOutcome:
            known = self._tasks.under_way("verify", store, run.name, one.id)
            task = known or self._tasks.begin("verify", store, run.name, who.name, lambda task: verify(task, run, one, verified), one.id)
            return ActionOutcome(True, "under way" if known is None else f"under way already, begun by {known.who}", task=task.id)

        return (
            _planned(
                "Verify",
                f"Every byte of checkpoint {one.id} (step {one.step}) will be read and compared.",
                f"relight verify {_at(fields)} {one.id}",
                (one.id,),
            ),
            do,
            ActionFacts(checkpoint=one.id),
        )

    def _prune(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run = self._run(fields)
        numbers = {name: _number(name, fields[name]) for name in ("keep_last", "keep_every", "keep_best") if fields.get(name)}
        rules = keep(
            last=numbers.get("keep_last"),
            every=numbers.get("keep_every"),
            best=numbers.get("keep_best"),
            undo_window=fields.get("undo_window") or None,
        )
        if rules.is_everything:
            raise ConfigError(
                "no rule was given, so everything stays", hint="keep_last, keep_every or keep_best: how many, or each how manieth step"
            )
        plan = plan_prune(run.store, run.name, rules)
        words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in numbers.items()) + (
            f" --undo-window {fields['undo_window']}" if fields.get("undo_window") else ""
        )
        says = f"{len(plan.going)} of {len(plan.verdicts)} checkpoints will go." if plan.going else "Nothing would go."
        hidden = self._index.hidden_branches(fields["store"], fields["run"])
        rows = [(one.id, str(one.step), "stays" if one.keep else "goes", _without(one.reason, hidden)) for one in plan.verdicts]
        what = [(one.id, one.keep) for one in plan.verdicts] + list(plan.due)
        planned = _planned("Prune", says, f"relight prune {_at(fields)} {words}", what)._replace(
            columns=("id", "step", "fate", "because"), rows=rows, danger=True
        )
        stay = [one.id for one in plan.verdicts if one.keep]
        return planned, lambda: _pruned(plan, run), ActionFacts(before=", ".join(one.id for one in plan.verdicts), after=", ".join(stay))

    def _promote(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, one = self._one(fields)
        stage = fields.get("stage", "") or STAGES[-1]
        if stage not in STAGES:
            raise ConfigError(f"{stage[:40]!r} is no stage", hint=f"they are {', '.join(STAGES)}")
        before = run.history().tags.get(stage)

        def do() -> ActionOutcome:
            promote(run, one, stage, why=fields.get("why", ""), by=who.name)
            return ActionOutcome(True, f"{stage} is {one.id} (step {one.step})")

        says = f"{stage} will be checkpoint {one.id} (step {one.step})" + (f" instead of {before}." if before else ".")
        facts = ActionFacts(checkpoint=one.id, before=before or "", after=one.id)
        return _planned("Promote", says, f"relight promote {_at(fields)}@{one.id} {stage}", (one.id, stage, before)), do, facts

    def _revoke(self, fields: Mapping[str, str]) -> Prepared:
        token_id = fields.get("id", "").removeprefix("rl_").partition(".")[0]
        found = next((one for one in self._state.tokens() if one.id == token_id), None)
        if found is None or not everything():  # tokens are not below any run
            raise CheckpointNotFound(f"no token {token_id[:40]!r}")

        def do() -> ActionOutcome:
            self._state.revoke(token_id)
            return ActionOutcome(True, f"the token {found.name} opens nothing any more")

        planned = _planned(
            "Revoke",
            f"The token {found.name} ({found.role}) will open nothing any more, at once.",
            f"relight token revoke {token_id}",
            (token_id, found.state),
        )
        return planned._replace(danger=True), do, ActionFacts(before=found.state, after="revoked")

    def _save(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, why = self._run(fields), fields.get("why", "")
        told_at = newest_account_time(self._index.state(fields["store"], run.name).accounts)
        ago_s = time.time() - told_at if told_at is not None else None
        watched = (
            f"relight run told of it {max(0.0, ago_s):.0f} s ago: it looks every {LOOK_S:.0f} s whether it is asked."
            if ago_s is not None and ago_s < WATCHED_S
            else f"No relight run has told of it within {WATCHED_S / 60:.0f} minutes, and without one nobody hears: "
            "kill -USR1 of the training process, where it runs, has it save."
        )

        def do() -> ActionOutcome:
            seq = ask_for_save(run, who.name[:WHO_MAX], why)
            task = self._tasks.begin("save", fields["store"], run.name, who.name, lambda task: wait_for(task, run, seq, SAVE_S))
            return ActionOutcome(True, f"asked, in record {seq} of its log", task=task.id)

        says = f"The job of {run.name} is asked to save at the end of its step, in your name."
        planned = _planned("Save now", says, f"relight save {_at(fields)}", (run.name, why))
        return planned._replace(says=f"{says} {watched}"), do, ActionFacts()  # seconds pass, and it is the same plan

    def _drill(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run = self._run(fields)
        url = f"{run.store.url.rstrip('/')}/{run.name}"

        def do() -> ActionOutcome:
            known = self._tasks.under_way("drill", fields["store"], run.name)
            task = known or self._tasks.begin("drill", fields["store"], run.name, who.name, lambda task: drill(task, url))
            return ActionOutcome(True, "under way" if known is None else f"under way already, begun by {known.who}", task=task.id)

        says = (
            "The newest two checkpoints are copied to this server's machine. There the newest is read to the byte and restored; damaged, "
            "robbed of a file and of its record, each of which must be noticed, and the one before be restored; and pruned. "
            "Neither the run nor its job notices; copies are removed. Failures of the job itself need its script: "
            f"relight drill --from {_at(fields)} train.py, where it runs."
        )
        return _planned("Drill", says, f"relight drill --copy {_at(fields)}", (run.name,)), do, ActionFacts()


def _pruned(plan: PrunePlan, run: Run) -> ActionOutcome:
    report = execute(plan, run.store)
    return ActionOutcome(True, f"{len(report.retired)} checkpoints have gone", "\n".join(report.retired[:50]))


def newest_account_time(accounts: Sequence[Account]) -> float | None:
    """When a supervisor of the run wrote down last where the time went; None if none ever did."""
    ends = [began + one.seconds for one in accounts if (began := seconds_since_epoch(one.began)) is not None]
    return max(ends, default=None)


def _given(verb: str, fields: Mapping[str, str]) -> ActionFacts:
    """Return the fields that the action has: a caller chooses the names of any others, and so could fill the log."""
    known = {name: fields[name] for name in FIELDS.get(verb, ()) if name in fields}
    return ActionFacts(run=known.get("run", ""), why=known.get("why", ""), given=known)


def _without(text: str, hidden: Sequence[str]) -> str:
    """Return ``text`` without the names of branches that the asker may not know of."""
    for name in hidden:
        text = text.replace(name, "a branch")
    return text


def _planned(name: str, says: str, command: str, what: object) -> Planned:
    digest = hashlib.sha256(repr((name, says, command, what)).encode()).hexdigest()
    return Planned(name, says, digest, command=command)


def _at(fields: Mapping[str, str]) -> str:
    return shlex.quote(f"{fields.get('store', '')}/{run_name(fields.get('run', ''))}")


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii() or not 0 < int(text[:10]) < 10**9 or len(text) > 9:
        raise ConfigError(f"{name} is a number from 1 on, not {text[:20]!r}")
    return int(text)

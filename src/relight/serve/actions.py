"""Actions of pages and the API. Each makes the calls of the command of its name. An action is planned, shown, then executed.

Execution writes to the audit log before and after. If the audit log cannot be written, nothing is done.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from relight.audit import AuditLog
from relight.audit.effects import ACTIONS as EFFECTS_OF
from relight.audit.facts import ActionFacts
from relight.catalog.branches import check_free
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound, ConfigError, Fenced, RelightError
from relight.format.names import check_run_name
from relight.log import Checkpoint
from relight.log.identity import seconds_since_epoch
from relight.observe import emit
from relight.policy import keep
from relight.policy.best_by import is_best
from relight.reclaim import PrunePlan, execute, plan_prune
from relight.run_names import dir_of, run_name
from relight.run_records.holds import hold, holds_of, release
from relight.run_records.save_requests import REQUEST_POLL_S, WHO_MAX, ask_for_save
from relight.run_records.verification import damage
from relight.serve.index import Index
from relight.serve.pages_actions import ActionOutcome, Planned
from relight.serve.pages_views import ACTIONS
from relight.serve.scope import Caller, everything, require
from relight.serve.state import TokenFile
from relight.serve.tasks import Tasks
from relight.serve.tasks_work import drill, verify, wait_for
from relight.supervise.goodput import Account
from relight.units import age_text, duration_text
from relight.versions.branching import branch
from relight.versions.stages import STAGES, promote

FIELDS = {
    "tag": ("store", "run", "which", "name"),
    "branch": ("store", "run", "which", "to", "why"),
    "hold": ("store", "run", "which", "why"),
    "verify": ("store", "run", "which"),
    "save": ("store", "run", "why"),
    "drill": ("store", "run"),
    "prune": ("store", "run", "keep_last", "keep_every", "keep_best", "undo_window"),
    "promote": ("store", "run", "which", "stage", "why"),
    "revoke": ("id",),
}
"""Fields of each action. Any other field is refused."""
SAVE_S = 600.0
"""Seconds to wait for a requested save."""
WATCHED_S = 180.0
"""Age in seconds of the last goodput record above which ``relight run``, which writes one each minute, has probably ended."""
VERIFIED_S = 600.0
"""Seconds for which a plan of retention uses the verifications of the plan before: each reads a whole checkpoint."""
RECORDED_S = 60.0
"""Seconds between two audit entries for refusals of the same caller and action."""
assert FIELDS.keys() == ACTIONS.keys()
Prepared = tuple[Planned, Callable[[], ActionOutcome], ActionFacts]


class Actions:
    """Plans and executes actions for a caller. ``done`` is called with a store's id after the store was changed."""

    def __init__(
        self, index: Index, state: TokenFile, book: AuditLog, tasks: Tasks, done: Callable[[str], None] = lambda _: None
    ) -> None:
        self._index, self._state, self._book, self._tasks, self._done = index, state, book, tasks, done
        self._recorded: dict[tuple[str, str], float] = {}
        """Monotonic time at which a refusal by role was last recorded, by caller and action."""
        self._verified: dict[tuple[str, str], tuple[float, dict[str, bool]]] = {}
        """By store and run: when plans of retention began to verify its checkpoints, and the results."""

    def plan(self, verb: str, fields: Mapping[str, str], who: Caller) -> Planned:
        """Return what the action would do. Change nothing. A refused plan is recorded in the audit log: it shows what a caller tried."""
        try:
            return self._prepared(verb, fields, who)[0]
        except (ConfigError, CheckpointNotFound) as error:
            self._record(verb, fields, who, f"planned only: {type(error).__name__}: {error}")
            raise

    def refused(self, verb: str, who: Caller, reason: str) -> None:
        """Record that the role of ``who`` did not suffice, at most once in ``RECORDED_S`` for a caller and action. Never raise."""
        verb, now = verb if verb in FIELDS else "another action", time.monotonic()
        caller = who.token or f"user {who.name}"  # users of a login proxy have no token
        if now - self._recorded.get((caller, verb), -RECORDED_S) >= RECORDED_S:
            self._recorded[caller, verb] = now
            self._record(verb, {}, who, reason)

    def _record(self, verb: str, fields: Mapping[str, str], who: Caller, reason: str) -> None:
        """Add a refusal to the audit log. If that fails, emit an event: no action was done, so the log misses none."""
        try:
            seq = self._book.begin(
                who.name, verb, self._on(fields), who.role, token=who.token, facts=_given(verb, fields)
            )
            self._book.end(seq, "refused", reason)
        except (RelightError, OSError) as unwritten:
            emit(
                "audit.failed",
                f"a refused request to {verb} is not in the audit log: {unwritten}",
                error=str(unwritten)[:500],
            )

    def execute(self, verb: str, fields: Mapping[str, str], who: Caller, digest: str = "") -> ActionOutcome:
        """Execute the action. With ``digest``, raise ``Fenced`` if the plan has changed since the digest was computed."""
        on = self._on(fields)
        if not who.may(ACTIONS.get(verb, "admin")):
            raise ConfigError(f"{verb[:20]!r} needs the role {ACTIONS.get(verb, 'admin')}")
        prepared, refused, facts = None, None, _given(verb, fields)
        try:
            prepared = self._prepared(verb, fields, who)  # changes nothing; the first record needs its facts
            details = prepared[2]
            facts = replace(facts, checkpoint=details.checkpoint, before=details.before, after=details.after)
        except (RelightError, OSError) as error:
            refused = error
        seq = self._book.begin(who.name, verb, on, who.role, token=who.token, facts=facts)
        try:
            if prepared is None:
                raise refused or Fenced("the action could not be prepared")
            planned, do, _ = prepared
            if digest and planned.digest != digest:
                raise Fenced("the plan has changed since it was shown", hint="check the new plan")
            outcome = do()
        except BaseException as error:
            self._book.end(
                seq,
                "refused" if isinstance(error, ConfigError | Fenced | CheckpointNotFound) else "failed",
                f"{type(error).__name__}: {error}",
            )
            raise
        if outcome.task:
            self._tasks.get(outcome.task).when_over(lambda ended: self._over(seq, fields, ended))
        else:
            self._over(seq, fields, outcome)
        return outcome

    def _over(self, seq: int, fields: Mapping[str, str], done: ActionOutcome) -> None:
        self._book.end(seq, "ok" if done.ok else "failed", done.says)
        self._done(fields.get("store", ""))

    def _on(self, fields: Mapping[str, str]) -> str:
        if "store" not in fields:
            return fields.get("id", "").removeprefix("rl_").partition(".")[0][:80]  # never the token's secret
        which = fields.get("which", "")
        run = dir_of(fields.get("run", ""))  # the name may contain @, which separates run and checkpoint in this text
        return f"{fields['store']}/{run}"[:300] + (f"@{which[:80]}" if which else "")

    def _prepared(self, verb: str, fields: Mapping[str, str], who: Caller) -> Prepared:
        if verb not in FIELDS:
            raise ConfigError(f"there is no action {verb[:40]!r}", hint=f"the actions are {', '.join(FIELDS)}")
        unknown = [name for name in fields if name not in FIELDS[verb]]
        if unknown:
            raise ConfigError(f"{verb} takes no {unknown[0][:40]!r}", hint=f"it takes {', '.join(FIELDS[verb])}")
        if any(not value.isprintable() or len(value) > 400 for value in fields.values()):
            raise ConfigError("a field has at most 400 characters, all printable")
        if verb == "revoke":
            require("revoke token", who)
            return self._revoke(fields)
        for effect in EFFECTS_OF[verb]:
            require(effect, who, fields.get("store", ""), fields.get("to" if effect == "create run" else "run", ""))
        planned, do, facts = {
            "tag": self._tag,
            "branch": self._branch,
            "hold": self._hold,
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

    def _at(self, fields: Mapping[str, str]) -> str:
        """Return the run as a command takes it: the server's short name of a store is no path."""
        store = self._index.reader(fields.get("store", "")).url.rstrip("/")
        return shlex.quote(f"{store}/{run_name(fields.get('run', ''))}")

    def _run(self, fields: Mapping[str, str]) -> Run:
        store, name = fields.get("store", ""), fields.get("run", "")
        self._index.state(store, name)  # raises if the caller may not see this run
        return Run(self._index.reader(store).store, name)

    def _checkpoint(self, fields: Mapping[str, str]) -> tuple[Run, Checkpoint]:
        run = self._run(fields)
        return run, self._index.find(fields["store"], fields["run"], fields.get("which", "") or "latest")

    def _tag(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, checkpoint = self._checkpoint(fields)
        name = check_free(fields.get("name", ""))
        before = run.history().tags.get(name)
        summary = f"The tag {name} will name checkpoint {checkpoint.id} (step {checkpoint.step})" + (
            f" instead of {before}." if before not in (None, checkpoint.id) else "."
        )

        def do() -> ActionOutcome:
            run.tag(name, checkpoint.id, by=who.name)
            return ActionOutcome(True, f"{name} names {checkpoint.id} (step {checkpoint.step})")

        facts = ActionFacts(checkpoint=checkpoint.id, before=before or "", after=checkpoint.id)
        return (
            _planned(
                "Tag", summary, f"relight tag {self._at(fields)} {name} {checkpoint.id}", (checkpoint.id, name, before)
            ),
            do,
            facts,
        )

    def _branch(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, checkpoint = self._checkpoint(fields)
        to = check_run_name(fields.get("to", ""))

        def do() -> ActionOutcome:
            new_branch = branch(run, checkpoint, to, by=who.name, why=fields.get("why", ""))
            return ActionOutcome(
                True,
                f"{new_branch.name} continues from {checkpoint.id} (step {checkpoint.step})"
                + ("" if new_branch.made else ", as before"),
            )

        return (
            _planned(
                "Branch",
                f"A run {to} will continue from checkpoint {checkpoint.id} (step {checkpoint.step}).",
                f"relight branch {self._at(fields)}@{checkpoint.id} {shlex.quote(run_name(to))}",
                (checkpoint.id, to),
            ),
            do,
            ActionFacts(checkpoint=checkpoint.id, after=to),
        )

    def _hold(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, checkpoint = self._checkpoint(fields)
        hold_reason = holds_of(run.history()).get(checkpoint.id)

        def words(reason: str | None) -> str:
            return "" if reason is None else f"held: {reason}"

        why = fields.get("why", "") or f"hold by {who.name}"

        def do() -> ActionOutcome:
            if hold_reason is None:
                hold(run.store, run.name, checkpoint.id, why)
            else:
                release(run.store, run.name, checkpoint.id, why)
            return ActionOutcome(
                True, f"{checkpoint.id} (step {checkpoint.step}) is {'on hold' if hold_reason is None else 'released'}"
            )

        summary = (
            f"Checkpoint {checkpoint.id} (step {checkpoint.step}) will be kept regardless of the retention rules."
            if hold_reason is None
            else f"Its hold ({hold_reason}) will be released: the retention rules apply again."
        )
        return (
            _planned(
                "Hold" if hold_reason is None else "Release",
                summary,
                f"relight tag {self._at(fields)}@{checkpoint.id} --hold"
                + (" --release" if hold_reason is not None else ""),
                (checkpoint.id, hold_reason),
            ),
            do,
            ActionFacts(
                checkpoint=checkpoint.id, before=words(hold_reason), after="" if hold_reason is not None else words(why)
            ),
        )

    def _verify(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, checkpoint = self._checkpoint(fields)
        store = fields["store"]

        def verified(ok: bool) -> None:
            if ok:
                self._index.note_verified(store, run.name, checkpoint.id)

        def do() -> ActionOutcome:
            running = self._tasks.under_way("verify", store, run.name, checkpoint.id)
            task = running or self._tasks.begin(
                "verify", store, run.name, who.name, lambda task: verify(task, run, checkpoint, verified), checkpoint.id
            )
            return ActionOutcome(
                True, "running" if running is None else f"already running, started by {running.who}", task=task.id
            )

        return (
            _planned(
                "Verify",
                f"Every byte of checkpoint {checkpoint.id} (step {checkpoint.step}) will be read and compared.",
                f"relight verify {self._at(fields)} {checkpoint.id}",
                (checkpoint.id,),
            ),
            do,
            ActionFacts(checkpoint=checkpoint.id),
        )

    def _prune(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run = self._run(fields)
        numbers = {
            name: _number(name, fields[name]) for name in ("keep_last", "keep_every", "keep_best") if fields.get(name)
        }
        rules = keep(
            last=numbers.get("keep_last"),
            every=numbers.get("keep_every"),
            best=numbers.get("keep_best"),
            undo_window=fields.get("undo_window") or None,
        )
        if rules.is_everything:
            raise ConfigError(
                "no retention rule was given, so every checkpoint is kept",
                hint="keep_last and keep_best are numbers of checkpoints, keep_every is a number of steps",
            )
        plan = plan_prune(run.store, run.name, rules, verified=self._verified_lately(run))
        words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in numbers.items()) + (
            f" --undo-window {fields['undo_window']}" if fields.get("undo_window") else ""
        )
        summary = (
            f"{len(plan.going)} of {len(plan.verdicts)} checkpoints will be retired."
            if plan.going
            else "No checkpoint would be retired."
        )
        hidden = self._index.hidden_branches(fields["store"], fields["run"])
        rows = [
            (verdict.id, str(verdict.step), "stays" if verdict.keep else "goes", _without(verdict.reason, hidden))
            for verdict in plan.verdicts
        ]
        details = [(verdict.id, verdict.keep) for verdict in plan.verdicts] + list(plan.due)
        planned = _planned("Prune", summary, f"relight prune {self._at(fields)} {words}", details)._replace(
            columns=("id", "step", "fate", "because"), rows=rows, danger=True
        )
        stay = [verdict.id for verdict in plan.verdicts if verdict.keep]
        return (
            planned,
            lambda: _pruned(plan, run),
            ActionFacts(before=", ".join(verdict.id for verdict in plan.verdicts), after=", ".join(stay)),
        )

    def _verified_lately(self, run: Run) -> dict[str, bool]:
        """Return which checkpoints plans found whole in the last ``VERIFIED_S``. The next plan adds its own results.

        A checkpoint that failed is verified again: it may have been repaired since.
        """
        now, place = time.monotonic(), (run.store.url, run.name)
        since, known = self._verified.get(place, (-VERIFIED_S, {}))
        if now - since >= VERIFIED_S:
            since, known = now, {}
        damaged = damage(run.history())  # found since
        known = {id_: True for id_, is_whole in list(known.items()) if is_whole and id_ not in damaged}
        self._verified[place] = since, known
        return known

    def _promote(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, checkpoint = self._checkpoint(fields)
        stage = fields.get("stage", "") or STAGES[-1]
        if stage not in STAGES:
            raise ConfigError(f"{stage[:40]!r} is not a stage", hint=f"the stages are {', '.join(STAGES)}")
        before = run.history().tags.get(stage)

        def do() -> ActionOutcome:
            promote(run, checkpoint, stage, why=fields.get("why", ""), by=who.name)
            return ActionOutcome(True, f"{stage} is {checkpoint.id} (step {checkpoint.step})")

        summary = f"{stage} will be checkpoint {checkpoint.id} (step {checkpoint.step})" + (
            f" instead of {before}." if before else "."
        )
        facts = ActionFacts(checkpoint=checkpoint.id, before=before or "", after=checkpoint.id)
        return (
            _planned(
                "Promote",
                summary,
                f"relight tag {self._at(fields)}@{checkpoint.id} --stage {stage}",
                (checkpoint.id, stage, before),
            ),
            do,
            facts,
        )

    def _revoke(self, fields: Mapping[str, str]) -> Prepared:
        token_id = fields.get("id", "").removeprefix("rl_").partition(".")[0]
        token = next((row for row in self._state.tokens() if row.id == token_id), None)
        if token is None or not everything():  # tokens do not belong to a run, so a caller with a scope sees none
            raise CheckpointNotFound(f"no token {token_id[:40]!r}")

        def do() -> ActionOutcome:
            self._state.revoke(token_id)
            return ActionOutcome(True, f"the token {token.name} is no longer valid")

        planned = _planned(
            "Revoke",
            f"The token {token.name} ({token.role}) will be invalid at once.",
            f"relight token revoke {token_id}",
            (token_id, token.state),
        )
        return planned._replace(danger=True), do, ActionFacts(before=token.state, after="revoked")

    def _save(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run, why = self._run(fields), fields.get("why", "")
        recorded_at = newest_account_time(self._index.state(fields["store"], run.name).accounts)
        ago_s = time.time() - recorded_at if recorded_at is not None else None
        watched = (
            f"relight run recorded its goodput {age_text(max(0.0, ago_s))}: it checks for requests every {duration_text(REQUEST_POLL_S)}."
            if ago_s is not None and ago_s < WATCHED_S
            else f"No relight run has recorded anything within {duration_text(WATCHED_S)}, and no other process receives the request: "
            "send SIGUSR1 to the training process on its own machine instead."
        )

        def do() -> ActionOutcome:
            asked = Future[int]()
            # the task is first: if too many run, the action is refused, and a request that is in the log cannot be withdrawn
            task = self._tasks.begin(
                "save", fields["store"], run.name, who.name, lambda task: wait_for(task, run, asked.result, SAVE_S)
            )
            try:
                seq = ask_for_save(run.store, run.name, who.name[:WHO_MAX], why)
            except BaseException as error:
                asked.set_exception(error)
                raise
            asked.set_result(seq)
            return ActionOutcome(True, f"save requested, in record {seq} of its log", task=task.id)

        summary = f"The job of {run.name} will be asked in your name to save at the end of its current step."
        planned = _planned("Save now", summary, f"relight save {self._at(fields)}", (run.name, why))
        # The digest does not cover ``watched``: its seconds change while the plan stays the same.
        return planned._replace(says=f"{summary} {watched}"), do, ActionFacts()

    def _drill(self, fields: Mapping[str, str], who: Caller) -> Prepared:
        run = self._run(fields)
        url = f"{run.store.url.rstrip('/')}/{run.name}"

        def do() -> ActionOutcome:
            running = self._tasks.under_way("drill", fields["store"], run.name)
            task = running or self._tasks.begin(
                "drill", fields["store"], run.name, who.name, lambda task: drill(task, url)
            )
            return ActionOutcome(
                True, "running" if running is None else f"already running, started by {running.who}", task=task.id
            )

        summary = (
            "The newest two checkpoints are copied to this server's machine. There the newest is verified and restored. Then it is "
            "damaged, a file of it is deleted, and its record is deleted: each fault must be detected, and the checkpoint before it "
            "restored. Then it is pruned. The run and its job are unaffected, and the copies are removed. "
            f"To test failures of the job itself: relight drill --from {self._at(fields)} train.py, on the job's machine."
        )
        return _planned("Drill", summary, f"relight drill --copy {self._at(fields)}", (run.name,)), do, ActionFacts()


def _pruned(plan: PrunePlan, run: Run) -> ActionOutcome:
    report = execute(plan, run.store)
    return ActionOutcome(True, f"{len(report.retired)} checkpoints retired", "\n".join(report.retired[:50]))


def newest_account_time(accounts: Sequence[Account]) -> float | None:
    """Return the Unix time up to which supervisors of the run have recorded its goodput; None without a record."""
    ends = [
        began + account.seconds for account in accounts if (began := seconds_since_epoch(account.began)) is not None
    ]
    return max(ends, default=None)


def _given(verb: str, fields: Mapping[str, str]) -> ActionFacts:
    """Return the facts of the action's known fields. Unknown fields are left out: a caller could fill the log with them."""
    fields_given = {name: fields[name] for name in FIELDS.get(verb, ()) if name in fields}
    return ActionFacts(run=fields_given.get("run", ""), why=fields_given.get("why", ""), given=fields_given)


def _without(text: str, hidden: Sequence[str]) -> str:
    """Return ``text`` without the names of branches outside the caller's scope."""
    for name in hidden:
        text = text.replace(name, "a branch")
    return text


def _planned(name: str, summary: str, command: str, what: object) -> Planned:
    digest = hashlib.sha256(repr((name, summary, command, what)).encode()).hexdigest()
    return Planned(name, summary, digest, command=command)


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii() or not 0 < int(text[:10]) < 10**9 or len(text) > 9:
        raise ConfigError(f"{name} must be a positive integer, not {text[:20]!r}")
    return int(text)

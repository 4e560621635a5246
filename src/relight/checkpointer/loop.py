"""The Checkpointer: the three lines in a training loop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, Protocol

from relight.capture import Captured, capture, differences, environment, unwatch_loaders, watch_loaders
from relight.catalog.find import best, metric_value
from relight.checkpointer.boundary import Boundary
from relight.checkpointer.failure_policy import Failures, check_failures
from relight.checkpointer.preflight import check_room, probe
from relight.checkpointer.resume import Resumed, resume
from relight.checkpointer.save_handle import Save
from relight.checkpointer.signals import Signals
from relight.commit import Attempt, SaveReport, SaveRequest
from relight.errors import ConfigError, Fenced, IncompatibleState, RelightError, SaveFailed
from relight.format import encode_tree
from relight.format.names import check_run_name, check_tag_name
from relight.format.records import TagBody
from relight.log import History, Log, fold
from relight.observe import emit
from relight.policy import Facts, Keep, Trigger
from relight.policy.when import check_trigger
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep
from relight.store import ByteStore, open_bytes
from relight.store.urls import split_run


class Observer(Protocol):
    """Somebody who watches the loop, such as ``relight prove``. Called in the training thread."""

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Where a Checkpointer that was given this store and run is to save instead."""

    def on_start(self, ckpt: Checkpointer) -> None:
        """A Checkpointer was made."""

    def on_restore(self, ckpt: Checkpointer, step: int, checkpoint_id: str | None) -> None:
        """State was restored from ``checkpoint_id``, None on a fresh run; ``step`` is the first still to do."""

    def on_step(self, ckpt: Checkpointer, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Step ``step`` ended; nothing was decided yet."""


observers: list[Observer] = []
"""Told by every Checkpointer of this process."""


class Checkpointer:
    """Saves and restores the whole state of one training run.

    ``path`` names the store and the run: ``runs/demo`` is run ``demo`` in store ``runs``; with ``run=`` the whole path is the store.
    Everything else that is not an option is a *component*: modules, optimizers, schedulers, scalers, loaders, anything with
    ``state_dict``/``load_state_dict``, generators, arrays, plain values. RNGs are captured without being asked. Components whose names
    are taken by options go into ``state={"name": object}``.

    Options: ``save`` when (``relight.every(…) | relight.best(…)``; None: only when asked, on signals and at the end), ``keep`` which
    (``relight.keep(…)``; None: all), ``on_failure`` (``"warn"``, ``"retry"``, ``"raise"``, ``relight.failures(…)``), ``signals``
    (False leaves them alone), ``metadata`` (JSON kept with each checkpoint).

    Errors: ``ConfigError`` and ``IncompatibleState`` at once and always; a store's errors by ``on_failure``; ``Fenced`` always, as this
    process can never save again. Not thread-safe: one loop uses it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run: str | None = None,
        save: Trigger | None = None,
        keep: Keep | None = None,
        on_failure: str | Failures = "warn",
        signals: bool = True,
        metadata: Mapping[str, Any] | None = None,
        state: Mapping[str, object] | None = None,
        **components: object,
    ) -> None:
        url, name = (os.fspath(path), run) if run is not None else split_run(path)
        for observer in observers:
            url, name = observer.place(url, name)
        self._run = check_run_name(name)
        self._store: ByteStore = open_bytes(url)
        self._trigger = check_trigger(save) if save is not None else None
        if keep is not None and not isinstance(keep, Keep):
            raise ConfigError(f"keep= takes relight.keep(…), not {keep!r}")
        self._keep = keep or Keep()
        self._policy = check_failures(on_failure)
        self._metadata = _plain_json(metadata or {})
        self._components = _components(state, components)
        self._boundary = Boundary(self._components)
        self._signals = Signals(self._on_signal) if signals else None
        self._attempt: Attempt | None = None
        self._environment: dict[str, Any] | None = None
        self._resumed = Resumed()
        self._best: dict[str, float] = {}
        self._verified: dict[str, bool] = {}
        self._parent: str | None = None
        self._last_digest: bytes | None = None
        self._last_saved_step: int | None = None
        self._last_step: int | None = None
        self._last_save_s = monotonic()
        self._failed_in_a_row = 0
        self._closed = False
        watch_loaders(self._components)
        for observer in observers:
            observer.on_start(self)

    # -- in the loop ---------------------------------------------------------------------------------------------------------

    def restore(
        self,
        which: str | int = "latest",
        *,
        only: list[str] | None = None,
        strict: bool = True,
        map: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> int:
        """Put the state back and give the first step still to do; 0 on a run without a checkpoint.

        ``latest`` takes the newest checkpoint that verifies and warns about what it passed over; a tag, a step, an id or ``best``
        takes that one or raises. ``only=["model/*"]`` restores just what matches and leaves the rest of the live state alone;
        ``strict=False`` restores what fits; ``map`` renames stored names to live ones. Bytes go straight into the live tensors.

        After an error the live state may be a mixture: do not train on it.
        """
        self._start_up()
        found = resume(self._store, self._run, self._components, which, only=only, strict=strict, rename=map)
        self._resumed = found
        for checkpoint_id in found.damaged:
            self._verified[checkpoint_id] = False
        if found.checkpoint is None:
            emit("restore.fresh", f"run {self._run!r} has no checkpoint yet: starting from scratch", run=self._run)
            start = 0
        else:
            self._parent = found.checkpoint.id
            self._components.update({name: value for name, value in found.values.items() if name in self._components})
            start = found.checkpoint.step + (1 if found.micro_step is None else 0)
            self._last_step = self._last_saved_step = found.checkpoint.step
            self._say_restored(found, start)
        self._boundary = Boundary(self._components)
        self._last_save_s = monotonic()
        for observer in observers:
            observer.on_restore(self, start, self._parent)
        return start

    def step(self, step: int, *, samples: Any = None, micro_step: int | None = None, **metrics: Any) -> Save | None:
        """Tell that ``step`` ended; save if a trigger or a signal asks for it. Returns the save if there was one.

        ``metrics`` may be numbers or 0-d tensors; tensors are read (which waits for the device) only when a save or trigger needs it.
        ``micro_step=k`` says that micro-batch ``k`` of an unfinished step ended: gradients are then saved too. Ends the process, after
        saving, if SIGTERM or SIGINT asked for that.
        """
        self._start_up()
        self._take_charge()
        for observer in observers:
            observer.on_step(self, step, metrics, samples)
        self._last_step = step
        reason = self._why_now(step, metrics, micro_step)
        save = None
        if reason is not None:
            save = self._save(step, reason, metrics, None, micro_step)
        if self._signals is not None:
            self._signals.saved()
            if self._signals.ending:
                self._finish()
                self._signals.end()
        self._boundary.remember(step)
        return save

    def save(
        self,
        step: int,
        *,
        tag: str | None = None,
        block: bool = True,
        metrics: Mapping[str, Any] | None = None,
        reason: str = "asked",
        micro_step: int | None = None,
    ) -> Save:
        """Save now, as the state at the end of ``step``. ``tag`` names it, which also keeps it. ``block=False`` is the same today.

        A store's failure is handled by ``on_failure`` and told by the handle's ``error``.
        """
        if tag is not None:
            check_tag_name(tag)
        self._start_up()
        self._take_charge()
        self._last_step = step
        return self._save(step, reason, metrics or {}, tag, micro_step)

    def close(self, *, save: bool = True) -> None:
        """End the run's bookkeeping: save the last step if no save has it yet, give back signal handlers and loaders. Twice is fine."""
        if self._closed:
            return
        try:
            if save and self._attempt is not None and self._last_step is not None and self._last_step != self._last_saved_step:
                self._save(self._last_step, "end", {}, None, None)
        finally:
            self._finish()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            if isinstance(error, Exception) and not isinstance(error, Fenced):
                self._save_boundary(error)
        finally:
            self._finish()

    # -- what there is -------------------------------------------------------------------------------------------------------

    def captured(self) -> dict[str, Any]:
        """What a save would hold: ``found`` and ``missed``, as lists of sentences, ``bytes`` and ``tensors``. Copies nothing."""
        state = capture(self._components)
        return {"found": state.found, "missed": state.missed, "bytes": state.logical_bytes, "tensors": len(state.items)}

    def __getitem__(self, name: str) -> Any:
        """A component; for plain values, what was restored or last set."""
        return self._components[name]

    def __setitem__(self, name: str, value: object) -> None:
        """Set a component that is a plain value."""
        if name not in self._components:
            raise ConfigError(f"no component {name!r}", hint=f"give it to the Checkpointer first: {name}=…")
        self._components[name] = value

    @property
    def components(self) -> Mapping[str, object]:
        """The components by name."""
        return self._components

    @property
    def run(self) -> str:
        """The run's name."""
        return self._run

    @property
    def micro_step(self) -> int | None:
        """The first micro-batch still to do of the step ``restore`` returned, if it was saved in the middle of one."""
        return None if self._resumed.micro_step is None else self._resumed.micro_step + 1

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _start_up(self) -> None:
        """Once: everything that should fail now rather than in hours."""
        if self._closed:
            raise ConfigError("this Checkpointer is closed")
        if self._environment is not None:
            return
        state = capture(self._components)
        probe(self._store, self._run)
        check_room(self._store, _full_bytes(state), self._keep.last or 2)
        self._environment = environment()
        if self._signals is not None:
            self._signals.install()

    def _take_charge(self) -> Attempt:
        if self._attempt is None:
            self._attempt = Attempt.begin(self._store, self._run, reason="restored" if self._parent else "fresh")
            history = self._attempt.history()
            emit("attempt.started", f"attempt {self._attempt.epoch} of run {self._run!r}", run=self._run, epoch=self._attempt.epoch)
            self._know_best(history)
            self._notice_newer(history)
            self._sweep()
        return self._attempt

    def _why_now(self, step: int, metrics: Mapping[str, Any], micro_step: int | None) -> str | None:
        if self._signals is not None and self._signals.pending:
            return self._signals.pending
        if self._trigger is None or micro_step is not None:
            return None
        wanted = {name for name, _ in self._trigger.metrics}
        values = {name: _number(name, metrics[name]) for name in wanted if name in metrics}
        facts = Facts(step, monotonic(), self._last_saved_step, self._last_save_s, values, self._best)
        return self._trigger.due(facts)

    def _save(self, step: int, reason: str, metrics: Mapping[str, Any], tag: str | None, micro_step: int | None) -> Save:
        state = capture(self._components, micro_step=micro_step)
        return self._write(state, step, reason, metrics, tag, micro_step)

    def _write(
        self, state: Captured, step: int, reason: str, metrics: Mapping[str, Any], tag: str | None, micro_step: int | None
    ) -> Save:
        """Try, by the policy; never raises for a store's sake unless the policy says so."""
        save = Save(step, reason)
        emit("save.requested", step=step, reason=reason)
        started = perf_counter()
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        for turn in range(1 + self._policy.retries):
            try:
                report = self._commit(state, step, reason, numbers, micro_step)
                break
            except (Fenced, IncompatibleState, ConfigError) as error:
                save.error = error
                raise
            except Exception as error:  # the trainer's edge: told, counted, and decided by the policy
                save.error = self._failed(error, step, turn)
        else:
            self._failed_in_a_row += 1
            self._last_save_s = monotonic()
            limit = self._policy.raise_after
            if limit is not None and self._failed_in_a_row >= limit:
                raise SaveFailed(f"{self._failed_in_a_row} saves in a row failed", where=f"step {step}") from save.error
            return save
        save.error = None
        self._committed(save, report, numbers, perf_counter() - started)
        if tag is not None:
            self._tag(tag, report.id)
        self._prune()
        return save

    def _commit(
        self, state: Captured, step: int, reason: str, metrics: Mapping[str, float], micro_step: int | None
    ) -> SaveReport:
        user = dict(self._metadata)
        if micro_step is not None:
            user["relight.micro_step"] = micro_step
        return self._take_charge().save(
            SaveRequest(
                step=step,
                tree=encode_tree(state.tree),
                items=state.items,
                reason=reason,
                metrics=metrics,
                user=user,
                environment=self._environment or {},
                components=state.kinds,
                exact=state.notes,
                parents=[self._parent] if self._parent else [],
            )
        )

    def _committed(self, save: Save, report: SaveReport, metrics: Mapping[str, float], seconds: float) -> None:
        self._failed_in_a_row = 0
        save.id, save.sealed, save.done = report.id, True, True
        save.bytes, save.timings = report.stored_bytes, {**report.timings_s, "blocked": seconds}
        emit(
            "save.durable",
            f"step {save.step} saved as {report.id} in {seconds:.3f} s ({report.stored_bytes / 1e6:.1f} MB, {save.reason})",
            step=save.step,
            id=report.id,
            reason=save.reason,
            bytes=report.stored_bytes,
            blocked_s=round(seconds, 6),
        )
        changed = save.step != self._last_saved_step
        if changed and self._last_digest == report.trainable_digest and report.logical_bytes and self._trains():
            emit(
                "save.stale",
                f"every trainable tensor saved at step {save.step} equals the one saved at step {self._last_saved_step}: is the model "
                "given to the Checkpointer the one that is trained?",
                step=save.step,
                id=report.id,
            )
        self._last_digest = report.trainable_digest
        self._parent, self._last_saved_step, self._last_save_s = report.id, save.step, monotonic()
        if self._trigger is not None:
            for name, mode in self._trigger.metrics:
                value = metrics.get(name)
                known = self._best.get(f"{name}:{mode}")
                if value is not None and (known is None or (value < known if mode == "min" else value > known)):
                    self._best[f"{name}:{mode}"] = value

    def _failed(self, error: Exception, step: int, turn: int) -> RelightError:
        known = error if isinstance(error, RelightError) else SaveFailed(f"{type(error).__name__}: {error}", where=f"step {step}")
        if known is not error:
            known.__cause__ = error
        ahead = "trying again" if turn < self._policy.retries else "training goes on; the next save will be tried as usual"
        emit("save.failed", f"the save at step {step} failed: {known}\n  {ahead}", step=step, kind=known.kind, turn=turn)
        return known

    def _save_boundary(self, error: Exception) -> None:
        """An exception is on its way out: save the last step's end if that is still what parameters and optimizer hold."""
        step = self._boundary.step
        if self._attempt is None or step is None or step == self._last_saved_step:
            return
        try:
            state = self._boundary.consistent()
            if state is None:
                emit(
                    "save.none",
                    f"{type(error).__name__} in the step after {step}: parameters or optimizer had changed since its end (or remembering "
                    "every step's end would have cost too much), so nothing was saved",
                    step=step,
                )
                return
            self._write(state, step, f"exception: {type(error).__name__}", {}, None, None)
        except Exception as second:  # the caller's exception matters more than ours
            emit("save.failed", f"saving after {type(error).__name__} failed: {second}", step=step, kind="exception")

    def _prune(self) -> None:
        if self._keep.is_everything or self._attempt is None:
            return
        try:
            plan = plan_prune(self._store, self._run, self._keep, verified=self._verified)
            report = execute(plan, self._store, epoch=self._attempt.epoch)
            if report.retired:
                emit("prune.done", f"removed {len(report.retired)} checkpoints", retired=report.retired, left=report.left)
        except Fenced:
            raise
        except RelightError as error:
            emit("prune.failed", f"old checkpoints could not be removed this time: {error}", kind=error.kind)

    def _sweep(self) -> None:
        try:
            report = execute_sweep(plan_sweep(self._store, self._run), self._store)
            if report.deleted:
                emit("sweep.done", f"removed what {len(report.deleted)} unfinished saves had left", deleted=report.deleted)
        except RelightError as error:
            emit("prune.failed", f"leftovers could not be removed this time: {error}", kind=error.kind)

    def _tag(self, name: str, checkpoint_id: str) -> None:
        log = Log(self._store, self._run)
        log.read()
        log.append(lambda view: (TagBody(name=name, id=checkpoint_id), fold(view).epoch))

    def _know_best(self, history: History) -> None:
        for name, mode in self._trigger.metrics if self._trigger else ():
            found = best(history.live, name, mode)
            if found:
                self._best[f"{name}:{mode}"] = metric_value(found.body.metrics[name])

    def _notice_newer(self, history: History) -> None:
        newest = history.live[-1].id if history.live else None
        expected = self._resumed.newest_seen
        if newest is not None and self._resumed.looked and newest != expected:
            emit(
                "preflight.warning",
                f"another process committed checkpoint {newest} to this run after this one restored; it is superseded now",
                id=newest,
            )

    def _say_restored(self, found: Resumed, start: int) -> None:
        assert found.checkpoint is not None
        emit(
            "restore.done",
            f"restored step {found.checkpoint.step} ({found.checkpoint.id}) in {found.seconds:.2f} s: going on with step {start}",
            step=found.checkpoint.step,
            id=found.checkpoint.id,
            bytes=found.bytes_read,
            seconds=round(found.seconds, 6),
        )
        different = differences(found.environment, self._environment or {})
        if different:
            emit("environment.differs", "this resume may not be bit-exact: " + "; ".join(different), differences=different)
        if found.notes:
            emit("environment.differs", "this resume may not be bit-exact: " + "; ".join(found.notes), differences=found.notes)

    def _trains(self) -> bool:
        return any(item.trainable for item in capture(self._components).items)

    def _on_signal(self, name: str) -> None:
        then = "saving at the end of this step" if name == "SIGUSR1" else "finishing this step, saving, then ending"
        emit("signal.received", f"{name}: {then}", signal=name)

    def _finish(self) -> None:
        if self._signals is not None and not self._signals.ending:
            self._signals.restore()
        unwatch_loaders(self._components)
        self._closed = True


def _components(state: Mapping[str, object] | None, components: dict[str, object]) -> dict[str, object]:
    merged = dict(state or {})
    for name, value in components.items():
        if name in merged:
            raise ConfigError(f"component {name!r} is given twice")
        merged[name] = value
    for name in merged:
        if not name or name == "rng" or name == "grad" or "/" in name:
            raise ConfigError(f"{name!r} cannot be a component's name", hint="'rng' and 'grad' are Relight's own; '/' separates levels")
    if not merged:
        raise ConfigError("nothing to save", hint="Checkpointer(path, model=model, optimizer=optimizer, …)")
    return merged


def _plain_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata is not JSON: {error}") from None


def _full_bytes(state: Captured) -> int:
    """The state's size once an optimizer that has no state yet has two moments a parameter."""
    trainable = sum(item.source.length for item in state.items if item.trainable)
    has_moments = any(item.role == "optim" for item in state.items)
    return state.logical_bytes + (0 if has_moments else 2 * trainable)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric {name!r} is not a number: {error}") from None



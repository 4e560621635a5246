"""Check the arguments of a Checkpointer and its methods. Each error states what to pass instead."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import msgspec

from relight.capture import Captured, kind_of, loader_of
from relight.capture.kinds import MODULE, VALUE
from relight.catalog.branches import check_free
from relight.checkpointer.failure_policy import FailurePolicy, check_failures
from relight.checkpointer.file_defaults import CheckpointerOptions, with_file_defaults
from relight.checkpointer.heartbeat_observer import attach_heartbeat
from relight.checkpointer.inflight import PRIORITIES
from relight.checkpointer.metric_values import check_metrics, number_of
from relight.checkpointer.observer import observers
from relight.checkpointer.option_names import refuse_slip
from relight.errors import ConfigError, shown
from relight.format import dtype_named
from relight.format.names import check_run_name
from relight.format.records import WORDS_MAX
from relight.format.root_keys import PREFIX
from relight.format.step_number import step_of, which_of
from relight.heartbeat import assert_past_standby
from relight.keys import StoreSecurity
from relight.policy import Compact, Keep, Limits, Peers, Tier, Tiers, Trigger
from relight.policy.argument_checks import check_bool, one_of
from relight.policy.compact import lossy_of, with_asked
from relight.policy.rollback_env import SPLIT
from relight.policy.triggers import check_trigger
from relight.settings.environment import environment
from relight.settings.registry import from_variable
from relight.store.urls import local_path, path_text, split_run

_SAVE_OPTIONS = ("tag", "block", "metrics", "reason", "micro_step", "priority")
EVERY, ONE = "every rank", "rank 0"
"""Values of ``writer=``."""
NAME_MAX, METADATA_MAX = 512, 1 << 20
"""Most bytes of a component's name, and of all metadata: both must fit into a root of 4 MiB."""


class RunOptions(NamedTuple):
    """Options of a Checkpointer, checked. What the caller left out is from ``relight.toml``, or the default."""

    url: str
    """The store that saves commit to."""
    run: str
    tiers: Tiers | None
    trigger: Trigger | None
    keep: Keep
    """Without ``keep=``, the nearest tier's rules."""
    policy: FailurePolicy
    limits: Limits
    metadata: dict[str, Any]
    compact: Compact | None
    peers: Peers | None
    background: bool
    signals: bool
    fresh: bool
    takeover: str | None
    writer: str
    per_rank: tuple[str, ...]
    """Names of components that differ between ranks."""
    security: StoreSecurity
    first_step: int = 0
    """The number of the run's first step: 0 or 1."""


def checked(
    path: str | os.PathLike[str] | Tiers,
    run: str | None,
    given: CheckpointerOptions,
    *,
    on_failure: str | FailurePolicy,
    metadata: Mapping[str, Any] | None,
    signals: bool,
    fresh: bool,
    writer: str,
    first_step: int,
    security: tuple[Any, Any, Any, Any],
) -> RunOptions:
    """Return the options, each checked but ``per_rank``. ``security``: ``encrypt=``, ``sign=``, ``trust=`` and ``anchor=``."""
    assert_past_standby("a Checkpointer")
    url, name, tiers, own = where_to(path, run)
    if given.background is not None:  # "no" would count as True
        check_bool(given.background, "background=")
    completed = with_file_defaults(given, writer, tiers, (url, name) if own else None)
    tiers, run = completed.tiers, check_run_name(name)
    return RunOptions(
        url,
        run,
        tiers,
        check_trigger(completed.save) if completed.save is not None else None,
        check_keep(completed.keep) or (tiers.nearest.keep if tiers is not None else Keep()),
        check_failures(on_failure),
        check_limits(completed.limits),
        check_metadata(metadata),
        check_compact(completed.compact),
        completed.peers,
        wants_background(completed.background),
        check_bool(signals, "signals="),
        fresh,
        completed.takeover,
        writer,
        (),
        StoreSecurity.from_settings(*security),
        check_first_step(first_step),
    )


def check_first_step(first_step: object) -> int:
    """Return ``first_step=`` if it is 0 or 1; raise ``ConfigError`` otherwise."""
    if type(first_step) is not int or first_step not in (0, 1):
        raise ConfigError(
            f"first_step={shown(first_step)}",
            where="first_step=",
            hint="0 if the loop is range(N); 1 if the number is the count of the steps that are done, as frameworks have it",
        )
    return first_step


def where_to(path: str | os.PathLike[str] | Tiers, run: str | None) -> tuple[str, str, Tiers | None, bool]:
    """Return the store in which saves commit, the run's name, all tiers if there are several, and whether this is the
    caller's place: observers may redirect the run to another one."""
    tiers = path if isinstance(path, Tiers) else None
    if tiers is not None and run is not None:
        raise ConfigError("run= does not go with Tiers(…)", hint="each tier's URL ends in the run's name")
    check_path(path)
    if run is not None and not isinstance(run, str):
        hint = f"run={getattr(run, 'name', 'demo')!r}: the name alone" if isinstance(run, os.PathLike) else 'run="demo"'
        raise ConfigError(f"run= must be a run's name, a text, not {shown(run)}", where="run=", hint=hint)
    given = tiers.nearest.url if tiers is not None else path
    url, name = (os.fspath(given), run) if run is not None else split_run(given)  # type: ignore[arg-type]
    attach_heartbeat()
    intended = (url, name)
    for observer in observers:
        url, name = observer.place(url, name)
    return url, name, tiers if (url, name) == intended else None, (url, name) == intended


def check_path(path: object) -> None:
    """Raise ``ConfigError`` for an invalid or empty path, and for a file where the run or its store must be a
    directory."""
    example = 'Checkpointer("runs/demo", model=model, …)'
    if isinstance(path, Tier):
        raise ConfigError(
            "a relight.tier(…) stands in a relight.Tiers(…), and not alone",
            where="path",
            hint="Checkpointer(relight.Tiers(hot=…, cold=…), …)",
        )
    if isinstance(path, Tiers):
        return
    text = path_text(path)
    if not text.strip():
        raise ConfigError("the path is empty", where="path", hint=example)
    if (local := local_path(text)) is not None:
        file = next((path for path in (local, os.path.dirname(local)) if os.path.isfile(path)), None)
        if file is not None:
            hint = "name the store's directory and the run, as in runs/demo; relight import reads files of other frameworks"
            raise ConfigError(f"{file} is a file; a run is a directory", where="path", hint=hint)


def wants_background(option: bool | None) -> bool:
    """Return the option, else ``RELIGHT_BACKGROUND``, else True."""
    if option is not None:
        return option
    return from_variable("checkpoint.background") is not False


def micro_batch_split() -> int:
    """Return ``RELIGHT_SPLIT``, the number of parts into which to split each micro-batch, else 1."""
    text = os.environ.get(SPLIT, "1")
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise ConfigError(f"{SPLIT} must be a whole number from 1 on, not {text[:40]!r}")
    return int(text)


def check_writer(writer: str) -> str:
    """Return ``writer`` if it is valid, else raise ``ConfigError``."""
    return one_of(writer, (EVERY, ONE), "writer=")


def check_limits(limits: Limits | None) -> Limits:
    """Return the limits, or the defaults for None. Raise ``ConfigError`` for another type."""
    if limits is not None and not isinstance(limits, Limits):
        raise ConfigError(
            f"limits= takes relight.Limits(…), not {shown(limits)}", where="limits=", hint=_called(limits, "Limits")
        )
    return limits or Limits()


def check_keep(keep: Keep | None) -> Keep | None:
    """Return the retention rules. Raise ``ConfigError`` for another type."""
    if keep is not None and not isinstance(keep, Keep):
        hint = (
            f"keep=relight.keep(last={keep})"
            if isinstance(keep, int) and not isinstance(keep, bool)
            else _called(keep, "keep")
        )
        raise ConfigError(f"keep= takes relight.keep(…), not {shown(keep)}", where="keep=", hint=hint)
    return keep


def check_compact(compact: Compact | bool | None) -> Compact | None:
    """Return the rules of compaction: the defaults for ``True``, None if it is off, changed by ``RELIGHT_LOSSY``."""
    if compact is not None and not isinstance(compact, (Compact, bool)):
        raise ConfigError(
            f"compact= takes relight.Compact(…), True or False, not {shown(compact)}", hint=_called(compact, "Compact")
        )
    rules = Compact() if compact is True else compact or None
    patterns = lossy_of(environment().lossy)
    return with_asked(rules or Compact(reuse=False, codecs="never"), patterns) if patterns else rules


def check_peers(peers: Peers | None, writer: str, background: bool) -> Peers | None:
    """Return the peers' rules. Raise ``ConfigError`` if they do not fit the other options."""
    if peers is None:
        return None
    if not isinstance(peers, Peers):
        raise ConfigError(f"peers= takes relight.Peers(…), not {shown(peers)}", hint=_called(peers, "Peers"))
    if writer == ONE:
        raise ConfigError(
            'peers= do not go with writer="rank 0"', hint="one rank has all there is: let every rank write"
        )
    if not background:
        raise ConfigError(
            "peers= need the agent, which holds snapshots in memory",
            hint="leave background= and RELIGHT_BACKGROUND alone",
        )
    return peers


def _called(value: object, name: str) -> str:
    """Return a hint for a dict of arguments, or for a function that was not called; else an empty text."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return f"relight.{name}({', '.join(f'{key}={item!r}' for key, item in [*value.items()][:4])})"
    return f"call it: relight.{name}(…)" if callable(value) else ""


def check_components(
    state: Mapping[str, object] | None, components: dict[str, object], options: Iterable[str]
) -> dict[str, object]:
    """Return all components by name. ``options``: the Checkpointer's own keywords, to detect misspelt options."""
    if state is not None and not isinstance(state, Mapping):
        hint = f"state={{{'model' if kind_of(state) == MODULE else 'name'!r}: …}}"
        raise ConfigError(f"state= must be a dict of components by name, not {shown(state)}", where="state=", hint=hint)
    merged = {name: loader_of(value) for name, value in (state or {}).items()}
    for name, value in ((name, loader_of(value)) for name, value in components.items()):
        if name in merged:
            raise ConfigError(f"component {name!r} is given twice")
        refuse_slip(name, value, options)
        merged[name] = value
    merged = dict(_apart(merged))
    for name in merged:
        if not isinstance(name, str):
            raise ConfigError(f"a component's name must be a text, not {shown(name)}", where="state=")
        if not name or name == "rng" or name == "grad" or "/" in name:
            raise ConfigError(
                f"{name!r} cannot be a component's name",
                hint="'rng' and 'grad' are Relight's own; '/' separates levels",
            )
        if not name.isprintable() or len(name.encode(errors="replace")) > NAME_MAX:
            hint = f"up to {NAME_MAX} bytes of printable characters"
            raise ConfigError(f"{name[:40]!r} cannot be a component's name", where="state=", hint=hint)
    if not merged:
        raise ConfigError("nothing to save", hint="Checkpointer(path, model=model, optimizer=optimizer, …)")
    return merged


def _apart(components: Mapping[Any, object]) -> Iterator[tuple[Any, object]]:
    """Yield the components, each component of a list, tuple or dict separately: ``optimizers=[a, b]`` gives
    optimizers.0 and optimizers.1.

    Raise ``ConfigError`` for a container that also has plain values: a restore would have to put those back into it.
    """
    for name, value in components.items():
        pairs = (
            value.items()
            if isinstance(value, Mapping)
            else enumerate(value)
            if isinstance(value, (list, tuple))
            else ()
        )
        inside = {f"{name}.{key}": element for key, element in pairs}
        stateful = [key for key, element in inside.items() if _holds_stateful(element)]
        if not stateful:
            yield name, value
        elif len(stateful) < len(inside):
            plain = next(key for key in inside if key not in stateful)
            raise ConfigError(
                f"{name}= holds a component, {stateful[0]}, and a plain value, {plain}",
                where=f"{name}=",
                hint="give each component a name of its own, and keep plain values in a container without components",
            )
        else:
            twice = next((key for key in inside if key in components), None)
            if twice is not None:
                raise ConfigError(f"component {twice!r} is given twice", where=f"{name}=")
            yield from _apart(inside)


def _holds_stateful(value: object) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_holds_stateful, value.values() if isinstance(value, Mapping) else value))
    return kind_of(value) != VALUE


def check_per_rank(per_rank: object, components: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of components that differ between ranks. A text is refused: it would count as one name for each
    letter."""
    if (
        isinstance(per_rank, str)
        or not isinstance(per_rank, Collection)
        or not all(isinstance(name, str) for name in per_rank)
    ):
        hint = f"per_rank=[{per_rank!r}]" if isinstance(per_rank, str) else 'per_rank=["data"]'
        raise ConfigError(
            f"per_rank= must be a list of components' names, not {shown(per_rank)}", where="per_rank=", hint=hint
        )
    unknown = sorted(set(per_rank) - components.keys())
    if unknown:
        close = get_close_matches(unknown[0], components, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(components)}"
        raise ConfigError(f"per_rank= names {unknown[0]!r}, which is not a component", where="per_rank=", hint=hint)
    return tuple(per_rank)


def check_metadata(metadata: object) -> dict[str, Any]:
    """Return a copy of the metadata. Raise ``ConfigError`` if it is not pure JSON or too large: otherwise every save
    would fail."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise ConfigError(
            f"metadata= must be a dict, not {shown(metadata)}", where="metadata=", hint='metadata={"note": …}'
        )
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise ConfigError(f"a key of metadata must be a text, not {shown(key)}", where="metadata=")
        if key.startswith(PREFIX):
            raise ConfigError(
                f"metadata key {key!r} is Relight's own", where="metadata=", hint=f"leave out the prefix {PREFIX!r}"
            )
        try:
            data = msgspec.msgpack.encode(plain := json.loads(json.dumps({key: value}, allow_nan=False)))
            if plain != msgspec.msgpack.decode(data) or len(data) > METADATA_MAX:
                raise ValueError(f"it takes {len(data)} bytes, at most {METADATA_MAX} are allowed")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            hint = "text, numbers, True, False, None, lists and dicts of these; other values, as text: str(…)"
            raise ConfigError(f"metadata {key!r} is not JSON: {error}", where=f"metadata {key}", hint=hint) from None
    copied: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    if len(json.dumps(copied)) > METADATA_MAX:
        raise ConfigError(
            f"metadata takes more than {METADATA_MAX} bytes", where="metadata=", hint="keep large things in state={…}"
        )
    return copied


def check_restore(which: Any, only: Any, strict: Any, rename: Any) -> str | int:
    """Return the requested checkpoint. Raise ``ConfigError`` for an argument of another type."""
    if only is not None and (
        isinstance(only, str) or not isinstance(only, Collection) or not all(isinstance(name, str) for name in only)
    ):
        hint = f"only=[{only!r}]" if isinstance(only, str) else 'only=["model/*"]'
        raise ConfigError(f"only= must be a list of patterns, not {shown(only)}", where="only=", hint=hint)
    check_bool(strict, "strict=")
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise ConfigError(
            f"map= must be a dict or a function, not {shown(rename)}",
            where="map=",
            hint='map={"model/old.*": "model/new.*"}',
        )
    return which_of(which)


def check_step(
    step: Any, micro_step: Any, metrics: Any, tag: Any = None, reason: Any = "asked"
) -> tuple[int, int | None]:
    """Return ``step`` and ``micro_step`` as ints. Raise ``ConfigError`` now for a value that a later save could not
    record.

    A tag and a reason must be texts that are short enough for a record.
    """
    number, micro = step_of(step), None if micro_step is None else step_of(micro_step, "micro_step")
    check_metrics(metrics if metrics is not None else {})
    if tag is not None:
        if not isinstance(tag, str):
            hint = f'tag="step-{tag}": a bare number names a step' if hasattr(tag, "__index__") else 'tag="good"'
            raise ConfigError(f"tag= must be a text, not {shown(tag)}", where="tag=", hint=hint)
        check_free(tag)
    if not isinstance(reason, str) or not reason.isprintable() or len(reason) > WORDS_MAX:
        raise ConfigError(
            f"reason= must be a text of at most {WORDS_MAX} printable characters, not {shown(reason)}", where="reason="
        )
    return number, micro


def all_metrics(metrics: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics of ``metrics=`` and of keywords together. Raise ``ConfigError`` for a name that both have."""
    if not metrics and isinstance(metrics, (Mapping, type(None))):
        return named
    if not isinstance(metrics, Mapping):
        check_metrics(metrics)
        return named
    twice = metrics.keys() & named.keys()
    if twice:
        raise ConfigError(f"metric {min(twice)!r} is given twice", where="metrics=", hint="leave one of them out")
    return {**metrics, **named}


def refuse_save_slip(named: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a keyword of ``save()`` that looks like a misspelt option: it would be a metric of that name."""
    for name in named:
        for option in get_close_matches(name, _SAVE_OPTIONS, 1, 0.75):
            hint = f'did you mean {option}=? As a metric, pass metrics={{"{name}": …}}'
            raise ConfigError(f"save() has no option {name[:40]!r}", where=f"{name[:40]}=", hint=hint)


def check_priority(priority: Any) -> str:
    """Return the priority of a save if it is valid, else raise ``ConfigError``."""
    return one_of(priority, PRIORITIES, "save(priority=…)")


def full_bytes(state: Captured) -> int:
    """Return the bytes of the state of all ranks, plus two moments per parameter if the optimizer has no state yet."""
    sizes = [(math.prod(item.shape) * dtype_named(item.dtype).itemsize, item) for item in state.items]
    trainable = sum(size for size, item in sizes if item.trainable)
    has_moments = any(item.role == "optim" for item in state.items)
    return sum(size for size, _ in sizes) + (0 if has_moments else 2 * trainable)


def numbers_for(trigger: Trigger | None, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of the metrics that the trigger needs. Reading a tensor waits for its device."""
    names = {name for name, _ in trigger.metrics} if trigger is not None else ()
    return {
        name: number for name in names if name in metrics and (number := number_of(name, metrics[name])) is not None
    }

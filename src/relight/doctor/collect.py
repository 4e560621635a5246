"""Collect all facts for a path that a user typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from relight.catalog.locate import Location, locate
from relight.doctor.bounded import BoundedProbe
from relight.doctor.facts import ConfigFacts, DoctorFacts, Drilled, Proven, RunFacts, StoreFacts, Trouble
from relight.doctor.facts_config import collect_config
from relight.doctor.facts_machine import collect_machine
from relight.doctor.facts_run import collect_run, measure_restore
from relight.doctor.facts_store import collect_store
from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.run_records.proofs import Proof, proofs_of
from relight.store import ByteStore, open_bytes
from relight.store.urls import absolute

RUNS_MAX = 32
"""Largest number of a store's runs that are read. To check another run, name it."""
PLACE_S = 30.0
"""Seconds that a store may take to answer: longer than a command's patience with an object store."""
MEASURE_BYTES, MEASURE_S = 4 << 30, 60.0
StageCallback = Callable[[str], None]
_Led = tuple[Location | RelightError | Trouble, str]
"""What a path names, or the error; and what exists there instead."""
Remembered = Callable[[ByteStore, str], Sequence[Drilled]]


def collect(
    path: str,
    *,
    quick: bool = False,
    measure: bool = False,
    drills: Remembered | None = None,
    on_stage: StageCallback = lambda what: None,
    progress: Callable[[int], None] = lambda count: None,
) -> DoctorFacts:
    """Collect all facts about this machine, the settings, and ``path``: a store or a run that need not exist yet.

    Problems with these are facts, and not errors. Raise ``ConfigError`` only if ``path`` is not a path or URL. ``drills`` reads the drills
    that are recorded with a run. ``measure`` reads the newest checkpoint of each run, up to 4 GiB or one minute. ``on_stage`` receives the
    names of the stages, and ``progress`` the number of bytes read.
    """
    if not path or "\0" in path:
        raise ConfigError("the path of a store is empty, or has a zero byte")
    url = absolute(path)
    on_stage("settings")
    probes = BoundedProbe(PLACE_S)
    config = probes.at("settings", lambda: collect_config(url), ConfigFacts())
    if probes.unseen:
        config = replace(config, unseen=dict(probes.unseen))
    on_stage("machine")
    machine = collect_machine(url, quick=quick)
    on_stage("place")
    silent: _Led = (Trouble("store", "no answer", url), "")
    location, absent = probes.at("place", lambda: _place(path), silent)
    if isinstance(location, ConfigError) and not config.bad and all(package.installed for package in machine.packages):
        raise location  # the path is wrong
    if not isinstance(location, Location):
        error = (
            Trouble.from_error(location, url)
            if isinstance(location, RelightError)
            else location._replace(what=probes.unseen["place"])
        )
        return DoctorFacts(
            machine=machine, config=config, store=StoreFacts(url=url, there=False, error=error, unseen=probes.unseen)
        )
    place = location
    on_stage("store")
    store = replace(collect_store(place.store, quick=quick), absent=absent)
    names = (
        ([place.run] if place.run is not None else list(store.runs))
        if (store.there or store.runs) and _opens(store)
        else []
    )
    runs = []
    for name in names[:RUNS_MAX]:
        on_stage(f"run {name}")
        run = collect_run(
            place.store,
            name,
            f"{path.rstrip('/')}/{name}" if place.run is None else _without_which(path, place),
            quick=quick,
        )
        runs.append(_more(place.store, run, measure, drills, progress))
    if len(names) > RUNS_MAX:
        store = replace(
            store, unseen={**store.unseen, "runs": f"only the first {RUNS_MAX} of {len(names)} runs were examined"}
        )
    return DoctorFacts(machine=machine, config=config, store=store, runs=tuple(runs))


def _place(path: str) -> _Led:
    """Return what the path names: an existing or future store or run, with what exists there instead; or the error."""
    try:
        return locate(path), ""
    except CheckpointNotFound as error:
        return Location(open_bytes(absolute(path)), None), f"{error.what}; {error.hint}" if error.hint else error.what
    except RelightError as error:
        return error, ""


def _opens(store: StoreFacts) -> bool:
    """Return whether runs can be read: the key is known, or none is needed."""
    return store.record is None or store.record.kind != "wrong_key"


def _without_which(path: str, place: Location) -> str:
    """Return the run's path if the given path names a checkpoint of it."""
    if place.which is not None and path.endswith(f"@{place.which}"):
        return path[: -len(place.which) - 1]
    return path.rstrip("/") if place.which is None else f"{place.store.url}/{place.run}"


def _more(
    store: ByteStore, run: RunFacts, measure: bool, drills: Remembered | None, progress: Callable[[int], None]
) -> RunFacts:
    if run.error is not None:
        return run
    unseen = dict(run.unseen)
    recorded: Sequence[Drilled] = ()
    if drills is not None:
        try:
            recorded = drills(store, run.name)
        except RelightError as error:
            unseen["drills"] = error.what
    proofs: tuple[Proven, ...] = ()
    try:
        proofs = tuple(_proven(proof) for proof in proofs_of(store, run.name))
    except RelightError as error:
        unseen["proofs"] = error.what
    measured = None
    if measure:
        try:
            measured = measure_restore(
                store, run.name, bytes_max=MEASURE_BYTES, seconds_max=MEASURE_S, progress=progress
            )
        except RelightError as error:
            unseen["restore"] = error.what
    return replace(run, drills=tuple(recorded), proofs=proofs, measured=measured, unseen=unseen)


def _proven(proof: Proof) -> Proven:
    verified = tuple((checkpoint.id, checkpoint.step, checkpoint.damage) for checkpoint in proof.checkpoints)
    return Proven(proof.kind, proof.time_s, proof.ok, proof.summary, verified)

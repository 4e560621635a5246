"""Effects, roles and routes: who can cause an effect by any route, and what a token with a scope can learn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.serve.made_server import Server, serving
from tests.serve.made_stores import make_run, make_store
from tests.serve.test_serve_roles import routes

import relight
from relight.audit.effects import ACTIONS, EFFECTS, ROUTES, role_of
from relight.catalog.branches import tag_if_possible
from relight.catalog.run import Run, list_runs
from relight.cli import COMMANDS, FORMS, cli
from relight.errors import ConfigError
from relight.format.names import STAGES
from relight.format.records import NoteBody, RecallBody, RetireBody, TagBody
from relight.log import Checkpoint, Log, LogView, read_store
from relight.reader import VerifyFinding
from relight.reclaim import prune
from relight.run_records.verification import record_checked
from relight.serve.actions import FIELDS
from relight.serve.live import TOGETHER_S, Hub
from relight.serve.scope import Caller, asking, in_scope
from relight.store import ByteStore, open_bytes
from relight.transfer.pushing import execute_push, plan_push
from relight.versions.branching import branch
from relight.versions.stages import clear, promote

LIBRARY: dict[str, tuple[str, ...]] = {
    "Store.report": ("note",),
    "Store.tag": ("tag",),
    "Store.branch": ("create run",),
    "Store.promote": ("stage",),
    "Store.prune": ("retire",),
    "Store.verify": ("read",),
    "Run.tag": ("tag",),
    "save": ("create run", "add checkpoints"),
    "Checkpointer.save": ("create run", "add checkpoints", "tag"),
    **dict.fromkeys(
        (
            "Store.checkpoints", "Store.latest", "Store.plan_prune", "Store.run", "Store.runs",
            "Run.history", "Run.open", "Run.require_whole_log", "Run.view", "load", "open",
        ),
        ("read",),
    ),
}  # fmt: skip
"""Effects of library calls on a store, beyond a job's own saves."""
OURS, SECRET = "run-000", "secret-project"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server with a run for the scoped token, and a secret run that is a branch of it and has a branch."""
    root = make_store(tmp_path / "runs", 1, 3)
    store = open_bytes(str(root))
    make_run(root, read_store(store).id, "other", 2, 900)
    ours = Run(store, OURS)
    branch(ours, ours.history().live[0], SECRET, by="ann")
    secret = Run(store, SECRET)
    branch(secret, secret.history().live[0], f"{SECRET}-child", by="ann")
    promote(ours, ours.history().live[0], "production", by="ann")
    with serving([root], tmp_path) as made:
        for role in ("viewer", "operator"):
            made.tokens[f"scoped {role}"] = made.app.state.store.new_token(role, role, f"runs/{OURS}")[1]
        yield made


def test_the_log_of_a_run_is_a_page(server: Server, tmp_path: Path) -> None:
    """The page has each record of the log. With a scoped token it has those of its run, and no name of another run."""
    whole, scoped = (server.get(f"/runs/runs/{OURS}/log", who).text for who in ("viewer", "scoped viewer"))
    newest = Run(open_bytes(str(tmp_path / "runs")), OURS).history().live[-1]
    for page in (whole, scoped):
        assert f"{newest.id} step {newest.step}" in page and "takes charge" in page
    assert SECRET in whole and SECRET not in scoped
    assert server.get("/runs/runs/nothing/log").status_code == 404


def test_every_route_declares_its_effect_and_takes_its_role(server: Server) -> None:
    """A route without an entry in the table of effects, or with another role than its effect, fails here."""
    roles = {(method, path): role for method, path, role in routes(server.app)}
    assert roles.keys() == ROUTES.keys(), roles.keys() ^ ROUTES.keys()
    for way, effect in ROUTES.items():
        expected = "operator" if effect == "by action" else EFFECTS[effect].role or None
        assert roles[way] == expected, way


def test_every_action_command_and_call_declares_its_effects() -> None:
    """A new action, command or public call without declared effects fails here."""
    assert ACTIONS.keys() == FIELDS.keys()
    calls = {
        f"{kind.__name__}.{name}" for kind in (relight.Store, Run) for name in vars(kind) if not name.startswith("_")
    }
    calls |= {"save", "load", "open", "Checkpointer.save"}
    assert calls == LIBRARY.keys()
    commands = {name: command.effects for name, command in (COMMANDS | FORMS).items()}
    for table in (ACTIONS, commands, LIBRARY):
        assert all(effect in EFFECTS for effects in table.values() for effect in effects)


def effects_since(server: Server, before: dict[str, int]) -> set[tuple[str, str]]:
    """Return the effects on the store as ``(effect, run)``, from the new records and runs."""
    store = server.app.state.readers[0].store
    effects: set[tuple[str, str]] = set()
    for name in list_runs(store):
        if name not in before:
            effects.add(("create run", name))
        for record in Log(store, name).read().records[before.get(name, 0) :]:
            body = record.body
            if isinstance(body, TagBody) and not body.name.startswith("branches/"):
                effects.add(("stage" if body.name in STAGES else "tag", name))
            elif isinstance(body, RetireBody):
                effects.add(("retire", name))
            elif isinstance(body, RecallBody):
                effects.add(("undelete", name))
            elif isinstance(body, NoteBody) and body.topic == "hold":
                effects.add(("hold", name))
    return effects


def attempts() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each action with each run, and with a stage or another run's name in every field for a name."""
    for run in (OURS, SECRET, "other"):
        base = {"store": "runs", "run": run, "which": "latest"}
        for name in ("good", *STAGES, "branches/x", "Production"):
            yield "tag", base | {"name": name}
        for to in ("fork", "production", SECRET, "other", f"{SECRET}-2", "runs-2"):
            yield "branch", base | {"to": to}
        yield "hold", base
        yield "promote", base | {"stage": "production"}
        yield "promote", base | {"stage": "staging"}
        yield "prune", {"store": "runs", "run": run, "keep_last": "1"}


@pytest.mark.parametrize("asker", ["viewer", "operator", "admin", "scoped viewer", "scoped operator", "scoped"])
def test_an_effect_takes_its_role_and_scope_whichever_way_leads_to_it(server: Server, asker: str) -> None:
    """The effects of all attempts of a client are within the role and the scope of its token."""
    role = {"scoped": "admin"}.get(asker, asker.removeprefix("scoped "))
    who, scope = Caller(asker, role), f"runs/{OURS}" if asker.startswith("scoped") else ""
    store = server.app.state.readers[0].store
    before = {name: len(Log(store, name).read().records) for name in list_runs(store)}
    for verb, fields in attempts():
        plan = server.post(f"/api/v1/actions/{verb}", asker, json={"fields": fields})
        digest = plan.json().get("digest", "0" * 64)
        done = server.post(f"/api/v1/actions/{verb}", asker, json={"fields": fields, "confirm": digest})
        page = server.post(f"/act/{verb}", asker, data={**fields, "go": digest})
        assert plan.status_code < 500 and done.status_code < 500 and page.status_code < 500, (verb, fields)
        server.app.state.readers[0].poll()
    effects = effects_since(server, before)
    for effect, run in effects:
        assert who.may(role_of(effect)), (effect, run)
        assert in_scope(scope, "runs", {run}), (effect, run)
    expected = {
        "viewer": set(),
        "operator": {"tag", "create run", "hold"},
        "admin": {"tag", "create run", "hold", "stage"},
    }[role]
    if scope:
        expected = expected - {"create run"}
    assert expected <= {effect for effect, _ in effects}, effects


def test_no_way_but_promote_moves_a_stage(tmp_path: Path) -> None:
    """Tags of the library, the command line, saves, pushes and agents do not move stages."""
    torch.set_num_threads(1)
    for step in (1, 2):
        relight.save(tmp_path / "s" / "run", {"x": torch.zeros(2)}, step=step)
    path, store = tmp_path / "s" / "run", open_bytes(tmp_path / "s")
    run = Run(store, "run")
    first, last = run.history().live
    promote(run, first, "production")

    def production() -> str | None:
        return Run(store, "run").history().tags.get("production")

    for stage in STAGES:
        for call in (
            lambda stage=stage: run.tag(stage, last.id),
            lambda stage=stage: run.tag(stage, None),
            lambda stage=stage: relight.open(path).tag(stage, 2),
        ):
            with pytest.raises(ConfigError, match="is a stage"):
                call()  # type: ignore[no-untyped-call]
        tag_if_possible(Log(store, "run"), stage, last.id)
        for words in ([str(path), stage, "2"], [str(path), stage, "--delete"]):
            done = CliRunner().invoke(cli, ["tag", *words])
            assert done.exit_code != 0 and isinstance(done.exception, ConfigError) and "--stage" in done.exception.hint
    with (
        relight.Checkpointer(path, model=torch.nn.Linear(1, 1), background=False) as ckpt,
        pytest.raises(ConfigError, match="is a stage"),
    ):
        ckpt.save(3, tag="production")
    for stage in STAGES[:2]:
        branch(run, last, stage)  # a run may have this name; it is not a stage
    assert production() == first.id
    target = open_bytes(tmp_path / "mirror")
    execute_push(plan_push(run, target, "run"))
    assert "production" not in Run(target, "run").history().tags
    promote(Run(target, "run"), Run(target, "run").history().live[-1], "production")
    was = Run(target, "run").history().tags["production"]
    execute_push(plan_push(run, target, "run", force=True))
    assert Run(target, "run").history().tags["production"] == was
    clear(run, "production")
    assert production() is None


def test_a_scoped_token_learns_no_other_runs_name(server: Server) -> None:
    """No page, answer, error, task, audit entry or branch tag for a scoped token names a run outside its scope."""
    acts = server.app.state.acts
    admin = Caller("admin", "admin", "", "tokenid000")
    for verb, fields in (
        ("branch", {"store": "runs", "run": OURS, "which": "latest", "to": f"{SECRET}-3"}),
        ("hold", {"store": "runs", "run": SECRET, "which": "latest"}),
    ):
        acts.execute(verb, fields, admin)
    server.app.state.tasks.begin("save", "runs", SECRET, "admin", lambda task: None)
    server.app.state.readers[0].poll()
    assert (
        SECRET in server.get(f"/api/v1/runs/runs/{OURS}", "admin").text
        and SECRET in server.get("/api/v1/audit", "admin").text
    )
    parts = {"{store}": "runs", "{run}": OURS, "{which:path}": "latest", "{which}": "latest", "{task}": "0" * 16}
    seen = 0
    for method, path in ROUTES:
        if method != "GET" or path == "/events":
            continue
        for part, value in parts.items():
            path = path.replace(part, value)
        answer = server.get(f"{path}?a={OURS}@100&b={OURS}@200&path=x", "scoped")
        assert SECRET not in answer.text, path
        seen += answer.status_code == 200
    assert seen > 15
    for verb, fields in attempts():
        given = {name: value for name, value in fields.items() if SECRET not in value}
        answer = server.post(f"/api/v1/actions/{verb}", "scoped", json={"fields": given})
        assert SECRET not in answer.text, (verb, fields)
    taken = server.post(
        "/api/v1/actions/branch",
        "scoped",
        json={"fields": {"store": "runs", "run": OURS, "which": "100", "to": SECRET}},
    )
    free = server.post(
        "/api/v1/actions/branch",
        "scoped",
        json={"fields": {"store": "runs", "run": OURS, "which": "100", "to": "free-name"}},
    )
    assert taken.status_code == free.status_code == 422 and taken.json() == free.json()


def test_events_of_a_scoped_token_are_of_its_runs() -> None:
    """A change of a run outside the scope wakes no stream of a scoped token."""
    assert in_scope(f"runs/{OURS}", "runs", {OURS, SECRET}) and not in_scope(f"runs/{OURS}", "runs", {SECRET})
    assert not in_scope("runs", "others", set()) and in_scope("runs", "runs", {SECRET}) and in_scope("", "x", {"y"})

    async def woken(run: str) -> bool:
        hub = Hub()
        with asking(f"runs/{OURS}"):
            events = hub.listen("", "", "scoped", lambda: True)
            await anext(events)
            hub.changed("runs", {run})
            with contextlib.suppress(TimeoutError):
                return (await asyncio.wait_for(anext(events), 2 * TOGETHER_S))["event"] == "changed"
            return False

    assert asyncio.run(woken(OURS)) and not asyncio.run(woken(SECRET))


def test_a_plan_of_retention_reads_a_checkpoint_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The confirmation uses the verification of the plan that was shown, unless damage was recorded since."""
    reads = list[str]()

    def counted(store: ByteStore, view: LogView, checkpoint: Checkpoint, **options: Any) -> list[VerifyFinding]:
        reads.append(checkpoint.id)
        return []  # the checkpoints of the made store have no bytes

    monkeypatch.setattr(prune, "verify_checkpoint", counted)
    acts, fields = server.app.state.acts, {"store": "runs", "run": "other", "keep_last": "1"}
    admin = Caller("ann", "admin")
    digest = acts.plan("prune", fields, admin).digest
    assert acts.plan("prune", fields, admin).digest == digest and len(reads) == 1
    record_checked(open_bytes(str(tmp_path / "runs")), "other", {reads[0]: "a chunk differs"}, "relight verify")
    digest = acts.plan("prune", fields, admin).digest
    assert len(reads) == 2
    assert acts.execute("prune", fields, admin, digest).ok and len(reads) <= 3


def test_a_plan_of_retention_verifies_a_failed_checkpoint_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that failed once may have been repaired since: the next plan reads it again."""
    reads = list[str]()

    def fails_once(store: ByteStore, view: LogView, checkpoint: Checkpoint, **options: Any) -> list[VerifyFinding]:
        reads.append(checkpoint.id)
        return [] if len(reads) > 1 else [VerifyFinding("corrupt", "chunks", "", "a chunk differs")]

    monkeypatch.setattr(prune, "verify_checkpoint", fails_once)
    acts, fields, admin = (
        server.app.state.acts,
        {"store": "runs", "run": "other", "keep_last": "1"},
        Caller("ann", "admin"),
    )
    acts.plan("prune", fields, admin)
    first = reads[0]
    acts.plan("prune", fields, admin)
    assert reads.count(first) == 2

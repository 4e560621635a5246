"""Every audited action's first record states what is done: all fields, the arguments, and the id of the token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from tests.serve.made_server import Server, serving
from tests.serve.made_stores import make_store

import relight
from relight.audit import AuditEntry, AuditLog, facts
from relight.audit.effects import ACTIONS, EFFECTS
from relight.audit.facts import FIELDS, VALUE_MAX, ActionFacts
from relight.catalog.run import Run
from relight.cli import COMMANDS, FORMS, cli
from relight.cli.audited import WITH
from relight.cli.audited_facts import facts_of
from relight.format.records import NoteBody
from relight.log import Log
from relight.serve.pieces import short_audit
from relight.serve.values import AuditRow
from relight.store import open_bytes
from relight.versions.stages import promotions

GIVEN: dict[str, dict[str, str]] = {
    "tag": {"store": "runs", "run": "run-000", "which": "latest", "name": "good"},
    "branch": {"store": "runs", "run": "run-000", "which": "latest", "to": "fork", "why": "half the rate"},
    "hold": {"store": "runs", "run": "run-000", "which": "latest", "why": "for the paper"},
    "verify": {"store": "runs", "run": "run-000", "which": "latest"},
    "save": {"store": "runs", "run": "run-000", "why": "before the move"},
    "drill": {"store": "runs", "run": "run-000"},
    "prune": {"store": "runs", "run": "run-000", "keep_last": "2"},
    "promote": {"store": "runs", "run": "run-000", "which": "latest", "stage": "production", "why": "passed"},
    "revoke": {"id": "nothing000"},
}
CHANGES = {"tag": True, "branch": True, "hold": True, "promote": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server with one run of three checkpoints."""
    with serving([make_store(tmp_path / "runs", 1, 3)], tmp_path) as made:
        yield made


def first_record(book: AuditLog) -> dict[str, Any]:
    """The data of the newest first record, read from the log itself."""
    bodies = [record.body for record in Log(book.store, "audit").read().records]
    return next(dict(body.data) for body in reversed(bodies) if isinstance(body, NoteBody) and "begun" not in body.data)


def test_every_action_of_the_dashboard_records_all_of_it(server: Server) -> None:
    """For each action of the server, the first record has every field, every argument, and the id of the token, whatever the outcome."""
    assert GIVEN.keys() == ACTIONS.keys()
    token = server.tokens["admin"]
    for verb, fields in GIVEN.items():
        plan = server.post(f"/api/v1/actions/{verb}", "admin", json={"fields": fields}).json()
        server.post(
            f"/api/v1/actions/{verb}", "admin", json={"fields": fields, "confirm": plan.get("digest", "x" * 64)}
        )
        record = first_record(server.app.state.book)
        assert record["what"] == verb and set(FIELDS) <= record.keys(), verb
        assert {f"given.{name}": value for name, value in fields.items()}.items() <= record.items(), verb
        assert record["token"] == token[3:13] and record["run"] == fields.get("run", ""), verb
        assert record["why"] == fields.get("why", "")
        if "which" in fields:
            assert len(record["checkpoint"]) == 10, verb
        if verb in CHANGES:
            assert record["before"] != record["after"], verb
        assert token.partition(".")[2] not in str(record)
    tag = next(entry for entry in server.app.state.book.entries() if entry.what == "tag")
    assert dict(tag.fields)["after"] == dict(tag.fields)["checkpoint"] and dict(tag.fields)["before"] == ""
    rows = server.get("/api/v1/audit", "admin").json()["rows"]
    assert all(
        row["token"] == token[3:13] and row["fields"]["given.run"] == "run-000"
        for row in rows
        if row["what"] != "revoke"
    )


def test_a_moved_stage_is_recorded_with_what_it_was(server: Server) -> None:
    """The record of a promotion names the checkpoint that was in the stage before."""
    ids = []
    for which in ("100", "200"):
        fields = GIVEN["promote"] | {"which": which}
        plan = server.post("/api/v1/actions/promote", "admin", json={"fields": fields}).json()
        assert (
            server.post(
                "/api/v1/actions/promote", "admin", json={"fields": fields, "confirm": plan["digest"]}
            ).status_code
            == 200
        )
        record = first_record(server.app.state.book)
        ids.append(record["after"])
        server.app.state.readers[0].poll()
    assert record["before"] == ids[0] != ids[1]


def test_a_pasted_token_is_recorded_without_its_secret(server: Server) -> None:
    """A caller who names a token by its whole text leaves the id in the log, and nothing of the secret."""
    _, token = server.app.state.store.new_token("leaver", "viewer")
    for fields in ({"id": token}, GIVEN["tag"] | {"name": token[:40]}, GIVEN["hold"] | {"why": f"see {token}"}):
        verb = "revoke" if "id" in fields else "hold" if "why" in fields else "tag"
        plan = server.post(f"/api/v1/actions/{verb}", "admin", json={"fields": fields}).json()
        server.post(
            f"/api/v1/actions/{verb}", "admin", json={"fields": fields, "confirm": plan.get("digest", "x" * 64)}
        )
    text = str([record.body for record in Log(server.app.state.book.store, "audit").read().records])
    assert token.partition(".")[2][:20] not in text


def test_a_variable_does_not_put_another_name_into_the_audit_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry of a command, and the author of what it writes, have the name of the real user."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "mallory")
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "audit"))
    make_store(tmp_path / "runs", 1, 3)
    run = f"{tmp_path}/runs/run-000"
    assert CliRunner().invoke(cli, ["tag", f"{run}@200", "--stage", "candidate"]).exit_code == 0
    (entry,) = AuditLog(open_bytes(str(tmp_path / "audit"))).entries()
    moved = promotions(Run(open_bytes(str(tmp_path / "runs")), "run-000").view().records)[-1]
    assert entry.who == moved.by != "mallory"


def test_every_command_that_changes_something_is_audited() -> None:
    """A command with an effect that is audited is in the table of audited commands, or writes its record itself."""
    changing = {
        name
        for name, command in (COMMANDS | FORMS).items()
        if any(EFFECTS[effect].changes for effect in command.effects)
    }
    assert changing <= WITH.keys() | {"token"} and WITH.keys() <= changing


SIMPLE = {
    "tag": ["{run}", "good", "200"],
    "note": ["{run}@200", "looks fine"],
    "tag --hold": ["{run}@200", "--why", "for the paper"],
    "tag --stage": ["{run}@200", "production", "--why", "passed"],
    "branch": ["{run}@200", "fork", "--why", "half the rate"],
    "prune": ["{run}", "--keep-last", "2", "-y"],
    "undelete": ["{run}", "all"],
    "verify": ["{run}", "200"],
    "cp": ["{run}@200", "{root}/other/"],
    "repack": ["{run}"],
    "log --rebuild": ["{run}", "-y"],
    "verify --repair": ["{run}", "--dry-run"],
    "export": ["{run}@200", "{root}/out.safetensors"],
    "import": ["{root}/none.pt", "{root}/fifth/copy"],
    "import --all": ["{root}/none", "{root}/sixth"],
    "keys": ["new", "{root}/a.key"],
    "keys rekey": ["{root}/runs", "--all"],
    "doctor": ["{run}", "--fix", "-y", "--quick"],
    "save": ["{run}", "--why", "before the move", "--timeout", "1.0"],
    "drill": ["--copy", "{run}", "--deadline", "1.0", "--env", "API_TOKEN=swordfish"],
    "follow": ["{run}", "--run", "true", "--once"],
    "export --follow": ["{run}", "{root}/newest.safetensors", "--until", "300"],
}


def test_every_audited_command_records_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each audited command, the first record has every field and every argument that was given."""
    torch.set_num_threads(1)
    make_store(tmp_path / "runs", 1, 3)
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "audit"))
    monkeypatch.chdir(tmp_path)
    assert SIMPLE.keys() == WITH.keys()
    book = AuditLog(open_bytes(tmp_path / "audit"))
    seen: dict[str, dict[str, Any]] = {}
    # what a command does is other tests' subject; here its record counts, so the slow ones do nothing
    from relight.cli import drill, export_follow, follow, save

    for slow in (drill, export_follow, follow, save):
        monkeypatch.setattr(slow.command, "callback", lambda **given: 0)
    for name, words in SIMPLE.items():
        words = [word.format(run=f"{tmp_path}/runs/run-000", root=tmp_path) for word in words]
        CliRunner().invoke(cli, [*name.split(), *words])
        record = first_record(book)
        assert str(record["what"]) == ("keys new" if name == "keys" else name) and set(FIELDS) <= record.keys(), name
        given = [str(value) for key, value in record.items() if key.startswith("given.")]
        for word in words:
            if not word.startswith("-") and word != "new" and "swordfish" not in word:
                assert any(word == value or word in value.split(", ") for value in given), (name, word, given)
        assert "swordfish" not in str(record)
        seen[name] = record
    for name in ("tag", "note", "tag --hold", "tag --stage", "branch", "verify", "cp", "export"):
        assert seen[name]["run"] == "run-000" and len(seen[name]["checkpoint"]) == 10, name
    assert (
        seen["tag"]["after"] == seen["tag"]["checkpoint"]
        and seen["tag --stage"]["after"] == f"production: {seen['tag --stage']['checkpoint']}"
    )
    assert seen["tag --hold"]["why"] == "for the paper" and seen["prune"]["before"].count(",") == 2


def test_tokens_of_the_command_line_are_recorded_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making and revoking a token records name, role, scope and the token's id, never the token."""
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "audit"))
    state = ["--state", str(tmp_path / "s.sqlite")]
    made = CliRunner().invoke(cli, ["token", "new", "anna", "--role", "operator", "--scope", "runs/demo", *state])
    token = made.stdout.split()[0]
    CliRunner().invoke(cli, ["token", "revoke", token, *state])
    new, gone = AuditLog(open_bytes(tmp_path / "audit")).entries()
    assert {"given.name": "anna", "given.role": "operator", "given.scope": "runs/demo"}.items() <= dict(
        new.fields
    ).items()
    assert token[3:13] in new.says and dict(gone.fields)["given.id"] == token[3:13] == gone.on
    assert dict(gone.fields)["before"] == "valid" and token.partition(".")[2] not in str((new, gone))


def test_library_calls_record_their_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``relight.load`` is recorded with what it was given."""
    torch.set_num_threads(1)
    relight.save(tmp_path / "runs" / "run-000", {"x": torch.zeros(3)}, step=200)
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "audit"))
    relight.load(tmp_path / "runs" / "run-000", 200)
    entry: AuditEntry = AuditLog(open_bytes(tmp_path / "audit")).entries()[-1]
    assert entry.what == "load" and dict(entry.fields)["given.which"] == "200" and entry.how == "ok"


def test_long_values_keep_their_length_and_hash() -> None:
    """A value that is too long for a record shows what was left out, so two of them are never confused."""
    first, second = (ActionFacts(given={"why": "x" * 5000 + end}).record()["given.why"] for end in "ab")
    assert len(first) == VALUE_MAX == len(second) and first != second and "5001 characters" in first
    hidden = ActionFacts(
        given={"url": "https://anna:pw@host/x", "password": "pw", "words": ("--api-token", "pw", "TOKEN=pw")}
    ).record()
    assert "pw" not in str(hidden.values()) and "host/x" in hidden["given.url"]


def test_arguments_of_a_run_that_cannot_be_read_are_recorded(tmp_path: Path) -> None:
    """The record does not depend on the run: its arguments are there, too, if it is gone."""
    facts = facts_of("tag", {"path": str(tmp_path / "none" / "run"), "name": "good"})
    assert facts.run.endswith("none/run") and facts.given["name"] == "good"


def test_a_refused_plan_is_recorded_with_known_arguments_alone(server: Server) -> None:
    """A plan without permission is recorded. Unknown argument names are left out of the entry."""
    operator = {"store": "runs", "run": "run-000", "which": "latest", "name": "production"}
    other = {"store": "runs", "run": "secret", "which": "latest", "name": "x"}
    for role, fields in (
        ("operator", operator),
        ("scoped", other),
        ("operator", operator | {f"odd-{n}": "x" * 400 for n in range(6)}),
    ):
        assert server.post("/api/v1/actions/tag", role, json={"fields": fields}).status_code in (404, 422)
        entry = server.app.state.book.entries()[-1]
        assert (entry.who, entry.what, entry.how) == (role, "tag", "refused") and entry.says.startswith(
            "planned only: "
        )
        given = {name for name, _ in entry.fields if name.startswith("given.")}
        assert given == {f"given.{name}" for name in operator}
    assert (
        server.post(
            "/api/v1/actions/tag", "operator", json={"fields": operator | {"odd": "1"}, "confirm": "x"}
        ).status_code
        == 422
    )
    assert "given.odd" not in dict(server.app.state.book.entries()[-1].fields)
    assert len(server.app.state.book.entries()) == 4
    assert (
        server.post("/api/v1/actions/tag", "operator", json={"fields": operator | {"name": "fine"}}).status_code == 200
    )
    assert len(server.app.state.book.entries()) == 4, "a plan that may be done is not recorded until it is"


def test_a_piece_of_the_audit_log_has_a_bound_in_bytes() -> None:
    """500 rows with the longest values, in characters that JSON or UTF-8 expand, take under 1 MB. Short values are
    unchanged."""
    for letter in ("x", "\U0001f600", "\x01", '"'):
        long = {f"{letter}{n}" * 40: letter * 2000 for n in range(40)}
        row = AuditRow(
            7, "2026-11-26T10:00:00Z", letter * 500, "tag", letter * 380, "refused", letter * 300, letter * 300, long
        )
        short = short_audit(row)
        assert len(msgspec.json.encode(short)) < 1900
        assert list(short.fields)[-1] == "…" and short.seq == 7
    row = AuditRow(
        7,
        "2026-11-26T10:00:00Z",
        "anna",
        "tag",
        "runs/run-000@latest",
        "ok",
        "operator",
        "abcdefghij",
        {"run": "run-000", "before": ""},
    )
    assert short_audit(row) == row


def test_a_path_that_is_not_utf_8_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a path that are not UTF-8 are recorded as escapes. Neither begin nor end of the entry fails."""
    book = AuditLog(open_bytes(tmp_path / "audit"))
    path = "/data/\udcff/run"
    book.end(
        book.begin("me", "tag", path, facts=ActionFacts(run=path, given={path: path, "list": [path]})),
        "failed",
        f"no store at {path}",
    )
    (entry,) = book.entries()
    assert entry.on == "/data/\\udcff/run" == dict(entry.fields)["given./data/\\udcff/run"] and entry.says.endswith(
        "/data/\\udcff/run"
    )
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "audit"))
    ended = CliRunner().invoke(cli, ["tag", f"{tmp_path}/\udcff/run@latest", "good"])
    assert ended.exit_code == 2 or not isinstance(ended.exception, UnicodeError), ended.exception
    assert book.entries()[-1].what == "tag" and book.entries()[-1].how in ("failed", "refused")


def test_secrets_of_a_command_line_are_masked() -> None:
    """A command that is one argument, such as that of ``relight follow --run``, is recorded without what its options hide."""
    line = "python eval.py --api-key sk-123 --data /big --password='two words' {checkpoint}"
    given = ActionFacts(given={"command_line": line}).record()["given.command_line"]
    assert "sk-123" not in given and "words" not in given
    assert given.startswith("python eval.py --api-key ") and "--data /big" in given


def test_a_text_is_rewritten_only_if_something_is_masked() -> None:
    """Mask a secret in a command line without options, and leave other texts unchanged, also with a word such as "-"."""
    command = "env WANDB_API_KEY=abc123 python eval.py {checkpoint}"
    reason = 'kept - "best"  so far'
    record = facts.ActionFacts(given={"run": command, "reason": reason}).record()
    assert "abc123" not in record["given.run"] and record["given.reason"] == reason

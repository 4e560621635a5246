"""The audit log: what is written, and that any change and a cut end are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from relight.audit import AuditLog, check, recorded
from relight.cli import cli
from relight.errors import CheckpointNotFound, ConfigError, RelightError, StoreUnavailable
from relight.observe import counters
from relight.store import open_bytes
from relight.store.memory import MemoryStore


def filled(root: Path, count: int = 4) -> AuditLog:
    """A book with so many entries."""
    book = AuditLog(open_bytes(str(root)))
    for number in range(count):
        with book.doing("anna", "tag", f"runs/demo@{number}", "operator"):
            pass
    return book


def test_an_action_is_written_before_and_after(tmp_path: Path) -> None:
    """Begun, then how it ended: as it should, with an error, or not at all."""
    book = filled(tmp_path / "audit", 1)
    with pytest.raises(ConfigError), book.doing("bert", "prune", "runs/demo"):
        raise ConfigError("no rule was given")
    with pytest.raises(OSError), book.doing("bert", "export", "runs/demo"):
        raise OSError("disk")
    book.begin("carl", "verify", "runs/demo")
    assert [(entry.who, entry.what, entry.how) for entry in book.entries()] == [
        ("anna", "tag", "ok"),
        ("bert", "prune", "refused"),
        ("bert", "export", "failed"),
        ("carl", "verify", ""),
    ]
    assert "no rule was given" in book.entries()[1].says


def test_any_byte_that_is_changed_is_found(tmp_path: Path) -> None:
    """Any changed byte of a record and any missing record is detected."""
    filled(tmp_path / "audit", 2)
    anchor = check(open_bytes(str(tmp_path / "audit"))).anchor
    records = sorted((tmp_path / "audit" / "audit" / "log").iterdir())
    tried = 0
    for path in records:
        whole = path.read_bytes()
        for offset in range(0, len(whole), 7):
            path.chmod(0o644)
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
            assert check(open_bytes(str(tmp_path / "audit")), anchor).faults, (path.name, offset)
            tried += 1
        path.unlink()
        assert check(open_bytes(str(tmp_path / "audit")), anchor).faults, f"{path.name} gone"
        path.write_bytes(whole)
    assert tried > 200
    assert not check(open_bytes(str(tmp_path / "audit")), anchor).faults


def test_the_anchor_reveals_a_cut_end_and_a_replaced_log(tmp_path: Path) -> None:
    """The chain alone cannot show that records are missing at its end."""
    filled(tmp_path / "audit", 3)
    anchor = check(open_bytes(str(tmp_path / "audit"))).anchor
    last = max((tmp_path / "audit" / "audit" / "log").iterdir())
    whole = last.read_bytes()
    last.unlink()
    assert check(open_bytes(str(tmp_path / "audit"))).faults == []
    assert "truncated" in check(open_bytes(str(tmp_path / "audit")), anchor).faults[0]
    last.write_bytes(whole)
    filled(tmp_path / "audit", 1)
    assert check(open_bytes(str(tmp_path / "audit")), anchor).faults == []
    filled(tmp_path / "another", 4)
    assert "rewritten" in check(open_bytes(str(tmp_path / "another")), anchor).faults[0]


def test_an_action_that_cannot_be_recorded_is_not_done() -> None:
    """The store's error comes before the action."""

    class Full(MemoryStore):
        def put_once(self, key: str, data: bytes) -> bool:
            raise StoreUnavailable("full")

    done = []
    with pytest.raises(StoreUnavailable), AuditLog(Full("full")).doing("anna", "prune", "runs/demo"):
        done.append(1)
    assert done == []


def test_two_books_of_one_store_write_one_chain(tmp_path: Path) -> None:
    """A server and a command at once."""
    writer, second_writer = AuditLog(open_bytes(str(tmp_path / "audit"))), AuditLog(open_bytes(str(tmp_path / "audit")))
    for _ in range(3):
        first, second = writer.begin("a", "tag", "x"), second_writer.begin("b", "tag", "y")
        writer.end(first, "ok")
        second_writer.end(second, "failed")
    assert [(entry.who, entry.how) for entry in writer.entries()] == [("a", "ok"), ("b", "failed")] * 3
    assert check(open_bytes(str(tmp_path / "audit"))).faults == []


def test_verify_reports_its_result_and_keeps_the_anchor(tmp_path: Path) -> None:
    """``relight log --audit --check`` returns 0 and advances the anchor. For a cut log it returns 1 and keeps the anchor."""
    store, anchor = tmp_path / "audit", tmp_path / "anchor"
    filled(store, 2)
    run = CliRunner()
    assert (
        run.invoke(
            cli, ["log", "--audit", "--check", str(store), "--anchor", str(anchor)], standalone_mode=False
        ).return_value
        == 0
    )
    kept = anchor.read_text()
    max((store / "audit" / "log").iterdir()).unlink()
    answered = run.invoke(
        cli, ["log", "--audit", "--check", str(store), "--anchor", str(anchor), "--json"], standalone_mode=False
    )
    assert answered.return_value == 1
    assert json.loads(answered.output)["ok"] is False
    assert anchor.read_text() == kept


def test_exported_values_are_not_formulas(tmp_path: Path) -> None:
    """Values that a spreadsheet would evaluate, such as ``=cmd``, are exported with a leading quote."""
    with AuditLog(open_bytes(str(tmp_path / "audit"))).doing('=HYPERLINK("x")', "tag", "@x"):
        pass
    done = CliRunner().invoke(cli, ["log", "--audit", "--csv", str(tmp_path / "audit")])
    row = done.output.splitlines()[1]
    assert done.exit_code == 0
    assert "'=HYPERLINK" in row and "'@x" in row and ",=" not in row


def test_the_library_records_in_the_audit_store_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library records in the store that ``RELIGHT_AUDIT`` names. Without the variable it records nothing."""
    with recorded("export", "runs/demo"):
        pass
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "audit"))
    with recorded("export", "runs/demo"):
        pass
    assert [(entry.what, entry.how) for entry in AuditLog(open_bytes(str(tmp_path / "audit"))).entries()] == [
        ("export", "ok")
    ]


def test_commands_that_change_something_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that changes something is in the log with its object. A read-only command is not."""
    from tests.serve.made_stores import make_store

    store = make_store(tmp_path / "runs", 1, 2)
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "audit"))
    run = CliRunner()
    assert run.invoke(cli, ["tag", f"{store}/run-000", "good"]).exit_code == 0
    assert run.invoke(cli, ["tag", f"{store}/run-000"]).exit_code == 0
    assert run.invoke(cli, ["ls", f"{store}/run-000"]).exit_code == 0
    assert run.invoke(cli, ["keys", "new", str(tmp_path / "key")]).exit_code == 0
    assert run.invoke(cli, ["tag", "--hold", f"{store}/run-000", "nothing-there", "--why", "x"]).exit_code != 0
    entries = AuditLog(open_bytes(str(tmp_path / "audit"))).entries()
    assert [(entry.what, entry.on, entry.how) for entry in entries] == [
        ("tag", f"{store}/run-000", "ok"),
        ("keys new", str(tmp_path / "key"), "ok"),
        ("tag --hold", f"{store}/run-000", "failed"),
    ]


def test_exports_and_imports_by_the_library_are_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export or import by a program is one entry, also if it fails. A command's own entry covers its export."""
    import torch

    import relight
    from relight.catalog import open_run
    from relight.export import Options, execute_export, plan_export
    from relight.importers import detect, import_checkpoint

    relight.save(str(tmp_path / "runs" / "demo"), {"model": {"w": torch.ones(3)}}, step=1)
    store, target, audited = open_bytes(str(tmp_path / "runs")), tmp_path / "out.safetensors", tmp_path / "audit"
    run = open_run(store, "demo")
    opened = run.open(run.history().live[-1])
    monkeypatch.setenv("RELIGHT_AUDIT", str(audited))
    plan = plan_export(opened, target, Options())
    execute_export(plan)
    import_checkpoint(detect(target), store, "brought")
    with pytest.raises(RelightError):
        execute_export(plan)  # it is there by now
    assert CliRunner().invoke(cli, ["export", f"{tmp_path}/runs/demo", f"{tmp_path}/more.safetensors"]).exit_code == 0
    assert [(entry.what, entry.on, entry.how == "ok") for entry in AuditLog(open_bytes(str(audited))).entries()] == [
        ("export", f"{store.url}/{opened.prefix}", True),
        ("import", f"{target} into {store.url}/brought", True),
        ("export", f"{store.url}/{opened.prefix}", False),
        ("export", f"{tmp_path}/runs/demo", True),
    ]


def test_an_import_that_cannot_be_recorded_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit store is below a file: the command fails first, and creates nothing."""
    import torch
    from safetensors.torch import save_file

    from relight.importers import detect, import_checkpoint

    save_file({"w": torch.ones(3)}, tmp_path / "in.safetensors")
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "file" / "audit"))
    with pytest.raises(RelightError):
        import_checkpoint(detect(tmp_path / "in.safetensors"), open_bytes(str(tmp_path / "runs")), "brought")
    assert not (tmp_path / "runs" / "brought").exists()


def test_a_jobs_own_restores_are_written_down_and_never_kept_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore is recorded with its user and step, also if it fails. If the audit store is unreachable, the restore
    succeeds with a warning."""
    import torch

    import relight

    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "audit"))
    for turn in range(2):
        with relight.Checkpointer(
            tmp_path / "runs" / "demo", save=None, model=torch.nn.Linear(2, 2), signals=False
        ) as ckpt:
            assert ckpt.restore() == 3 * turn
            ckpt.step(2)
            if turn:
                with pytest.raises(CheckpointNotFound):
                    ckpt.restore("missing")
    entries = AuditLog(open_bytes(str(tmp_path / "audit"))).entries()
    assert [(entry.what, entry.on.rpartition("/")[2], entry.how) for entry in entries] == [
        ("restore", "demo@latest", "ok"),
        ("restore", "demo@latest", "ok"),
        ("restore", "demo@missing", "failed"),
    ]
    assert entries[0].says == "there was none yet" and entries[1].says.startswith("step 2, ") and entries[0].who
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("RELIGHT_AUDIT", str(tmp_path / "file" / "audit"))
    before = counters["audit.failed"]
    with relight.Checkpointer(
        tmp_path / "runs" / "demo", save=None, model=torch.nn.Linear(2, 2), signals=False
    ) as ckpt:
        assert ckpt.restore() == 3
    assert counters["audit.failed"] == before + 1

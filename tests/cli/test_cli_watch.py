"""``relight top``, ``metrics``, ``trace`` and ``alerts``: their output, exit codes and JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from at_hand import HOSTILE, directory, flip, ids, in_process, on_terminal

from relight.observe import file, flush_events
from relight.observe.metrics import BY_NAME


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run a command in this process, without a settings file, and with no events but those that ``keep`` writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file, "_writer", None)  # an earlier test of this process may have made one
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    return lambda *arguments: in_process(monkeypatch, capfd, [str(argument) for argument in arguments])


def keep(tmp_path: Path, store: Path, run: str, *events: dict[str, Any]) -> None:
    """Write events into a file as a trainer does."""
    directory = tmp_path / "events"
    directory.mkdir(mode=0o700, exist_ok=True)
    now = time.time()
    head = {
        "relight": "events", "version": 1, "pid": 7, "host": "here", "store": str(store), "run": run, "rank": 0, "role": "trainer",
        "since": now, "monotonic": 50.0,
    }  # fmt: skip
    lines = [head, *({"time": now, **event} for event in events)]
    (directory / "1-1-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def way(id_: str, step: int) -> list[dict[str, Any]]:
    """Return the spans of a save."""
    parts = {
        "blocked": (10.0, 10.1),
        "snapshot": (10.1, 10.5),
        "write": (10.2, 11.5),
        "parts": (11.5, 11.6),
        "commit": (11.6, 12.0),
    }
    return [
        {"event": "save.span", "span": name, "id": id_, "step": step, "start": start, "end": end}
        for name, (start, end) in parts.items()
    ]


def test_top_shows_every_run_of_a_store(ask: Any, runs: Path, tmp_path: Path) -> None:
    """Print one row for each run.

    The times of a save are there once a process has recorded them; --json has all fields.
    """
    keep(
        tmp_path,
        runs,
        "demo",
        {"event": "save.durable", "id": "x", "step": 299, "seconds": 2.5, "blocked_s": 0.004, "bytes": 9},
    )
    shown = ask("top", runs, "--once")
    assert shown.code == 0 and max(map(len, shown.out.splitlines())) <= 80
    rows = {line.split()[0]: line.split() for line in shown.out.splitlines() if line}
    assert rows["demo"][1] == "299" and "4" in rows["demo"] and "2.5" in rows["demo"]
    value = ask("top", runs, "--json").json
    assert {run["run"] for run in value["runs"]} == {"demo", "baseline"}
    assert value["alerts"] == [] and value["runs"][1]["saving"]["last_s"] == 2.5


def test_top_refreshes_in_a_terminal_until_ctrl_c(runs: Path) -> None:
    """In a terminal the table is refreshed until Ctrl-C, with exit code 130."""
    shown = on_terminal("top", str(runs), "--every", "2", typed="\x03", prompt="Ctrl-C ends")
    assert shown.code == 130 and "demo" in shown.out


def test_metrics_are_printed_and_generated(ask: Any, runs: Path, tmp_path: Path) -> None:
    """Metrics are printed once, or as JSON. The dashboard and the rules are written to files and need no run."""
    shown = ask("metrics", runs)
    assert shown.code == 0 and f'relight_checkpoint_step{{run="demo",store="{runs}"}} 299.0' in shown.out
    assert {
        metric["name"] for run in ask("metrics", runs, "--json").json for metric in run["metrics"]
    } <= BY_NAME.keys()
    shown = ask("metrics", "--grafana", tmp_path / "made", "--rules", tmp_path / "made")
    assert shown.code == 0 and sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "prometheusrule.yaml",
        "relight.json",
        "relight.rules.yml",
    ]


@pytest.mark.parametrize(
    "arguments",
    [["metrics"], ["metrics", "RUNS", "--listen", "nowhere"], ["metrics", "RUNS", "--once", "--listen", "1"], ["metrics", "RUNS", "--alerts"],
     ["metrics", "RUNS", "--alerts", "--listen", "127.0.0.1:0"], ["metrics", "alerts", "test"], ["metrics", "--grafana", "FILE/x"], ["top"],
     ["metrics", "alerts", "list", "--settings", "none.toml"], ["top", "RUNS", "--every", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_invalid_arguments_are_reported_without_a_traceback(
    ask: Any, runs: Path, tmp_path: Path, arguments: list[str]
) -> None:
    """A usage error has exit code 2 and a message without a traceback."""
    (tmp_path / "FILE").write_text("")
    shown = ask(*[str(runs) if argument == "RUNS" else argument for argument in arguments])
    assert shown.code == 2 and shown.err and "Traceback" not in shown.err


def test_a_trace_is_shown_by_step_id_and_tag(ask: Any, runs: Path, tmp_path: Path) -> None:
    """A trace has lanes within 84 columns, the critical path, JSON and a picture.

    The default is the latest save; a failed save has one too.
    """
    second = ids(runs)[1]
    keep(tmp_path, runs, "demo", *way("lost000000", 150), *way(second, 199))
    for which in ("", "@199", f"@{second}", "@good", f"@{second[:5]}"):
        shown = ask("show", "--trace", f"{runs}/demo{which}")
        assert shown.code == 0, shown.err
        assert f"{second}, step 199" in shown.out and max(map(len, shown.out.splitlines())) <= 84
        assert "write" in shown.out and "50 %" in shown.out
    assert "step 150" in ask("show", "--trace", f"{runs}/demo@lost000000").out
    keep(tmp_path, runs, "demo", *way("1234abcdef", 77))
    assert "step 77" in ask("show", "--trace", f"{runs}/demo@1234a").out
    wrong = ask("show", "--trace", f"{runs}/demo@1234")
    assert wrong.code != 0 and "no trace of '1234'" in wrong.err, "digits are a step"
    value = ask("show", "--trace", f"{runs}/demo", "--json", "--plot", tmp_path / "trace.png").json
    assert value["durable_s"] == pytest.approx(2.0) and [leg["part"] for leg in value["critical_path"]][2] == "write"
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"


def test_no_trace_is_exit_code_1(ask: Any, runs: Path, tmp_path: Path) -> None:
    """Without a trace the exit code is 1, and the message names the saves that have one."""
    shown = ask("show", "--trace", f"{runs}/demo")
    assert shown.code == 1 and "no process has kept events" in shown.err
    keep(tmp_path, runs, "demo", *way("aaaaaaaaaa", 5))
    shown = ask("show", "--trace", f"{runs}/demo@99")
    assert shown.code == 1 and "aaaaaaaaaa (step 5)" in shown.err


def test_alerts_are_checked_listed_and_tried(ask: Any, runs: Path, tmp_path: Path) -> None:
    """``alerts check`` exits with 1 if a rule holds, else 0. No secret is printed."""
    assert ask("metrics", "alerts", "check", runs).code == 0
    keep(tmp_path, runs, "demo", *[{"event": "save.failed", "step": 1, "kind": "no_space"}] * 3)
    shown = ask("metrics", "alerts", "check", runs)
    assert shown.code == 1 and "saves_failing" in shown.out and "3 saves in a row have failed" in shown.out
    assert ask("metrics", "alerts", "check", runs, "--json").json[0]["kind"] == "saves_failing"
    (tmp_path / "relight.toml").write_text(
        '[alerts]\nto = ["nosuch://hunter2/x"]\n[alerts.rules.saves_failing]\ncount = 4\n'
    )
    assert ask("metrics", "alerts", "check", runs).code == 0
    shown = ask("metrics", "alerts", "list")
    assert "count = 4" in shown.out and "nosuch://…" in shown.out and "hunter2" not in shown.out


def test_damage_found_by_verify_is_an_alert_until_verify_succeeds(ask: Any, runs: Path) -> None:
    """After ``verify`` found damage, ``top`` shows the newest undamaged step, and the alert holds until ``verify``
    succeeds. A scrub that cannot repair the damage is an alert too."""
    pack = next((directory(runs, -1)).glob("pack-*"))
    flip(pack)
    shown = ask("verify", f"{runs}/demo")
    flush_events(10)
    assert shown.code == 1 and shown.err == ""
    alerts = ask("metrics", "alerts", "check", runs)
    assert alerts.code == 1 and "damaged" in alerts.out and ids(runs)[-1] in alerts.out
    (run,) = [run for run in ask("top", runs, "--json").json["runs"] if run["run"] == "demo"]
    assert (run["step"], run["good_step"]) == (299, 249)
    flip(pack)
    assert ask("verify", f"{runs}/demo").code == 0
    flush_events(10)
    assert ask("metrics", "alerts", "check", runs).code == 0
    flip(pack)
    assert ask("verify", "--repair", f"{runs}/demo").code == 1
    flush_events(10)
    assert "no tier has it whole" in ask("metrics", "alerts", "check", runs).out


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
def test_a_test_message_that_cannot_go_is_a_no(ask: Any, tmp_path: Path) -> None:
    """If a test message cannot be sent, the exit code is 1. The address is not printed."""
    (tmp_path / "relight.toml").write_text('[alerts]\nto = ["nosuch://hunter2/x"]\n')
    shown = ask("metrics", "alerts", "test")
    assert shown.code == 1 and "not sent" in shown.out and "hunter2" not in shown.out + shown.err


def test_texts_of_events_reach_the_terminal_escaped(ask: Any, runs: Path, tmp_path: Path) -> None:
    """Control characters in names and reasons are escaped."""
    hostile = {"event": "prune.failed", "kind": HOSTILE, "message": HOSTILE, "tier": HOSTILE}
    keep(tmp_path, runs, "demo", *[hostile] * 3, *way("aaaaaaaaaa", 5))
    for arguments in (
        ("top", runs, "--once"),
        ("metrics", "alerts", "check", runs),
        ("show", "--trace", f"{runs}/demo"),
        ("metrics", runs),
    ):
        shown = ask(*arguments)
        assert "\x1b" not in shown.out + shown.err and "\u202e" not in shown.out, arguments

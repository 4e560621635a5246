"""``relight top``, ``metrics``, ``trace`` and ``alerts`` as people and programs meet them."""

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
    """A command in this process, with no settings file and no events but those of ``kept``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file, "_writer", None)  # this process may have one, of a test before
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    return lambda *arguments: in_process(monkeypatch, capfd, [str(one) for one in arguments])


def keep(tmp_path: Path, store: Path, run: str, *events: dict[str, Any]) -> None:
    """Events as a trainer keeps them."""
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
    """The spans of a save."""
    parts = {"blocked": (10.0, 10.1), "snapshot": (10.1, 10.5), "write": (10.2, 11.5), "parts": (11.5, 11.6), "commit": (11.6, 12.0)}
    return [
        {"event": "save.span", "span": name, "id": id_, "step": step, "start": start, "end": end} for name, (start, end) in parts.items()
    ]


def test_top_shows_every_run_of_a_store(ask: Any, runs: Path, tmp_path: Path) -> None:
    """A row a run; what a save took is there once a process has told it; --json has all of it."""
    keep(tmp_path, runs, "demo", {"event": "save.durable", "id": "x", "step": 299, "seconds": 2.5, "blocked_s": 0.004, "bytes": 9})
    said = ask("top", runs, "--once")
    assert said.code == 0 and max(map(len, said.out.splitlines())) <= 80
    rows = {line.split()[0]: line.split() for line in said.out.splitlines() if line}
    assert rows["demo"][1] == "299" and "4.0" in rows["demo"] and "2.5" in rows["demo"]
    value = ask("top", runs, "--json").json
    assert {one["run"] for one in value["runs"]} == {"demo", "baseline"}
    assert value["alerts"] == [] and value["runs"][1]["saving"]["last_s"] == 2.5


def test_top_goes_on_in_a_terminal_until_it_is_told_to_end(runs: Path) -> None:
    """It looks again and again, and Ctrl-C ends it with 130."""
    said = on_terminal("top", str(runs), "--every", "2", typed="\x03", prompt="Ctrl-C ends")
    assert said.code == 130 and "demo" in said.out


def test_metrics_are_printed_and_generated(ask: Any, runs: Path, tmp_path: Path) -> None:
    """Once to standard output; files where they are asked for, which need no run; JSON by definition's name."""
    said = ask("metrics", runs)
    assert said.code == 0 and f'relight_checkpoint_step{{run="demo",store="{runs}"}} 299.0' in said.out
    assert {one["name"] for run in ask("metrics", runs, "--json").json for one in run["metrics"]} <= BY_NAME.keys()
    said = ask("metrics", "--grafana", tmp_path / "made", "--rules", tmp_path / "made")
    assert said.code == 0 and sorted(path.name for path in (tmp_path / "made").iterdir()) == ["relight.json", "relight.rules.yml"]


@pytest.mark.parametrize(
    "arguments",
    [["metrics"], ["metrics", "RUNS", "--listen", "nowhere"], ["metrics", "RUNS", "--once", "--listen", "1"], ["metrics", "RUNS", "--alerts"],
     ["metrics", "RUNS", "--alerts", "--listen", "127.0.0.1:0"], ["alerts", "test"], ["metrics", "--grafana", "FILE/x"], ["top"],
     ["alerts", "list", "--settings", "none.toml"], ["top", "RUNS", "--every", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_what_makes_no_sense_is_said(ask: Any, runs: Path, tmp_path: Path, arguments: list[str]) -> None:
    """Exit code 2 and a message, no traceback."""
    (tmp_path / "FILE").write_text("")
    said = ask(*[str(runs) if one == "RUNS" else one for one in arguments])
    assert said.code == 2 and said.err and "Traceback" not in said.err


def test_a_trace_is_shown_by_step_id_and_tag(ask: Any, runs: Path, tmp_path: Path) -> None:
    """Lanes within 84 columns, the critical path, JSON, a picture; the latest if nothing is said; a save that failed, too."""
    second = ids(runs)[1]
    keep(tmp_path, runs, "demo", *way("lost000000", 150), *way(second, 199))
    for which in ("", "@199", f"@{second}", "@good", f"@{second[:5]}"):
        said = ask("trace", f"{runs}/demo{which}")
        assert said.code == 0, said.err
        assert f"{second}, step 199" in said.out and max(map(len, said.out.splitlines())) <= 84
        assert "write" in said.out and "50 %" in said.out
    assert "step 150" in ask("trace", f"{runs}/demo@lost000000").out
    value = ask("trace", f"{runs}/demo", "--json", "--plot", tmp_path / "trace.png").json
    assert value["durable_s"] == pytest.approx(2.0) and [leg["part"] for leg in value["critical_path"]][2] == "write"
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"


def test_no_trace_is_a_no(ask: Any, runs: Path, tmp_path: Path) -> None:
    """Exit code 1, and what there is instead."""
    said = ask("trace", f"{runs}/demo")
    assert said.code == 1 and "no process has kept events" in said.err
    keep(tmp_path, runs, "demo", *way("aaaaaaaaaa", 5))
    said = ask("trace", f"{runs}/demo@99")
    assert said.code == 1 and "aaaaaaaaaa (step 5)" in said.err


def test_alerts_are_checked_listed_and_tried(ask: Any, runs: Path, tmp_path: Path) -> None:
    """1 if a rule holds, 0 if none does; what is secret is shown nowhere."""
    assert ask("alerts", "check", runs).code == 0
    keep(tmp_path, runs, "demo", *[{"event": "save.failed", "step": 1, "kind": "no_space"}] * 3)
    said = ask("alerts", "check", runs)
    assert said.code == 1 and "saves_failing" in said.out and "3 saves in a row have failed" in said.out
    assert ask("alerts", "check", runs, "--json").json[0]["kind"] == "saves_failing"
    (tmp_path / "relight.toml").write_text('[alerts]\nto = ["nosuch://hunter2/x"]\n[alerts.rules.saves_failing]\ncount = 4\n')
    assert ask("alerts", "check", runs).code == 0
    said = ask("alerts", "list")
    assert "count = 4" in said.out and "nosuch://…" in said.out and "hunter2" not in said.out


def test_what_verify_finds_is_an_alert_until_it_finds_it_whole(ask: Any, runs: Path) -> None:
    """The newest good checkpoint is another then, and the rule for damage holds; a scrub that cannot mend it says so, too."""
    pack = next((directory(runs, -1)).glob("pack-*"))
    flip(pack)
    said = ask("verify", f"{runs}/demo")
    flush_events(10)
    assert said.code == 1 and said.err == ""
    found = ask("alerts", "check", runs)
    assert found.code == 1 and "damaged" in found.out and ids(runs)[-1] in found.out
    (seen,) = [one for one in ask("top", runs, "--json").json["runs"] if one["run"] == "demo"]
    assert (seen["step"], seen["good_step"]) == (299, 249)
    flip(pack)
    assert ask("verify", f"{runs}/demo").code == 0
    flush_events(10)
    assert ask("alerts", "check", runs).code == 0
    flip(pack)
    assert ask("scrub", f"{runs}/demo").code == 1
    flush_events(10)
    assert "no tier has it whole" in ask("alerts", "check", runs).out


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
def test_a_test_message_that_cannot_go_is_a_no(ask: Any, tmp_path: Path) -> None:
    """Exit code 1, the address unsaid."""
    (tmp_path / "relight.toml").write_text('[alerts]\nto = ["nosuch://hunter2/x"]\n')
    said = ask("alerts", "test")
    assert said.code == 1 and "not sent" in said.out and "hunter2" not in said.out + said.err


def test_what_events_say_reaches_the_terminal_escaped(ask: Any, runs: Path, tmp_path: Path) -> None:
    """Names and reasons with control characters do nothing."""
    hostile = {"event": "prune.failed", "kind": HOSTILE, "say": HOSTILE, "tier": HOSTILE}
    keep(tmp_path, runs, "demo", *[hostile] * 3, *way("aaaaaaaaaa", 5))
    for arguments in (("top", runs, "--once"), ("alerts", "check", runs), ("trace", f"{runs}/demo"), ("metrics", runs)):
        said = ask(*arguments)
        assert "\x1b" not in said.out + said.err and "\u202e" not in said.out, arguments

"""Metrics and traces of a real training process and its agent, by way of the files of events."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.scripts import run_script
from watched import values

from relight.monitoring import Watcher
from relight.monitoring.files import EventFiles
from relight.monitoring.trace import saves_in, trace_of

SCRIPT = """
import sys, torch, relight
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = relight.Checkpointer(sys.argv[1], save=None, model=model, optimizer=optimizer)
for step in range(ckpt.restore(), 6):
    loss = model(torch.randn(4, 64)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    ckpt.step(step, loss=loss)
    if step % 2:
        ckpt.save(step, block=False).wait(60)
if len(sys.argv) > 2:
    import os; os._exit(9)
ckpt.close()
"""


def test_what_a_job_did_is_seen(tmp_path: Path) -> None:
    """Three saves by an agent are counted, timed and traced across both processes. The run is over once it has reported
    its end."""
    events, url = tmp_path / "events", str(tmp_path / "runs")
    assert run_script(SCRIPT, f"{url}/demo", RELIGHT_EVENTS=str(events), RELIGHT_BACKGROUND="1").returncode == 0
    events_read = list(EventFiles(events).new())
    assert {event.head.role for event in events_read} == {"trainer", "agent"}
    (seen,) = Watcher([url], events=events).poll(time.time())
    metrics = values(seen)
    assert (seen.step, seen.checkpoints, seen.active, seen.saving.saves) == (5, 3, False, 3)
    assert metrics["relight_saves_total"] == 3
    assert 0 < metrics["relight_save_blocked_seconds"] < metrics["relight_save_durable_seconds"]
    assert metrics["relight_save_phase_seconds{commit}"] > 0
    saves = saves_in(events_read, url, "demo")
    assert len(saves) == 3
    for id_, save_events in saves.items():
        trace = trace_of(url, "demo", id_, save_events)
        assert trace is not None and trace.committed and trace.slowest == 0
        assert {"blocked", "snapshot", "write", "parts", "commit"} <= {span.part for span in trace.spans}
        assert {span.role for span in trace.spans} == {"trainer", "agent"}
        starts = {span.part: span.start for span in trace.spans}
        assert starts["blocked"] <= starts["write"] <= starts["commit"]
        assert abs(sum(leg.seconds for leg in trace.path) - trace.durable_s) < 1e-6
        assert max(event.time_s for event in save_events) - min(event.time_s for event in save_events) < 60


def test_a_job_that_was_killed_is_not_over(tmp_path: Path) -> None:
    """A killed job has not reported its end. The events before its death are there, and the run does not count as
    finished."""
    events, url = tmp_path / "events", str(tmp_path / "runs")
    assert run_script(SCRIPT, f"{url}/demo", "die", RELIGHT_EVENTS=str(events)).returncode == 9
    (seen,) = Watcher([url], events=events).poll(time.time())
    assert (seen.step, seen.active) == (5, True)


def test_without_the_setting_no_events_are_kept(tmp_path: Path) -> None:
    """``RELIGHT_EVENTS=0`` means no directory and no thread. What the log has is seen all the same."""
    script = (
        "import threading\nfrom relight.observe import emit, write_events\nwrite_events('s', 'r')\nemit('save.coalesced', step=1)\n"
        "assert 'relight-events' not in [one.name for one in threading.enumerate()]"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "RELIGHT_EVENTS": "0", "TMPDIR": str(tmp_path)},
    )
    assert list(tmp_path.iterdir()) == []

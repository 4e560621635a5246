"""``relight undelete``: from the command line, what retention took is listed, brought back, given up."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_cli_hold import relight
from tests.log.test_log_stale_listings import save

from relight.commit import Attempt
from relight.store import LocalStore


def test_list_recall_give_up(tmp_path: Path) -> None:
    """Retired checkpoints are listed, recalled and given up. An invalid request gets a hint."""
    attempt = Attempt.begin(LocalStore(tmp_path), "run")
    ids = [save(attempt, step) for step in range(4)]
    run = tmp_path / "run"
    assert "nothing can be recalled" in relight("undelete", run)
    assert "can be recalled for 12h" in relight("prune", run, "--keep-last", "1", "--undo-window", "12h", "--yes")
    assert [(row["id"], row["due"], row["undo_s"]) for row in json.loads(relight("undelete", run, "--json"))] == [
        (id_, False, 43200.0) for id_ in ids[:3]
    ]
    assert "for 12 h of the run" in relight("undelete", run)
    relight("undelete", run, "17", status=1)
    relight("undelete", run, "--give-up", status=2)
    back = relight("undelete", run, "1", "--why", "wanted after all")
    assert "is back" in back and f"relight tag {run}@{ids[1]} --hold" in back
    assert [checkpoint["id"] for checkpoint in json.loads(relight("ls", run, "--json"))] == [ids[1], ids[3]]
    log = relight("log", run)
    assert "RECALL" in log and "wanted after all" in log and "may be recalled for 12 h" in log
    assert len(json.loads(relight("undelete", run, "all", "--give-up", "--json"))["deleted"]) == 2
    assert "given up" in relight("log", run)
    relight("undelete", run, "all", status=1)
    relight("verify", run)

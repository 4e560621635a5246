"""``best`` in addresses of the API and of pages, and in actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.serve.made_server import serving

import relight
from relight.log import Log
from relight.run_records.best_by import record_best_by
from relight.store import open_bytes


def test_addresses_take_the_run_s_own_best_and_state_by_what(tmp_path: Path) -> None:
    """``best`` uses the recorded metric, or any metric by name. The answer and page name it; an error lists them."""
    store = tmp_path / "runs"
    for step, value in enumerate([0.1, 0.9, 0.5]):
        for run in ("demo", "bare"):
            relight.save(store / run, {"w": np.zeros(3)}, step=step, metrics={"loss": 9.0 - step, "val/acc": value})
    record_best_by(Log(open_bytes(store), "demo"), ("val/acc", "max"))
    with serving([store], tmp_path) as server:
        base = "/api/v1/runs/runs"
        for address in (
            f"{base}/demo/checkpoints/best",
            f"{base}/bare/checkpoints/best:val/acc:max",
            f"{base}/bare/checkpoints/best:val%2Facc",
        ):
            answer = server.get(address).json()
            assert answer["row"]["step"] == 1, answer
            assert dict(answer["facts"])["chosen"].startswith("best by val/acc (max): 0.9 at step 1")
        assert server.get(f"{base}/bare/checkpoints/best:loss").json()["row"]["step"] == 2
        assert "numbers" in server.get(f"{base}/demo/checkpoints/best/values?path=w").json()
        refused = server.get(f"{base}/bare/checkpoints/best")
        assert refused.status_code >= 400 and "loss, val/acc" in refused.text
        assert "best by val/acc (max): 0.9 at step 1" in server.get("/runs/runs/demo/checkpoints/best").text

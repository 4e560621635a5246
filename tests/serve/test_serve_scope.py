"""A token for one run learns nothing of another by errors, tasks, damage, shared comparisons or names of branches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from tests.serve.made_server import Server, serving

import relight
from relight.catalog.run import Run
from relight.errors import CorruptCheckpoint
from relight.serve.scope import ANOTHER, asking, masked, masked_error
from relight.store import open_bytes
from relight.versions.branching import branch

SECRET = "team-b-secret"
FILE = "0000000003-0123456789-e1/root.json"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server. ``shared`` is a branch of a secret run, which has its files; ``run-000`` has a secret branch."""
    root = tmp_path / "runs"
    model = torch.nn.Linear(2, 2)
    for name in ("run-000", SECRET):
        with relight.Checkpointer(root / name, model=model, background=False, signals=False) as ckpt:
            for step in (1, 2, 3):
                with torch.no_grad():
                    model.weight.add_(1)
                ckpt.save(step)
    store = open_bytes(root)
    ours, secret = Run(store, "run-000"), Run(store, SECRET)
    branch(ours, ours.history().live[0], "merger")
    branch(secret, secret.history().live[0], "shared")
    with serving([root], tmp_path) as made:
        made.tokens["shared"] = made.app.state.store.new_token("partner", "viewer", "runs/shared")[1]
        yield made


def waited(server: Server, path: str, role: str, done: str) -> Any:
    """Return the answer once it contains ``done``."""
    ends = time.monotonic() + 20
    answer = server.get(path, role)
    while done not in answer.text and time.monotonic() < ends:
        time.sleep(0.05)
        answer = server.get(path, role)
    return answer


def test_damage_of_a_branch_does_not_name_the_run_that_has_its_files(server: Server, tmp_path: Path) -> None:
    """Tasks, rows, pages and errors for a token of the branch name no other run."""
    store = open_bytes(tmp_path / "runs")
    checkpoint = Run(store, SECRET).history().live[0]
    folder = next(path for path in (tmp_path / "runs" / SECRET).iterdir() if checkpoint.id in path.name)
    for file in folder.iterdir():
        if file.name != "root.json":
            file.unlink()
    fields = {"store": "runs", "run": "shared", "which": "latest"}
    digest = server.post("/api/v1/actions/verify", "admin", json={"fields": fields}).json()["digest"]
    task = server.post("/api/v1/actions/verify", "admin", json={"fields": fields, "confirm": digest}).json()["task"]
    assert SECRET in waited(server, f"/api/v1/tasks/{task}", "admin", '"failed"').text
    shown = server.get(f"/api/v1/tasks/{task}", "shared")
    assert "failed" in shown.text and ANOTHER in shown.text
    assert (
        waited(server, "/api/v1/runs/runs/shared/checkpoints", "shared", "damaged")
        .json()["rows"][0]["why"]
        .startswith(f"damaged: {ANOTHER}/")
    )
    (folder / "root.json").unlink()
    server.app.state.index.jobs._known.clear()  # noqa: SLF001
    for path in ("checkpoints/latest", "checkpoints", "checkpoints/latest/values?path=x"):
        assert SECRET not in server.get(f"/api/v1/runs/runs/shared/{path}", "shared").text, path
    for path in (
        "/",
        "/runs/runs/shared",
        "/runs/runs/shared/checkpoints/latest",
        f"/tasks/{task}",
        "/compare?a=shared@1&b=shared@latest",
        "/incidents",
    ):
        assert SECRET not in server.get(path, "shared", headers={"accept": "text/html"}).text, path


def test_a_comparison_has_the_words_of_its_own_asker(server: Server) -> None:
    """Two clients share one comparison, and neither gets the other's names of the checkpoints."""
    ids = [checkpoint.id for checkpoint in server.app.state.index.state("runs", "run-000").history.live]
    first = "/api/v1/diff?" + urlencode({"a": "runs/run-000@branches/merger", "b": "runs/run-000@latest"})
    assert waited(server, first, "admin", '"tensors"').json()["a"] == "runs/run-000@branches/merger"
    second = server.get(
        "/api/v1/diff?" + urlencode({"a": f"run-000@{ids[0]}", "b": f"run-000@{ids[-1]}"}), "scoped"
    ).json()
    assert (second["a"], second["b"]) == (f"run-000@{ids[0]}", f"run-000@{ids[-1]}")


def test_a_branch_tag_of_a_hidden_run_is_not_there(server: Server) -> None:
    """For a hidden run of a branch tag, the answer is the same as for a run that does not exist."""
    texts = []
    for name in ("merger", "nought"):
        path = f"/api/v1/runs/runs/run-000/checkpoints/branches/{name}"
        assert server.get(path, "admin").status_code == (200 if name == "merger" else 404)
        answers = [
            server.get(path, "scoped"),
            server.get(f"/api/v1/diff?a=run-000@branches/{name}&b=run-000@1", "scoped"),
        ]
        answers.append(
            server.post(
                "/api/v1/actions/hold",
                "scoped",
                json={"fields": {"store": "runs", "run": "run-000", "which": f"branches/{name}"}},
            )
        )
        assert {answer.status_code for answer in answers} == {404}
        texts.append([answer.text.replace(name, "NAME") for answer in answers])
    assert texts[0] == texts[1]


def test_what_is_masked_depends_on_the_text_and_the_scope_alone() -> None:
    """A run's name in a file's path is hidden from tokens of another run, also with spaces, quotes or any letters."""
    cases = {
        f"{SECRET}/{FILE}: gone": f"{ANOTHER}/{FILE}: gone", f"run-000/{FILE}: gone": f"run-000/{FILE}: gone",
        f"/data/my 'ü' run/{FILE}": f"/data/{ANOTHER}/{FILE}", f"no file /data/run-000/{FILE}": f"no file /data/run-000/{FILE}",
        f"it is lost [{SECRET}/log/000000000001.json]": f"it is lost [{ANOTHER}/log/000000000001.json]",
        f"not-run-000/{FILE}": f"{ANOTHER}/{FILE}", f"no run-000/{FILE}": f"{ANOTHER}/{FILE}", f"'run-000/{FILE}'": f"'run-000/{FILE}'", "tensor model/block.0/weight": "tensor model/block.0/weight",
        f"a\n{SECRET}/{FILE}\nrun-000/{FILE}": f"a\n{ANOTHER}/{FILE}\nrun-000/{FILE}",
    }  # fmt: skip
    for text, expected in cases.items():
        with asking("runs/run-000"):
            assert masked(text) == expected
        for scope in ("", "runs"):
            with asking(scope):
                assert masked(text) == text
    with asking("runs/run-000"):
        error = masked_error(
            CorruptCheckpoint(
                "gone", where=f"{SECRET}/{FILE}", details=[f"{SECRET}/{FILE}"], hint="try another", retryable=True
            )
        )
        assert SECRET not in str(error) and error.retryable and isinstance(error, CorruptCheckpoint)

"""``relight plan predict train`` with histories that other tools have measured."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from exported import BEGIN, END, FAILS, exposition, prometheus_stub

from relight.cli import cli
from relight.cli.plan_predict import _failures
from relight.errors import RelightError
from relight.prediction.model import read_model
from relight.supervise.incidents import Incident


def train(model: Path, *arguments: object) -> Result:
    """Run the command with five simulated runs and the rules alone."""
    words = [
        "plan",
        "predict",
        "train",
        str(model),
        "--runs",
        "5",
        "--seed",
        "2",
        "--detectors",
        "rules",
        *map(str, arguments),
    ]
    return CliRunner().invoke(cli, words)


def incident(directory: Path, at: float, *, host: str = "gpu-1", kind: str = "memory", rank: int | None = 1) -> None:
    """Write an incident of a node with the ranks 0 and 1, as ``relight run`` does."""
    record = Incident(
        id=f"{int(at * 1000):013d}-abcdef", at="then", host=host, job="job", life=1, kind=kind, why="a reason", rank=rank, step=10, durable=5,
        words="", action="restart", reason="a reason", delay_s=0.0, settings={}, clues=[], workers=[{"rank": 0}, {"rank": 1}],
    )  # fmt: skip
    directory.mkdir(exist_ok=True)
    (directory / f"{record.id}.json").write_bytes(msgspec.json.encode(record))


def span() -> list[str]:
    """Return the options of the time of the exported metrics."""
    return ["--since", f"{int(time.time() - BEGIN)}s", "--until", f"{int(time.time() - END)}s"]


def test_a_model_is_trained_on_prometheus_with_failures_of_incidents(tmp_path: Path) -> None:
    """Nodes of a Prometheus are in the model's history, and a failure of an incident is one of theirs."""
    incident(tmp_path / "incidents", FAILS)
    with prometheus_stub() as stub:
        done = train(tmp_path / "m", "--from-prometheus", stub.url, "--incidents", tmp_path / "incidents", *span())
    assert done.exit_code == 0, done.output
    assert "2 nodes, 3 of 3 pieces of up to six hours, 1 of them end at a failure" in done.output
    names = read_model(tmp_path / "m").metadata["recordings"]
    assert {name.partition("@")[0] for name in names} == {"gpu-0", "gpu-1"} and len(names) == 3


def test_a_model_is_trained_on_files(tmp_path: Path) -> None:
    """Files of two nodes are read. Without incidents, a line states that there are no failures."""
    (tmp_path / "m.prom").write_text("".join(exposition(15.0)))
    done = train(tmp_path / "m", "--from-dcgm", tmp_path / "m.prom")
    assert done.exit_code == 0, done.output
    assert "without --incidents" in done.output and "2 nodes, 2 of 2 pieces" in done.output


def test_only_failures_of_the_node_are_labels(tmp_path: Path) -> None:
    """A failure of another node's rank, or of the script, ends a run of the node, and is no failure of it."""
    incident(tmp_path / "incidents", FAILS)
    incident(tmp_path / "incidents", FAILS + 1, rank=7)
    incident(tmp_path / "incidents", FAILS + 2, kind="user")
    incident(tmp_path / "incidents", FAILS + 3, host="GPU-2.cluster.local", rank=None, kind="hang")
    failures = _failures((str(tmp_path / "incidents"),))
    assert [failure.kind for failure in failures["gpu-1"]] == ["memory", "", ""]
    assert [failure.kind for failure in failures["gpu-2"]] == ["hang"]
    assert failures["gpu-1"][0].at == pytest.approx(FAILS)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--from-prometheus", "prom:9090"], "not the address of a server"),
        (["--from-prometheus", "http://127.0.0.1:1"], "Prometheus did not answer"),
        (["--from-prometheus", "http://127.0.0.1:1", "--since", "soon"], "a time such as"),
        (["--from-prometheus", "http://127.0.0.1:1", "--since", "1h", "--until", "2h"], "longer time than --until"),
        (
            ["--from-prometheus", "http://127.0.0.1:1", "--auth", "env:NOT_THERE_AT_ALL"],
            "there is no password or token",
        ),
        (["--from-dcgm", "none.prom"], "No such file"),
        (["--from-dcgm", "none.prom", "--step", "90"], "90"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else None,
)
def test_mistakes_are_reported(tmp_path: Path, arguments: list[str], error: str) -> None:
    """An error in words before anything is simulated, and no model."""
    done = train(tmp_path / "m", *arguments)
    assert isinstance(done.exception, (RelightError, SystemExit)) and error in f"{done.exception} {done.output}"
    assert not (tmp_path / "m").exists()

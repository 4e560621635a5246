"""``relight plan predict``: a model comes out, and what it is worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.prediction.model import read_model

FEW = ("--runs", "5", "--seed", "2")


def test_train_and_eval_without_libraries_or_with_a_picture(relight, tmp_path: Path) -> None:
    """Training the rules needs only numpy. Results are a table, JSON or a picture. A recent model is kept."""
    path = tmp_path / "nodes.model"
    answer = relight("plan", "predict", "train", path, *FEW, "--detectors", "rules")
    assert answer.code == 0 and "rules" in answer.out and max(map(len, answer.out.splitlines())) <= 84
    assert set(read_model(path).detectors) == {"rules"}
    before = path.read_bytes()
    assert relight("plan", "predict", "train", path, *FEW, "--if-older", "24h", "--json").json == {
        "model": str(path),
        "trained": False,
    }
    assert path.read_bytes() == before
    assert relight("plan", "predict", "train", path, *FEW, "--detectors", "rules", "--if-older", "0s", "--json").json[
        "trained"
    ]
    answer = relight("plan", "predict", "eval", path, *FEW, "--json", "--plot", tmp_path / "worth.png")
    rows = answer.json["simulated"]
    assert [row["detector"] for row in rows] == ["rules", "together"] and rows[0]["days"] > 0.2
    assert (tmp_path / "worth.png").read_bytes().startswith(b"\x89PNG")
    answer = relight("plan", "predict", "eval", *FEW)
    assert "node-days" in answer.out and "together" in answer.out and max(map(len, answer.out.splitlines())) <= 84


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "m", "--detectors", "tea-leaves"), "no detector tea-leaves"),
        (("train", "m", "--if-older", "long"), "--if-older"),
        (("train", "m", "--runs", "0"), "at least one run each"),
        (("eval", "--runs", "0"), "no runs"),
        (("eval", "none.model"), "no model"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else None,
)
def test_invalid_arguments_are_reported(
    relight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    """Bad usage is 2, a model that is not there 1."""
    monkeypatch.chdir(tmp_path)
    answer = relight("plan", "predict", *arguments)
    assert answer.code == (1 if expected == "no model" else 2) and expected in answer.err

"""``relight export``: output, refusals, JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from at_hand import ids


def header(path: Path) -> dict[str, object]:
    """Return the header of a safetensors file."""
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def test_the_model_goes_out(relight, runs: Path) -> None:
    """The model is written to a named file. An existing file is not replaced, and a missing run exits with 1."""
    answer = relight("export", "runs/demo@good", "model.safetensors")
    assert (answer.code, answer.out) == (
        0,
        f"2 tensors of step 199 ({ids(runs)[1]}), 328 B, written to model.safetensors\n",
    ), answer.out
    assert header(runs.parent / "model.safetensors").keys() == {"__metadata__", "layer.weight", "layer.bias"}
    assert relight("export", "runs/demo", "model.safetensors").code == 2
    assert relight("export", "runs/demo", "model.safetensors", "--overwrite").code == 0
    assert relight("export", "runs/nothing", "x.safetensors").code == 1
    assert relight("export", "runs/demo", "x.safetensors", "--only", "no*").code == 1
    assert relight("export", "runs/demo", "x.safetensors", "--dtype", "int8").code == 2
    assert relight("export", "runs/demo").code == 2


def test_a_plan_writes_nothing_and_json_is_complete(relight, runs: Path) -> None:
    """``--dry-run`` lists files, tensors, and values that are left out."""
    before = sorted(runs.parent.rglob("*"))
    answer = relight("export", "runs/demo", "out", "--all", "--dry-run", "--json").json
    assert sorted(runs.parent.rglob("*")) == before
    assert (answer["to"], answer["component"], answer["tensors"], answer["dry_run"]) == ("safetensors", None, 5, True)
    assert {value["what"] for value in answer["left_out"]} >= {"odd.inf", "optimizer.state.0.step"}
    assert [entry["name"] for entry in answer["entries"]][:2] == ["model.layer.weight", "model.layer.bias"]
    assert "would be written to out" in relight("export", "runs/demo", "out", "--dry-run").out
    done = relight("export", "runs/demo", "out.pt", "--json").json
    assert (done["to"], done["dry_run"], done["files"][0]["name"], done["overflowed"]) == ("pt", False, "out.pt", {})


def test_averages(relight, runs: Path) -> None:
    """Newest or named checkpoints are averaged, with weights and across runs, into a file or a checkpoint."""
    answer = relight("export", "runs/demo", "a.safetensors", "--average", "last:2")
    assert answer.code == 0 and answer.out.count("weight 0.5\n") == 2
    data = (runs.parent / "a.safetensors").read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    assert struct.unpack("<2f", data[begin : begin + 8]) == (274.0, 274.125)
    named = relight("export", "runs/demo", "b.pt", "--average", "99=1,good=2,runs/baseline@99=1", "--json").json
    assert [checkpoint["weight"] for checkpoint in named["average"]] == [0.25, 0.5, 0.25]
    weights = relight("export", "runs/demo", "c.pt", "--average", "last:3", "--ema", "0.5", "--dry-run", "--json").json[
        "average"
    ]
    assert [round(weight["weight"], 3) for weight in weights] == [0.143, 0.286, 0.571]
    saved = relight("export", "runs/demo", "--average", "last:2", "--into", "runs/averages", "--json").json
    assert ids(runs, "averages") == [saved["id"]]
    assert relight("verify", "runs/averages").code == 0
    assert relight("export", "runs/demo", "--average", "last:2", "--into", "runs/averages", "--dry-run").code == 0
    for wrong in (
        ["--average", "last:9"],
        ["--average", "last:1"],
        ["--average", "99=x,good"],
        ["--average", "99,good", "--ema", "2"],
    ):
        assert relight("export", "runs/demo", "d.pt", *wrong).code == 2
    assert relight("export", "runs/demo", "--average", "last:2", "--into", "runs/demo").code == 2
    assert relight("export", "runs/demo", "--into", "runs/x").code == 2

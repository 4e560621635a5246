"""``ls``, ``show``, ``log``: their output for people and for programs."""

from __future__ import annotations

import builtins
import math
import shutil
from pathlib import Path

import pytest
from at_hand import CONTROL, HOSTILE, STEPS, directory, fenced, flip, ids, on_terminal, request

from relight.commit import Attempt
from relight.format.records import NoteBody
from relight.store import open_bytes

PROMISED = {
    "id",
    "step",
    "created",
    "reason",
    "logical_bytes",
    "stored_bytes",
    "new_bytes",
    "metrics",
    "tags",
    "requires",
}


def test_ls_json_lists_what_the_design_promises_newest_last(relight, runs: Path) -> None:
    """A list of objects with at least these keys, in the order of their commits."""
    rows = relight("ls", "runs/demo", "--json").json
    assert [row["step"] for row in rows] == STEPS
    assert all(row.keys() >= PROMISED for row in rows)
    assert [row["tags"] for row in rows] == [[], ["good"], [], []]
    assert rows[0]["metrics"] == {"loss": 3.0}


def test_ls_for_people_is_aligned_complete_and_plain_in_a_pipe(relight, runs: Path) -> None:
    """Nothing is cut, no line ends in spaces, no colour."""
    answer = relight("ls", "runs/demo")
    lines = answer.out.splitlines()
    assert lines[0].split() == ["id", "step", "saved", "size", "reason", "loss", "tags"]
    assert [line.split()[1] for line in lines[1:5]] == [str(step) for step in STEPS]
    assert lines[2].endswith("good")
    assert lines[5].startswith("4 checkpoints, ")
    assert all(line == line.rstrip() for line in lines)
    assert not CONTROL.search(answer.out)


def test_ls_leaves_out_columns_without_information(relight, runs: Path) -> None:
    """Without tags there is no column of tags. New bytes are shown only where they differ from the size."""
    assert "tags" not in relight("ls", "runs/baseline").out
    assert "new" not in relight("ls", "runs/demo").out.splitlines()[0]


def test_ls_n_gives_the_newest(relight, runs: Path) -> None:
    """``-n 2`` lists the end, and states that there are more."""
    assert [row["step"] for row in relight("ls", "runs/demo", "-n", 2, "--json").json] == STEPS[-2:]
    assert "2 of 4 checkpoints" in relight("ls", "runs/demo", "-n", 2).out


def test_ls_of_a_store_lists_its_runs(relight, runs: Path) -> None:
    """A store's runs are listed by name, with the number of checkpoints, the latest step and the attempts."""
    rows = relight("ls", "runs", "--json").json
    assert [row["run"] for row in rows] == ["baseline", "demo"]
    assert (rows[1]["checkpoints"], rows[1]["latest_step"], rows[1]["attempts"]) == (4, 299, 2)
    assert "demo                4          299" in relight("ls", "runs").out


def test_empty_stores_and_runs_are_reported(relight, tmp_path: Path) -> None:
    """A store or run without checkpoints is reported with exit code 0."""
    store = open_bytes(tmp_path / "runs")
    Attempt.begin(store, "demo")
    assert relight("ls", tmp_path / "runs/demo").out == "no checkpoint yet\n"
    assert relight("ls", tmp_path / "runs/demo", "--json").json == []
    assert relight("verify", tmp_path / "runs").out == "0 checkpoints, 0 B: as committed, to the byte\n"
    assert relight("tag", tmp_path / "runs/demo").out == "no tag yet\n"
    assert relight("show", tmp_path / "runs/demo").code == 1
    shutil.rmtree(tmp_path / "runs/demo")
    assert relight("ls", tmp_path / "runs").out == "no run yet\n"
    assert relight("verify", tmp_path / "runs", "--json").json == {
        "ok": True,
        "checkpoints": [],
        "log": [],
        "removed": [],
    }


def test_a_damaged_record_is_a_warning_on_stderr(relight, runs: Path) -> None:
    """The rest is listed all the same, and JSON stays JSON."""
    flip(runs / "demo/log/000000000003.json", 100)
    answer = relight("ls", "runs/demo", "--json")
    assert (answer.code, len(answer.json)) == (0, 3)
    assert answer.err.startswith("warning: demo/log/000000000003.json: ")


def test_one_unreadable_run_does_not_hide_the_others(relight, runs: Path) -> None:
    """A store is listed as far as it goes."""
    shutil.rmtree(runs / "baseline/log")
    (runs / "baseline/log").write_text("not a directory")
    answer = relight("ls", "runs", "--json")
    assert (answer.code, [row["run"] for row in answer.json]) == (0, ["demo"])
    assert "warning: baseline: " in answer.err


def test_a_terminal_of_80_columns_is_enough(runs: Path) -> None:
    """No line is wider than the terminal. Tables wrap inside their cells; those of ``ls`` are shortened."""
    Attempt.begin(open_bytes(runs), "demo", reason="a third time").save(
        request(
            399,
            reason="every 100 steps, best validation/accuracy: 0.98765, asked for by a signal",
            metrics={"validation/accuracy": 0.9, "loss": 1.0},
        )
    )
    for arguments in (
        ["ls", "runs/demo"],
        ["ls", "runs"],
        ["log", "runs/demo"],
        ["show", "runs/demo", "--stats"],
        ["show", "runs/demo", "--values"],
    ):
        answer = on_terminal(*arguments)
        assert answer.code == 0
        assert max(map(len, answer.out.splitlines())) <= 80, answer.out
    answer = on_terminal("ls", "runs/demo", columns=100)
    assert {"…dation/accuracy", "0.9"} <= set(answer.out.split())
    assert "\x1b[1m" in on_terminal("ls", "runs/demo").err  # with the colours left in: the heading is bold


def test_nothing_stored_drives_the_terminal(relight, runs: Path) -> None:
    """Escape sequences, bells and bidirectional overrides in names, reasons, metadata and metrics are shown, not obeyed."""
    attempt = Attempt.begin(open_bytes(runs), "demo", reason=HOSTILE)
    attempt.save(
        request(
            399,
            reason=HOSTILE,
            metrics={HOSTILE: 1.0},
            user={HOSTILE: HOSTILE},
            environment={"torch": HOSTILE, "host": HOSTILE, "devices": [HOSTILE]},
            components={HOSTILE: HOSTILE, "model": HOSTILE},
            exact=[HOSTILE],
        )
    )
    attempt.note(NoteBody(topic=HOSTILE, data={HOSTILE: HOSTILE}))
    for arguments in (
        ["ls", "runs/demo"],
        ["ls", "runs"],
        ["show", "runs/demo", "--values"],
        ["log", "runs/demo"],
        ["verify", "runs/demo"],
    ):
        for extra in ([], ["--json"]):
            answer = relight(*arguments, *extra)
            assert answer.code == 0
            assert not CONTROL.search(answer.out + answer.err), (arguments, extra)
    assert "\\x1b[31mred" in relight("ls", "runs/demo").out
    assert "[31m" not in on_terminal("ls", "runs/demo").err.replace("\\x1b[31m", "")
    assert not CONTROL.search(relight("show", "runs/demo", "\x1b[2J").err)
    assert not CONTROL.search(relight("ls", "runs/\x1b[2J\nx").err)


def test_show_has_facts_and_tensors_by_component_with_totals(relight, runs: Path) -> None:
    """The newest checkpoint is the default. Each component's total is above its tensors."""
    out = relight("show", "runs/demo").out
    assert out.startswith(f"checkpoint {ids(runs)[-1]}: step 299 of demo\n")
    lines = [line.split() for line in out.splitlines()]
    assert ["model", "(module)", "36", "in", "all", "136", "B"] in lines
    assert ["layer.weight", "8×4", "float32", "128", "B"] in lines
    assert ["scalar", "(value)", "scalar", "int64", "8", "B"] in lines
    assert "5 tensors, 85 elements, 288 B" in out
    assert "torch 2.13.0" in out
    assert "to the bit" in out


@pytest.mark.parametrize(("which", "step"), [("99", 99), ("good", 199), ("best", 299), ("latest", 299)])
def test_show_takes_whatever_names_a_checkpoint(relight, runs: Path, which: str, step: int) -> None:
    """A checkpoint is named by an argument or after ``@``. An id and the beginning of an id work, too."""
    assert relight("show", "runs/demo", which, "--json").json["step"] == step
    assert relight("show", f"runs/demo@{which}", "--json").json["step"] == step
    first = ids(runs)[0]
    assert relight("show", "runs/demo", first[:6], "--json").json["id"] == first


def test_show_has_the_notes_on_exactness_and_the_users_note(relight, runs: Path) -> None:
    """The notes of the save, in text and in JSON."""
    answer = relight("show", "runs/demo", "249")
    assert "no: the loader has no state" in answer.out
    assert "user.note" in answer.out
    facts = relight("show", "runs/demo", "249", "--json").json
    assert facts["exact"] == ["the loader has no state"]
    assert facts["user"] == {"note": "hello"}


def test_show_only_and_values(relight, runs: Path) -> None:
    """``--only`` takes patterns and components. Values keep their types, and values that JSON lacks become text."""
    facts = relight("show", "runs/demo", "--only", "model", "--only", "rng/*", "--json").json
    assert [row["name"] for row in facts["tensors"]] == ["model/layer.weight", "model/layer.bias", "rng/torch"]
    values = relight("show", "runs/demo", "--values", "--json").json["values"]
    assert values["optimizer/state/~0/step"] == 7
    assert values["optimizer/param_groups/0/betas"] == [0.9, 0.99]
    assert (values["odd/inf"], values["odd/nan"], values["odd/bytes"], values["odd/none"]) == (
        "inf",
        "nan",
        "b'\\x00'",
        None,
    )
    none = relight("show", "runs/demo", "--only", "nothing*")
    assert (none.code, none.out) == (1, "")


def test_show_stats_are_right_and_count_what_is_not_finite(relight, runs: Path) -> None:
    """Known values give known numbers, in bfloat16 and in integers beyond a double's precision too."""
    pytest.importorskip("numpy")
    stats = {row["name"]: row["stats"] for row in relight("show", "runs/demo", "--stats", "--json").json["tensors"]}
    values = [299 + n / 8 for n in range(32)]
    weight = stats["model/layer.weight"]
    assert (weight["min"], weight["max"], weight["nan"], weight["inf"]) == (values[0], values[-1], 0, 0)
    assert math.isclose(weight["mean"], sum(values) / 32, rel_tol=1e-12)
    assert math.isclose(weight["norm"], math.hypot(*values), rel_tol=1e-12)
    assert stats["model/layer.bias"] == {"min": 1.0, "max": 2.0, "mean": 1.5, "norm": math.sqrt(5), "nan": 1, "inf": 1}
    assert stats["scalar"]["min"] == -(2**62) - 1
    heading = relight("show", "runs/demo", "--stats").out.split("\n\n")[1].splitlines()[0].split()
    assert heading == ["tensor", "shape", "min", "max", "mean", "norm", "nan", "inf"]
    assert "none NaN or infinite" in relight("show", "runs/demo", "--stats", "--only", "rng").out


def test_show_stats_verify_what_they_read(relight, runs: Path) -> None:
    """A flipped bit is reported, not averaged. Without ``--stats`` the metadata can still be shown."""
    pytest.importorskip("numpy")
    flip(directory(runs, -1) / "pack-00000-000.safetensors", -1)
    answer = relight("show", "runs/demo", "--stats")
    assert (answer.code, answer.out) == (1, "")
    assert "pack-00000-000.safetensors" in answer.err
    assert relight("show", "runs/demo").code == 0


def test_show_stats_without_numpy_name_the_missing_package(
    relight, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without numpy the exit code is 2, and the hint names the package to install."""
    real = builtins.__import__

    def fake(name: str, *rest: object) -> object:
        if name == "numpy":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fake)
    answer = relight("show", "runs/demo", "--stats")
    assert answer.code == 2
    assert "pip install numpy" in answer.err


def test_log_lists_the_records_in_order(relight, runs: Path) -> None:
    """Attempts, commits and tags are listed, each with its writer if that is not the current attempt."""
    rows = relight("log", "runs/demo", "--json").json
    assert [row["kind"] for row in rows] == ["RUN", "FENCE", "COMMIT", "COMMIT", "FENCE", "COMMIT", "COMMIT", "TAG"]
    assert [row["seq"] for row in rows] == list(range(8))
    assert all(row["void"] is None and row["writer"] and row["time"] for row in rows)
    out = relight("log", "runs/demo").out
    assert "attempt 2 takes charge" in out
    assert "(restart)" in out
    assert f"good → {ids(runs)[1]} (by " in out


def test_log_shows_void_and_damaged_records_with_reasons(relight, runs: Path) -> None:
    """A superseded attempt's late commit is listed as void, and a flipped bit as damage."""
    fenced(runs)
    rows = relight("log", "runs/late", "--json").json
    assert [row["void"] for row in rows if row["void"]] == ["its epoch 1 was fenced by 2"]
    assert "VOID, its epoch 1 was fenced by 2" in relight("log", "runs/late").out
    flip(runs / "late/log/000000000002.json", 90)
    answer = relight("log", "runs/late", "--json")
    damaged = [row for row in answer.json if row["kind"] == "DAMAGED"]
    assert [(row["seq"], row["file"]) for row in damaged] == [(2, "late/log/000000000002.json")]
    assert answer.err == ""
    assert "DAMAGED" in relight("log", "runs/late").out

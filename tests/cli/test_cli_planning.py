"""``relight log --why``, ``plan`` and ``preset``: output, errors, and the documented examples."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from relight.cost_model import IntervalBounds, ScheduleInput, decide
from relight.cost_model.schedule_note import encode
from relight.format.topics import SCHEDULE
from relight.log import Log
from relight.store import open_bytes

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
SHOWN = re.findall(r"```\n\$ relight (.*?)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_outputs_on_the_page_are_current(command: str, printed: str, relight) -> None:
    """Every example of docs/planning.md equals the command's present output."""
    done = relight(*shlex.split(command))
    assert done.code == 0
    assert done.out.rstrip() == printed.rstrip()


def test_the_page_has_four_sizes() -> None:
    """The page has plans of 8B, 70B, 405B and 1T."""
    assert [command.split()[1] for command, _ in SHOWN if command.startswith("plan ")] == ["8B", "70B", "405B", "1T"]


def test_a_schedule_is_shown_decision_by_decision(runs: Path, relight) -> None:
    """The newest decision is shown completely, older ones as rows. A run without decisions exits with 1 and a hint."""
    log = Log(open_bytes(str(runs)), "demo")
    before = None
    for step, stall in ((0, 1.0), (100, 4.0)):
        seen = ScheduleInput(step=step, step_s=1.0, stalls_s=(stall,), durables_s=(5.0,), failures=2, watched_s=7200.0)
        before = decide(seen, before, IntervalBounds(overhead=0.5))
        note = SCHEDULE.note(encode(step, before))
        log.read()
        log.append(lambda view, note=note: (note, 1))
    done = relight("log", "--why", "runs/demo")
    assert done.code == 0
    assert "2 failures in 2 h" in done.out
    assert "Young" in done.out
    assert max(map(len, done.out.splitlines())) <= 84
    result = json.loads(relight("log", "--why", "runs/demo", "--json").out)
    assert [decision["step"] for decision in result] == [0, 100]
    assert result[1]["interval_s"] == pytest.approx(2 * result[0]["interval_s"], rel=0.1)
    assert len(json.loads(relight("log", "--why", "runs/demo", "--json", "--last", "1").out)) == 1
    none = relight("log", "--why", "runs/baseline")
    assert none.code == 1
    assert "relight.adaptive()" in none.err


def test_a_plan_of_a_run_a_configuration_and_a_number(runs: Path, relight, tmp_path: Path) -> None:
    """A run's plan counts its tensors' bytes by role, a configuration's plan is exact to the parameter, and JSON has
    every number."""
    live = json.loads(relight("plan", "runs/demo", "--json").out)
    tensors = json.loads(relight("show", "runs/demo", "--json").out)["tensors"]
    assert live["bytes"] == sum(tensor["bytes"] for tensor in tensors)
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 128256}))
    for where in ("model", "model/config.json"):
        assert json.loads(relight("plan", where, "--json").out)["bytes"] == 14 * 8_030_261_248
    number = json.loads(relight("plan", "8B", "--gpus", "64", "--mtbf", "6h", "--json").out)
    assert number["known"]["mtbf"] == {"value": 21600.0, "source": "given"}
    assert 0 < number["goodput"] < 1
    assert relight("plan", "8B", "--plot", tmp_path / "plan.png").code == 0
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def bench(path: Path, size: int, seconds: float) -> Path:
    """Write the part of the JSON of ``relight bench`` that ``relight plan`` reads."""
    figures = [
        {"name": name, "seconds": seconds * times}
        for name, times in (("save_lost", 1), ("save_durable", 2), ("restore_cold", 3))
    ]
    path.write_text(json.dumps({"state_bytes": size, "relight": figures}))
    return path


def test_measured_files_take_the_place_of_what_is_assumed(tmp_path: Path, relight) -> None:
    """Two measured sizes define a line, and the source is shown. Invalid files are refused."""
    first, second = bench(tmp_path / "one.json", 10**9, 1.0), bench(tmp_path / "two.json", 2 * 10**9, 1.5)
    result = json.loads(
        relight("plan", "100M", "--precision", "fp32", "--measured", first, "--measured", second, "--json").out
    )
    assert result["bytes"] == 12 * 10**8
    assert result["stall_s"] == pytest.approx(0.5 + 1.2 * 0.5)
    assert result["known"]["load_s"] == {
        "value": pytest.approx(3 * 1.1),
        "source": "measured: 2 files of relight bench",
    }
    for wrong in (
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"state_bytes": 1, "relight": [{"name": "save_lost"}]}',
        b'{"state_bytes": 0, "relight": []}',
        b"[" * 100_000,
    ):
        (tmp_path / "wrong.json").write_bytes(wrong)
        done = relight("plan", "8B", "--measured", tmp_path / "wrong.json")
        assert done.code == 2
        assert "Traceback" not in done.err
    assert relight("plan", "8B", "--measured", tmp_path / "none.json").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["8X"], ["8B", "--gpus", "12", "--tp", "5"], ["8B", "--levels", "memory"], ["8B", "--mtbf", "never"], ["8B", "--rates", "guesses"],
        ["8B", "--copy", "fast"], ["8B", "--window", "-1s"], ["config.json"], ["bad/config.json"], ["bad"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_invalid_arguments_of_plan_are_refused(
    arguments: list[str], relight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid arguments give an error message without a traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"hidden_size": -4')
    done = relight("plan", *arguments)
    assert done.code in (1, 2)
    assert done.out == ""
    assert done.err
    assert "Traceback" not in done.err


def test_presets_as_file_as_reasons_and_as_json(tmp_path: Path, relight, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--out`` writes the printed text, and never over a file. ``--explain`` has a reason for every setting. Sizes
    differ in numbers."""
    monkeypatch.chdir(tmp_path)
    printed = relight("config", "preset", "medium").out
    assert relight("config", "preset", "medium", "--out", "relight.toml").code == 0
    assert Path("relight.toml").read_text() == printed
    again = relight("config", "preset", "medium", "--out", "relight.toml")
    assert again.code == 2
    assert "the file exists already" in again.err
    result = json.loads(relight("config", "preset", "medium", "--json").out)
    assert result["toml"] == printed
    explained = relight("config", "preset", "medium", "--explain").out
    assert all(setting["why"] in explained for setting in result["settings"])
    other = tomllib.loads(relight("config", "preset", "medium", "--model", "70B", "--gpus", "8192").out)
    assert other["checkpoint"]["adaptive"]["at_most"] != tomllib.loads(printed)["checkpoint"]["adaptive"]["at_most"]
    assert len(json.loads(relight("config", "preset", "--json").out)) == 8
    assert relight("config", "preset", "tiny").code == 2

"""``relight bench``: plausible numbers, no leftovers, and refusals with numbers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from at_hand import Answer, environment, in_child, on_terminal

from relight.agent import reach
from relight.errors import NoSpace

SMALL = ("--size", "4MB", "--rounds", "2")
FLOORS = ["memcpy_1", "memcpy", "hash_1", "hash", "write_direct", "write_buffered", "read_cold", "read_cached"]
OURS = ["save_waiting", "save_blocked", "save_durable", "save_lost", "restore_cold", "restore_warm", "restore_memory"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answer, Path]:
    """Run the benchmark once in a directory that does not exist yet. Return its answer, and the folder with its
    picture."""
    folder = tmp_path_factory.mktemp("bench")
    return in_child(
        "bench", folder / "deep" / "runs", *SMALL, "--tensors", 30, "--json", "--plot", folder / "ratios.png"
    ), folder


def test_json_has_all_floors_and_all_that_relight_does(measured: tuple[Answer, Path]) -> None:
    """Each measurement has seconds, bytes per second, each round, and its ratio to existing floors."""
    answer, folder = measured
    assert answer.code == 0, answer.err
    report = answer.json
    assert list(report) == [
        "store", "state_bytes", "tensors", "rounds", "machine", "floors", "relight", "pace", "notes", "settings", "line",
    ]  # fmt: skip
    assert (report["store"], report["tensors"], report["rounds"]) == (str(folder / "deep" / "runs"), 40, 2)
    assert abs(report["state_bytes"] - 4_000_000) < 40_000
    floors = {floor["name"]: floor for floor in report["floors"]}
    assert list(floors) == [name for name in FLOORS if name != "write_direct" or report["machine"]["direct_io"]]
    assert [measurement["name"] for measurement in report["relight"]] == OURS
    for measurement in [*report["floors"], *report["relight"]]:
        assert 0 < measurement["seconds"] < 30, measurement
        assert len(measurement["seconds_each"]) == 2 and measurement["what"]
        assert min(measurement["seconds_each"]) <= measurement["seconds"] <= max(measurement["seconds_each"])
    for measurement in report["relight"]:
        assert measurement["ratio"] > 0 and measurement["floor"] and set(measurement["floor"]) <= floors.keys(), (
            measurement
        )


def test_numbers_stand_to_each_other_as_they_must(measured: tuple[Answer, Path]) -> None:
    """Saving returns before it is durable, threads are measured up to the cores, the machine is described."""
    answer = measured[0].json
    ours = {measurement["name"]: measurement for measurement in answer["relight"]}
    assert all(
        a < b for a, b in zip(ours["save_blocked"]["seconds_each"], ours["save_durable"]["seconds_each"], strict=True)
    )
    assert [measurement["threads"] for measurement in answer["pace"]][0] == 1
    assert [measurement["threads"] for measurement in answer["pace"]][-1] == min(answer["machine"]["cores"], 16)
    assert all(measurement["bytes_per_second"] > 1e6 for measurement in answer["pace"])


def test_settings_come_with_reasons_and_a_line(measured: tuple[Answer, Path]) -> None:
    """Each recommendation has a reason. The line is valid Python and names the store."""
    answer = measured[0].json
    assert [setting["name"] for setting in answer["settings"]] == [
        "background",
        "threads",
        "direct I/O",
        "memory",
        "save",
    ]
    assert all(any(char.isdigit() for char in setting["reason"]) for setting in answer["settings"])
    compile(answer["line"], "line", "eval")
    assert answer["store"] in answer["line"]


def test_nothing_is_left_but_the_picture(measured: tuple[Answer, Path]) -> None:
    """No directory of the benchmark is left."""
    answer, folder = measured
    assert [path.name for path in folder.iterdir()] == ["ratios.png"]
    assert (folder / "ratios.png").read_bytes().startswith(b"\x89PNG")
    assert "the picture is in" in answer.err


def test_on_a_terminal_there_is_progress_a_table_and_sentences(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with runs is unchanged afterwards."""
    monkeypatch.setenv("RELIGHT_PROGRESS", "1")  # at once, and not after two seconds
    before = sorted(runs.rglob("*"))
    answer = on_terminal("bench", "runs", "--size", "5MB", "--rounds", "1", columns=120)
    assert answer.code == 0, answer.out
    assert "measuring" in answer.out
    for text in (
        "time",
        "rate",
        "GB/s",
        "save that waits",
        "restore, from memory",
        "Settings",
        "relight.Checkpointer(",
    ):
        assert text in answer.out
    assert sorted(runs.rglob("*")) == before


def test_without_torch_the_floors_are_measured_and_a_note_is_printed(tmp_path: Path) -> None:
    """Without torch, no code tries to import it."""
    script = f"""
import sys
sys.modules["torch"] = None
sys.argv = ["relight", "bench", {str(tmp_path / "runs")!r}, "--size", "4MB", "--rounds", "1", "--json"]
from relight.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["relight"], result["tensors"]) == ([], None)
    assert len(result["floors"]) >= 7 and result["pace"]
    assert any("torch is not installed" in note for note in result["notes"])


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(
    relight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal for lack of room has the needed and the free bytes, and a size that fits."""
    monkeypatch.setattr("relight.store.local.LocalStore.free_bytes", lambda self: 100_000_000)
    answer = relight("bench", tmp_path / "runs", "--size", "1GB")
    assert (answer.code, answer.out) == (2, "")
    assert "needs 2.06 GB on the disk; 100 MB are free" in answer.err
    assert "--size 18MB fits" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_refused_before_anything_is_made(
    relight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory is refused before a file is written, as too little disk space is."""
    monkeypatch.setattr("relight.bench.measure.available_bytes", lambda: 1_000_000_000)
    answer = relight("bench", tmp_path / "runs", "--size", "1GB")
    assert answer.code == 2
    assert "of memory (the state, two snapshots of it, buffers); 1 GB are available" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["memory://x"], "only a store on a disk"),
        (["runs", "--size", "lots"], "is not a size"),
        (["runs", "--size", "10kB"], "too small to measure"),
        (["runs", "--rounds", "0"], "--rounds"),
        (["runs", "--tensors", "0"], "--tensors"),
    ],
    ids=str,
)
def test_bad_usage_is_2_and_makes_nothing(
    relight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    """Each wrong argument is refused with the reason."""
    monkeypatch.chdir(tmp_path)
    answer = relight("bench", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert text in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_without_matplotlib_is_refused_at_once(
    relight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without matplotlib a picture is refused before measuring begins."""
    monkeypatch.setattr("relight.cli.common.importlib.util.find_spec", lambda name: None)
    answer = relight("bench", tmp_path / "runs", "--plot", tmp_path / "x.png")
    assert answer.code == 2
    assert "matplotlib" in answer.err and "pip install" in answer.err


def test_an_error_in_the_middle_leaves_nothing(relight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fills up while packs are written, the error is reported and the directory is removed."""

    def full(*rest: object) -> None:
        raise NoSpace("the disk is full")

    monkeypatch.setattr("relight.bench.measure.write_image", full)
    (tmp_path / "runs").mkdir()
    answer = relight("bench", tmp_path / "runs", *SMALL)
    assert answer.code == 2
    assert "the disk is full" in answer.err
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_restore_that_gives_other_bytes_is_noticed(relight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore that does nothing, and so seems fast, is an error."""
    monkeypatch.setattr("relight.checkpointer.Checkpointer.restore", lambda self: 0)
    answer = relight("bench", tmp_path / "runs", *SMALL)
    assert answer.code == 1
    assert "other bytes than were saved" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_bench_are_reported(relight, tmp_path: Path) -> None:
    """A leftover directory is not removed: it may belong to a running benchmark."""
    old = tmp_path / ".relight-bench-0000"
    old.mkdir()
    answer = relight("bench", tmp_path, "--size", "1MB", "--rounds", "1")
    assert answer.code == 0, answer.err
    assert f"{old} exists" in answer.err
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_an_interrupt_leaves_neither_files_nor_an_agent(tmp_path: Path, number: int, code: int) -> None:
    """An interrupt during saves removes all files and processes, and prints no traceback."""
    store = tmp_path / "runs"
    command = [sys.executable, "-m", "relight", "bench", str(store), "--size", "4MB", "--rounds", "500"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as child:
        deadline = time.monotonic() + 60
        while not (saves := list(store.glob(".relight-bench-*/background/0*"))):
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.01)
        folder = saves[0].parents[1]
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (code, ""), err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    while (agent := reach(str(folder), "background")) is not None:
        agent.close()
        assert time.monotonic() < deadline
        time.sleep(0.05)

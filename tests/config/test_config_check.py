"""``relight config``: it locates every mistake, hides secrets, and refuses hostile files within bounds."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Iterator
from datetime import date
from datetime import time as clock
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import relight
from relight.checkpointer.file_defaults import CheckpointerOptions, with_file_defaults
from relight.cli import cli
from relight.config import check_file
from relight.config.check import makers
from relight.errors import ConfigError, RelightError
from relight.policy.file_defaults import defaults_of
from relight.settings import lines
from relight.settings.file import checked, forget_taken
from relight.settings.lines import places
from relight.settings.registry import settings_by_name
from relight.supervise.settings import read_settings

SECRET = "json://user:hunter2@pager.example/?token=hunter2"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty directory. Restore the environment after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RELIGHT_BACKGROUND")
    monkeypatch.delenv("RELIGHT_EVENTS")
    monkeypatch.setattr("relight.settings.file._given", set())  # forget the --set of other tests
    before = dict(os.environ)
    yield
    forget_taken()
    os.environ.clear()
    os.environ.update(before)


def ask(*words: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    answer = CliRunner().invoke(cli, list(words), standalone_mode=False, catch_exceptions=False)
    return answer.return_value, answer.stdout, answer.stderr


MISTAKES = """# a comment
[checkpoint]
background = "no"
keep = {last = 5, lastt = 2}

[checkpoint.limits]
threads = 0
memory = [
  1,  # ]
  2]
  deadline_s = "soon"

[supervise]
same = "x"
  sme = 3
[alrets]
to = []
[alerts]
group_s = -1
rules.slow_save.above = 3
quiet = ["25:00-26:00"]
[environment]
cache_bytes = "lots"
chache = "x"
"""
WHERE = {
    "checkpoint.background": (3, 1), "checkpoint.keep.lastt": (4, 1), "checkpoint.limits.threads": (7, 1), "checkpoint.limits.memory": (8, 1),
    "checkpoint.limits.deadline_s": (11, 3), "supervise.same": (14, 1), "supervise.sme": (15, 3), "alrets": (16, 1), "alerts.group_s": (19, 1),
    "alerts.rules.slow_save.above": (20, 1), "alerts.quiet": (21, 1), "environment.cache_bytes": (23, 1), "environment.chache": (24, 1),
}  # fmt: skip


def test_every_mistake_at_once_with_its_line_and_column() -> None:
    """All thirteen mistakes are listed in the order of the file, with exit code 1. A correct file has exit code 0."""
    Path("relight.toml").write_text(MISTAKES)
    code, out, _ = ask("config", "check", "--json")
    report = json.loads(out)
    assert code == 1 and report["ok"] is False
    assert {mistake["setting"]: (mistake["line"], mistake["column"]) for mistake in report["mistakes"]} == WHERE
    assert [mistake["line"] for mistake in report["mistakes"]] == sorted(
        mistake["line"] for mistake in report["mistakes"]
    )
    hints = {mistake["setting"]: mistake["hint"] for mistake in report["mistakes"]}
    assert hints["supervise.sme"] == "did you mean supervise.same?" and hints["alrets"] == "did you mean [alerts]?"
    assert hints["environment.chache"] == "did you mean environment.cache?"
    assert hints["checkpoint.keep.lastt"] == "did you mean checkpoint.keep.last?"
    code, out, _ = ask("config", "check")
    assert code == 1 and out.startswith("relight.toml:3:1: [checkpoint] background must be true or false, not 'no'\n")
    Path("relight.toml").write_text("[supervise]\nsame = 4\n")
    assert ask("config", "check")[:2] == (0, "")


def test_errors_of_readers_of_settings_name_the_line() -> None:
    """``relight run`` and a ``Checkpointer`` refuse a file, and name the line or the variable that is wrong."""
    Path("relight.toml").write_text("[supervise]\nsame = 3\nskip = 0\n[checkpoint.keep]\nlast = 2\nmode = 'most'\n")
    with pytest.raises(ConfigError) as raised:
        read_settings(None)
    assert raised.value.where == "relight.toml:3:1"
    with pytest.raises(ConfigError) as raised:
        checked("checkpoint", defaults_of)
    assert raised.value.where == "relight.toml:6:1"
    os.environ["RELIGHT_SUPERVISE__SKIP"] = "1"
    assert read_settings(None).skip == 1
    os.environ["RELIGHT_SUPERVISE__SAME"] = "0"
    with pytest.raises(ConfigError) as raised:
        read_settings(None)
    assert raised.value.where == "RELIGHT_SUPERVISE__SAME"
    os.environ["RELIGHT_SUPERVISE__GRACE_S"] = "5"
    with pytest.raises(ConfigError, match="RELIGHT_GRACE_S"):
        read_settings(None)


def test_two_values_that_contradict_each_other_are_one_mistake() -> None:
    """If two values contradict each other, one mistake is reported, at one of the two lines."""
    Path("relight.toml").write_text('[checkpoint.adaptive]\nat_least = "2h"\nat_most = "1h"\n')
    mistakes = check_file(Path("relight.toml"), False)
    assert [(mistake.line, mistake.column) for mistake in mistakes] in ([(2, 1)], [(3, 1)])


def test_variables_are_checked_too() -> None:
    """Unknown variables, similar names and invalid values are reported. Correct settings of the file are not."""
    Path("relight.toml").write_text("[supervise]\nsame = 4\n")
    os.environ |= {
        "RELIGHT_CASHE": "x",
        "RELIGHT_SUPERVISE__SAME": "none",
        "RELIGHT_SUPERVISE__SMAE": "1",
        "RELIGHT_CACHE_BYTES": "lots",
    }
    code, out, _ = ask("config", "check", "--json")
    mistakes = {mistake["where"]: mistake for mistake in json.loads(out)["mistakes"]}
    assert code == 1 and mistakes.keys() == {
        "RELIGHT_CASHE",
        "RELIGHT_SUPERVISE__SAME",
        "RELIGHT_SUPERVISE__SMAE",
        "RELIGHT_CACHE_BYTES",
    }
    assert mistakes["RELIGHT_CASHE"]["hint"] == "did you mean RELIGHT_CACHE?"
    assert mistakes["RELIGHT_SUPERVISE__SMAE"]["hint"] == "did you mean supervise.same?"


def test_secrets_are_never_printed() -> None:
    """No output, error or JSON has an alert's target, a key, or a password inside an address."""
    Path("named.toml").write_text(
        f'[alerts]\nto = ["{SECRET}"]\nescalate_to = "{SECRET}"\n[supervise]\nnotices = ["{SECRET}"]\n'
        f'[environment]\nkey = "hunter2"\nsign = ["hunter2"]\nanchor = "{SECRET}"\naudit = "{SECRET}"\n'
    )
    os.environ["RELIGHT_SETTINGS"] = "named.toml"
    for words in (
        ("show",),
        ("show", "--all"),
        ("show", "--json"),
        ("check",),
        ("check", "--json"),
        ("check", "named.toml"),
    ):
        _, out, err = ask("config", *words)
        assert "hunter2" not in out + err, words
    shown = {setting["name"]: setting for setting in json.loads(ask("config", "show", "--json")[1])["settings"]}
    assert shown["alerts.to"]["value"] == shown["environment.key"]["value"] == "set, hidden"
    assert shown["environment.anchor"]["value"] == "json://…@pager.example/?…"
    os.environ["RELIGHT_KEY"] = "hunter2"
    assert "hunter2" not in "".join(map(str, ask("config", "show", "--all")))


def test_show_names_the_origin_of_each_value(tmp_path: Path) -> None:
    """Origins are a default, a line, a variable or ``--set``. ``--all`` lists all. A directory can be given."""
    Path("relight.toml").write_text("[supervise]\nsame = 5\n\nskip = 2\n")
    os.environ["RELIGHT_SUPERVISE__SAME"] = "6"
    rows = [
        line.split(maxsplit=2) for line in ask("--set", "supervise.split=true", "config", "show")[1].splitlines()[2:]
    ]
    assert rows == [
        ["same", "6", "RELIGHT_SUPERVISE__SAME"],
        ["skip", "2", "relight.toml:4"],
        ["split", "true", "--set"],
        [],
    ]
    everything = ask("config", "show", "--all")[1]
    assert "relight.toml:2 (overridden)" in everything and "\n[environment]\n" in everything
    assert max(map(len, everything.splitlines())) <= 84
    os.environ |= {
        setting.variable: "[" + '"some text", ' * 9 + "]"
        for setting in settings_by_name().values()
        if "." in setting.name.partition(".")[2]
    }
    assert max(map(len, ask("config", "show")[1].splitlines())) <= 84
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "relight.toml").write_text("[supervise]\nskip = 9\n")
    settings = {
        setting["name"]: setting for setting in json.loads(ask("config", "show", "other", "--json")[1])["settings"]
    }
    assert (settings["supervise.skip"]["value"], settings["supervise.skip"]["line"]) == (9, 2)
    with pytest.raises(ConfigError, match="supervise.same"):
        ask("--set", "supervise.smae=1", "ls")


def test_every_entry_point_applies_the_environment_of_the_file() -> None:
    """Entry points refuse a mistake in the file's environment. ``relight config check`` and ``version`` still run."""
    Path("relight.toml").write_text('[environment]\nchache = "x"\n')
    calls = [
        lambda: ask("ls", "runs"),
        lambda: relight.open("runs"),
        lambda: relight.load("runs/demo"),
        lambda: with_file_defaults(CheckpointerOptions(*[None] * 6), "every rank", False),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as raised:
            call()
        assert raised.value.where == "relight.toml:2:1"
    assert ask("config", "check")[0] == 1 and ask("--version")[1]
    Path("relight.toml").write_text('[environment]\nnode = "here"\n')
    with pytest.raises(RelightError):
        relight.open("none/here")
    assert os.environ["RELIGHT_NODE"] == "here"
    assert {setting["name"]: setting["from"] for setting in json.loads(ask("config", "show", "--json")[1])["settings"]}[
        "environment.node"
    ] == "relight.toml:2"


HOSTILE: dict[str, Any] = {
    "deep": "a = " + "[" * 100_000, "deep tables": "a = " + "{a = " * 50_000, "dots": "a" + ".a" * 100_000 + " = 1", "heading": "[a" + ".a" * 100_000 + "]",
    "binary": bytes(range(256)) * 100, "not UTF-8": b'[supervise]\nmodel = "\xff"\n', "long array": "a = [\n" + "1,\n" * 80_000 + "]\n",
    "many keys": "[supervise]\n" + "".join(f"k{i} = 1\n" for i in range(15_000)), "nothing closed": 'a = """' + "x\n" * 100_000,
    "brackets": "a = [\n" + "[],\n" * 60_000 + "]\n", "many tables": "".join(f"[t{i}]\n" for i in range(20_000)), "number": "a = " + "9" * 200_000,
    "number with a base": "[supervise]\nsame = 0x" + "f" * 20_000,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_soon(name: str) -> None:
    """Deep, long, binary or truncated files give our own error, or mistakes, within seconds."""
    content = HOSTILE[name]
    Path("relight.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.monotonic()
    with pytest.raises(RelightError) as raised:
        read_settings(None)
    assert "relight.toml" in raised.value.where and len(str(raised.value)) < 1500
    assert check_file(Path("relight.toml"), False)
    assert time.monotonic() - began < 20


ODD: list[Any] = [
    True, -1, 0, 1.5, float("nan"), float("inf"), "x" * 1000, "a\0b", "", [], ["a"], [[1]], {}, {"a": 1}, {"": {}}, 1 << 62, -(1 << 63), date(2026, 1, 1), clock(1),
]  # fmt: skip


@pytest.mark.parametrize("name", settings_by_name())
def test_odd_values_are_refused_or_taken(name: str) -> None:
    """Any TOML value for any setting is accepted or raises a ``ConfigError`` with a printable message."""
    table, *keys = name.split(".")
    refused = 0
    for value in ODD:
        try:
            for key in reversed(keys):
                value = {key: value}
            makers("relight.toml")[table](value)
        except ConfigError as error:
            refused += 1
            assert error.what and len(error.what) < 3000
    assert refused


def test_an_invalid_file_is_refused_at_once() -> None:
    """Directories, FIFOs without a writer, devices, files of 1 GiB, circular links and missing files are refused."""
    Path("directory").mkdir()
    os.mkfifo("fifo")
    Path("link").symlink_to("link")
    with open("big", "wb") as file:
        file.truncate(1 << 30)
    for name in ("directory", "fifo", "link", "big", "/dev/zero", "none", "a\0b"):
        for call in (
            lambda: checked("supervise", lambda table, where: table, Path(name)),
            lambda: check_file(Path(name), True),
        ):
            began = time.monotonic()
            with pytest.raises(ConfigError):
                call()
            assert time.monotonic() - began < 2


def test_a_syntax_error_has_line_and_column() -> None:
    """The place is where the parser stopped, also at the end of the file."""
    Path("relight.toml").write_text("[supervise]\nsame = = 3\n")
    assert [mistake.place for mistake in check_file(Path("relight.toml"), False)] == ["relight.toml:2:8"]
    Path("relight.toml").write_text("[supervise]\nnotices = [\n")
    assert check_file(Path("relight.toml"), False)[0].line >= 2
    Path("relight.toml").write_bytes(b'[supervise]\nmodel = "\xff"\n')
    assert [mistake.place for mistake in check_file(Path("relight.toml"), False)] == ["relight.toml:2:10"]


_KEY = st.sampled_from(["a", "b1", '"x y"', "'q.q'", "c-d"])
_VALUE = st.sampled_from(
    [
        "1",
        '"t # ]"',
        "[1, 2]",
        "[\n  1, # ]\n\n  2,\n]",
        '"""\n[no]\na = 1\n"""',
        "'''\n]\n'''",
        "{i = 1, j = {k = 2}}",
        "2026-01-01",
    ]
)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(_KEY, min_size=1, max_size=3), _VALUE, st.integers(0, 3)), max_size=8)
)
def test_lines_are_those_of_the_statements(statements: list[tuple[bool, list[str], str, int]]) -> None:
    """In any valid file, each key has the line and column of its statement."""
    text, wanted, under = "", {}, ()
    for heading, keys, value, indent in statements:
        path = ".".join(keys)
        piece = " " * indent + (f"[{path}] # x\n" if heading else f"{path} = {value}\n")
        try:
            tomllib.loads(text + piece)
        except tomllib.TOMLDecodeError:
            continue
        names = tuple(key.strip("\"'") for key in keys)
        under, full = (names, names) if heading else (under, under + names)
        wanted[full] = (text.count("\n") + 1, indent + 1)
        text += piece
    result = places(text)
    assert {full: result[full] for full in wanted} == wanted


def test_work_on_lines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that would take long to compute are missing. Places before them exist."""
    monkeypatch.setattr(lines, "_WORK_MAX", 1000)
    assert places("a = 1\nb = [\n" + "[],\n" * 200 + "]\nc = 1\n") == {("a",): (1, 1)}

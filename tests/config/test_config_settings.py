"""The register of settings is what the code reads, and each setting may be said in any way, to the same effect."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import relight
from relight.checkpointer.file_defaults import CheckpointerOptions, with_file_defaults
from relight.checkpointer.options import wants_background
from relight.config import effective_settings
from relight.config.page import put_in
from relight.errors import ConfigError
from relight.monitoring.rules import KINDS
from relight.monitoring.settings import NUMBERS, RULE_WORDS, read_alerting
from relight.policy import Compact, Limits, Peers, adaptive, every, keep
from relight.policy.file_defaults import defaults_of
from relight.policy.grace import GRACE, grace_of
from relight.settings.file import checked, forget_taken, give, take_environment
from relight.settings.registry import NAMED_ONLY, RULES, SETTINGS, Setting, variable_of
from relight.supervise.decide import SuperviseRules
from relight.supervise.limits import HangTimeouts
from relight.supervise.prediction_thread import Foreseen
from relight.supervise.settings import Announced, Start, read_settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MAKERS: dict[str, Any] = {"adaptive": adaptive, "every": every, "keep": keep, "limits": Limits, "compact": Compact, "peers": Peers}
SUPERVISE = (SuperviseRules, HangTimeouts, Start, Announced, Foreseen)
ALERTS = ("to", "escalate_to", "min_severity", "quiet", "timezone", *NUMBERS)
NEEDS = {
    "checkpoint.adaptive.drop": 'loss = "loss"', "checkpoint.peers.memory": "copies = 1", "checkpoint.peers.bytes_per_second": "copies = 1",
    "checkpoint.keep.metric": "best = 1", "checkpoint.keep.mode": "best = 1", "checkpoint.every.loader": "epochs = 1",
}  # fmt: skip
"""What must stand beside some for them to count."""
VALUES: dict[str, Any] = {
    "checkpoint.adaptive.phases": {"warm-up": 4.0}, "checkpoint.adaptive.busy": {"disk": 0.8},
    "checkpoint.adaptive.overhead": 0.25, "checkpoint.adaptive.drop": 0.25, "checkpoint.adaptive.loss": "val", "checkpoint.keep.mode": "max",
    "checkpoint.keep.metric": "val_loss", "checkpoint.takeover": "take", "checkpoint.limits.memory": 1 << 30, "checkpoint.limits.nice": 3, "checkpoint.limits.when_busy": "queue",
    "checkpoint.compact.codecs": "always", "checkpoint.compact.coder": "gpu", "checkpoint.compact.max_error": {"optimizer/*": 1e-4}, "checkpoint.compact.lossy": {"optimizer/*": "bfloat16"}, "checkpoint.every.minutes": 2.5,
    "checkpoint.every.loader": "data", "checkpoint.every.hours": 1.5, "checkpoint.every.seconds": 45.0,
    "supervise.lr_cut": 0.5, "supervise.pause": 0.5, "supervise.spikes": 4.5, "supervise.preload": ["json"], "supervise.notices": ["aws"],
    "supervise.model": "a.model", "supervise.recordings": "seen", "alerts.to": ["env:A"], "alerts.escalate_to": ["env:B"],
    "alerts.min_severity": "info", "alerts.quiet": ["22:00-07:00"], "alerts.timezone": "Europe/Berlin",
}  # fmt: skip
BOOLEANS = ("environment.core_dumps", "environment.single_writer", "environment.keys_over_http", "environment.debug")


def value_for(one: Setting) -> Any:
    """Something that it may be, and is not of itself."""
    if one.name in VALUES:
        return VALUES[one.name]
    key = one.name.rpartition(".")[2]
    if one.kind == "true or false":
        return one.default == "false"
    if one.name == "checkpoint.tiers":
        return {"cold": {"url": "s3://bucket/runs"}}
    if one.name.startswith("environment."):
        return "5GB" if key == "cache_bytes" else "7" if key == "store_patience_s" else "some"
    if key in ("severity", "runs"):
        return {"severity": "info", "runs": ["prod-*"]}[key]
    if key in ("at_least", "at_most", "mtbf", "within", "undo_window"):
        return "90m" if key != "at_least" else "30m"
    return "5GB" if key in ("budget", "memory") else 4


def as_toml(value: Any) -> str:
    """As it stands in a file."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory, and an environment that is as before when a test has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RELIGHT_BACKGROUND")
    monkeypatch.delenv("RELIGHT_EVENTS")
    monkeypatch.setattr("relight.settings.file._given", set())  # what other tests have said by --set
    before = dict(os.environ)
    yield
    forget_taken()
    os.environ.clear()
    os.environ.update(before)


def effect(name: str) -> str:
    """What is made of a setting by the code that uses it."""
    take_environment()
    table = name.partition(".")[0]
    if name == "checkpoint.background":
        return repr(wants_background(with_file_defaults(CheckpointerOptions(*[None] * 6), "every rank", False).background))
    if name == "supervise.grace_s":  # as launch has it
        return repr(float(grace_of(os.environ.get(GRACE, "")) or read_settings(None).start.grace_s))
    if table == "environment":
        return os.environ.get(variable_of(name), "").replace("true", "1")
    return repr({"checkpoint": lambda: checked("checkpoint", defaults_of)[0], "supervise": lambda: read_settings(None),
                 "alerts": read_alerting}[table]())  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_three_ways_one_effect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file, as a variable, as an argument: a setting comes to the same, and to something else than its default."""
    one, table = SETTINGS[name], name.rpartition(".")[0]
    value = value_for(one)
    file = tmp_path / "named.toml"
    beside = f"[{table}]\n{NEEDS.get(name, '')}\n"
    monkeypatch.setenv("RELIGHT_SETTINGS", str(file))
    file.write_text(beside)
    unset = (
        effect(name)
        if name
        not in (
            *[f"checkpoint.every.{k}" for k in ("steps", "minutes", "hours", "seconds", "epochs")],
            *[f"checkpoint.peers.{k}" for k in ("copies", "data", "parity")],
        )
        else ""
    )
    file.write_text(f"{beside}{name.rpartition('.')[2]} = {as_toml(value)}\n")
    by_file = effect(name)
    file.write_text(beside if NEEDS.get(name) else "")
    forget_taken()
    text = value if isinstance(value, str) else as_toml(value)
    monkeypatch.setenv(one.variable, text)
    by_variable = effect(name)
    monkeypatch.delenv(one.variable)
    give(name, text)
    by_argument = effect(name)
    assert by_file == by_variable == by_argument != unset


@pytest.mark.parametrize("name", [name for name, one in SETTINGS.items() if name.count(".") == 2 and name.startswith("checkpoint.")])
def test_the_keyword_argument_says_the_same(name: str) -> None:
    """``keep(last=5)`` is ``[checkpoint.keep] last = 5``, and the register says so."""
    _, table, key = name.split(".")
    beside = {part[0].strip(): json.loads(part[1]) for part in [NEEDS.get(name, "").split("=")] if len(part) == 2}
    given = {**beside, key: value_for(SETTINGS[name])}
    told = defaults_of({table: given}, "x")
    assert (told.save if table in ("adaptive", "every") else getattr(told, table)) == MAKERS[table](**given)
    assert SETTINGS[name].argument == f"{MAKERS[table].__name__}({key}=)"
    assert getattr(relight, MAKERS[table].__name__) is MAKERS[table]


def test_the_register_has_all_that_the_code_reads_and_no_more() -> None:
    """Names are the arguments and fields of what is made of the tables."""
    names = {"checkpoint.background", "checkpoint.takeover", "checkpoint.tiers"}
    for table, make in MAKERS.items():
        names |= {f"checkpoint.{table}.{one}" for one in inspect.signature(make).parameters if one not in ("risk", "amount")}
    names |= {f"supervise.{one.name}" for kind in SUPERVISE for one in fields(kind)}
    names |= {f"alerts.{one}" for one in ALERTS}
    names |= {f"alerts.rules.{rule}.{word}" for rule, kind in KINDS.items() for word in (*RULE_WORDS, kind.limit) if word}
    assert {name for name in SETTINGS if not name.startswith("environment.")} == names


def test_defaults_are_those_of_the_code() -> None:
    """A default that is a plain value is the one there is."""
    real = {f"checkpoint.limits.{one.name}": one.default for one in fields(Limits)}
    real |= {f"checkpoint.compact.{one.name}": one.default for one in fields(Compact)}
    real |= {f"supervise.{one.name}": one.default for kind in SUPERVISE for one in fields(kind)}
    real |= {f"alerts.{name}": number for name, number in NUMBERS.items()}
    plain = {name: value for name, value in real.items() if value not in (None, MISSING, "", ()) and name != "supervise.grace_s"}
    told = {name: SETTINGS[name].default for name in plain}
    assert {name: str(value).lower().removesuffix(".0") for name, value in plain.items()} == {
        name: text.removesuffix(".0") for name, text in told.items()
    }
    assert {
        name: (kind.limit, f"{kind.default:g}" if kind.limit else "", kind.severity, f"{kind.for_s:g}") for name, kind in KINDS.items()
    } == RULES


def test_the_page_has_all_settings() -> None:
    """docs/configuration.md is current: ``python -m relight.config.page docs/configuration.md`` makes it so."""
    text = PAGE.read_text(encoding="utf-8")
    assert put_in(text) == text and "made by python -m relight.config.page" in text


def test_what_beats_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument beats a variable, a variable the file, key by key; the file beats the default. What was beaten is told."""
    Path("relight.toml").write_text("[supervise]\nsame = 5\nskip = 2\n")
    assert read_settings(None).rules.same == 5
    monkeypatch.setenv("RELIGHT_SUPERVISE__SAME", "6")
    assert (read_settings(None).rules.same, read_settings(None).rules.skip) == (6, 2)
    give("supervise.same", "7")
    assert read_settings(None).rules.same == 7
    shown = {one.setting.name: one for one in effective_settings(Path("relight.toml"))}["supervise.same"]
    assert shown.counts == (7, "--set", 0)
    assert shown.beaten == ((5, "relight.toml:2", 2), ("3", "default", 0))


def test_what_the_file_says_of_the_environment_goes_with_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable that is set stays; another working directory has another file; nothing of the first is left."""
    Path("relight.toml").write_text('[environment]\nnode = "one"\nrack = "r1"\nsingle_writer = true\n')
    with pytest.raises(ConfigError, match="only in a file that is named") as raised:
        take_environment()
    assert raised.value.where == "relight.toml:4:1" and "RELIGHT_NODE" not in os.environ
    Path("relight.toml").write_text('[environment]\nnode = "one"\nrack = "r1"\n')
    monkeypatch.setenv("RELIGHT_RACK", "mine")
    take_environment()
    assert (os.environ["RELIGHT_NODE"], os.environ["RELIGHT_RACK"]) == ("one", "mine")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    take_environment()
    assert "RELIGHT_NODE" not in os.environ and os.environ["RELIGHT_RACK"] == "mine"


@pytest.mark.parametrize("setting", sorted(NAMED_ONLY))
def test_a_file_that_lies_about_sets_no_protection_and_names_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """Such a setting counts in a file that is named, and is an error in one that lies in the working directory."""
    table, _, key = setting.partition(".")
    (tmp_path / "relight.toml").write_text(f'[{table}]\n{key} = "somewhere"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="counts only in a file that is named"):
        checked(table, lambda told, where: told)
    assert checked(table, lambda told, where: told, tmp_path / "relight.toml")[0] == {key: "somewhere"}


def test_every_setting_of_a_path_counts_in_a_named_file_alone() -> None:
    """A file that lies in the working directory chooses no file or directory that is read, written or removed."""
    assert {name for name, one in SETTINGS.items() if "path" in one.kind or "directory" in one.kind} <= NAMED_ONLY

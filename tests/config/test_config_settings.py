"""The registry of settings matches the code. A file, a variable and an argument have the same effect."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import relight
from relight.checkpointer.file_defaults import CheckpointerOptions, with_file_defaults
from relight.checkpointer.options import wants_background
from relight.config import effective_settings
from relight.config.page import put_in
from relight.errors import ConfigError
from relight.format.chunk_codecs import PLANES
from relight.heartbeat.ease import SHARE_MAX
from relight.monitoring.rules import KINDS
from relight.monitoring.settings import read_alerting
from relight.policy import Compact, Limits, Peers, adaptive, every, keep
from relight.policy.file_defaults import defaults_of
from relight.policy.grace import GRACE, grace_of
from relight.settings.alert_settings import AlertRulesSettings
from relight.settings.checkpoint_settings import CheckpointSettings, TierSettings
from relight.settings.file import checked, forget_taken, give, take_environment
from relight.settings.registry import Setting, settings_by_name
from relight.supervise.settings import read_settings, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MAKERS: dict[str, Any] = {
    "adaptive": adaptive,
    "every": every,
    "keep": keep,
    "limits": Limits,
    "compact": Compact,
    "peers": Peers,
}
NEEDS = {
    "checkpoint.adaptive.drop": 'loss = "loss"', "checkpoint.peers.memory": "copies = 1", "checkpoint.peers.bytes_per_second": "copies = 1", "checkpoint.peers.tls": "copies = 1",
    "checkpoint.peers.plane": "copies = 1",
    "checkpoint.keep.metric": "best = 1", "checkpoint.keep.mode": "best = 1", "checkpoint.every.loader": "epochs = 1",
}  # fmt: skip
"""Other lines of the table without which a setting has no effect."""
VALUES: dict[str, Any] = {
    "checkpoint.adaptive.phases": {"warm-up": 4.0}, "checkpoint.adaptive.busy": {"disk": 0.8},
    "checkpoint.adaptive.overhead": 0.25, "checkpoint.adaptive.drop": 0.25, "checkpoint.adaptive.loss": "val", "checkpoint.keep.mode": "max",
    "environment.log": "info", "checkpoint.peers.plane": "rdma", "checkpoint.keep.metric": "val_loss", "checkpoint.takeover": "take", "checkpoint.limits.memory": 1 << 30, "checkpoint.limits.nice": 3, "checkpoint.limits.when_busy": "queue",
    "checkpoint.compact.codecs": "always", "checkpoint.compact.coder": "gpu", "checkpoint.compact.max_error": {"optimizer/*": 1e-4}, "checkpoint.compact.lossy": {"optimizer/*": "bfloat16"}, "checkpoint.compact.plugin_codecs": {"model/*": "toy"}, "checkpoint.every.minutes": 2.5,
    "checkpoint.every.loader": "data", "checkpoint.every.hours": 1.5, "checkpoint.every.seconds": 45.0,
    "supervise.lr_cut": 0.5, "supervise.pause": 0.5, "supervise.spikes": 4.5, "supervise.preload": ["json"], "supervise.notices": ["aws"],
    "supervise.model": "a.model", "supervise.recordings": "seen", "alerts.to": ["env:A"], "alerts.escalate_to": ["env:B"],
    "alerts.min_severity": "info", "alerts.quiet": ["22:00-07:00"], "alerts.timezone": "Europe/Berlin",
    "alerts.dashboard": "https://host:8443/", "environment.otlp_endpoint": "http://host:4318",
    "environment.otlp_traces_endpoint": "http://host:4318/v1/traces",
}  # fmt: skip


@pytest.fixture(autouse=True)
def any_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any name in ``plugin_codecs``: no codec is installed here."""
    monkeypatch.setattr("relight.policy.compact.plugin", lambda name: PLANES)


BOOLEANS = ("environment.core_dumps", "environment.single_writer", "environment.keys_over_http", "environment.debug")


def value_for(setting: Setting) -> Any:
    """Return a valid value of a setting that differs from its default."""
    if setting.name in VALUES:
        return VALUES[setting.name]
    key = setting.name.rpartition(".")[2]
    if setting.kind == "true or false":
        return setting.default == "false"
    if setting.name == "checkpoint.tiers":
        return {"cold": {"url": "s3://bucket/runs"}}
    if setting.name.startswith("environment."):
        return "5GB" if key == "cache_bytes" else "7" if key in ("store_patience_s", "mirror_wait_s") else "some"
    if key in ("severity", "runs"):
        return {"severity": "info", "runs": ["prod-*"]}[key]
    if key in ("at_least", "at_most", "mtbf", "within", "undo_window"):
        return "90m" if key != "at_least" else "30m"
    return "5GB" if key in ("budget", "memory") else 4


def as_toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


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


def effect(name: str) -> str:
    """Return the repr of what the code makes from a setting."""
    take_environment()
    table = name.partition(".")[0]
    if name == "checkpoint.background":
        return repr(
            wants_background(with_file_defaults(CheckpointerOptions(*[None] * 6), "every rank", False).background)
        )
    if name == "supervise.grace_s":  # as ``launch`` computes it
        return repr(float(grace_of(os.environ.get(GRACE, "")) or read_settings(None).grace_s))
    if table == "environment":
        return os.environ.get(settings_by_name()[name].variable, "").replace("true", "1").replace("false", "0")
    return repr(
        {
            "checkpoint": lambda: checked("checkpoint", defaults_of)[0],
            "supervise": lambda: read_settings(None),
            "alerts": read_alerting,
        }[table]()
    )


@pytest.mark.parametrize("name", settings_by_name())
def test_file_variable_and_argument_have_one_effect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting has the same effect from a file, a variable and an argument, and another effect than its default."""
    setting, table = settings_by_name()[name], name.rpartition(".")[0]
    value = value_for(setting)
    file = tmp_path / "named.toml"
    needed = f"[{table}]\n{NEEDS.get(name, '')}\n"
    monkeypatch.setenv("RELIGHT_SETTINGS", str(file))
    file.write_text(needed)
    unset = (
        effect(name)
        if name
        not in (
            *[f"checkpoint.every.{k}" for k in ("steps", "minutes", "hours", "seconds", "epochs")],
            *[f"checkpoint.peers.{k}" for k in ("copies", "data", "parity")],
        )
        else ""
    )
    file.write_text(f"{needed}{name.rpartition('.')[2]} = {as_toml(value)}\n")
    by_file = effect(name)
    file.write_text(needed if NEEDS.get(name) else "")
    forget_taken()
    text = value if isinstance(value, str) else as_toml(value)
    monkeypatch.setenv(setting.variable, text)
    by_variable = effect(name)
    monkeypatch.delenv(setting.variable)
    give(name, text)
    by_argument = effect(name)
    assert by_file == by_variable == by_argument != unset


@pytest.mark.parametrize(
    "name", [name for name in settings_by_name() if name.count(".") == 2 and name.startswith("checkpoint.")]
)
def test_the_keyword_argument_has_the_same_effect(name: str) -> None:
    """``keep(last=5)`` equals ``[checkpoint.keep] last = 5``, and the registry states it."""
    _, table, key = name.split(".")
    needed = {part[0].strip(): json.loads(part[1]) for part in [NEEDS.get(name, "").split("=")] if len(part) == 2}
    given = {**needed, key: value_for(settings_by_name()[name])}
    defaults = defaults_of({table: given}, "x")
    assert (defaults.save if table in ("adaptive", "every") else getattr(defaults, table)) == MAKERS[table](**given)
    assert settings_by_name()[name].argument == f"{MAKERS[table].__name__}({key}=)"
    assert getattr(relight, MAKERS[table].__name__) is MAKERS[table]


@pytest.mark.parametrize("name", MAKERS)
def test_a_table_has_the_arguments_of_its_function(name: str) -> None:
    """The struct of ``[checkpoint.keep]`` has the parameters of ``keep``, and its default in words is the parameter's."""
    table = next(field.type for field in msgspec.structs.fields(CheckpointSettings) if field.name == name)
    parameters = {
        key: parameter.default
        for key, parameter in inspect.signature(MAKERS[name]).parameters.items()
        if key not in ("risk", "amount")
    }
    assert set(table.__struct_fields__) == parameters.keys()
    defaults = {key: value for key, value in parameters.items() if isinstance(value, (bool, int, float, str))}
    assert {key: settings_by_name()[f"checkpoint.{name}.{key}"].default for key in defaults} == {
        key: f"{value:g}" if isinstance(value, float) else str(value).lower() for key, value in defaults.items()
    }


def test_tiers_have_the_arguments_of_tier() -> None:
    """A table of ``[checkpoint.tiers]`` has the parameters of ``relight.tier``."""
    assert {*inspect.signature(relight.tier).parameters, "url"} - {"also"} == {*TierSettings.__struct_fields__}


def test_the_alert_rules_are_the_kinds_of_alerts() -> None:
    """Each kind of alert has a table, and each table a kind. The longest pause is the one that the ranks allow."""
    assert KINDS.keys() == set(AlertRulesSettings.__struct_fields__)
    assert settings_of({"pause": SHARE_MAX}, "").pause == SHARE_MAX
    with pytest.raises(ConfigError, match="a share from 0 to 0.9"):
        settings_of({"pause": SHARE_MAX + 0.01}, "")


def test_the_page_has_all_settings() -> None:
    """docs/configuration.md is current: ``python -m relight.config.page docs/configuration.md`` makes it so."""
    text = PAGE.read_text(encoding="utf-8")
    assert put_in(text) == text and "made by python -m relight.config.page" in text


def test_precedence_of_the_sources_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument overrides a variable, and a variable the file, key by key. Overridden values are shown."""
    Path("relight.toml").write_text("[supervise]\nsame = 5\nskip = 2\n")
    assert read_settings(None).same == 5
    monkeypatch.setenv("RELIGHT_SUPERVISE__SAME", "6")
    assert (read_settings(None).same, read_settings(None).skip) == (6, 2)
    give("supervise.same", "7")
    assert read_settings(None).same == 7
    shown = {setting.setting.name: setting for setting in effective_settings(Path("relight.toml"))}["supervise.same"]
    assert shown.counts == (7, "--set", 0)
    assert shown.beaten == ((5, "relight.toml:2", 2), ("3", "default", 0))


def test_the_environment_of_the_file_ends_with_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A set variable stays. In another working directory, the first file's variables are gone."""
    Path("relight.toml").write_text('[environment]\nnode = "one"\nrack = "r1"\nsingle_writer = true\n')
    with pytest.raises(ConfigError, match="only in a settings file that is named") as raised:
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


@pytest.mark.parametrize("setting", sorted(name for name, setting in settings_by_name().items() if setting.named))
def test_a_file_that_was_not_named_sets_no_protection_and_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Such a setting counts in a named file. In a file of the working directory it is an error."""
    table, _, key = setting.partition(".")
    (tmp_path / "relight.toml").write_text(f'[{table}]\n{key} = "somewhere"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is used only in a settings file that is named explicitly"):
        checked(table, lambda table, where: table)
    assert checked(table, lambda table, where: table, tmp_path / "relight.toml")[0] == {key: "somewhere"}


def test_every_setting_of_a_path_counts_in_a_named_file_alone() -> None:
    """A file of the working directory selects no file or directory that is read, written or removed."""
    assert all(
        setting.named
        for setting in settings_by_name().values()
        if "path" in setting.kind or "directory" in setting.kind
    )

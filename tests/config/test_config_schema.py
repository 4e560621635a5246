"""The JSON schema of relight.toml: every setting is in it, and it accepts what the checks accept."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from relight.cli import cli
from relight.config.schema import schema, schema_text
from relight.settings.registry import settings_by_name

ROOT = Path(__file__).parents[2]
_TYPES = {"string": str, "number": (int, float), "integer": int, "boolean": bool, "object": dict, "array": list}


def mistakes(value: Any, rule: dict[str, Any], at: str = "$") -> list[str]:
    """Return the places where ``value`` contradicts ``rule``. Covers the keywords that the schema uses."""
    if "$ref" in rule:
        return mistakes(value, schema()["$defs"][rule["$ref"].rpartition("/")[2]], at)
    if "anyOf" in rule:
        return [] if any(not mistakes(value, part, at) for part in rule["anyOf"]) else [at]
    if "enum" in rule:
        return [] if value in rule["enum"] else [at]
    types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    fits = any(isinstance(value, _TYPES[name]) and (name == "boolean") == isinstance(value, bool) for name in types)
    if not fits:
        return [at]
    if isinstance(value, (int, float)):
        below = value < rule.get("minimum", value) or value <= rule.get("exclusiveMinimum", value - 1)
        return [at] if below or value > rule.get("maximum", value) else []
    if isinstance(value, list):
        return [place for item in value for place in mistakes(item, rule["items"], f"{at}[]")]
    if not isinstance(value, dict):
        return []
    places = []
    for key, below_value in value.items():
        part = rule.get("properties", {}).get(key, rule.get("additionalProperties", True))
        places += (
            [f"{at}.{key}"] if part is False else [] if part is True else mistakes(below_value, part, f"{at}.{key}")
        )
    return places


def test_every_setting_is_in_the_schema_with_its_purpose() -> None:
    """Each setting has a place with its description, default and variable; each kind of value has a schema."""
    for setting in settings_by_name().values():
        rule = schema()
        for key in setting.name.split("."):
            rule = rule["properties"][key]
        assert setting.doc in rule["description"] and setting.variable in rule["description"]


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("examples/**/relight.toml"), *ROOT.glob("deploy/**/relight.toml")]), ids=str
)
def test_files_of_the_examples_follow_the_schema(path: Path) -> None:
    """Each relight.toml of this repository is accepted."""
    assert mistakes(tomllib.loads(path.read_text()), schema()) == []


@pytest.mark.parametrize("kind", ["one-node", "slurm"])
def test_presets_follow_the_schema(kind: str) -> None:
    """What ``relight config preset`` prints is accepted."""
    answer = CliRunner().invoke(cli, ["config", "preset", kind])
    if answer.exit_code == 0:
        assert mistakes(tomllib.loads(answer.output), schema()) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[checkpoint.keep]\nlast = 0", "$.checkpoint.keep.last"),
        ("[checkpoint.keep]\nlst = 3", "$.checkpoint.keep.lst"),
        ("[checkpoint]\nbackground = 1", "$.checkpoint.background"),
        ('[supervise]\nsplit = "yes"', "$.supervise.split"),
        ("[supervise]\nlr_cut = 0.0", "$.supervise.lr_cut"),
        ('[alerts]\nmin_severity = "loud"', "$.alerts.min_severity"),
        ("[checkpoint.compact.lossy]\nx = 3", "$.checkpoint.compact.lossy.x"),
        ("[nothing]\n", "$.nothing"),
        ("[checkpoint.tiers.cold]\nspeed = 1", "$.checkpoint.tiers.cold.speed"),
        ("[checkpoint.tiers.cold.keep]\nlast = 0", "$.checkpoint.tiers.cold.keep.last"),
    ],
)
def test_mistakes_are_marked_at_their_place(text: str, place: str) -> None:
    """A wrong type, a number outside of its range, a wrong word and an unknown key are refused."""
    assert mistakes(tomllib.loads(text), schema()) == [place]


def test_the_file_of_the_repository_is_current() -> None:
    """``python -m relight.config.schema docs/relight.schema.json`` writes it, and docs/configuration.md names it."""
    assert (ROOT / "docs" / "relight.schema.json").read_text(encoding="utf-8") == schema_text()
    assert "relight.schema.json" in (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_command_prints_the_schema() -> None:
    """``relight config schema`` prints it as JSON."""
    assert json.loads(CliRunner().invoke(cli, ["config", "schema"]).output) == schema()

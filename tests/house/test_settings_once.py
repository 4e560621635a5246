"""Each setting is described once, by its struct. Its variable is read in one place."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner
from tree import PRODUCT, SOURCES, page, rel

from relight.cli import cli
from relight.config.page import BEGIN, END
from relight.config.schema import schema
from relight.settings.environment import PREFIX, PROCESS_VARIABLES
from relight.settings.kinds import SettingsTable
from relight.settings.registry import TABLES, settings_by_name, settings_by_variable

HOME = PRODUCT / "settings"
READERS = {
    "RELIGHT_HEARTBEAT": "heartbeat/writer.py",
    "RELIGHT_STACKS": "supervise/stacks.py",
    "RELIGHT_BEFORE": "restore/rollback.py",
    "RELIGHT_SKIP": "restore/rollback.py",
    "RELIGHT_LR_CUT": "restore/rollback.py",
    "RELIGHT_SPLIT": "checkpointer/options.py",
    "RELIGHT_SPIKES": "checkpointer/heartbeat_observer.py",
}
"""Variables that ``relight run`` sets for its ranks, and the file with the only function that reads each. The function
takes most of them out of the environment, so that the ranks' own children do not inherit them."""
OTHER_LISTS = {
    "checkpointer/option_names.py": "names of other frameworks' options, and what each is here",
    "cli/metrics_alerts.py": "the keys of the command's JSON",
    "doctor/ready_operations.py": "the settings of keep that keep no older version",
    "monitoring/rules.py": "the check of each kind of alert: a test compares the kinds with the structs",
    "policy/keep.py": "the fields of Keep that are rules, and the reason that each gives",
}
"""Files that may list several settings of one table, and what the list is."""


def described(table: type[SettingsTable], above: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, description and field of each setting of a struct."""
    for field in msgspec.structs.fields(table):
        if isinstance(field.type, type) and issubclass(field.type, SettingsTable):
            yield from described(field.type, f"{above}.{field.name}")
        else:
            yield f"{above}.{field.name}", field.type.__metadata__[-1].description, field


ALL = {name: (doc, field) for table, kind in TABLES.items() for name, doc, field in described(kind, table)}


def leaves(rule: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the names of the settings in a JSON schema."""
    for name, below in rule["properties"].items():
        yield from leaves(below, f"{above}{name}.") if "properties" in below else [f"{above}{name}"]


def constants_of_reads(path: Path) -> Iterator[str]:
    """Yield the variables of Relight that a file reads from ``os.environ``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    loops = {
        each.target.id: each.iter
        for node in ast.walk(tree)
        if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.SetComp)
        for each in node.generators
        if isinstance(each.target, ast.Name)
    }

    def values(node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Tuple | ast.List):
            for element in node.elts:
                yield from values(element)
        elif isinstance(node, ast.Name) and node.id in loops:
            yield from values(loops[node.id])
        elif isinstance(node, ast.Name) and isinstance(
            value := getattr(
                importlib.import_module("relight." + rel(path).removesuffix(".py").replace("/", ".")), node.id, None
            ),
            str,
        ):
            yield value

    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if ast.unparse(node.func) in ("os.environ.get", "os.environ.pop", "os.getenv"):
                key = node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice if ast.unparse(node.value) == "os.environ" else None
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            key = node.left
        yield from [] if key is None else (text for text in values(key) if text.startswith(PREFIX))


def test_the_register_is_made_from_the_structs() -> None:
    """Each field of a struct is a setting with a description and a kind, and there is no other setting."""
    assert {name: doc for name, (doc, _) in ALL.items()} == {
        name: each.doc for name, each in settings_by_name().items()
    }
    assert all(setting.doc and setting.kind and setting.default for setting in settings_by_name().values())
    assert len(settings_by_variable()) == len(settings_by_name()), "two settings have one variable"


def test_page_schema_and_command_have_the_settings_of_the_structs() -> None:
    """docs/configuration.md, the JSON schema and ``relight config show`` have every setting, and no other one."""
    assert set(leaves(schema())) == ALL.keys()
    shown = json.loads(CliRunner().invoke(cli, ["config", "show", "--all", "--json"]).output)["settings"]
    assert {each["name"] for each in shown} == ALL.keys()
    text = page("configuration.md").partition(BEGIN)[2].partition(END)[0]
    rows = {
        f"{table}.{key}"
        for table, part in re.findall(r"### (\w+)\n(.*?)(?=\n###|\Z)", text, re.DOTALL)
        for key in re.findall(r"^\| `([a-z0-9_.]+)` \|", part, re.MULTILINE)
    }
    assert rows == {name for name in ALL if not name.startswith("alerts.rules.")}


def test_no_description_of_a_setting_stands_elsewhere() -> None:
    """The text that describes a setting is in the structs alone."""
    texts = {doc for doc, _ in ALL.values() if len(doc) > 25}
    elsewhere = {
        rel(path): node.value
        for path in SOURCES
        if path.parent != HOME
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in texts
    }
    assert elsewhere == {}


def test_no_second_table_of_names_exists() -> None:
    """No other file lists five or more settings of one table, except those listed with their purpose."""
    tables: dict[str, set[str]] = {}
    for name in ALL:
        table, _, key = name.rpartition(".")
        tables.setdefault(table, set()).add(key)
    tables["alerts.rules"] = {table.rpartition(".")[2] for table in tables if table.startswith("alerts.rules.")}
    lists = {
        rel(path)
        for path in SOURCES
        if path.parent != HOME
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for keys in [getattr(node, "keys", None) if isinstance(node, ast.Dict) else getattr(node, "elts", None)]
        if keys is not None
        for names in [{key.value for key in keys if isinstance(key, ast.Constant)}]
        if any(len(names & table) >= 5 for table in tables.values())
    }
    assert lists == OTHER_LISTS.keys()


def test_the_environment_is_read_in_one_place() -> None:
    """``settings/environment.py`` alone reads variables of settings. Each variable of the process has one reader."""
    reads = {
        (variable, rel(path))
        for path in SOURCES
        if path != HOME / "environment.py"
        for variable in constants_of_reads(path)
    }
    assert reads == set(READERS.items())
    others = {
        "RELIGHT_SETTINGS": "settings/file.py reads it by settings/environment.py",
        "RELIGHT_RESULT": "a user's command reads it",
    }
    assert {*READERS, *others} == {*PROCESS_VARIABLES}

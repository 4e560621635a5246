"""Dashboards and rules made from the definitions: complete, of nothing that is not there, and taken by promtool."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import relight
from relight.monitoring.generated import (
    alert_rules,
    dashboard,
    expression,
    metrics_in,
    write_dashboard,
    write_deploy,
    write_operator_rules,
    write_rules,
)
from relight.monitoring.rules import KINDS, AlertRule, alert_name, usual_rules
from relight.monitoring.settings import Alerting
from relight.observe import EVENTS
from relight.observe.fields import CARRIES, FIELDS
from relight.observe.metrics import BY_NAME, COUNTER, METRICS, ROWS, SAME_ON_ALL_NODES

DEPLOY = Path(__file__).parents[2] / "deploy"
SOURCES = sorted(Path(relight.__file__).parent.rglob("*.py"))


def test_counters_of_several_nodes_are_not_added_if_all_report_the_same() -> None:
    """Each node reports the run's saves: their sum would grow with the number of nodes."""
    panels = {panel["title"]: panel["targets"][0]["expr"] for panel in dashboard()["panels"] if "targets" in panel}
    assert panels["saves"].startswith("max by (store, run)")
    assert panels["saves failed"].startswith("sum by (store, run, kind)")
    assert all(BY_NAME[name].kind == COUNTER for name in SAME_ON_ALL_NODES)


def test_each_metric_has_its_panel_and_no_panel_asks_for_another() -> None:
    """The dashboard has one row for each group and one panel for each metric. Expressions name defined metrics only."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] == "timeseries"]
    asked = [name for panel in panels for name in metrics_in(" ".join(target["expr"] for target in panel["targets"]))]
    assert sorted(asked) == sorted(metric.name for metric in METRICS)
    assert {metric.panel for metric in METRICS} == set(ROWS)


def test_each_rule_asks_for_metrics_that_are_there() -> None:
    """Every rule's expression uses defined metrics only."""
    for rule in usual_rules():
        assert metrics_in(expression(rule)) <= BY_NAME.keys(), rule.kind
        assert metrics_in(expression(rule))
    assert metrics_in("relight_no_such_thing > 1") - BY_NAME.keys() == {"relight_no_such_thing"}


def test_names_are_as_they_should_be() -> None:
    """Base units, counters in ``_total`` and nothing else, no label without an end, a help that is a sentence."""
    for metric in METRICS:
        assert metric.name.startswith("relight_")
        assert (metric.kind == COUNTER) == metric.name.endswith("_total"), metric.name
        assert not set(metric.labels) & {"step", "id", "message", "why", "reason", "file"}, metric.name
        assert metric.help.endswith("."), metric.name
        assert not any(word in metric.name for word in ("_ms", "_mb", "_percent", "_minutes")), metric.name
    assert len(BY_NAME) == len(METRICS)


def test_metrics_are_made_of_events_and_fields_that_there_are() -> None:
    """Each event of a metric is emitted, with the metric's field."""
    for metric in METRICS:
        if metric.made is not None:
            fields = CARRIES[metric.made.event]
            wanted = {
                *metric.made.once,
                *(metric.field_of(label) for label in metric.labels),
                metric.made.field,
                metric.made.less,
            } - {""}
            assert wanted <= set(fields), metric.name


def emitted() -> dict[str, set[str]]:
    """Return the fields that the source emits, by event, of calls that name event and fields literally."""
    fields: dict[str, set[str]] = {}
    for text in [text for path in SOURCES if "emit(" in (text := path.read_text(encoding="utf-8"))]:
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", "")) == "emit"
                and node.args
            ):
                names = [
                    leaf.value
                    for leaf in ast.walk(node.args[0])
                    if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
                ]
                for name in names:
                    fields.setdefault(name, set()).update(word.arg for word in node.keywords if word.arg)
    return fields


def test_fields_of_events_are_those_of_the_table() -> None:
    """Every event has its row. The row has each emitted field, and a meaning with its unit for each."""
    assert CARRIES.keys() == EVENTS.keys()
    assert {
        name: fields - set(CARRIES[name]) for name, fields in emitted().items() if fields - set(CARRIES[name])
    } == {}
    assert {field for fields in CARRIES.values() for field in fields} == FIELDS.keys()


def test_grafana_reads_the_dashboard(tmp_path: Path) -> None:
    """The dashboard fits the schema: unique ids, panels that do not overlap in 24 columns, a letter per query, a data
    source."""
    board = json.loads(write_dashboard(tmp_path).read_text())
    assert {
        "uid",
        "title",
        "schemaVersion",
        "panels",
        "templating",
        "time",
        "refresh",
        "tags",
        "annotations",
    } <= board.keys()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & taken and position["x"] + position["w"] <= 24
        taken |= cells
        if panel["type"] == "timeseries":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            assert panel["fieldConfig"]["defaults"]["unit"] in ("s", "bytes", "percentunit", "short")
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "store", "run"]


PANEL = {
    "id": int, "type": ("row", "timeseries"), "title": str, "gridPos": dict, "collapsed": bool, "panels": list, "description": str,
    "datasource": dict, "targets": list, "fieldConfig": dict, "options": dict,
}  # fmt: skip
VARIABLE = {
    "name": str, "label": str, "type": ("query", "datasource"), "query": (dict, str), "datasource": dict, "definition": str, "refresh": (0, 1, 2),
    "includeAll": bool, "multi": bool, "current": dict, "sort": tuple(range(9)), "hide": (0, 1, 2),
}  # fmt: skip
BOARD = {
    "uid": str, "title": str, "tags": list, "schemaVersion": int, "version": int, "editable": bool, "timezone": ("browser", "utc", ""), "refresh": str,
    "time": dict, "annotations": dict, "templating": dict, "panels": list,
}  # fmt: skip
"""The fields that ours uses, as Grafana's published model has them (its ``kinds/dashboard/dashboard_kind.cue``, and its plug-ins' options)."""


def misfits(value: dict[str, object], model: dict[str, object], needed: set[str]) -> list[str]:
    """Fields that the model lacks, or has otherwise, or that are not there."""
    wrong = [f"no {name}" for name in sorted(needed - value.keys())]
    for name, item in value.items():
        wanted = model.get(name)
        kinds = wanted if isinstance(wanted, tuple) and all(isinstance(kind, type) for kind in wanted) else (wanted,)
        fits = (
            item in wanted
            if isinstance(wanted, tuple) and kinds is not wanted
            else any(type(item) is kind for kind in kinds)
        )
        if not fits:
            wrong.append(f"{name} is {item!r}")
    return wrong


def test_the_dashboard_fits_grafanas_model() -> None:
    """The dashboard has no unknown field and no field of a wrong type. Queries and panels refer to defined
    variables."""
    board = dashboard()
    assert misfits(board, BOARD, set(BOARD)) == []
    assert misfits({"colour": 1, "id": "1"}, PANEL, {"title"}) == ["no title", "colour is 1", "id is '1'"]
    variables = board["templating"]["list"]
    for variable in variables:
        assert misfits(variable, VARIABLE, {"name", "type", "query", "current"}) == [], variable["name"]
    known = {variable["name"] for variable in variables}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]) + json.dumps(variables)))
    assert used <= known | {"__rate_interval", "__all"} and known <= used
    for panel in board["panels"]:
        assert misfits(panel, PANEL, {"id", "type", "title", "gridPos"}) == [], panel["title"]
        position = panel["gridPos"]
        assert set(position) == {"h", "w", "x", "y"} and all(type(number) is int for number in position.values())
        assert (
            position["h"] >= 1
            and 1 <= position["w"] <= 24
            and 0 <= position["x"] <= 24 - position["w"]
            and position["y"] >= 0
        )
        if panel["type"] == "timeseries":
            options = panel["options"]
            assert options["legend"]["displayMode"] in ("list", "table", "hidden") and options["legend"][
                "placement"
            ] in ("bottom", "right")
            assert options["tooltip"]["mode"] in ("single", "multi", "none") and options["tooltip"]["sort"] in (
                "none",
                "asc",
                "desc",
            )
            assert panel["targets"] and all(
                re.fullmatch("[A-Z]", target["refId"]) and target["legendFormat"] for target in panel["targets"]
            )


def test_promtool_takes_each_query_of_the_dashboard(tmp_path: Path) -> None:
    """Each query works as a recording rule, with values for Grafana's variables. Invalid PromQL fails."""
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    put_in = {"$__rate_interval": "5m", "$store": ".*", "$run": "demo|a.b"}
    for broken in (False, True):
        rules = []
        for number, query in enumerate(asked):
            text = query.replace("}", "", 1) if broken and number == 3 else query
            for name, value in put_in.items():
                text = text.replace(name, value)
            rules.append({"record": f"asked_{number}", "expr": text})
        path = tmp_path / "queries.yml"
        path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
        done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is not broken, done.stdout + done.stderr
    assert len(asked) > len(METRICS)


def test_promtool_takes_the_rules_and_they_fire(tmp_path: Path) -> None:
    """``promtool check rules``, and ``promtool test rules``: each rule fires on what is wrong, and on nothing else."""
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    rules = (
        *(rule for rule in usual_rules() if rule.kind != "risk"),
        AlertRule("risk", 0.8, "warning", 0.0, ("demo", 'a"\\*')),
    )
    path = write_rules(tmp_path, Alerting(rules=rules))
    subprocess.run(["promtool", "check", "rules", str(path)], check=True, capture_output=True)
    labels = 'store="s",run="demo"'
    wrong = {
        "no_good_checkpoint": [
            f"relight_checkpoint_good_age_seconds{{{labels}}} 4000",
            f"relight_run_active{{{labels}}} 1",
        ],
        "saves_failing": [f"relight_saves_failed_in_a_row{{{labels}}} 3", f"relight_run_active{{{labels}}} 1"],
        "slow_save": [f"relight_save_last_seconds{{{labels}}} 700", f"relight_run_active{{{labels}}} 1"],
        "tier_full": [f'relight_tier_full_ratio{{{labels},tier="hot"}} 0.95'],
        "tier_behind": [f'relight_tier_lag_seconds{{{labels},tier="hot"}} 4000', f"relight_run_active{{{labels}}} 1"],
        "damaged": [f"relight_checkpoints_damaged{{{labels}}} 1"],
        "risk": [f"relight_risk_ratio{{{labels}}} 0.9"],
        "job_given_up": [f"relight_job_given_up{{{labels}}} 1"],
        "node_excluded": [f"relight_nodes_excluded{{{labels}}} 1"],
        "rolled_back": [f"relight_recent_roll_backs{{{labels}}} 1"],
        "hardware_failure": [f"relight_recent_hardware_failures{{{labels}}} 1"],
        "crash_loop": [f"relight_recent_failures{{{labels}}} 3"],
        "drive_degraded": [f"relight_mirror_drives_degraded{{{labels}}} 1"],
        "retention_blocked": [f"relight_retention_failed{{{labels}}} 3", f"relight_run_active{{{labels}}} 1"],
        "unreadable": [f"relight_store_up{{{labels}}} 0"],
    }
    assert wrong.keys() == KINDS.keys()
    fine = [
        "relight_checkpoint_good_age_seconds 60",
        "relight_run_active 1",
        "relight_saves_failed_in_a_row 0",
        "relight_store_up 1",
    ]
    groups = []
    for name, series in {**wrong, "": [f"{line.split()[0]}{{{labels}}} {line.split()[1]}" for line in fine]}.items():
        inputs = [{"series": line.rsplit(" ", 1)[0], "values": f"{line.rsplit(' ', 1)[1]}x10"} for line in series]
        tests = [
            {
                "expr": f'count(ALERTS{{alertname="{alert_name(kind)}",alertstate="firing"}}) or vector(0)',
                "eval_time": "5m",
                "exp_samples": [{"labels": "{}", "value": int(kind == name)}],
            }
            for kind in KINDS
        ]
        groups.append({"interval": "1m", "input_series": inputs, "promql_expr_test": tests})
    (tmp_path / "tests.yml").write_text(
        json.dumps({"rule_files": [path.name], "evaluation_interval": "1m", "tests": groups})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_in_deploy_equal_the_definitions(tmp_path: Path) -> None:
    """The dashboard and both files of rules in deploy/ are those that the code writes."""
    for path in write_deploy(tmp_path):
        kept = DEPLOY / path.relative_to(tmp_path)
        text = kept.read_text(encoding="utf-8") if kept.is_file() else ""
        assert text == path.read_text(encoding="utf-8"), "python -m relight.monitoring.generated deploy writes it"


def test_the_operators_resource_has_the_same_rules(tmp_path: Path) -> None:
    """A PrometheusRule has the groups of the file of rules. Every value of its labels and annotations is a text."""
    settings = Alerting(rules=usual_rules())
    resource = yaml.safe_load(write_operator_rules(tmp_path, settings).read_text())
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"] == yaml.safe_load(write_rules(tmp_path, settings).read_text()) == alert_rules(settings)
    rules = resource["spec"]["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == {alert_name(kind) for kind in KINDS}
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert all(isinstance(text, str) for text in [*rule["labels"].values(), *rule["annotations"].values()])


def test_a_rule_of_some_runs_asks_for_these_alone() -> None:
    """Patterns of run names become regular expressions of Prometheus."""
    text = expression(AlertRule("no_good_checkpoint", 60.0, "critical", 0.0, ("prod-*", "a.b")))
    assert text == (
        'relight_checkpoint_good_age_seconds{run=~"prod\\\\-.*|a\\\\.b"} > 60 and relight_run_active{run=~"prod\\\\-.*|a\\\\.b"} == 1'
    )
    assert "for" not in alert_rules(Alerting(rules=(AlertRule("risk", 1.0, "info"),)))["groups"][0]["rules"][0]

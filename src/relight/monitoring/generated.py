"""Grafana's dashboard and Prometheus' alert rules, made from the definitions of metrics and of alerts.

``python -m relight.monitoring.generated deploy`` writes the files in ``deploy``, with the default rules.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relight.errors import ConfigError
from relight.monitoring.rules import KINDS, AlertRule, alert_name, usual_rules
from relight.monitoring.settings import Alerting
from relight.observe.metrics import COUNTER, HISTOGRAM, METRICS, ROWS, SAME_ON_ALL_NODES, Metric

DASHBOARD_FILE, RULES_FILE, OPERATOR_FILE = "relight.json", "relight.rules.yml", "prometheusrule.yaml"
SCHEMA_VERSION = 39
"""Schema version of Grafana 10.4's dashboards, which all later versions read."""
_HEADER = "# Generated from the definitions of alerts. With your settings: relight metrics --rules DIR"
_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit", "": "short"}
_WIDTH, _HEIGHT = 8, 7
_SELECTED = 'store=~"$store",run=~"$run"'
_NAME = re.compile(r"\brelight_[a-z_]+")


def dashboard() -> dict[str, Any]:
    """Return a Grafana dashboard with a row for each group of metrics and a panel for each metric."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        metrics = [metric for metric in METRICS if metric.panel == row]
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "panels": [],
                "gridPos": _at(top, 0, 24, 1),
            }
        )
        top += 1
        for number, metric in enumerate(metrics):
            position = _at(top + number // 3 * _HEIGHT, number % 3 * _WIDTH, _WIDTH, _HEIGHT)
            panels.append(_panel(metric, len(panels) + 1, position))
        top += -(-len(metrics) // 3) * _HEIGHT
    return {
        "uid": "relight", "title": "Relight", "tags": ["relight"], "schemaVersion": SCHEMA_VERSION, "version": 1, "editable": True,
        "timezone": "browser", "refresh": "30s", "time": {"from": "now-6h", "to": "now"}, "annotations": {"list": []},
        "templating": {"list": [_source(), _variable("store", "relight_store_up"), _variable("run", 'relight_store_up{store=~"$store"}')]},
        "panels": panels,
    }  # fmt: skip


def _panel(metric: Metric, number: int, position: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend, "datasource": _DATASOURCE}
        for index, (expr, legend) in enumerate(queries(metric))
    ]
    return {
        "id": number, "type": "timeseries", "title": title_of(metric), "description": f"{metric.help} ({metric.name})", "gridPos": position,
        "datasource": _DATASOURCE, "targets": targets,
        "fieldConfig": {"defaults": {"unit": _UNITS[metric.unit], "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
    }  # fmt: skip


def queries(metric: Metric) -> list[tuple[str, str]]:
    """Return a panel's queries, each with its legend."""
    labels = ", ".join(metric.all_labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in ("run", *metric.labels))
    if metric.kind == COUNTER:
        over_nodes = "max" if metric.name in SAME_ON_ALL_NODES else "sum"
        return [(f"{over_nodes} by ({labels}) (increase({metric.name}{{{_SELECTED}}}[$__rate_interval]))", legend)]
    if metric.kind == HISTOGRAM:
        rate = f"sum by ({labels}, le) (rate({metric.name}_bucket{{{_SELECTED}}}[$__rate_interval]))"
        return [
            (f"histogram_quantile({share}, {rate})", f"{legend} {words}")
            for share, words in ((0.5, "median"), (0.99, "p99"))
        ]
    return [(f"{metric.name}{{{_SELECTED}}}", legend)]


def title_of(metric: Metric) -> str:
    """Return a metric's name in words: ``save blocked seconds`` for ``relight_save_blocked_seconds``."""
    return metric.name.removeprefix("relight_").removesuffix("_total").replace("_", " ")


def alert_rules(settings: Alerting) -> dict[str, Any]:
    """Return the settings' rules as Prometheus rules with the same meaning, for alerting by Prometheus."""
    rules = [_alert_rule(rule) for rule in settings.rules]
    return {"groups": [{"name": "relight", "rules": rules}]}


def _alert_rule(rule: AlertRule) -> dict[str, Any]:
    kind = KINDS[rule.kind]
    alert: dict[str, Any] = {"alert": alert_name(rule.kind), "expr": expression(rule)}
    if rule.for_s:
        alert["for"] = f"{rule.for_s:g}s" if rule.for_s >= 1 else "1s"
    where = "{{ $labels.store }}/{{ $labels.run }}"
    about = " ({{ $labels.tier }})" if rule.kind.startswith("tier") else ""
    value = " It is {{ $value | humanize }}." if kind.limit else ""
    alert["labels"] = {"severity": rule.severity}
    alert["annotations"] = {
        "summary": f"{where}{about}: {kind.summary}",
        "description": f"{kind.summary}: {where}{about}.{value}",
        "hint": kind.hint.replace("RUN", where),
    }
    return alert


def expression(rule: AlertRule) -> str:
    """Return a rule's Prometheus expression, limited to the runs that the rule is for."""
    text = KINDS[rule.kind].expr.replace("LIMIT", f"{rule.limit:g}")
    if rule.runs == ("*",):
        return text
    pattern = "|".join(_as_regex(glob) for glob in rule.runs).replace("\\", "\\\\").replace('"', '\\"')
    return _NAME.sub(lambda match: f'{match[0]}{{run=~"{pattern}"}}', text)


def _as_regex(pattern: str) -> str:
    """Return a pattern of run names as a regular expression of Prometheus."""
    return "".join(".*" if char == "*" else "." if char == "?" else re.escape(char) for char in pattern)


def metrics_in(text: str) -> set[str]:
    """Return the names of the metrics in an expression, without suffixes of histograms."""
    names = set(_NAME.findall(text))
    known = {metric.name for metric in METRICS}
    return {name if name in known else re.sub(r"_(bucket|sum|count)\Z", "", name) for name in names}


def write_dashboard(directory: Path) -> Path:
    """Write Grafana's dashboard into ``directory``."""
    return _write(directory / DASHBOARD_FILE, json.dumps(dashboard(), indent=2) + "\n")


def write_rules(directory: Path, settings: Alerting) -> Path:
    """Write Prometheus' rules into ``directory``."""
    return _write(directory / RULES_FILE, _yaml_text(alert_rules(settings)))


def write_operator_rules(directory: Path, settings: Alerting) -> Path:
    """Write the same rules into ``directory`` as a ``PrometheusRule``, which the Prometheus operator reads."""
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "relight", "labels": {"app.kubernetes.io/name": "relight"}},
        "spec": alert_rules(settings),
    }
    return _write(directory / OPERATOR_FILE, _yaml_text(resource))


def write_deploy(directory: Path) -> list[Path]:
    """Write the files in ``deploy`` that are made from the definitions: the dashboard, and the default rules in both formats."""
    settings = Alerting(rules=usual_rules())
    return [
        write_dashboard(directory / "grafana"),
        write_rules(directory / "prometheus", settings),
        write_operator_rules(directory / "kubernetes" / "monitoring", settings),
    ]


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error.strerror}", where=str(path)) from None
    return path


def _yaml_text(value: Any) -> str:
    return "\n".join([_HEADER, *_yaml(value), ""])


def _yaml(value: Any, indent: int = 0) -> Iterable[str]:
    """Yield mappings, lists and texts as lines of YAML. Texts are JSON strings, which are valid YAML."""
    pad = "  " * indent
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, (dict, list)):
                yield f"{pad}{name}:"
                yield from _yaml(item, indent + 1)
            else:
                yield f"{pad}{name}: {json.dumps(item)}"
    else:
        for item in value:
            first, *other_lines = _yaml(item, indent + 1)
            yield f"{pad}- {first.lstrip()}"
            yield from other_lines


def _at(y: int, x: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }


def _variable(name: str, of: str) -> dict[str, Any]:
    return {
        "name": name, "label": name, "type": "query", "datasource": _DATASOURCE, "definition": f"label_values({of}, {name})",
        "query": {"query": f"label_values({of}, {name})", "refId": name}, "refresh": 2, "includeAll": True, "multi": True,
        "current": {"text": "All", "value": "$__all"}, "sort": 1,
    }  # fmt: skip


if __name__ == "__main__":
    write_deploy(Path(sys.argv[1]))

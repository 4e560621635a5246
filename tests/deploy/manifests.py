"""What deploy/kubernetes holds, as values: the documents, with what a kustomization does to them that matters here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"


def documents() -> list[tuple[Path, dict[str, Any]]]:
    """Every document but the kustomizations, with its file."""
    found = []
    for path in sorted(ROOT.rglob("*.yaml")):
        if path.name != "kustomization.yaml":
            found += [(path, one) for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    assert found, "no manifests were found: nothing would be checked"
    return found


def kustomizations() -> list[tuple[Path, dict[str, Any]]]:
    """Every kustomization, with its file."""
    return [(path, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in sorted(ROOT.rglob("kustomization.yaml"))]


def jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The specifications of Jobs in a JobSet or a TrainingRuntime."""
    spec = document["spec"]
    if document["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [one["template"]["spec"] for one in spec.get("replicatedJobs", [])]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The specifications of pods in a document."""
    if document["kind"] == "Deployment":
        return [document["spec"]["template"]["spec"]]
    if document["kind"] in ("JobSet", "TrainingRuntime"):
        return [job["template"]["spec"] for job in jobs(document)]
    return []

"""The documents of deploy/kubernetes as values, with the effects of kustomizations that tests need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"


def documents() -> list[tuple[Path, dict[str, Any]]]:
    """Return every document except kustomizations, with its file."""
    result = []
    for path in sorted(ROOT.rglob("*.yaml")):
        if path.name != "kustomization.yaml":
            result += [(path, document) for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    assert result, "no manifests were found: nothing would be checked"
    return result


def kustomizations() -> list[tuple[Path, dict[str, Any]]]:
    """Return every kustomization, with its file."""
    return [
        (path, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in sorted(ROOT.rglob("kustomization.yaml"))
    ]


def jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specifications of Jobs in a JobSet or a TrainingRuntime."""
    spec = document["spec"]
    if document["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [job["template"]["spec"] for job in spec.get("replicatedJobs", [])]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specifications of pods in a document."""
    if document["kind"] == "Deployment":
        return [document["spec"]["template"]["spec"]]
    if document["kind"] in ("JobSet", "TrainingRuntime"):
        return [job["template"]["spec"] for job in jobs(document)]
    return []

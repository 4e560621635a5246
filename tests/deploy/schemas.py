"""``make manifests``: validate each document of deploy/kubernetes against the published schema. Unknown fields are
errors."""

from __future__ import annotations

import sys
from typing import Any

import kubernetes_validate
from cloudcoil.models.prometheus_operator import v1 as prometheus
from kubeflow_trainer_api import models as kubeflow
from pydantic import ValidationError
from tests.deploy.manifests import ROOT, documents, jobs

MODELS = {
    "JobSet": kubeflow.JobsetV1alpha2JobSet,
    "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
    "TrainingRuntime": kubeflow.TrainerV1alpha1TrainingRuntime,
    "PodMonitor": prometheus.PodMonitor,
    "PrometheusRule": prometheus.PrometheusRule,
}


def lost(given: Any, kept: Any, where: str = "") -> list[str]:
    """Return the fields of a document that a model did not keep, because it does not know them."""
    if isinstance(given, dict):
        kept = kept if isinstance(kept, dict) else {}
        missing = [f"{where}.{key}" for key in given if key not in kept]
        return missing + [
            field for key in given if key in kept for field in lost(given[key], kept[key], f"{where}.{key}")
        ]
    if isinstance(given, list):
        kept = kept if isinstance(kept, list) else []
        return [
            field
            for index, item in enumerate(given)
            for field in lost(item, kept[index] if index < len(kept) else None, f"{where}[{index}]")
        ]
    return []


QUANTITIES = ("limits", "requests", "sizeLimit")
"""Numbers with units: the models want objects there that no manifest has. They are checked as Kubernetes' own, below."""


def without_quantities(given: Any) -> Any:
    """A document as the models can read it."""
    if isinstance(given, dict):
        return {key: without_quantities(value) for key, value in given.items() if key not in QUANTITIES}
    return [without_quantities(item) for item in given] if isinstance(given, list) else given


def inside(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the Kubernetes objects in a document: jobs with their pods, and resources in a pod made for them."""
    spec = document["spec"]
    if not isinstance(spec, dict):
        return []
    if document["kind"] == "TrainJob":
        container = {"name": "one", "image": "one", "resources": spec["trainer"]["resourcesPerNode"]}
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {"containers": [container]}}]
    if document["kind"] in ("JobSet", "TrainingRuntime"):
        return [
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": job}
            for job in jobs(document)
        ]
    return []


def wrong(document: dict[str, Any]) -> list[str]:
    """Return the violations of a document's schema."""
    model = MODELS.get(document["kind"])
    if model is None:
        return against_kubernetes(document)
    plain = without_quantities(document)
    try:
        read = model.model_validate(plain)
    except ValidationError as error:
        return [str(error)]
    kept = (
        read.to_dict() if hasattr(read, "to_dict") else read.model_dump(mode="json", by_alias=True, exclude_none=True)
    )
    return lost(plain, kept) + [
        violation for resource in inside(document) for violation in against_kubernetes(resource)
    ]


def against_kubernetes(document: dict[str, Any]) -> list[str]:
    """The newest version's strict schema."""
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(str(key) for key in error.path)}: {error.message}"]
    return []


def main() -> int:
    """Validate each document. Also check that an unknown field in it would be reported."""
    bad = 0
    for path, document in documents():
        violations = wrong(document)
        bad += len(violations)
        print(f"{path.relative_to(ROOT)}  {document['kind']}  {'; '.join(violations) or 'valid'}")
        spec = document["spec"]
        planted = [wrong(document | {"spec": spec | {"planted": 1}})]
        planted += [wrong(document | {"spec": "text"})]
        if not all(planted):
            bad += 1
            print(f"{path.relative_to(ROOT)}  a field that does not exist was not noticed")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())

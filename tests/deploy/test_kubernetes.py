"""The manifests for Kubernetes: names meet, times fit, commands are commands. Against published schemas: ``make manifests``."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.deploy.manifests import ROOT, documents, jobs, kustomizations, pods

from relight.cli import COMMANDS, cli

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "kubernetes.md"
DOCUMENTS = [pytest.param(document, id=f"{path.parent.name}-{document['kind']}") for path, document in documents()]
WITH_PODS = [document for document in DOCUMENTS if pods(document.values[0])]
TRAINERS = [document for document in DOCUMENTS if jobs(document.values[0])]


def env(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables with plain values."""
    return {variable["name"]: variable["value"] for variable in container.get("env", []) if "value" in variable}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_grace_fits(trainer: dict[str, Any]) -> None:
    """preStop and the grace period together end before SIGKILL. The ranks' grace period is what preStop leaves."""
    for pod in pods(trainer):
        for container in pod["containers"]:
            hook = container["lifecycle"]["preStop"]["exec"]["command"][-1]
            slept = re.search(r"kill -USR1 1; sleep (\d+)", hook)
            assert slept, "preStop asks for a save, of the process that SIGTERM goes to"
            assert int(slept[1]) + float(env(container)["RELIGHT_GRACE_S"]) < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_pod_that_was_asked_to_end_does_not_count_as_failed(trainer: dict[str, Any]) -> None:
    """Exit codes 75 and 76, and disruptions, use up no retries. Wrong usage ends the job. The named container
    exists."""
    for job in jobs(trainer):
        rules = job["podFailurePolicy"]["rules"]
        by_codes = {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in rules if "onExitCodes" in rule}
        assert by_codes == {(75, 76): "Ignore", (2,): "FailJob"}
        names = {container["name"] for container in job["template"]["spec"]["containers"]}
        assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} <= names
        assert job["template"]["spec"]["restartPolicy"] == "Never", "what podFailurePolicy needs"
        assert job["podReplacementPolicy"] == "Failed", "no second writer while the first one saves"


@pytest.mark.parametrize("document", WITH_PODS)
def test_pods_may_little(document: dict[str, Any]) -> None:
    """No pod runs as root, gains privileges, or mounts a token of the cluster."""
    for pod in pods(document):
        assert (
            pod["securityContext"]["runAsNonRoot"]
            and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        )
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("document", WITH_PODS)
def test_mounted_volumes_and_probed_ports_exist(document: dict[str, Any]) -> None:
    """Mounted volumes are declared. Probes use ports that the container has."""
    for pod in pods(document):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            ports = {port["name"] for port in container.get("ports", [])}
            probed = {
                container[name]["httpGet"]["port"]
                for name in ("startupProbe", "readinessProbe", "livenessProbe")
                if name in container
            }
            assert probed <= ports


def test_claims_selectors_and_ports_meet() -> None:
    """A pod's claim exists. Service, NetworkPolicy and PodMonitor select the dashboard's pod, and its ports."""
    every = [document for _, document in documents()]
    claims = {manifest["metadata"]["name"] for manifest in every if manifest["kind"] == "PersistentVolumeClaim"}
    named = {
        v["persistentVolumeClaim"]["claimName"]
        for manifest in every
        for pod in pods(manifest)
        for v in pod["volumes"]
        if "persistentVolumeClaim" in v
    }
    assert named == claims
    kinds = {manifest["kind"]: manifest for manifest in every}
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for container in pods(kinds["Deployment"])[0]["containers"] for port in container["ports"]}
    assert (
        kinds["Service"]["spec"]["selector"] == labels
        and {port["targetPort"] for port in kinds["Service"]["spec"]["ports"]} <= ports
    )
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert {port["port"] for rule in kinds["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]} <= ports
    assert kinds["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert {
        podMetricsEndpoint["port"] for podMetricsEndpoint in kinds["PodMonitor"]["spec"]["podMetricsEndpoints"]
    } <= ports


def test_the_dashboard_cannot_write_the_store() -> None:
    """Every container of the Deployment has the store read-only, and its own file system."""
    for document in (entry for _, entry in documents() if entry["kind"] == "Deployment"):
        for container in pods(document)[0]["containers"]:
            assert [mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] == "store"] == [True]
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_kustomizations_name_what_is_there() -> None:
    """Each file is in a kustomization, each that is named is there, each image that is set is used."""
    named = set()
    for path, kustomization in kustomizations():
        assert kustomization["kind"] == "Kustomization"
        resources = [path.parent / resource for resource in kustomization["resources"]]
        assert all(place.is_file() or (place / "kustomization.yaml").is_file() for place in resources), path
        named |= {place.resolve() for place in resources}
        used = {
            container["image"]
            for place in resources
            if place.is_file()
            for document in _in(place)
            for pod in pods(document)
            for container in pod["containers"]
        }
        assert {image["name"] for image in kustomization.get("images", [])} <= used
    assert {path.resolve() for path, _ in documents()} <= named


def _in(place: Path) -> list[dict[str, Any]]:
    return [document for path, document in documents() if path.resolve() == place.resolve()]


@pytest.mark.parametrize("document", WITH_PODS)
def test_relight_commands_have_the_options_that_they_are_given(document: dict[str, Any]) -> None:
    """A container's command is one of ours, and takes what it is given. ``relight run`` takes torchrun's flags."""
    for pod in pods(document):
        for container in pod["containers"]:
            words = [*container["command"], *container.get("args", [])]
            match = re.search(r"\brelight ([a-z]+)", " ".join(words))
            assert match and match[1] in COMMANDS, words
            command = cli.get_command(None, match[1])  # type: ignore[arg-type]
            assert isinstance(command, click.Command)
            if match[1] != "run":
                known = {option for parameter in command.params for option in parameter.opts}
                assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def _overlays() -> list[dict[str, Any]]:
    """Return the kustomizations of the page on Kubernetes."""
    blocks = re.findall(r"^ *```yaml\n(.*?)^ *```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in map(yaml.safe_load, map(textwrap.dedent, blocks)) if "resources" in block]


def _patched(document: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the document after a JSON patch. Replaced and removed values must exist, and an added member must not."""
    document = copy.deepcopy(document)
    for change in patch:
        *parents, last = change["path"].strip("/").split("/")
        place: Any = document
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        key = int(last) if isinstance(place, list) and last != "-" else last
        if change["op"] == "remove":
            del place[key]
        elif last == "-":
            place.append(change["value"])
        else:
            exists = key < len(place) if isinstance(place, list) else key in place
            assert exists is (change["op"] == "replace"), change
            place[key] = change["value"]
    return document


@pytest.mark.parametrize("overlay", _overlays())
def test_the_patches_of_the_page_fit_the_files(overlay: dict[str, Any]) -> None:
    """Each patched field exists, images have the names of the base, and a patched pod mounts only volumes that it has."""
    base = (ROOT.parents[1] / "overlay" / overlay["resources"][0]).resolve()
    assert base.is_dir()
    images = {image["newName"] for path, each in kustomizations() for image in each.get("images", [])}
    assert {image["name"] for image in overlay.get("images", [])} <= images
    changed: dict[tuple[str, str], dict[str, Any]] = {}
    for patch in overlay.get("patches", []):
        target = patch["target"]["kind"], patch["target"]["name"]
        [document] = [each for _, each in documents() if (each["kind"], each["metadata"]["name"]) == target]
        changes = yaml.safe_load(patch["patch"])
        if isinstance(changes, dict):
            assert changes["$patch"] == "delete"
            continue
        changed[target] = _patched(changed.get(target, document), changes)
    for pod in (pod for document in changed.values() for pod in pods(document)):
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert all(mount["name"] in volumes for each in pod["containers"] for mount in each["volumeMounts"])
        if "s3://" in str(pod):
            assert "store" not in volumes and "/store" not in str(pod)
        arguments = pod["containers"][0]["args"]
        assert ("--tls-key=/tls/tls.key" in arguments) is ("tls" in volumes), "no mount waits for a Secret without use"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", _overlays())
def test_overlays_of_the_page_render(overlay: dict[str, Any], tmp_path: Path) -> None:
    """kubectl renders each overlay with the images of the user, and the dashboard contains no claim of the job."""
    shutil.copytree(ROOT, tmp_path / "deploy" / "kubernetes")
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "overlay")], capture_output=True, text=True, timeout=60, check=True
    )
    every = [document for document in yaml.safe_load_all(rendered.stdout) if document]
    images = {container["image"] for document in every for pod in pods(document) for container in pod["containers"]}
    assert images == {f"{image['newName']}:{image['newTag']}" for image in overlay.get("images", [])}
    if any(document["kind"] == "Deployment" for document in every):
        claims = {document["metadata"]["name"] for document in every if document["kind"] == "PersistentVolumeClaim"}
        assert claims == {"relight-state"}, "deleting the dashboard must not delete the store"


def test_all_kinds_of_manifests_exist() -> None:
    """Both kinds of trainers, the dashboard and the monitor are in the files."""
    assert {document["kind"] for _, document in documents()} >= {
        "JobSet",
        "TrainJob",
        "TrainingRuntime",
        "Deployment",
        "Service",
        "PodMonitor",
        "PrometheusRule",
    }
    assert ROOT.is_dir() and TRAINERS and WITH_PODS

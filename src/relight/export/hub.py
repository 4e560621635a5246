"""Export to a repository of the Hugging Face Hub: written and verified locally, then uploaded in one commit."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from relight.engines import IN_PROCESS, Engine
from relight.errors import ConfigError, CorruptCheckpoint
from relight.export.average import Mixture
from relight.export.execute import ExportReport, execute_export
from relight.export.plan import ExportPlan, plan_export
from relight.export.selection import Options
from relight.importers.hub import HubAddress, hub_errors, hub_library
from relight.reader.opened import Opened
from relight.units import size_text
from relight.version import VERSION

CARD, LINEAGE = "README.md", "relight.json"
SHARD_BYTES = 5_000_000_000
"""Largest file by default, as transformers has it."""
OLD_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")


class HubReport(NamedTuple):
    """Result of an upload. ``commit``: the commit's URL. ``card``: whether a model card was written."""

    plan: ExportPlan
    export: ExportReport
    commit: str
    card: bool


def plan_hub_export(opened: Opened | Mixture, folder: str, options: Options) -> ExportPlan:
    """Plan the export of a directory for the Hub, in ``folder``. Raise ``ConfigError`` for other formats than safetensors."""
    if options.to != "safetensors":
        raise ConfigError(f"an export to the Hub is safetensors, not {options.to}", hint="leave --to away")
    shard = options.shard_bytes if options.shard_bytes is not None else SHARD_BYTES
    return plan_export(opened, os.path.join(folder, "model"), replace(options, shard_bytes=shard, overwrite=False))


def export_to_hub(
    opened: Opened | Mixture,
    address: HubAddress,
    options: Options,
    *,
    private: bool = True,
    progress: Callable[[int], None] | None = None,
    engine: Engine = IN_PROCESS,
) -> HubReport:
    """Export to a temporary directory (``TMPDIR`` needs room for the model), and upload it in one commit.

    A new repository is ``private``. One that has weights is refused without ``options.overwrite``, which replaces them. A model card that
    exists stays; the lineage is in ``relight.json`` then, too. The Hub's checksums are compared with the written files'. Raise
    ``StoreUnavailable`` if the Hub fails, ``CorruptCheckpoint`` if it has other bytes.
    """
    hub = hub_library()
    api = hub.HfApi(library_name="relight", library_version=VERSION)
    with hub_errors(address):
        existing = (
            set(api.list_repo_files(address.repo, revision=address.revision)) if _exists(api, address) else set[str]()
        )
    weights = sorted(name for name in existing if name.endswith((".safetensors", ".safetensors.index.json")))
    if weights and not options.overwrite:
        raise ConfigError(
            f"the repository has {weights[0]} already", where=str(address), hint="--overwrite replaces it"
        )
    with tempfile.TemporaryDirectory(prefix="relight-hub-") as folder:
        plan = plan_hub_export(opened, folder, options)
        report = execute_export(plan, progress, engine=engine)
        facts = lineage(plan, {name: _sha256(os.path.join(plan.path, name)) for name in report.files})
        _write(os.path.join(plan.path, LINEAGE), json.dumps(facts, indent=2) + "\n")
        has_card = CARD in existing
        if not has_card:
            _write(os.path.join(plan.path, CARD), model_card(facts))
        with hub_errors(address):
            api.create_repo(address.repo, private=private, exist_ok=True)
            if address.revision and not existing:
                api.create_branch(address.repo, branch=address.revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=address.repo,
                folder_path=plan.path,
                revision=address.revision,
                commit_message=f"{facts['run']} step {facts['step']}, checkpoint {facts['checkpoint']}",
                delete_patterns=list(OLD_WEIGHTS),
            )
            uploaded = api.get_paths_info(address.repo, report.files, revision=commit.oid)
        _compare(address, facts["files"], uploaded)
    return HubReport(plan, report, str(commit.commit_url), not has_card)


def lineage(plan: ExportPlan, digests: dict[str, str]) -> dict[str, Any]:
    """Return where a model comes from. ``digests``: SHA-256 of its files, by name."""
    root, environment = plan.opened.root, plan.opened.root.environment
    return {
        "run": plan.opened.prefix.partition("/")[0],
        "checkpoint": root.id,
        "step": root.step,
        "created": root.created,
        "root_blake3": plan.opened.checkpoint.body.root,
        "parents": list(root.parents),
        "average": plan.mixed.to_record() if plan.mixed is not None else [],
        "metrics": plan.opened.checkpoint.metrics,
        "dtype": plan.options.dtype,
        "tensors": len(plan.entries),
        "bytes": plan.bytes_written,
        "code": environment.get("code"),
        "files": digests,
        "relight": VERSION,
    }


def model_card(facts: dict[str, Any]) -> str:
    """Return a model card (Markdown with metadata) from the lineage."""
    metrics = [f"| {name} | {value} |" for name, value in facts["metrics"].items()]
    code = facts["code"] if isinstance(facts["code"], dict) else {}
    rows = [
        ("Run", facts["run"]),
        ("Checkpoint", f"`{facts['checkpoint']}`, after step {facts['step']}, saved {facts['created']}"),
        ("Hash of its metadata (BLAKE3)", f"`{facts['root_blake3']}`"),
        ("Earlier checkpoint", ", ".join(f"`{parent}`" for parent in facts["parents"]) or "none"),
        ("Code", f"`{code['commit']}`" if code.get("commit") else "not recorded"),
        ("Size", f"{facts['tensors']} tensors, {size_text(facts['bytes'])}"),
    ]
    average = [f"- `{part['id']}`, step {part['step']}, weight {part['weight']:.6g}" for part in facts["average"]]
    return "\n".join(
        [
            "---",
            "tags:",
            "- relight",
            "---",
            "",
            f"# {facts['run']}",
            "",
            "Exported by Relight, which verified every byte against the checkpoint. `relight.json` has the same facts for programs.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            *(["", "Average of:", "", *average] if average else []),
            *(["", "| Metric | Value |", "|---|---|", *metrics] if metrics else []),
            "",
            "| File | SHA-256 |",
            "|---|---|",
            *(f"| {name} | `{digest}` |" for name, digest in facts["files"].items()),
            "",
        ]
    )


def _exists(api: Any, address: HubAddress) -> bool:
    return bool(
        api.repo_exists(address.repo)
        and (address.revision is None or api.revision_exists(address.repo, address.revision))
    )


def _compare(address: HubAddress, digests: dict[str, str], uploaded: list[Any]) -> None:
    """Raise ``CorruptCheckpoint`` if a file on the Hub has another SHA-256. Small files, without one there, are not compared."""
    known = {info.path: info for info in uploaded}
    for name, digest in digests.items():
        info = known.get(name)
        uploaded_digest = "missing"
        if info is not None:
            uploaded_digest = digest if info.lfs is None else info.lfs.sha256
        if uploaded_digest != digest:
            raise CorruptCheckpoint(
                f"{name} differs from what was uploaded ({uploaded_digest})",
                where=str(address),
                hint="repeat with --overwrite",
            )


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)

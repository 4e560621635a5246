"""Abandoned multipart uploads: S3 keeps their parts, unlisted, and charges for them. Needs boto3."""

from __future__ import annotations

import importlib
from typing import Any

from relight.store.object_client import s3_server

UPLOADS_MAX = 100_000


def boto3_client() -> Any:
    """Return a client with the environment's endpoint, region and credentials; None without boto3, and for unsigned requests."""
    server = s3_server()
    if server.anonymous:
        return None
    try:
        boto3 = importlib.import_module("boto3")
    except ImportError:
        return None
    return boto3.client("s3", endpoint_url=server.endpoint, region_name=server.region)


def list_uploads(client: Any, bucket: str, prefix: str) -> list[tuple[str, str]]:
    """Return ``(key, id)`` of the uploads below ``prefix``, at most ``UPLOADS_MAX``: the next sweep finds the others."""
    uploads: list[tuple[str, str]] = []
    marker: dict[str, str] = {}
    while len(uploads) < UPLOADS_MAX:
        page = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix, **marker)
        uploads += [(upload["Key"], upload["UploadId"]) for upload in page.get("Uploads", ())]
        following = {"KeyMarker": page.get("NextKeyMarker", ""), "UploadIdMarker": page.get("NextUploadIdMarker", "")}
        if not page.get("IsTruncated") or following == marker:
            break
        marker = following
    return uploads


def abort_upload(client: Any, bucket: str, key: str, upload_id: str) -> None:
    """Abort an upload. A missing one is no error."""
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    except client.exceptions.NoSuchUpload:
        return

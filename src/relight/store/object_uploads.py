"""Multipart uploads that nobody will end: S3 keeps their parts, unlisted, and charges for them. Through boto3, where installed."""

from __future__ import annotations

import importlib
from typing import Any

UPLOADS_MAX = 100_000


def boto3_client() -> Any:
    """A client with the environment's endpoint and credentials; None without boto3."""
    try:
        boto3 = importlib.import_module("boto3")
    except ImportError:
        return None
    return boto3.client("s3")


def list_uploads(client: Any, bucket: str, prefix: str) -> list[tuple[str, str]]:
    """``(key, id)`` of each below ``prefix``, ``UPLOADS_MAX`` at most: the next sweep finds the others."""
    found: list[tuple[str, str]] = []
    marker: dict[str, str] = {}
    while len(found) < UPLOADS_MAX:
        page = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix, **marker)
        found += [(one["Key"], one["UploadId"]) for one in page.get("Uploads", ())]
        following = {"KeyMarker": page.get("NextKeyMarker", ""), "UploadIdMarker": page.get("NextUploadIdMarker", "")}
        if not page.get("IsTruncated") or following == marker:
            break
        marker = following
    return found


def abort_upload(client: Any, bucket: str, key: str, upload_id: str) -> None:
    """Call one off."""
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    except client.exceptions.NoSuchUpload:
        return

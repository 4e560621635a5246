"""Clients of object stores, and translation of their errors. Uses obstore: S3 and compatible stores, Google Cloud Storage, Azure, HTTP.

Credentials come from the usual sources of each cloud: environment, instance or workload identity, application default credentials; for
S3 with boto3 installed, also profiles and single sign-on. No credential is ever part of a URL, a file or an error.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from datetime import timedelta
from typing import Any, NamedTuple

from relight.errors import CheckpointNotFound, ConfigError, NoSpace, RelightError, StoreUnavailable, extra_hint
from relight.settings.environment import environment

SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "http": "http",
    "https": "https",
}
"""URL schemes, each with its canonical name."""
_QUERY = re.compile(r"(https?://[^\s?\"'<>]+)\?[^\s\"'<>]*")
_USER = re.compile(r"://[^/\s@\"']+@")
_STATUS = re.compile(r"non-2xx status code: (\d{3}) ?([A-Za-z ]*)")
_CODE = re.compile(r"<Code>([^<]*)</Code>|\"(?:code|reason)\": *\"([^\"]*)\"")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>|\"message\": *\"([^\"]*)\"")
_REQUEST = re.compile(r"performing ([A-Z]+) (\S+) in ")
_PASSES = (408, 409, 425, 429)
"""4xx statuses after which the same request may succeed later."""
_WORDS_MAX = 400
_FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage", "507 Insufficient")
_ACCESS = "check the credentials, and that they allow to list, read, write and delete there"
_METADATA = ("169.254.169.254", "metadata.google.internal")
"""Metadata servers, which provide credentials on a cloud's machines if there are no others."""
_NO_KEYS = (
    "no credentials were found: set them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give a path on a disk"
)
_S3_ENDPOINTS, _S3_REGIONS = (
    ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    ("AWS_REGION", "AWS_DEFAULT_REGION"),
)
_S3_KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SKIP_SIGNATURE",
)


class RetryTimes(NamedTuple):
    """Timeouts in seconds of one request and of all its tries, number of retries, and first and longest pause (with backoff and jitter)."""

    request_s: float = 60.0
    deadline_s: float = 120.0
    tries: int = 10
    pause_s: float = 0.1
    pause_max_s: float = 10.0

    @classmethod
    def usual(cls) -> RetryTimes:
        """Return the times with the deadline of the settings."""
        deadline_s = environment().store_patience_s
        return cls(deadline_s=deadline_s, request_s=min(cls().request_s, deadline_s))


class Bucket(NamedTuple):
    """Target of a URL: canonical ``scheme``, name of the bucket, container or host, and the keys' common prefix."""

    scheme: str
    name: str
    prefix: str

    @classmethod
    def from_url(cls, url: str) -> Bucket:
        """Parse a URL. Raise ``ConfigError`` if it is invalid or contains credentials."""
        scheme, _, rest = url.partition("://")
        name, _, prefix = rest.partition("/")
        if "?" in rest or "#" in rest or "@" in name:
            raise ConfigError(
                "an object store's URL is scheme://bucket/prefix and nothing else",
                hint="credentials and endpoints come from the environment, such as AWS_ENDPOINT_URL",
            )
        if not name:
            raise ConfigError(f"{scheme}:// names no bucket", hint=f"give {scheme}://bucket/run")
        prefix = prefix.strip("/")
        if any(part in ("", ".", "..") or "\0" in part for part in prefix.split("/")) and prefix:
            raise ConfigError(f"{prefix[:80]!r} is an invalid prefix in a bucket")
        return cls(SCHEMES[scheme.lower()], name, prefix)


class S3Server(NamedTuple):
    """The S3 server that the environment names; None for Amazon's, or the default region. ``anonymous``: requests are not signed."""

    endpoint: str | None
    region: str | None
    anonymous: bool


def s3_server() -> S3Server:
    """Return the S3 server of the environment. Every client of S3 must use it: another one would send requests to Amazon."""
    endpoint, region = (
        next((value for name in names if (value := os.environ.get(name))), None)
        for names in (_S3_ENDPOINTS, _S3_REGIONS)
    )
    return S3Server(endpoint, region, os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"))


class Clients(NamedTuple):
    """Two clients of one bucket. ``patient`` retries by itself. ``once`` does not, for requests that are not idempotent."""

    patient: Any
    once: Any


_clients: dict[tuple[Any, ...], Clients] = {}
"""Clients by settings: stores share connections and threads."""
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_process: int | None = None
"""Process in which the library's threads run. They do not survive a fork: a forked process would wait for them forever."""


def surroundings() -> frozenset[tuple[str, str]]:
    """Return the environment's server and credential settings. Cached knowledge about a server holds only for the same settings."""
    return frozenset(
        (name, value) for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))
    )


def clients_of(bucket: Bucket, patience: RetryTimes) -> Clients:
    """Return a bucket's clients, created at first use. Raise ``ConfigError`` without the library, ``StoreUnavailable`` after a fork."""
    global _process
    with _lock:
        if _process not in (None, os.getpid()):
            raise StoreUnavailable(
                "this process was forked from one that uses an object store, and the library does not survive that",
                hint="use multiprocessing's 'spawn' or 'forkserver', started before the store is used",
                retryable=False,
            )
        key = (bucket.scheme, bucket.name, patience, surroundings())
        clients = _clients.get(key)
        if clients is None:
            clients = _clients[key] = Clients(_open(bucket, patience, patience.tries), _open(bucket, patience, 0))
            _process = os.getpid()
        return clients


def _open(bucket: Bucket, patience: RetryTimes, tries: int) -> Any:
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        extra = "s3" if bucket.scheme == "s3" else "objects"
        raise ConfigError(f"{bucket.scheme}:// needs the library obstore: {error}", hint=extra_hint(extra)) from None
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=patience.request_s),
        "connect_timeout": timedelta(seconds=min(5.0, patience.request_s)),
        "user_agent": "relight",
    }
    retry = {
        "max_retries": tries,
        "retry_timeout": timedelta(seconds=patience.deadline_s),
        "backoff": {
            "init_backoff": timedelta(seconds=patience.pause_s),
            "max_backoff": timedelta(seconds=patience.pause_max_s),
            "base": 2,
        },
    }
    try:
        if bucket.scheme in ("http", "https"):
            if bucket.scheme == "http":
                options["allow_http"] = True
            return stores.HTTPStore(f"{bucket.scheme}://{bucket.name}", client_options=options, retry_config=retry)
        if bucket.scheme == "gs":
            if _plain_http(os.environ.get("GOOGLE_BASE_URL")):
                options["allow_http"] = True  # the user chose a plain http endpoint
            return stores.GCSStore(bucket.name, client_options=options, retry_config=retry)
        if bucket.scheme == "az":
            if os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true"):
                options["allow_http"] = True
            return stores.AzureStore(bucket.name, client_options=options, retry_config=retry)
        if _plain_http(s3_server().endpoint):
            options["allow_http"] = True  # the user chose a plain http endpoint
        return stores.S3Store(
            bucket.name,
            client_options=options,
            retry_config=retry,
            credential_provider=_profile(),
            disable_bulk_delete=True,
        )
    except Exception as error:  # settings that the library does not take
        raise ConfigError(f"no client for {bucket.scheme}://{bucket.name}: {shortened(error)}", hint=_ACCESS) from None


def _plain_http(endpoint: str | None) -> bool:
    return bool(endpoint) and str(endpoint).lower().startswith("http://")


def _profile() -> Any:
    """Return credentials that only boto3 finds: profiles, single sign-on, assumed roles. None: obstore finds its own."""
    if any(os.environ.get(name) for name in _S3_KEYS):
        return None
    try:
        boto3 = importlib.import_module("boto3")
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
        session = boto3.Session()
        credentials = session.get_credentials()
        if credentials is None or credentials.method in ("iam-role", "container-role"):
            # the library renews these by itself
            return None
        return provider(session)
    except Exception:  # a broken profile: obstore reports what is missing
        return None


def shortened(error: BaseException) -> str:
    """Return a library error in one line: request, status, and the server's code and message.

    Queries, users and signatures are left out, as they may be secret.
    """
    text = _USER.sub("://", _QUERY.sub(r"\1", str(error).split("\n\nDebug source", 1)[0]))
    request, status = _REQUEST.search(text), _STATUS.search(text)
    if status is not None:
        words = [f"{status[1]} {status[2]}".strip()]
        code, message = _CODE.search(text), _MESSAGE.search(text)
        words += [next(filter(None, match.groups()), "") for match in (code, message) if match is not None]
        text = (f"{request[1]} {request[2]}: " if request else "") + ", ".join(filter(None, words))
    elif request is not None:
        text = f"{request[1]} {request[2]}: {text.rsplit(' - ', 1)[-1]}"
    text = " ".join(text.split())
    return text if len(text) <= _WORDS_MAX else f"{text[:_WORDS_MAX]}…"


def translate(error: BaseException, doing: str, where: str) -> RelightError:
    """Return the ``RelightError`` for a library error."""
    name, text = type(error).__name__, str(error)
    what = f"{doing} failed: {shortened(error)}"
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return StoreUnavailable(
            what, where=where, hint="create the bucket first, or check its name and the endpoint", retryable=False
        )
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFound(f"{doing} failed: no such object", where=where)
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return StoreUnavailable(what, where=where, hint=_ACCESS, retryable=False)
    if any(word in text for word in _FULL):
        return NoSpace(what, where=where, hint="raise the quota, or keep fewer checkpoints (relight prune)")
    status = _STATUS.search(text)
    asked = any(host in text for host in _METADATA)
    fault = status is not None and 300 <= int(status[1]) < 500 and int(status[1]) not in _PASSES
    if (
        fault
        or "builder error" in text
        or name in ("NotSupportedError", "InvalidPathError", "UnknownConfigurationKeyError")
    ):
        return StoreUnavailable(what, where=where, hint=_NO_KEYS if asked else "", retryable=False)
    hint = _NO_KEYS if asked else "is the server up, and the endpoint the right one?" if status is None else ""
    return StoreUnavailable(what, where=where, hint=hint)


def is_taken(error: BaseException) -> bool:
    """Return whether a creation was refused because the name exists, or because another writer is creating it."""
    return type(error).__name__ in ("AlreadyExistsError", "PreconditionError")


def is_past_end(error: BaseException) -> bool:
    """Return whether a range request was refused because the range is beyond the object's end."""
    status = _STATUS.search(str(error))
    return status is not None and status[1] == "416"

"""The table ``[environment]``, and the only place that reads ``RELIGHT_*`` and ``OTEL_*`` settings from the environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping
from typing import Annotated, Any, cast

import msgspec

from relight.decode import from_plain
from relight.errors import ConfigError, shown
from relight.settings import kinds
from relight.settings.kinds import NOT_SET, SettingsTable, about, fields_of

PREFIX = "RELIGHT_"
PROCESS_VARIABLES = (
    "RELIGHT_SETTINGS", "RELIGHT_HEARTBEAT", "RELIGHT_STACKS", "RELIGHT_BEFORE", "RELIGHT_SKIP", "RELIGHT_LR_CUT", "RELIGHT_SPLIT",
    "RELIGHT_SPIKES", "RELIGHT_RESULT",
)  # fmt: skip
"""Variables that are not settings of the file: one names the file, ``relight run`` and ``relight follow`` set the others for
the processes they start."""

OTEL = {
    "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT", "otlp_traces_endpoint": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "otlp_headers": "OTEL_EXPORTER_OTLP_HEADERS", "otlp_protocol": "OTEL_EXPORTER_OTLP_PROTOCOL",
    "otlp_traces_protocol": "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "otel_traces_exporter": "OTEL_TRACES_EXPORTER",
    "otel_service_name": "OTEL_SERVICE_NAME", "otel_resource_attributes": "OTEL_RESOURCE_ATTRIBUTES",
    "otel_sdk_disabled": "OTEL_SDK_DISABLED",
}  # fmt: skip
"""Settings that have OpenTelemetry's variables. Its exporter reads these and further ones itself."""


# fmt: off
class EnvironmentSettings(SettingsTable, frozen=True):
    """``[environment]``: variables of the process."""

    events: Annotated[kinds.DirectoryOr0, about("where processes keep their events; 0: nowhere", "a private one", named=True)] = ""
    node: Annotated[
        kinds.Name, about("this process's node, where one machine counts as several: a node's processes share an agent", "the host's")
    ] = ""
    rack: Annotated[kinds.Name, about("this node's failure domain: peers of different racks protect each other")] = ""
    peers_host: Annotated[kinds.Address, about("where this node's agent listens to peers", "where routes lead from", named=True)] = ""
    store_patience_s: Annotated[
        kinds.DaySecondsAbove0, about("seconds for an object store's answer, all tries together", "120, of commands 20")
    ] = 120.0
    mirror_wait_s: Annotated[
        kinds.DaySecondsAbove0, about("seconds for which one drive of a mirrored store may keep the other waiting, until it is set away")
    ] = 20.0
    cache: Annotated[
        kinds.Directory, about("a local disk's directory that caches what is read from remote stores", "no cache", named=True)
    ] = ""
    cache_bytes: Annotated[kinds.SizeAbove0, about("the cache's size", "a tenth of what is free")] = ""
    lossy: Annotated[
        kinds.LossyPairs, about("tensors to store inexactly, whatever the script specifies; WAY may be a bound: 1e-4, 0.1%", "nothing")
    ] = ""
    key: Annotated[
        kinds.KeySpecs, about("keys that open and encrypt stores; the first encrypts", argument="encrypt=", secret=True, named=True)
    ] = ""
    sign: Annotated[kinds.SignSpec, about("the key that signs records", argument="sign=", secret=True, named=True)] = ""
    trust: Annotated[kinds.PublicKeys, about("keys that may sign; others are refused", "all records", argument="trust=", named=True)] = ""
    job_secret: Annotated[
        kinds.SecretSpec, about("the secret that a job's nodes share", "one node needs none", secret=True, named=True)
    ] = ""
    anchor: Annotated[kinds.Store, about("another store, in which the end of each log is recorded", argument="anchor=", named=True)] = ""
    audit: Annotated[kinds.Store, about("the audit store, which records who did what", named=True)] = ""
    core_dumps: Annotated[kinds.YesNo, about("whether processes that hold keys may leave core dumps, with the keys", named=True)] = False
    single_writer: Annotated[kinds.YesNo, about("a promise: at most one process writes to the store", named=True)] = False
    keys_over_http: Annotated[kinds.YesNo, about("whether key services on other machines are asked without TLS", named=True)] = False
    debug: Annotated[kinds.YesNo, about("whether tracebacks of errors, also of commands, have all lines: relight --debug")] = False
    log: Annotated[kinds.LogLevel, about("which events go to stderr if no logging is configured")] = "default"
    progress: Annotated[
        kinds.YesNo, about("whether work that takes long shows a progress bar on stderr", "if stderr is a terminal or a notebook")
    ] = NOT_SET
    otlp_endpoint: Annotated[
        kinds.WebAddress, about("the OpenTelemetry receiver that gets traces, by /v1/traces", variable=OTEL["otlp_endpoint"], named=True)
    ] = ""
    otlp_traces_endpoint: Annotated[
        kinds.WebAddress, about("the same with its whole path", variable=OTEL["otlp_traces_endpoint"], named=True)
    ] = ""
    otlp_headers: Annotated[
        kinds.Pairs, about("headers for the receiver of traces", variable=OTEL["otlp_headers"], secret=True, named=True)
    ] = ""
    otlp_protocol: Annotated[
        kinds.Name, about("how traces are sent: only http/protobuf is supported", "http/protobuf", variable=OTEL["otlp_protocol"])
    ] = ""
    otlp_traces_protocol: Annotated[
        kinds.Name, about("the same, of traces alone", "http/protobuf", variable=OTEL["otlp_traces_protocol"])
    ] = ""
    otel_traces_exporter: Annotated[
        kinds.Name, about("otlp to send traces, none to send none", "otlp with a receiver", variable=OTEL["otel_traces_exporter"])
    ] = ""
    otel_service_name: Annotated[kinds.Name, about("the service's name in traces", "relight", variable=OTEL["otel_service_name"])] = ""
    otel_resource_attributes: Annotated[
        kinds.Pairs, about("attributes of the resource in traces", variable=OTEL["otel_resource_attributes"])
    ] = ""
    otel_sdk_disabled: Annotated[kinds.YesNo, about("whether no traces are sent", variable=OTEL["otel_sdk_disabled"])] = False
# fmt: on


def variable_of(name: str, given: str = "") -> str:
    """Return a setting's variable: prefix and name in capitals, ``__`` for each dot. For ``environment.cache`` it is
    ``RELIGHT_CACHE``. ``given``: its variable, if the setting names one."""
    return given or PREFIX + name.removeprefix("environment.").replace(".", "__").upper()


TIERS = variable_of("checkpoint.tiers")
"""The variable of ``[checkpoint.tiers]``."""


def leave_out_tiers(variables: MutableMapping[str, str]) -> None:
    """Change a process's variables so that its runs have none of the settings' further tiers, which hold the user's own runs."""
    for name in [variable for variable in variables if variable.startswith(TIERS)]:
        del variables[name]
    variables[TIERS] = "{}"


_KEYS = {key: variable_of(f"environment.{key}", OTEL.get(key, "")) for key in EnvironmentSettings.__struct_fields__}
_WORDS = {"yes": "true", "no": "false"}
_usual: dict[str, str] = {}
"""Defaults of this process. They are not in the environment, so that child processes do not inherit them."""


def set_default(key: str, value: str) -> None:
    """Make ``value`` this process's default of a key of ``[environment]``, which counts while the variable is not set."""
    _usual[key] = value


def typed(table: type[SettingsTable], key: str, text: str, variable: str) -> Any:
    """Return a variable's text as the type of the table's setting. Raise ``ConfigError`` that names the variable."""
    metadata = fields_of(table)[key].type.__metadata__
    kind, own = metadata[0].extra, metadata[-1].extra
    value = None
    for word in (_WORDS.get(text.lower(), text), text.lower()):
        with contextlib.suppress(msgspec.ValidationError):
            value = getattr(from_plain({key: word}, table, strict=False), key)
            break
    if kind["parse"] and (value is None or isinstance(value, str)):
        number = kind["parse"](text)
        with contextlib.suppress(msgspec.ValidationError):
            value = None if number is None else getattr(from_plain({key: number}, table, strict=False), key)
    if value is None:
        what = "" if own["secret"] else f", not {shown(text)}"
        raise ConfigError(f"{variable} must be {kind['kind']}{what}", where=variable)
    return value


class _Snapshot:
    """The variables of ``[environment]`` at one moment. A value is converted when it is read, so that an invalid
    variable affects only the code that needs it."""

    __slots__ = ("_texts",)

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def __getattr__(self, key: str) -> Any:
        text = self._texts.get(key, "")
        return typed(EnvironmentSettings, key, text, _KEYS[key]) if text else getattr(_DEFAULTS, key)


_DEFAULTS = from_plain(
    {}, EnvironmentSettings
)  # learned at the import: a signal handler must not wait for the lock of a first use


def environment(variables: Mapping[str, str] = os.environ) -> EnvironmentSettings:
    """Return the settings of ``[environment]`` that this process has now. Reading an invalid one raises ``ConfigError``."""
    texts = {key: variables.get(variable, "").strip() for key, variable in _KEYS.items()}
    return cast(EnvironmentSettings, _Snapshot({key: text or _usual.get(key, "") for key, text in texts.items()}))


def wants_traces(settings: EnvironmentSettings) -> bool:
    """Return whether the variables of OpenTelemetry request traces. Raise ``ConfigError`` for one that cannot be followed."""
    exporters = [name.strip() for name in settings.otel_traces_exporter.split(",") if name.strip()]
    has_receiver = bool(settings.otlp_endpoint or settings.otlp_traces_endpoint)
    if settings.otel_sdk_disabled or not ("otlp" in exporters if exporters else has_receiver):
        return False
    for key in ("otlp_traces_protocol", "otlp_protocol"):
        protocol = getattr(settings, key)
        if protocol not in ("", "http/protobuf"):
            hint = f"{OTEL['otlp_traces_protocol']}=http/protobuf"
            raise ConfigError(f"traces cannot be sent by {shown(protocol)}", where=OTEL[key], hint=hint)
        if protocol:
            break
    return True


def text_of(variable: str) -> str:
    """Return the text of a setting's variable; empty if it is not set."""
    return os.environ.get(variable, "")


def given_variables() -> dict[str, str]:
    """Return all variables of Relight that are set and not empty: settings, variables of the process, and unknown ones."""
    return {name: text for name, text in os.environ.items() if name.startswith(PREFIX) and text}

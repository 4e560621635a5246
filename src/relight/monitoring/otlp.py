"""Makes OpenTelemetry spans of saves, restores and incidents, and sends them to a receiver by HTTP.

All ids are derived from those of checkpoints, incidents and events. So all machines' spans of one save form one trace,
and a span that is sent twice is the same span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relight.errors import ConfigError, StoreUnavailable, extra_hint
from relight.format import hexdigest
from relight.http_request import url_shown
from relight.monitoring.alert_delivery import clean
from relight.monitoring.files import FileEvent
from relight.monitoring.hushed import hushed
from relight.monitoring.trace import SaveTrace, TraceSpan
from relight.run_names import run_name
from relight.version import VERSION

TIMEOUT_S = 10
_LIBRARIES = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.sdk.resources",
    "urllib3",
)


def export(trace: SaveTrace, url: str) -> int:
    """Send a trace, and return the number of spans.

    Raise ``StoreUnavailable`` if no receiver takes it, and ``ConfigError`` without the library.
    """
    if not url.startswith(("http://", "https://")):
        hint = "http://127.0.0.1:4318/v1/traces"
        raise ConfigError("an OTLP receiver is reached by http:// or https://", where=url_shown(url), hint=hint)
    exporter = exporter_for(url)
    spans = spans_of(trace)
    try:
        is_taken = send_spans(exporter, spans)
    finally:
        exporter.shutdown()
    if not is_taken:
        hint = "does it listen there, at the path /v1/traces?"
        raise StoreUnavailable("the receiver did not take the trace", where=url_shown(url), hint=hint)
    return len(spans)


def exporter_for(url: str | None = None) -> Any:
    """Return OpenTelemetry's exporter for a URL; without one, as the variables ``OTEL_EXPORTER_OTLP_…`` state.

    Raise ``ConfigError`` without the library, or if it refuses a variable.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError:
        raise ConfigError("traces need OpenTelemetry", hint=extra_hint("traces")) from None
    try:
        return OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S) if url is not None else OTLPSpanExporter()
    except (ValueError, OSError) as error:
        raise ConfigError(f"OpenTelemetry refuses its settings: {clean(str(error))[:200]}") from None


def send_spans(exporter: Any, spans: Sequence[Any]) -> bool:
    """Send spans in one request. Return whether the receiver took them."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    with hushed(*_LIBRARIES):  # the caller reports the failure
        return bool(exporter.export(spans) is SpanExportResult.SUCCESS)


def spans_of(trace: SaveTrace, *, root: bool = True) -> list[Any]:
    """Return the spans: with ``root`` the save as the root, and each stage below it."""
    common: dict[str, Any] = {
        "relight.run": run_name(trace.run), "relight.store": clean(trace.store), "relight.checkpoint": trace.id, "relight.step": trace.step,
    }  # fmt: skip
    wall = trace.spans[0].time_s - trace.spans[0].end
    end = max(span.end for span in trace.spans)
    save = _save_context(trace.store, trace.run, trace.id)
    slowest: dict[str, Any] = {} if trace.slowest is None else {"relight.slowest_rank": trace.slowest}
    spans = []
    if root:
        first = trace.spans[0].host
        spans.append(
            _span("save", save, trace.start + wall, end + wall, first, "save", {**common, **slowest}, trace.committed)
        )
    critical = {(leg.part, leg.rank) for leg in trace.path}
    for span in trace.spans:
        attributes = {
            **common,
            "relight.rank": span.rank,
            "process.pid": span.pid,
            "relight.critical": (span.part, span.rank) in critical,
            **({"relight.tier": span.about} if span.about else {}),
        }
        context = _context(save.trace_id, f"{trace.id} {_place(span)}")
        spans.append(
            _span(
                span.part, context, span.start + wall, span.end + wall, span.host, span.role, attributes,
                trace.committed or span.part == "drain", parent=save,
            )
        )  # fmt: skip
    return spans


def restore_span(event: FileEvent) -> Any:
    """Return the span of a ``restore.done``, a trace of its own with a link to that of the save; None for an invalid event."""
    from opentelemetry.trace import Link

    head, fields = event.head, event.fields
    seconds, id_ = fields.get("seconds"), fields.get("id")
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e6 or not isinstance(id_, str):
        return None
    attributes = {
        "relight.run": run_name(head.run), "relight.store": clean(head.store), "relight.checkpoint": id_[:80],
        "relight.rank": head.rank, "process.pid": head.pid, **_plain(fields, "step", "bytes", "source"),
    }  # fmt: skip
    trace = f"restore {head.store} {head.run} {head.host} {head.pid} {event.time_s}"
    link = Link(_save_context(head.store, head.run, id_))
    return _span(
        "restore", _context(_trace_id(trace), trace), event.time_s - seconds, event.time_s, head.host, head.role, attributes, True,
        links=[link],
    )  # fmt: skip


def incident_span(failure: FileEvent, action: str, recovered: FileEvent | None) -> Any:
    """Return the span of an incident, from the failure to the first step after it. Without a recovery it has no duration."""
    head, id_ = failure.head, str(failure.fields.get("incident", ""))[:80]
    attributes = {
        "relight.run": run_name(head.run), "relight.store": clean(head.store), "relight.incident": id_, "relight.action": action[:80],
        **_plain(failure.fields, "kind", "step", "rank"), **_plain(recovered.fields if recovered else {}, "steps_lost"),
    }  # fmt: skip
    end = recovered.time_s if recovered else failure.time_s
    trace = f"incident {head.store} {head.run} {id_}"
    context = _context(_trace_id(trace), trace)
    return _span(
        "incident", context, min(failure.time_s, end), end, head.host, head.role, attributes, recovered is not None
    )


def _span(
    name: str, context: Any, start_s: float, end_s: float, host: str, role: str, attributes: dict[str, Any], good: bool, *,
    parent: Any = None, links: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """Return a span. ``good``: whether its status is OK, and not ERROR. Times are seconds since 1970."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.status import Status, StatusCode

    own = Resource({"service.name": "relight", "service.version": VERSION, "host.name": host, "relight.role": role})
    with hushed(*_LIBRARIES):  # it warns at each span about a part of OTEL_RESOURCE_ATTRIBUTES that it cannot read
        resource = own.merge(OTELResourceDetector().detect())
    return ReadableSpan(
        name, context=context, parent=parent, kind=SpanKind.INTERNAL, resource=resource, attributes=attributes, links=links,
        status=Status(StatusCode.OK if good else StatusCode.ERROR), start_time=int(start_s * 1e9), end_time=int(end_s * 1e9),
        instrumentation_scope=InstrumentationScope("relight", VERSION),
    )  # fmt: skip


def _plain(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return those fields of an event that are numbers or short texts, with their names as attributes."""
    given = {f"relight.{name}": fields.get(name) for name in names}
    return {
        name: value
        for name, value in given.items()
        if type(value) in (int, float) or (isinstance(value, str) and len(value) < 200)
    }


def _trace_id(text: str) -> int:
    return int(hexdigest(text.encode())[:32], 16)


def _context(trace_id: int, text: str) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace_id, int(hexdigest(text.encode())[:16], 16) or 1, False, TraceFlags(TraceFlags.SAMPLED))


def _save_context(store: str, run: str, id_: str) -> Any:
    return _context(_trace_id(f"trace {store} {run} {id_}"), f"{id_} save")


def _place(span: TraceSpan) -> str:
    """Return what identifies a span within its save. A drain is reported by several processes, at different times."""
    time = "" if span.part == "drain" else f" {span.time_s}"
    return f"{span.host} {span.pid} {span.rank} {span.part} {span.about}{time}"

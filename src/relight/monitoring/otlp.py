"""Sends a save's trace to an OpenTelemetry receiver by HTTP.

The trace's id is derived from the checkpoint's id. So all machines' spans of one save form one trace.
"""

from __future__ import annotations

import logging
from typing import Any

from relight.errors import ConfigError, StoreUnavailable
from relight.format import hexdigest
from relight.monitoring.alert_delivery import clean
from relight.monitoring.trace import SaveTrace, TraceSpan
from relight.run_names import run_name
from relight.version import VERSION

TIMEOUT_S = 10


def export(trace: SaveTrace, url: str) -> int:
    """Send a trace, and return the number of spans.

    Raise ``StoreUnavailable`` if no receiver takes it, and ``ConfigError`` without the library.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ModuleNotFoundError:
        raise ConfigError("traces need OpenTelemetry", hint="pip install 'relight[traces]'") from None
    if not url.startswith(("http://", "https://")):
        hint = "http://127.0.0.1:4318/v1/traces"
        raise ConfigError("an OTLP receiver is reached by http:// or https://", where=clean(url), hint=hint)
    spans = spans_of(trace)
    logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    before, logger.disabled = logger.disabled, True  # the error is raised below
    exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
    try:
        result = exporter.export(spans)
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
        logger.disabled = before
    if result is not SpanExportResult.SUCCESS:
        hint = "does it listen there, at the path /v1/traces?"
        raise StoreUnavailable("the receiver did not take the trace", where=clean(url), hint=hint)
    return len(spans)


def spans_of(trace: SaveTrace) -> list[Any]:
    """Return the spans: the save as the root, and each stage below it."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    trace_id = int(hexdigest(f"trace {trace.store} {trace.run} {trace.id}".encode())[:32], 16)
    flags, scope = TraceFlags(TraceFlags.SAMPLED), InstrumentationScope("relight", VERSION)

    def context(what: str) -> SpanContext:
        return SpanContext(trace_id, int(hexdigest(f"{trace.id} {what}".encode())[:16], 16) or 1, False, flags)

    def resource(host: str, role: str) -> Resource:
        return Resource(
            {"service.name": "relight", "service.version": VERSION, "host.name": host, "relight.role": role}
        )

    wall = trace.spans[0].time_s - trace.spans[0].end

    def ns(seconds: float) -> int:
        return int((seconds + wall) * 1e9)

    root = context("save")
    common: dict[str, Any] = {
        "relight.run": run_name(trace.run), "relight.store": clean(trace.store), "relight.checkpoint": trace.id, "relight.step": trace.step,
    }  # fmt: skip
    status = Status(StatusCode.OK if trace.committed else StatusCode.ERROR)
    end = max(span.end for span in trace.spans)
    slowest: dict[str, Any] = {} if trace.slowest is None else {"relight.slowest_rank": trace.slowest}
    spans = [
        ReadableSpan(
            "save", context=root, kind=SpanKind.INTERNAL, resource=resource(trace.spans[0].host, "save"), attributes={**common, **slowest},
            status=status, start_time=ns(trace.start), end_time=ns(end), instrumentation_scope=scope,
        )
    ]  # fmt: skip
    critical = {(leg.part, leg.rank) for leg in trace.path}
    for number, span in enumerate(trace.spans):
        spans.append(
            ReadableSpan(
                span.part,
                context=context(f"{_place(span)} {number}"),
                parent=root,
                kind=SpanKind.INTERNAL,
                resource=resource(span.host, span.role),
                attributes={
                    **common,
                    "relight.rank": span.rank,
                    "process.pid": span.pid,
                    "relight.critical": (span.part, span.rank) in critical,
                    **({"relight.tier": span.about} if span.about else {}),
                },
                status=status,
                start_time=ns(span.start),
                end_time=ns(span.end),
                instrumentation_scope=scope,
            )
        )
    return spans


def _place(span: TraceSpan) -> str:
    return f"{span.host} {span.pid} {span.rank} {span.part}"

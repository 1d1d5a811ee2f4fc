"""Spans and metrics on their way out, by the exporters of the OpenTelemetry SDK.

Whether a call is traced is decided before the SDK is asked, by the flag in its trace context; so a
call that is not sampled makes no object of the SDK. Metrics are counted by our own instruments,
since the SDK's take some 13 microseconds a value, and put into its data model at export.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
)
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from callforest_mesh.chassis.instruments import Metrics
from callforest_mesh.chassis.metrics_model import metrics_of
from callforest_mesh.chassis.telemetry import (
    NO_SPAN,
    Attributes,
    Link,
    ServiceTelemetry,
    Span,
    SpanKind,
    TelemetryOptions,
    Tracer,
)
from callforest_mesh.chassis.trace_context import TraceContext, parse_traceparent

_LOG = logging.getLogger("callforest")
LINKS_MAX: Final = 1024
"""Most links of one span; a rollout or a group may have more sampled calls."""
QUEUE_SPANS: Final = 4096
"""Most spans that wait for their export; further ones are dropped, and that is logged."""
_KINDS: Final = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}


@dataclass(frozen=True, slots=True)
class Exporters:
    """Where spans and metrics go.

    Attributes:
        spans: takes ended spans, through a queue and a thread of its own.
        metrics: takes the metrics of all services once an interval.
    """

    spans: SpanProcessor
    metrics: MetricExporter


def exporters_of(options: TelemetryOptions) -> Exporters:
    """Make the configured exporters."""
    if options.exporter == "console":
        spans: SpanExporter = ConsoleSpanExporter(out=sys.stdout, formatter=_span_line)
        metrics: MetricExporter = ConsoleMetricExporter(out=sys.stdout, formatter=_metrics_line)
        return Exporters(_batched(spans), metrics)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    insecure = options.endpoint.startswith("http://")
    timeout_s = options.flush_timeout_s
    spans = OTLPSpanExporter(endpoint=options.endpoint, insecure=insecure, timeout=timeout_s)
    metrics = OTLPMetricExporter(endpoint=options.endpoint, insecure=insecure, timeout=timeout_s)
    return Exporters(_batched(spans), metrics)


class ExportedTelemetry:
    """What the services of one process export.

    Args:
        options: how much and how often.
        exporters: where to.
    """

    def __init__(self, options: TelemetryOptions, exporters: Exporters) -> None:
        self._options = options
        self._exporters = exporters
        self._services: dict[str, ServiceTelemetry] = {}
        self._metrics: dict[str, tuple[Resource, Metrics]] = {}
        self._begun_ns = time.time_ns()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._export_metrics, name="metrics-export", daemon=True
        )
        self._thread.start()

    def service(self, name: str) -> ServiceTelemetry:
        """Give the ports of a service, by its short name."""
        if name not in self._services:
            resource = Resource.create({"service.name": f"callforest-{name}"})
            provider = TracerProvider(
                sampler=ALWAYS_ON,  # what is asked for was sampled before
                resource=resource,
                shutdown_on_exit=False,
                span_limits=SpanLimits(max_links=LINKS_MAX),
            )
            provider.add_span_processor(self._exporters.spans)
            tracer = _SdkTracer(provider.get_tracer("callforest"), self._options.sample_ratio)
            metrics = Metrics()
            self._services[name] = ServiceTelemetry(tracer, metrics)
            self._metrics = {**self._metrics, name: (resource, metrics)}
        return self._services[name]

    def export_metrics(self) -> None:
        """Export the metrics of all services as of now."""
        exported = metrics_of(list(self._metrics.values()), self._begun_ns, time.time_ns())
        self._exporters.metrics.export(exported)

    def shutdown(self) -> None:
        """Export what is left, within the flush's bound; blocks. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        # The SDK's own flush knows no bound; what is still under way then is given up.
        closing = threading.Thread(target=self._close, name="telemetry-close", daemon=True)
        closing.start()
        closing.join(self._options.flush_timeout_s)
        if closing.is_alive():
            _LOG.warning("the last spans and metrics were not exported in time")

    def _close(self) -> None:
        self._exporters.spans.shutdown()
        self._thread.join()
        self._exporters.metrics.shutdown()

    def _export_metrics(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(self._options.metrics_interval_s)
            try:
                self.export_metrics()
            except Exception:  # noqa: BLE001 - a collector that is away costs metrics alone
                _LOG.exception("metrics were not exported")


class _SdkTracer(Tracer):
    """Makes spans of the SDK for what is sampled."""

    def __init__(self, tracer: trace.Tracer, sample_ratio: float) -> None:
        self._tracer = tracer
        self._sample_ratio = sample_ratio

    def entry(self, name: str, parent: str) -> Span:
        """Begin the span of a request from outside: the caller's trace, or a sampled new one."""
        context = parse_traceparent(parent)
        if context is not None:
            return self._begin(name, context, "server") if context.is_sampled else NO_SPAN
        if random.random() >= self._sample_ratio:  # noqa: S311 - chooses samples, guards nothing
            return NO_SPAN
        return self._begin(name, None, "server")

    def child(self, name: str, parent: str, kind: SpanKind = "internal") -> Span:
        """Begin a span below `parent` if that one is sampled. Never begins a trace."""
        context = parse_traceparent(parent)
        if context is None or not context.is_sampled:
            return NO_SPAN
        return self._begin(name, context, kind)

    def linked(self, name: str, links: Iterable[Link], *, begun_ns: int | None = None) -> Span:
        """Begin the span of work that comes of spans of other traces, if one of them is sampled."""
        found = [
            trace.Link(_span_context(context), dict(link.attributes))
            for link in links
            if (context := parse_traceparent(link.traceparent)) is not None and context.is_sampled
        ]
        if not found:
            return NO_SPAN
        return _SdkSpan(self._tracer.start_span(name, Context(), links=found, start_time=begun_ns))

    def _begin(self, name: str, parent: TraceContext | None, kind: SpanKind) -> Span:
        context = Context()
        if parent is not None:
            remote = trace.NonRecordingSpan(_span_context(parent))
            context = trace.set_span_in_context(remote, context)
        return _SdkSpan(self._tracer.start_span(name, context, kind=_KINDS[kind]))


class _SdkSpan(Span):
    """A span of the SDK."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def recording(self) -> bool:
        """Whether attributes are worth their making."""
        return self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """What the next service gets as its parent."""
        own = self._span.get_span_context()
        return TraceContext(own.trace_id, own.span_id, own.trace_flags).traceparent

    def describe(self, attributes: Attributes) -> None:
        """Add attributes, unless the span has ended."""
        if self._span.is_recording():
            self._span.set_attributes(dict(attributes))

    def fail(self, outcome: str) -> None:
        """Mark the span as failed."""
        if self._span.is_recording():
            self._span.set_attribute("error.type", outcome)
            self._span.set_status(trace.StatusCode.ERROR)

    def end(self) -> None:
        """End the span. Idempotent."""
        if self._span.is_recording():
            self._span.end()


def _span_context(context: TraceContext) -> trace.SpanContext:
    return trace.SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=True,
        trace_flags=trace.TraceFlags(context.flags),
    )


def _batched(exporter: SpanExporter) -> SpanProcessor:
    return BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS)


def _span_line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"


def _metrics_line(exported: MetricsData) -> str:
    return f"{exported.to_json(indent=None)}\n"

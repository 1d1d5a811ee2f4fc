"""Telemetry that a test can look at: what the services of one process would export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from callforest_mesh.chassis.telemetry import TelemetryOptions
from callforest_mesh.chassis.telemetry_export import ExportedTelemetry, Exporters


class KeptMetrics(MetricExporter):
    """Keeps the last export."""

    def __init__(self) -> None:
        super().__init__()
        self.last: MetricsData | None = None

    def export(
        self,
        metrics_data: MetricsData,
        timeout_millis: float = 0,  # noqa: ARG002 - theirs
        **_more: object,
    ) -> MetricExportResult:
        self.last = metrics_data
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:  # noqa: ARG002 - theirs
        return True

    def shutdown(self, timeout_millis: float = 0, **_more: object) -> None:
        pass


@dataclass(frozen=True)
class Seen:
    """One span as a backend shows it."""

    service: str
    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    kind: str
    attributes: dict[str, object]
    links: list[tuple[int, int, dict[str, object]]]
    failed: bool

    @classmethod
    def of(cls, span: ReadableSpan) -> Seen:
        assert span.context is not None
        return cls(
            service=str(span.resource.attributes["service.name"]),
            name=span.name,
            trace_id=span.context.trace_id,
            span_id=span.context.span_id,
            parent_id=span.parent.span_id if span.parent else None,
            kind=span.kind.name,
            attributes=dict(span.attributes or {}),
            links=[
                (link.context.trace_id, link.context.span_id, dict(link.attributes or {}))
                for link in span.links
            ],
            failed=not span.status.is_unset,
        )


class RecordedTelemetry(ExportedTelemetry):
    """Keeps what it would export."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self._kept_spans = InMemorySpanExporter()
        self._kept_metrics = KeptMetrics()
        processor = SimpleSpanProcessor(self._kept_spans)
        super().__init__(
            TelemetryOptions("console", sample_ratio=sample_ratio),
            Exporters(processor, self._kept_metrics),
        )

    def spans(self, chosen: Callable[[Seen], bool] = lambda _: True) -> list[Seen]:
        """Give the ended spans, in the order of their ends."""
        seen = [Seen.of(span) for span in self._kept_spans.get_finished_spans()]
        return [span for span in seen if chosen(span)]

    def named(self, name: str) -> list[Seen]:
        """Give the ended spans of a name."""
        return self.spans(lambda span: span.name == name)

    def measured(self, service: str, name: str) -> dict[tuple[str, ...], float]:
        """Export, and give a metric's values (counts, for distributions) by their labels."""
        self.export_metrics()
        assert self._kept_metrics.last is not None
        found: dict[tuple[str, ...], float] = {}
        for resource in self._kept_metrics.last.resource_metrics:
            if resource.resource.attributes["service.name"] != f"callforest-{service}":
                continue
            for metric in resource.scope_metrics[0].metrics:
                for point in metric.data.data_points if metric.name == name else ():
                    labels = tuple(str(value) for value in (point.attributes or {}).values())
                    found[labels] = point.count if hasattr(point, "count") else point.value
        return found

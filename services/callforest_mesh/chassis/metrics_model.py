"""Our instruments in the data model of OpenTelemetry, as its exporters take it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, TypeVar

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Gauge as GaugePoints
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from callforest_mesh.chassis import instruments
from callforest_mesh.chassis.instruments import Description, Metrics

_LOG = logging.getLogger("callforest")
_PointT = TypeVar("_PointT", NumberDataPoint, HistogramDataPoint)
_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


def metrics_of(
    services: Sequence[tuple[Resource, Metrics]], begun_ns: int, now_ns: int
) -> MetricsData:
    """Read all instruments.

    Args:
        services: each service's resource and instruments.
        begun_ns: since when sums and distributions count, nanoseconds since the epoch.
        now_ns: as of when they are read.
    """
    scope = InstrumentationScope("callforest")
    return MetricsData(
        [
            ResourceMetrics(
                resource,
                [ScopeMetrics(scope, _Reading(begun_ns, now_ns).read(metrics), "")],
                "",
            )
            for resource, metrics in services
        ]
    )


class _Reading:
    """One reading of one service."""

    def __init__(self, begun_ns: int, now_ns: int) -> None:
        self._begun_ns = begun_ns
        self._now_ns = now_ns

    def read(self, metrics: Metrics) -> list[Metric]:
        """Give a metric for each name that has a value."""
        totals: dict[str, tuple[Description, list[NumberDataPoint]]] = {}
        levels: dict[str, tuple[Description, list[NumberDataPoint]]] = {}
        for counter in metrics.counters:
            for labels, total in counter.sums():
                _put(totals, counter.description, self._number(labels, total))
        for gauge in metrics.gauges:
            value = _value_of(gauge)
            if value is not None:
                into = totals if gauge.kind == "total" else levels
                number = self._number(dict(gauge.description.constants), value)
                _put(into, gauge.description, number)
        return [
            *(_metric(one, _total(points)) for one, points in totals.values()),
            *(_metric(one, GaugePoints(points)) for one, points in levels.values()),
            *self._histograms(metrics.histograms),
        ]

    def _histograms(self, histograms: Sequence[instruments.Histogram]) -> list[Metric]:
        found: dict[str, tuple[Description, list[HistogramDataPoint]]] = {}
        for histogram in histograms:
            for labels, seen in histogram.distributions():
                counts = list(seen.counts)
                point = HistogramDataPoint(
                    attributes=labels,
                    start_time_unix_nano=self._begun_ns,
                    time_unix_nano=self._now_ns,
                    count=sum(counts),
                    sum=seen.total,
                    bucket_counts=counts,
                    explicit_bounds=histogram.bounds,
                    min=seen.least,
                    max=seen.most,
                )
                _put(found, histogram.description, point)
        return [_metric(one, Histogram(points, _CUMULATIVE)) for one, points in found.values()]

    def _number(self, labels: dict[str, str], value: float) -> NumberDataPoint:
        return NumberDataPoint(labels, self._begun_ns, self._now_ns, value)


def _value_of(gauge: instruments.Gauge) -> float | None:
    """Read a value; one that cannot be read now is left out."""
    try:
        return gauge.read()
    except Exception:  # noqa: BLE001 - logged; the other instruments are exported
        _LOG.exception("%s cannot be read", gauge.description.name)
        return None


def _total(points: list[NumberDataPoint]) -> Sum:
    return Sum(points, aggregation_temporality=_CUMULATIVE, is_monotonic=True)


def _put(
    found: dict[str, tuple[Description, list[_PointT]]], description: Description, point: _PointT
) -> None:
    found.setdefault(description.name, (description, []))[1].append(point)


def _metric(description: Description, points: Sum | GaugePoints | Histogram) -> Metric:
    return Metric(description.name, description.text, description.unit, points)

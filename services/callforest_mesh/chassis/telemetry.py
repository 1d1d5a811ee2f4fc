"""What a service says of its work: spans of sampled calls, and counts of all.

Services hold these ports. While nothing is exported they do nothing, and no OpenTelemetry module is
loaded. Neither spans nor labels ever hold token material or what a message says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, reason_name
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.instruments import (
    Counter,
    Gauge,
    Histogram,
    Metrics,
    SilentMetrics,
)

__all__ = [
    "SILENT",
    "Attributes",
    "Counter",
    "Gauge",
    "Histogram",
    "Link",
    "Metrics",
    "ServiceTelemetry",
    "Span",
    "Telemetry",
    "TelemetryOptions",
    "Tracer",
    "open_telemetry",
]

AttributeValue: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, AttributeValue]
SpanKind: TypeAlias = Literal["internal", "server", "client"]

OK: Final = "OK"
CANCELLED: Final = "CANCELLED"
REASONS: Final[Collection[str]] = frozenset(
    {OK, CANCELLED, *(reason_name(number) for number in er.ErrorReason.values())}
)
"""Every outcome of an item or a call."""


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """What is exported, and how much of it.

    Attributes:
        exporter: "none"; "console", lines of JSON on standard output; or "otlp", OTLP over gRPC.
        endpoint: the OTLP collector; https:// is TLS. Its secrets come from the variables that
            OpenTelemetry defines (OTEL_EXPORTER_OTLP_HEADERS and so on).
        sample_ratio: which part of the calls is traced when their callers do not say. A caller's
            sampled `traceparent` is followed always, an unsampled one never.
        metrics_interval_s: how often metrics are exported.
        flush_timeout_s: how long an export may take, and how long the end of the process waits
            for the last one.
    """

    exporter: Literal["none", "console", "otlp"] = "none"
    endpoint: str = "http://127.0.0.1:4317"
    sample_ratio: float = 0.01
    metrics_interval_s: float = 60.0
    flush_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse values out of their range.

        Raises:
            ValueError: the message names the option.
        """
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio must be 0 to 1, not {self.sample_ratio}")
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint must begin with http:// or https://, not {self.endpoint!r}")
        if self.metrics_interval_s < 1 or self.flush_timeout_s <= 0:
            raise ValueError("metrics_interval_s must be at least 1, flush_timeout_s above 0")


class Span:
    """A span that records nothing; what is recorded derives from it.

    Used as a context: the end of the block ends it, an exception marks it as failed.
    """

    __slots__ = ()

    @property
    def recording(self) -> bool:
        """Whether attributes are worth their making."""
        return False

    @property
    def traceparent(self) -> str:
        """What the next service gets as its parent; "" when nothing is recorded."""
        return ""

    def describe(self, attributes: Attributes) -> None:
        """Add attributes."""

    def fail(self, outcome: str) -> None:
        """Mark the span as failed, with one of REASONS or another word of a closed set."""

    def end(self) -> None:
        """End the span. Idempotent."""

    def __enter__(self) -> Span:  # noqa: PYI034 - what is recorded is of another class
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(outcome_of(error))
        self.end()


NO_SPAN: Final = Span()


@dataclass(frozen=True, slots=True)
class Link:
    """A span that another one comes of, with what the link says of it."""

    traceparent: str
    attributes: Attributes = field(default_factory=dict)


class Tracer:
    """Makes the spans of one service: this one makes none."""

    def entry(self, name: str, parent: str) -> Span:
        """Begin the span of a request from outside: the caller's trace, or a sampled new one."""
        del name, parent
        return NO_SPAN

    def child(self, name: str, parent: str, kind: SpanKind = "internal") -> Span:
        """Begin a span below `parent` if that one is sampled. Never begins a trace."""
        del name, parent, kind
        return NO_SPAN

    def linked(self, name: str, links: Iterable[Link], *, begun_ns: int | None = None) -> Span:
        """Begin the span of work that comes of spans of other traces, if one of them is sampled.

        Args:
            name: names the work.
            links: what it comes of; those that are not sampled are left out.
            begun_ns: when it began, nanoseconds since the epoch; now unless given.
        """
        del name, links, begun_ns
        return NO_SPAN


@dataclass(frozen=True, slots=True)
class ServiceTelemetry:
    """What one service says of its work."""

    tracer: Tracer = field(default_factory=Tracer)
    metrics: Metrics = field(default_factory=SilentMetrics)


SILENT: Final = ServiceTelemetry()
"""Says nothing and costs nothing."""


class Telemetry(Protocol):
    """What the services of one process say."""

    def service(self, name: str) -> ServiceTelemetry:
        """Give the ports of a service, by its short name."""
        ...

    def shutdown(self) -> None:
        """Export what is left, within the flush's bound; blocks. Idempotent."""
        ...


class _SilentTelemetry:
    """Exports nothing."""

    def service(self, name: str) -> ServiceTelemetry:
        """Give ports that do nothing."""
        del name
        return SILENT

    def shutdown(self) -> None:
        """Return at once."""


def open_telemetry(options: TelemetryOptions) -> Telemetry:
    """Begin to export as the options say."""
    if options.exporter == "none":
        return _SilentTelemetry()
    from callforest_mesh.chassis.telemetry_export import ExportedTelemetry, exporters_of

    return ExportedTelemetry(options, exporters_of(options))


def outcome_of(error: BaseException) -> str:
    """Name what an exception means to its caller, as one of REASONS."""
    if isinstance(error, Refusal | CallforestError):
        return reason_name(error.reason)
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    return reason_name(er.ERROR_REASON_INTERNAL)

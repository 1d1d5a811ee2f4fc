"""What the gateway counts: how calls end, why they have failure rows, how long requests take."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.telemetry import CANCELLED, REASONS, Metrics, outcome_of
from callforest_mesh.gateway.life import (
    INVALID_COORDINATES,
    MISSING_COORDINATES,
    REQUEST_FINISHED,
    WORKER_CAPTURE_FAILED,
    AbandonedError,
)
from callforest_mesh.gateway.refusals import HttpRefusal

_FAILURE_REASONS: Final = (
    WORKER_CAPTURE_FAILED,
    MISSING_COORDINATES,
    INVALID_COORDINATES,
    REQUEST_FINISHED,
)
_HTTP_CODES: Final = (
    *("overloaded", "unavailable", "internal_error", "attempt_not_found", "attempt_closed"),
    *("call_refused", "invalid_request_error", "unsupported_value"),
    *("ambiguous_history", "history_claim_refused", "mode_mismatch"),
    *("call_mismatch", "ambiguous_retry"),
    *("configuration_changed", "candidate_without_proof"),
)
_STATUSES: Final = tuple(
    map(str, (200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 499, 500, 502, 503, 504))
)


def ended_by(error: BaseException) -> str:
    """Name how a life ended, in words of a closed set."""
    if isinstance(error, HttpRefusal):
        return error.code
    return CANCELLED if isinstance(error, AbandonedError) else outcome_of(error)


class LifeMeasures:
    """Counts lives.

    Args:
        metrics: the gateway's.
        running: how many calls are in work.
    """

    def __init__(self, metrics: Metrics, running: Callable[[], int]) -> None:
        self._ended = metrics.counter(
            Description("callforest.gateway.calls", "{call}", "Calls by how they ended."),
            {"outcome": {*REASONS, *_HTTP_CODES}},
        )
        self._failures = metrics.counter(
            Description("callforest.gateway.failures", "{call}", "Failure rows by reason."),
            {"reason": _FAILURE_REASONS},
        )
        metrics.gauge(
            Description("callforest.gateway.running", "{call}", "Calls in work."), running
        )

    def count(self, outcome: str) -> None:
        """Count a call that ended."""
        self._ended.add(1, outcome)

    def count_failure(self, reason: str) -> None:
        """Count a failure row that is to be written."""
        self._failures.add(1, reason)


class RequestMeasures:
    """Measures HTTP requests, as OpenTelemetry's conventions for HTTP name them.

    Args:
        metrics: the gateway's.
        routes: the served routes' patterns.
    """

    def __init__(self, metrics: Metrics, routes: Collection[str]) -> None:
        self._durations = metrics.histogram(
            Description("http.server.request.duration", "s", "Duration of HTTP requests."),
            {"http.route": frozenset(routes), "http.response.status_code": _STATUSES},
        )

    def record(self, seconds: float, route: str, status: int) -> None:
        """Note a request that was answered."""
        self._durations.record(seconds, route, str(status))

"""What the ledger says of restores: one log line and counters."""

from __future__ import annotations

import logging
from typing import Final

from callforest.ledger.v1 import restore_attempt_pb2 as pb
from callforest_client.errors import reason_name
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.telemetry import Metrics
from callforest_mesh.ledger.restore_refusals import FAULTS
from callforest_mesh.ledger.restoring import Restored

_LOG = logging.getLogger("callforest")
_NONE: Final = "none"


class RestoreMeasures:
    """Counts restores by what came of them.

    Args:
        metrics: makes the counters.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._restores = metrics.counter(
            Description("callforest.ledger.restores", "{attempt}", "Asked restores by fault."),
            {"fault": (_NONE, *FAULTS)},
        )
        self._calls = metrics.counter(
            Description("callforest.ledger.restored_calls", "{call}", "Calls that were taken over.")
        )

    def count(self, request: pb.RestoreAttemptRequest, restored: Restored) -> None:
        """Count an attempt that was restored; a repeated request took nothing over again."""
        attempt = restored.attempt
        self._restores.add(1, _NONE)
        if not restored.is_repeat:
            self._calls.add(attempt.restored_count)
        _LOG.info(
            "attempt %s is restored from %s with %d calls%s",
            attempt.capture_key,
            request.point.capture_key,
            attempt.restored_count,
            ", answered again" if restored.is_repeat else "",
        )

    def count_refused(self, request: pb.RestoreAttemptRequest, refusal: Refusal) -> None:
        """Count a restore that was refused; what is no fault of the point counts as other."""
        fault = refusal.facts.get("fault", reason_name(refusal.reason).lower())
        self._restores.add(1, fault)
        _LOG.info("rollout %s is not restored: %s: %s", request.rollout_id, fault, refusal.message)

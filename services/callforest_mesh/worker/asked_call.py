"""A call in a worker's hands: what was asked, until when, and what the engine made of it."""

from __future__ import annotations

from dataclasses import dataclass

from callforest.capture.v1 import capture_admission_pb2, item_pb2
from callforest.worker.v1 import worker_service_pb2 as pb
from callforest_client.capture_decision import decision_to_proto
from callforest_core.custody.capture_input import CaptureDecision
from callforest_core.custody.errors import CaptureError
from callforest_mesh.worker import core
from callforest_mesh.worker.engine import EngineResult, PrefixEvidence


@dataclass(slots=True, eq=False)
class Schedule:
    """When the parts of a call must be done, on the loop's clock.

    The item's own timeout would drop a completion that is there; so each part ends before it.
    """

    timeout_ms: int
    generated: float
    staged: float


@dataclass(slots=True, eq=False)
class AskedCall:
    """A call that was taken: what is asked, what may be captured of it, and until when."""

    context: item_pb2.ItemContext
    call: pb.GenerateCall
    admission: capture_admission_pb2.CaptureAdmission | None
    evidence: PrefixEvidence | None
    schedule: Schedule

    def decision(
        self, made: CaptureDecision | None
    ) -> capture_admission_pb2.CaptureDecision | None:
        """Give the decision to report, the engine's being given."""
        if self.admission is None:
            return None
        decision = core.decision_of(self.admission, made)
        return decision_to_proto(decision) if decision else None


@dataclass(slots=True, eq=False)
class AnsweredCall:
    """What is known of a call when its generation is there."""

    context: item_pb2.ItemContext
    admission: capture_admission_pb2.CaptureAdmission
    prefix: core.Sequence | None
    fault: CaptureError | None
    result: EngineResult
    schedule: Schedule

"""Requests, evidence and finalized rollouts for the finalizer's decisions."""

from collections.abc import Sequence
from dataclasses import replace

from callforest.capture.v1 import attempt_pb2, completion_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.codec import staged_call_to_proto
from callforest_core.custody.call import CallRecord, StagedCall
from callforest_core.lineage.terminal import Terminal, TerminalStage
from callforest_mesh.finalizer import core
from tests.unit.custody.chains import KEY, Attempt, Turn

SEALED = attempt_pb2.ATTEMPT_STATE_SEALED


def two_turns() -> Attempt:
    return Attempt(Turn("c1", None, [1, 2, 3], [10, 11]), Turn("c2", "c1", [4], [12, 13, 14]))


def records_of(attempt: Attempt, **changes: object) -> tuple[CallRecord, ...]:
    return tuple(
        replace(CallRecord.of(call, f"resp-{call.identity.call_id}", status="completed"), **changes)
        for call in attempt.staged()
    )


def request(**changes: object) -> pb.FinalizeRolloutRequest:
    fields: dict[str, object] = {
        "tenant": "default",
        "group_id": "g",
        "rollout_id": KEY,
        "slot": 0,
        "capture_key": KEY,
        "epoch": 1,
        "revision": 5,
        "reward": 0.5,
    }
    return pb.FinalizeRolloutRequest(**(fields | changes))


def sealed(**changes: object) -> attempt_pb2.Attempt:
    fields: dict[str, object] = {
        "rollout_id": KEY,
        "capture_key": KEY,
        "state": SEALED,
        "epoch": 1,
        "revision": 5,
    }
    return attempt_pb2.Attempt(**(fields | changes))


def evidence(
    attempt: attempt_pb2.Attempt | None = None,
    records: tuple[CallRecord, ...] = (),
    failures: Sequence[attempt_pb2.CallFailure] = (),
) -> core.Evidence:
    return core.Evidence(attempt, records, tuple(failures))


def failure(reason: str = "worker_capture_failed", **fields: str) -> attempt_pb2.CallFailure:
    return attempt_pb2.CallFailure(capture_key=KEY, call_id="c9", reason=reason, **fields)


def declared(call_id: str) -> Terminal:
    return Terminal(call_id, TerminalStage.DECLARED, "")


def message(call: StagedCall) -> object:
    completion = completion_pb2.Completion(
        status=completion_pb2.COMPLETION_STATUS_COMPLETED, finish_reason="stop"
    )
    return staged_call_to_proto(call, b"", completion)


def finalized(
    slot: int, *, stage: str = "declared", masked: bool = False, **fields: object
) -> row_log_pb2.FinalizedRollout:
    """A finalized rollout of two calls, or a masked one."""
    rollout = row_log_pb2.FinalizedRollout(**fields)
    receipt = rollout.receipt
    receipt.group_id, receipt.rollout_id, receipt.slot = "g", f"r{slot}", slot
    receipt.capture_key, receipt.terminal_selection = f"r{slot}", stage
    for call_id in ("a", "b"):
        receipt.calls.add(call_id=call_id, digest=bytes([slot]) * 32, selected=not masked)
    if masked:
        receipt.masked, receipt.mask_reason = True, "pending_call"
    else:
        rollout.path_call_ids.extend(["a", "b"])
    return rollout

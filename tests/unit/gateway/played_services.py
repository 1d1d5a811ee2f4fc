"""The services behind a gateway, played by hand."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
    commit_coords_pb2,
    completion_pb2,
    staged_call_pb2,
)
from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_service_pb2
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_client.errors import CallforestError, RefusedError, UnavailableError
from callforest_mesh.gateway import core
from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
from callforest_mesh.gateway.life import Served
from callforest_mesh.gateway.options import GatewayOptions

ROOT = capture_admission_pb2.Verdict(root=capture_admission_pb2.Root())
UNCAPTURED = capture_admission_pb2.Verdict(
    uncaptured=capture_admission_pb2.Uncaptured(reason="unresolved_parent", detail="no_match")
)


RESPONSE = json.dumps(
    {"id": "chatcmpl-c0", "choices": [{"message": {"role": "assistant", "content": "a"}}]}
).encode()
COMPLETION = completion_pb2.Completion(
    status=completion_pb2.COMPLETION_STATUS_COMPLETED,
    finish_reason="stop",
    generation_token_count=3,
    weight_version_count=1,
)


DESCRIPTION = worker_pb.DescribeResponse(configuration_digest=bytes([7]) * 32)


def coords(capture_key: str = "k", call_id: str = "c0") -> commit_coords_pb2.CommitCoords:
    digests = {
        name: bytes(32) for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash")
    }
    return commit_coords_pb2.CommitCoords(
        capture_key=capture_key, call_id=call_id, delta_token_count=7, **digests
    )


def staged(**changed: object) -> worker_pb.GeneratedCall:
    fields = {"chat_response": RESPONSE, "completion": COMPLETION, "staged": coords()}
    return worker_pb.GeneratedCall(**{**fields, **changed})


@dataclass
class Played:
    """The services behind a gateway: each answer is a value, or an exception to raise."""

    verdict: object = field(default_factory=lambda: ROOT)
    generated: object = field(default_factory=staged)
    described: list[object] = field(default_factory=list)
    measured: object = field(default_factory=lambda: ROOT)
    kept: dict[str, staged_call_pb2.StagedCall] = field(default_factory=dict)
    staging_answers: list[object] = field(default_factory=list)
    record_answers: list[object] = field(default_factory=list)
    failure_answers: list[object] = field(default_factory=list)
    admitting: Callable[[], Awaitable[None]] | None = None
    generating: Callable[[], Awaitable[None]] | None = None
    look_ups: list[attempt_pb2.CallIntent] = field(default_factory=list)
    intents: list[attempt_pb2.CallIntent] = field(default_factory=list)
    calls: list[worker_pb.GenerateCall] = field(default_factory=list)
    records: list[call_record_pb2.CallRecord] = field(default_factory=list)
    failures: list[attempt_pb2.CallFailure] = field(default_factory=list)
    withdrawals: list[attempt_pb2.CallWithdrawal] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    async def admit(self, intent: attempt_pb2.CallIntent, **_sent: object) -> object:
        if intent.WhichOneof("probe") == "source" and not intent.configuration_digest:
            self.order.append("look_up")
            self.look_ups.append(intent)
            return give(self._known())
        self.order.append("intent")
        self.intents.append(intent)
        if self.admitting is not None:
            await self.admitting()
        return give(self.verdict)

    def _known(self) -> object:
        """Answer what can only be a repeat: nothing but a repeat is announced."""
        verdict = self.verdict
        if isinstance(verdict, capture_admission_pb2.Verdict):
            is_answer = verdict.HasField("earlier") or verdict.HasField("refused")
            return verdict if is_answer else refused(er.ERROR_REASON_INVALID_MESSAGE)
        return verdict

    async def measure(self, _intent: attempt_pb2.CallIntent) -> object:
        self.order.append("measure")
        return give(self.measured)

    async def fetch(
        self, _capture_key: str, call_ids: list[str], **asked: object
    ) -> list[staged_call_pb2.StagedCall]:
        assert asked["without_columns"] is True
        self.order.append("fetch")
        if self.staging_answers:
            give(self.staging_answers.pop(0))
        if call_ids[0] not in self.kept:
            raise refused(er.ERROR_REASON_CALL_NOT_FOUND)
        return [self.kept[call_ids[0]]]

    async def describe(self) -> object:
        self.order.append("describe")
        return give(self.described.pop(0) if self.described else DESCRIPTION)

    async def generate(self, call: worker_pb.GenerateCall, **_sent: object) -> object:
        self.order.append("generate")
        self.calls.append(call)
        if self.generating is not None:
            await self.generating()
        return give(self.generated)

    async def record(self, record: call_record_pb2.CallRecord, **_sent: object) -> object:
        self.order.append("record")
        self.records.append(record)
        return give(next_of(self.record_answers))

    async def record_failure(self, failure: attempt_pb2.CallFailure, **_sent: object) -> object:
        self.order.append("failure")
        self.failures.append(failure)
        return give(next_of(self.failure_answers))

    async def record_withdrawal(
        self, withdrawal: attempt_pb2.CallWithdrawal, **_sent: object
    ) -> object:
        self.order.append("withdrawal")
        self.withdrawals.append(withdrawal)
        return give(next_of(self.failure_answers))


def give(answer: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer


def next_of(answers: list[object]) -> object:
    return answers.pop(0) if answers else ledger_service_pb2.CommittedEntry(revision=1)


REQUEST = core.read_request(b'{"messages":[{"role":"user","content":"go"}]}')


def away() -> UnavailableError:
    return UnavailableError(
        grpc.StatusCode.UNAVAILABLE, "gone", reason=er.ERROR_REASON_PEER_UNAVAILABLE
    )


def refused(
    reason: er.ErrorReason.ValueType, *, retry_after_ms: int | None = None
) -> CallforestError:
    code = grpc.StatusCode.FAILED_PRECONDITION
    return RefusedError(code, "no", reason=reason, retry_after_ms=retry_after_ms)


def calls_of(played: Played, **options: object) -> Calls:
    ids = (f"c{number}" for number in range(100))
    return Calls(
        played,
        played,
        played,
        played,
        EngineConfiguration(played),
        GatewayOptions(**options),
        new_id=lambda: next(ids),
        now_ns=lambda: 1_700_000_000_123_456_789,
    )


async def serve(played: Played, **options: object) -> Served:
    calls = calls_of(played, **options)
    try:
        return await calls.serve("k", REQUEST)
    finally:
        await calls.settle(5.0)

"""What an attempt's log says of one of its calls."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import attempt_pb2, call_record_pb2, capture_admission_pb2


@dataclass(slots=True)
class AdmittedCall:
    """What the log says of one call.

    Attributes:
        body_digest: of the request body, from the intent.
        verdict: the serialized Verdict.
        record: the serialized CallRecord, or None.
        failures: its serialized failure rows, in order.
        failure_reasons: theirs.
        is_keyed: whether an idempotency key alone names it.
        admit_time: the serialized Timestamp of when the gateway took it.
        withdrawal: the serialized CallWithdrawal that settled it, or None.
        source_capture_key: the attempt that made a restored call, "" for one of this attempt. A
            restored call has a record and nothing else, and takes no write.
        intent_number: its place among the calls that the attempt announced, from 1.
    """

    body_digest: bytes
    verdict: bytes
    is_keyed: bool = False
    admit_time: bytes = b""
    withdrawal: bytes | None = None
    record: bytes | None = None
    failures: tuple[bytes, ...] = ()
    failure_reasons: tuple[str, ...] = ()
    source_capture_key: str = ""
    intent_number: int = 0

    @property
    def is_restored(self) -> bool:
        """Whether an earlier attempt made the call."""
        return bool(self.source_capture_key)

    def read_verdict(self) -> capture_admission_pb2.Verdict:
        """Give the verdict as it was first given; a restored call has none."""
        return capture_admission_pb2.Verdict.FromString(self.verdict)

    def read_record(self) -> call_record_pb2.CallRecord | None:
        """Give the committed record, or None."""
        return None if self.record is None else call_record_pb2.CallRecord.FromString(self.record)

    def read_withdrawal(self) -> attempt_pb2.CallWithdrawal | None:
        """Give the withdrawal, or None."""
        stored = self.withdrawal
        return None if stored is None else attempt_pb2.CallWithdrawal.FromString(stored)

    def earlier(self, call_id: str) -> capture_admission_pb2.EarlierCall:
        """Give what a repeat learns of the call; it is not withdrawn."""
        if self.record is not None:
            state = capture_admission_pb2.EARLIER_STATE_COMMITTED
        elif self.failure_reasons:
            state = capture_admission_pb2.EARLIER_STATE_FAILED
        else:
            state = capture_admission_pb2.EARLIER_STATE_PENDING
        taken = timestamp_pb2.Timestamp.FromString(self.admit_time)
        return capture_admission_pb2.EarlierCall(call_id=call_id, state=state, admit_time=taken)

    def read_failures(self) -> list[attempt_pb2.CallFailure]:
        """Give the failure rows, in order."""
        return [attempt_pb2.CallFailure.FromString(row) for row in self.failures]

"""The Ledger service's client."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import grpc
import grpc.aio

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
    restore_point_pb2,
)
from callforest.ledger.v1 import (
    ledger_care_service_pb2,
    ledger_care_service_pb2_grpc,
    restore_attempt_pb2,
)
from callforest.ledger.v1 import ledger_service_pb2 as pb
from callforest.ledger.v1 import ledger_service_pb2_grpc as rpc
from callforest_client import unary
from callforest_client.capture_mode import of_mode
from callforest_client.errors import UnavailableError
from callforest_client.item_stream import ItemStream
from callforest_client.streams import COMMIT_CALLS, RECORD_INTENTS

SETTLE_WAIT_S = 300.0
"""How long a rollout owner waits for admitted calls (LED-6)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """An attempt and all its rows, in the order in which they became durable."""

    attempt: attempt_pb2.Attempt
    entries: tuple[attempt_pb2.ManifestEntry, ...]

    @property
    def records(self) -> list[call_record_pb2.CallRecord]:
        """The committed calls."""
        return [one.record for one in self.entries if one.WhichOneof("entry") == "record"]

    @property
    def failures(self) -> list[attempt_pb2.CallFailure]:
        """The calls that were not captured."""
        return [one.failure for one in self.entries if one.WhichOneof("entry") == "failure"]

    @property
    def withdrawals(self) -> list[attempt_pb2.CallWithdrawal]:
        """The calls that were refused before anything was generated; they mask nothing."""
        return [one.withdrawal for one in self.entries if one.WhichOneof("entry") == "withdrawal"]


class LedgerClient:
    """Records attempts and calls, and reads them back.

    Args:
        channel: a channel to the Ledger service.
        tenant: owns everything that is touched.
        timeout_s: the deadline of each call, waits apart.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, tenant: str = "default", timeout_s: float = 10.0
    ) -> None:
        self._stub = rpc.LedgerServiceStub(channel)
        self._care_stub = ledger_care_service_pb2_grpc.LedgerCareServiceStub(channel)
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._intents = ItemStream(RECORD_INTENTS, self._stub.RecordIntents)
        self._commits = ItemStream(COMMIT_CALLS, self._stub.CommitCalls)

    async def open_attempt(
        self,
        rollout_id: str,
        *,
        request_id: str,
        mode: attempt_pb2.CaptureMode.ValueType = attempt_pb2.CAPTURE_MODE_UNSPECIFIED,
    ) -> attempt_pb2.Attempt:
        """Open the next attempt of a rollout; the one before is sealed.

        Raises:
            RefusedError: MODE_MISMATCH, among others: the ledger opened it in another mode.
        """
        request = pb.OpenAttemptRequest(
            tenant=self._tenant, rollout_id=rollout_id, request_id=request_id, mode=mode
        )
        response = await unary.call(self._stub.OpenAttempt, request, timeout_s=self._timeout_s)
        return of_mode(response.attempt, mode)

    async def restore_attempt(
        self, rollout_id: str, *, request_id: str, point: restore_point_pb2.RestorePoint
    ) -> attempt_pb2.Attempt:
        """Open the next attempt of a rollout with calls of the latest one, which is sealed.

        Args:
            rollout_id: the logical rollout.
            request_id: a UUID, of one start of the harness; a repeat with it gets the first answer
                until the attempt is used.
            point: names the latest attempt and the calls that are taken over.

        Raises:
            RefusedError: RESTORE_REFUSED, among others; its code is UNIMPLEMENTED when a service
                is of a release that cannot restore. Nothing was opened and nothing sealed.
        """
        request = restore_attempt_pb2.RestoreAttemptRequest(
            tenant=self._tenant, rollout_id=rollout_id, request_id=request_id, point=point
        )
        response = await unary.call(self._stub.RestoreAttempt, request, timeout_s=self._timeout_s)
        return response.attempt

    async def record_intent(
        self,
        intent: attempt_pb2.CallIntent,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> capture_admission_pb2.Verdict:
        """Record a call before inference and learn what it continues."""
        return await self._intents.send(
            intent,
            tenant=self._tenant,
            timeout_s=timeout_s or self._timeout_s,
            traceparent=traceparent,
        )

    async def find_predecessor(
        self,
        capture_key: str,
        probe: capture_admission_pb2.ChainProbe | capture_admission_pb2.SourceProbe,
        *,
        configuration_digest: bytes = b"",
    ) -> capture_admission_pb2.Verdict:
        """Learn what a request would continue; record nothing.

        Args:
            capture_key: names the attempt.
            probe: of the attempt's mode.
            configuration_digest: the engine's, 32 bytes, or empty when it is not known.
        """
        request = pb.FindPredecessorRequest(
            tenant=self._tenant,
            capture_key=capture_key,
            chain=probe if isinstance(probe, capture_admission_pb2.ChainProbe) else None,
            source=probe if isinstance(probe, capture_admission_pb2.SourceProbe) else None,
            configuration_digest=configuration_digest,
        )
        response = await unary.call(self._stub.FindPredecessor, request, timeout_s=self._timeout_s)
        return response.verdict

    async def get_call(self, capture_key: str, call_id: str) -> pb.GetCallResponse:
        """Read all that the ledger has of one call."""
        request = pb.GetCallRequest(tenant=self._tenant, capture_key=capture_key, call_id=call_id)
        return await unary.call(self._stub.GetCall, request, timeout_s=self._timeout_s)

    async def record(
        self,
        record: call_record_pb2.CallRecord,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> pb.CommittedEntry:
        """Append the record of a staged call; from now on it can be a parent."""
        entry = attempt_pb2.ManifestEntry()
        entry.record.CopyFrom(record)  # a keyword would write and parse it
        return await self._commits.send(
            entry,
            tenant=self._tenant,
            timeout_s=timeout_s or self._timeout_s,
            traceparent=traceparent,
        )

    async def record_failure(
        self,
        failure: attempt_pb2.CallFailure,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> pb.CommittedEntry:
        """Append a failure row; the call can never be a parent."""
        return await self._commits.send(
            attempt_pb2.ManifestEntry(failure=failure),
            tenant=self._tenant,
            timeout_s=timeout_s or self._timeout_s,
            traceparent=traceparent,
        )

    async def record_withdrawal(
        self,
        withdrawal: attempt_pb2.CallWithdrawal,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> pb.CommittedEntry:
        """Settle a call that was definitely refused before it was generated; it masks nothing."""
        return await self._commits.send(
            attempt_pb2.ManifestEntry(withdrawal=withdrawal),
            tenant=self._tenant,
            timeout_s=timeout_s or self._timeout_s,
            traceparent=traceparent,
        )

    async def close_admissions(self, capture_key: str) -> attempt_pb2.Attempt:
        """End new calls of an attempt."""
        request = pb.CloseAdmissionsRequest(tenant=self._tenant, capture_key=capture_key)
        response = await unary.call(self._stub.CloseAdmissions, request, timeout_s=self._timeout_s)
        return response.attempt

    async def await_settled(
        self, capture_key: str, *, wait_s: float = SETTLE_WAIT_S
    ) -> attempt_pb2.Attempt:
        """Wait until no admitted call is pending, at most `wait_s`, through restarts too."""

        async def once(left_s: float) -> pb.AwaitSettledResponse:
            # The next ledger is asked for what is left of the wait, not for all of it again.
            wait_ms = max(0, round((left_s - self._timeout_s) * 1000))
            request = pb.AwaitSettledRequest(
                tenant=self._tenant, capture_key=capture_key, wait_ms=wait_ms
            )
            response: pb.AwaitSettledResponse = await self._stub.AwaitSettled(
                request, timeout=left_s
            )
            return response

        return (await unary.repeated(once, wait_s + self._timeout_s)).attempt

    async def seal(self, capture_key: str) -> attempt_pb2.Attempt:
        """Fix epoch, revision and pending calls of an attempt."""
        request = pb.SealAttemptRequest(tenant=self._tenant, capture_key=capture_key)
        response = await unary.call(self._stub.SealAttempt, request, timeout_s=self._timeout_s)
        return response.attempt

    async def manifest(self, capture_key: str) -> Manifest:
        """Read an attempt and all its rows."""
        request = pb.GetManifestRequest(tenant=self._tenant, capture_key=capture_key)
        attempt: attempt_pb2.Attempt | None = None
        entries: list[attempt_pb2.ManifestEntry] = []
        pages = await unary.read_all(self._stub.GetManifest, request, timeout_s=self._timeout_s)
        for page in pages:
            if page.HasField("attempt"):
                attempt = page.attempt
            entries.extend(page.entries)
        if attempt is None:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "the manifest came without pages")
        return Manifest(attempt, tuple(entries))

    async def has_rows(self, capture_key: str) -> bool:
        """Say whether a call of the attempt committed or failed."""
        request = pb.HasRowsRequest(tenant=self._tenant, capture_key=capture_key)
        response = await unary.call(self._stub.HasRows, request, timeout_s=self._timeout_s)
        return response.has_rows

    async def forget(self, capture_key: str) -> int:
        """Remove the log of a sealed attempt that nobody needs; give how many events it had."""
        request = ledger_care_service_pb2.ForgetAttemptRequest(
            tenant=self._tenant, capture_key=capture_key
        )
        response = await unary.call(
            self._care_stub.ForgetAttempt, request, timeout_s=self._timeout_s
        )
        return response.event_count

    def for_tenant(self, tenant: str) -> LedgerClient:
        """Give the same client for another tenant; streams are shared."""
        if tenant == self._tenant:
            return self
        other = copy.copy(self)
        other._tenant = tenant  # noqa: SLF001 - a copy of this very class
        return other

    async def close(self) -> None:
        """End the client's streams; the channel stays open."""
        await self._intents.close()
        await self._commits.close()

"""The Admission service's client."""

from __future__ import annotations

import copy

import grpc.aio

from callforest.admission.v1 import admission_service_pb2 as pb
from callforest.admission.v1 import admission_service_pb2_grpc as rpc
from callforest.capture.v1 import attempt_pb2, capture_admission_pb2, restore_point_pb2
from callforest_client import unary
from callforest_client.capture_mode import of_mode
from callforest_client.item_stream import ItemStream
from callforest_client.streams import ADMIT_CALLS


class AdmissionClient:
    """Opens attempts and has calls judged.

    Args:
        channel: a channel to the Admission service.
        tenant: owns everything that is touched.
        timeout_s: the deadline of each call.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, tenant: str = "default", timeout_s: float = 10.0
    ) -> None:
        self._stub = rpc.AdmissionServiceStub(channel)
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._admissions = ItemStream(ADMIT_CALLS, self._stub.AdmitCalls)

    async def open_attempt(
        self,
        rollout_id: str,
        *,
        request_id: str,
        mode: attempt_pb2.CaptureMode.ValueType = attempt_pb2.CAPTURE_MODE_UNSPECIFIED,
    ) -> attempt_pb2.Attempt:
        """Open the next attempt of a rollout; the one before is sealed.

        Args:
            rollout_id: the logical rollout.
            request_id: a UUID; a repeat with it gets the first answer.
            mode: how its calls are found; unspecified for the one that Admission is set to.

        Raises:
            RefusedError: MODE_MISMATCH, among others: the attempt is of another mode.
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
        request = pb.RestoreAttemptRequest(
            tenant=self._tenant, rollout_id=rollout_id, request_id=request_id, point=point
        )
        response = await unary.call(self._stub.RestoreAttempt, request, timeout_s=self._timeout_s)
        return response.attempt

    async def admit(
        self, intent: attempt_pb2.CallIntent, *, traceparent: str = ""
    ) -> capture_admission_pb2.Verdict:
        """Announce a call and learn what may be captured of it."""
        return await self._admissions.send(
            intent, tenant=self._tenant, timeout_s=self._timeout_s, traceparent=traceparent
        )

    async def measure(self, intent: attempt_pb2.CallIntent) -> capture_admission_pb2.Verdict:
        """Learn what might be captured of a call now; announce nothing."""
        request = pb.MeasureRequest(tenant=self._tenant, intent=intent)
        response = await unary.call(self._stub.Measure, request, timeout_s=self._timeout_s)
        return response.verdict

    async def close_attempt(self, capture_key: str) -> attempt_pb2.Attempt:
        """End new calls of an attempt."""
        request = pb.CloseAttemptRequest(tenant=self._tenant, capture_key=capture_key)
        response = await unary.call(self._stub.CloseAttempt, request, timeout_s=self._timeout_s)
        return response.attempt

    def for_tenant(self, tenant: str) -> AdmissionClient:
        """Give the same client for another tenant; streams are shared."""
        if tenant == self._tenant:
            return self
        other = copy.copy(self)
        other._tenant = tenant  # noqa: SLF001 - a copy of this very class
        return other

    async def close(self) -> None:
        """End the client's streams; the channel stays open."""
        await self._admissions.close()

"""The Gateway service's client: what a harness needs that speaks gRPC instead of HTTP."""

from __future__ import annotations

import copy

import grpc.aio

from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest.gateway.v1 import gateway_service_pb2_grpc as rpc
from callforest_client import unary
from callforest_client.item_stream import ItemStream
from callforest_client.streams import COMPLETE, MEASURE_CONTEXT

CHAT = pb.COMPLETION_API_CHAT
RESPONSES = pb.COMPLETION_API_RESPONSES


class GatewayClient:
    """Makes model calls within attempts.

    Args:
        channel: a channel to the Gateway service.
        tenant: owns the attempts; the gateway serves one.
        timeout_s: the deadline of each call, its generation included.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, tenant: str = "default", timeout_s: float = 630.0
    ) -> None:
        self._stub = rpc.GatewayServiceStub(channel)
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._completions = ItemStream(COMPLETE, self._stub.Complete)
        self._measures = ItemStream(MEASURE_CONTEXT, self._stub.Measure)

    async def complete(
        self,
        capture_key: str,
        request: bytes,
        api: pb.CompletionApi.ValueType = CHAT,
        *,
        continues_call_id: str | None = None,
        history_is_whole: bool = False,
        idempotency_key: str = "",
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> pb.ServedCompletion:
        """Make one call; a repeat is another call, unless it has the same idempotency key.

        Args:
            capture_key: the attempt.
            request: the API's request, JSON bytes.
            api: which API it is of.
            continues_call_id: makes this a delta request: the request's turns are only those that
                follow the answer of this call. A claim that is checked, never trusted.
            history_is_whole: the request brings its whole history all the same; the claim then
                only breaks a tie.
            idempotency_key: makes every repeat of the request the same call: 1 to 255 visible ASCII
                characters, minted at random for each logical request before its first try. With it
                the call is sent again when its stream broke.
            timeout_s: instead of the client's own.
            traceparent: the caller's W3C trace context, or "".

        Raises:
            RefusedError: REQUEST_REFUSED with the parameter at fault, ATTEMPT_NOT_FOUND,
                ATTEMPT_CLOSED, AMBIGUOUS_HISTORY, HISTORY_CLAIM_REFUSED, MODE_MISMATCH,
                CONFIGURATION_CHANGED, OVERLOADED, INVALID_MESSAGE; CALL_MISMATCH, the key was used
                with another request; HISTORY_REQUIRED: send the
                request again with its whole history and `history_is_whole`.
            UnavailableError: no answer; the call may have been made.
        """
        call = _call(capture_key, request, api, continues_call_id, history_is_whole)
        call.idempotency_key = idempotency_key
        bound_s = self._timeout_s if timeout_s is None else timeout_s
        return await self._completions.send(
            call,
            tenant=self._tenant,
            timeout_s=bound_s,
            traceparent=traceparent,
            repeatable=bool(idempotency_key),
        )

    async def measure(
        self,
        capture_key: str,
        request: bytes,
        api: pb.CompletionApi.ValueType = CHAT,
        *,
        continues_call_id: str | None = None,
        history_is_whole: bool = False,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> pb.MeasuredContext:
        """Learn how many prompt tokens a call would have; none is made, nothing is kept.

        Args and errors are those of `complete`.
        """
        call = _call(capture_key, request, api, continues_call_id, history_is_whole)
        bound_s = self._timeout_s if timeout_s is None else timeout_s
        return await self._measures.send(
            call, tenant=self._tenant, timeout_s=bound_s, traceparent=traceparent
        )

    async def list_models(self) -> list[str]:
        """Name the served models."""
        response = await unary.call(
            self._stub.ListModels, pb.ListModelsRequest(), timeout_s=self._timeout_s
        )
        return list(response.models)

    def for_tenant(self, tenant: str) -> GatewayClient:
        """Give the same client for another tenant; streams are shared."""
        if tenant == self._tenant:
            return self
        other = copy.copy(self)
        other._tenant = tenant  # noqa: SLF001 - a copy of this very class
        return other

    async def close(self) -> None:
        """End the client's streams; the channel stays open."""
        await self._completions.close()
        await self._measures.close()


def _call(
    capture_key: str,
    request: bytes,
    api: pb.CompletionApi.ValueType,
    continues: str | None,
    history_is_whole: bool,  # noqa: FBT001 - as the message has it
) -> pb.CompletionCall:
    return pb.CompletionCall(
        capture_key=capture_key,
        api=api,
        request=request,
        continues_call_id=continues,
        history_is_whole=history_is_whole,
    )

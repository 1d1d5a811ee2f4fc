"""The one place that turns what a handler raised into what its caller sees.

Exception text never crosses the wire: an unexpected exception becomes INTERNAL with an incident id,
and the log has the rest.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import grpc
from google.rpc import status_pb2

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, status_of, status_of_error
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.fatal import end_if_without_memory

_LOG = logging.getLogger("callforest")


def status_of_exception(error: BaseException, *, service: str) -> status_pb2.Status:
    """Give the status that the caller of `service` gets for an exception of its handler.

    Args:
        error: what the handler raised.
        service: names the service in the log and in what it says of its peers.
    """
    if isinstance(error, Refusal):
        return status_of(error)
    if isinstance(error, CallforestError):
        return _of_peer(error)
    if isinstance(error, asyncio.CancelledError):
        return status_pb2.Status(code=grpc.StatusCode.CANCELLED.value[0], message="cancelled")
    end_if_without_memory(service, error)
    incident_id = secrets.token_hex(8)
    _LOG.error("incident %s in %s", incident_id, service, exc_info=error)
    return status_of(
        Refusal(
            er.ERROR_REASON_INTERNAL,
            f"a fault of the {service} service; its log has incident {incident_id}",
            incident_id=incident_id,
        )
    )


def item_late(timeout_ms: int) -> Refusal:
    """Make the refusal of an item whose time is up."""
    return Refusal(
        er.ERROR_REASON_ITEM_DEADLINE,
        "the item was not done in time; repeat it with the same ids",
        timeout_ms=timeout_ms,
    )


def draining(service: str) -> Refusal:
    """Make the refusal of a service that shuts down."""
    return Refusal(
        er.ERROR_REASON_DRAINING, f"the {service} service is shutting down", service=service
    )


def overloaded(limit: str, limit_value: int, *, retry_after_ms: int = 1000) -> Refusal:
    """Make the refusal at a bound."""
    return Refusal(
        er.ERROR_REASON_OVERLOADED,
        f"{limit} is at its limit of {limit_value}; repeat after the given delay",
        retry_after_ms=retry_after_ms,
        limit=limit,
        limit_value=limit_value,
    )


def _of_peer(error: CallforestError) -> status_pb2.Status:
    """Pass a typed answer of a peer on as it is; an untyped one becomes PEER_UNAVAILABLE.

    A method that the peer's release does not have is no absence: no repeat would find it.
    """
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        return status_pb2.Status(code=error.code.value[0], message=error.message)
    if error.reason == er.ERROR_REASON_UNSPECIFIED:
        _LOG.warning("a peer failed: %s", error)
        return status_of(
            Refusal(
                er.ERROR_REASON_PEER_UNAVAILABLE,
                "a service behind this one did not answer; repeat",
                peer=error.code.name.lower(),
            )
        )
    return status_of_error(error)

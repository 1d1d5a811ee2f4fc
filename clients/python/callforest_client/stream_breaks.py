"""How an item stream fails: what its items get when it breaks, or when their time is up."""

from __future__ import annotations

import grpc
import grpc.aio

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, UnavailableError, error_of_rpc


def why_ended(name: str, error: grpc.aio.AioRpcError) -> CallforestError:
    """Turn the error of a whole stream into what its items get.

    Our services give a reason with every INTERNAL and UNKNOWN. Without one, the code is gRPC's own:
    for instance for a write into a stream that the server has just ended, whatever its status was.
    """
    failure = error_of_rpc(error)
    own = failure.reason != er.ERROR_REASON_UNSPECIFIED
    if own or failure.code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return failure
    return broken(name, failure.code.name)


def late(name: str, timeout_s: float) -> UnavailableError:
    """Make the error of an item without an answer in time."""
    return UnavailableError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        f"{name} did not answer in time; repeat with the same ids",
        reason=er.ERROR_REASON_ITEM_DEADLINE,
        metadata={"timeout_ms": str(int(timeout_s * 1000))},
    )


def broken(name: str, how: str) -> UnavailableError:
    """Make the error of a stream that broke."""
    return UnavailableError(
        grpc.StatusCode.UNAVAILABLE,
        f"the {name} stream is broken ({how})",
        reason=er.ERROR_REASON_PEER_UNAVAILABLE,
        metadata={"peer": name},
    )

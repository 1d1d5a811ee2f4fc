"""`callforest health`: asks services whether they serve, as an orchestrator's probe does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc.aio
from grpc_health.v1 import health_pb2

from callforest_client.channel import connect
from callforest_mesh.chassis.configuration import MeshConfiguration

PROBE_S: Final = 5.0
AWAY: Final = "does not answer"


def check(configuration: MeshConfiguration, names: Sequence[str]) -> dict[str, str]:
    """Ask services for their health.

    Args:
        configuration: says where they are.
        names: their short names.

    Returns:
        "SERVING", "NOT_SERVING", "NOT_FOUND" (something else is there) or AWAY for each.
    """
    return asyncio.run(_check(configuration, names))


async def _check(configuration: MeshConfiguration, names: Sequence[str]) -> dict[str, str]:
    found = await asyncio.gather(*(probe(configuration.addresses.of(name), name) for name in names))
    return dict(zip(names, found, strict=True))


async def probe(address: str, name: str) -> str:
    """Ask one service for its health; see `check`."""
    async with connect(address) as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ] = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            response = await ask(health_pb2.HealthCheckRequest(service=name), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            return "NOT_FOUND" if error.code() is grpc.StatusCode.NOT_FOUND else AWAY
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

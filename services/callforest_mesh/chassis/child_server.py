"""The server in a child that `child_process` starts: one service, for the parent alone."""

from __future__ import annotations

import grpc.aio

from callforest_mesh.chassis.child_process import MESSAGE_OPTIONS
from callforest_mesh.chassis.interceptors import EdgeInterceptor
from callforest_mesh.chassis.item_server import Drain


def child_server(name: str, full_name: str, *, calls_most: int | None = None) -> grpc.aio.Server:
    """Make a server without services, which listens nowhere; it is guarded like the mesh's.

    Args:
        name: names the child in errors, for instance "engine".
        full_name: of the gRPC service that it will serve.
        calls_most: calls at once before further ones are refused; None for as many as come.
    """
    guard = EdgeInterceptor(name, Drain(), own=frozenset({full_name}))
    return grpc.aio.server(
        interceptors=[guard], options=MESSAGE_OPTIONS, maximum_concurrent_rpcs=calls_most
    )

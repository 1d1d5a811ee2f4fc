"""What a service is to the process that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import grpc


class ServerLike(Protocol):
    """Takes the handlers of servicers: a grpc.aio.Server, or the registry of embedded services."""

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]
    ) -> None:
        """Take handlers."""
        ...

    def add_registered_method_handlers(
        self,
        service_name: str,
        method_handlers: Mapping[str, grpc.RpcMethodHandler[object, object]],
    ) -> None:
        """Take the handlers of one service by name."""
        ...


class MeshService(Protocol):
    """One of the services, whichever process it runs in.

    A service is built from its options, a Drain, and the typed clients of its peers. The process
    starts it before it serves, begins the Drain, waits until calls are done, and stops it.
    """

    @property
    def name(self) -> str:
        """The service's short name, for instance "ledger"."""
        ...

    @property
    def full_names(self) -> frozenset[str]:
        """The full names of its gRPC services, for health, reflection and the interceptors."""
        ...

    def attach(self, server: ServerLike) -> None:
        """Add the service's handlers to a server."""
        ...

    async def start(self) -> None:
        """Open stores and children; return when the service can answer."""
        ...

    async def stop(self) -> None:
        """Flush and close everything. Idempotent."""
        ...

"""Admission as a service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import grpc.aio

from callforest.admission.v1 import admission_service_pb2_grpc as rpc
from callforest.capture.v1 import attempt_pb2
from callforest_client.ledger import LedgerClient
from callforest_mesh.admission.servicer import AdmissionServicer
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.service import ServerLike
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry

CHAIN: Final = attempt_pb2.CAPTURE_MODE_CHAIN
FOREST: Final = attempt_pb2.CAPTURE_MODE_FOREST
_FULL_NAME: Final = "callforest.admission.v1.AdmissionService"


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """How Admission runs.

    Attributes:
        forest: attempts that are opened without a mode are of forest mode, not of chain mode.
    """

    forest: bool = False


class AdmissionService:
    """Opens attempts and has calls judged.

    Args:
        options: how it runs.
        drain: when begun, streams end.
        ledger: decides; closed by its owner.
        telemetry: what it says of its work.
    """

    name = "admission"
    full_names = frozenset({_FULL_NAME})

    def __init__(
        self,
        options: AdmissionOptions,
        drain: Drain,
        ledger: LedgerClient,
        *,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self.options = options
        self._servicer = AdmissionServicer(
            ledger, drain, telemetry, mode=FOREST if options.forest else CHAIN
        )

    def attach(self, server: ServerLike) -> None:
        """Add the RPCs to a server."""
        rpc.add_AdmissionServiceServicer_to_server(
            self._servicer,
            cast("grpc.aio.Server", server),  # takes handlers as a server does
        )

    async def start(self) -> None:
        """Return at once: there is nothing to open."""

    async def stop(self) -> None:
        """Return at once: there is nothing to flush."""

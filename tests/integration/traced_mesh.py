"""A whole mesh whose telemetry is kept."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from callforest_client.rollout import RolloutOwner
from callforest_mesh.assembly import Clients, EmbeddedMesh
from callforest_mesh.chassis.configuration import load
from tests.integration.recorded_telemetry import RecordedTelemetry
from tests.integration.running_mesh import settings

PATHS = {
    # Each span of a captured call, with its parent's.
    ("callforest-admission", "admission/AdmitCalls"): "call",
    ("callforest-ledger", "ledger/RecordIntents"): "admission/AdmitCalls",
    ("callforest-worker", "worker/Generate"): "call",
    ("callforest-worker", "chat"): "worker/Generate",
    ("callforest-staging", "staging/Stage"): "worker/Generate",
    ("callforest-ledger", "ledger/CommitCalls"): "call",
}


@dataclass
class Traced:
    """A mesh whose telemetry is kept."""

    mesh: EmbeddedMesh
    telemetry: RecordedTelemetry
    clients: Clients = field(init=False)

    def __post_init__(self) -> None:
        self.clients = self.mesh.clients()

    @property
    def gateway_url(self) -> str:
        return self.mesh.gateway_url

    @property
    def owner(self) -> RolloutOwner:
        clients = self.clients
        return RolloutOwner(
            clients.admission(), clients.ledger(), clients.finalizer(), self.gateway_url
        )


@asynccontextmanager
async def traced(folder: Path, sample_ratio: float = 1.0) -> AsyncIterator[Traced]:
    telemetry = RecordedTelemetry(sample_ratio)
    configuration = load(environment={}, settings=settings(folder))
    async with EmbeddedMesh(configuration, listen=False, telemetry=telemetry) as mesh:
        yield Traced(mesh, telemetry)

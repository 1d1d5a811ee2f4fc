"""`callforest status`: what the services of a running mesh are at, for people."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Final

from callforest.trainer.v1 import trainer_service_pb2 as trainer_pb
from callforest_client.errors import CallforestError, UnavailableError
from callforest_mesh import terminal
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.health_check import AWAY, probe

_SERVING: Final = "SERVING"
_MIB: Final = 2**20


def tell(configuration: MeshConfiguration) -> tuple[list[str], int]:
    """Ask every configured service for its health, and those that have one for their state.

    Args:
        configuration: says which services, where they are, and the tenant.

    Returns:
        The lines to print, and the exit status: 3 when a service does not answer, 1 when one does
        not serve or the trainer has stopped for good, else 0.
    """
    return asyncio.run(_tell(configuration))


async def _tell(configuration: MeshConfiguration) -> tuple[list[str], int]:
    async with AsyncExitStack() as closers:
        clients = Clients(configuration, addressed(configuration), closers)
        found = await asyncio.gather(
            *(_ask(name, configuration, clients) for name in configuration.services)
        )
    pairs = zip(configuration.services, found, strict=True)
    lines = [f"{name:<10} {words}" for name, (words, _) in pairs]
    return lines, max((status for _, status in found), default=terminal.DONE)


async def _ask(name: str, configuration: MeshConfiguration, clients: Clients) -> tuple[str, int]:
    health = await probe(configuration.addresses.of(name), name)
    if health != _SERVING:
        return health, terminal.AWAY if health == AWAY else terminal.NO
    question = _QUESTIONS.get(name)
    if question is None:
        return health, terminal.DONE
    try:
        words, status = await question(clients)
    except UnavailableError as error:
        return f"{health}, and then away: {error}", terminal.AWAY
    except CallforestError as error:
        return f"{health}, but: {error}", terminal.NO
    return f"{health}  {words}", status


async def _staging(clients: Clients) -> tuple[str, int]:
    stat = await clients.staging().stat()
    return (
        f"{stat.call_count} calls of {stat.call_bytes / _MIB:.1f} MiB are staged; its file has"
        f" {stat.store_bytes / _MIB:.0f} MiB and room for {stat.room_bytes / _MIB:.0f} more"
    ), terminal.DONE


async def _finalizer(clients: Clients) -> tuple[str, int]:
    log = await clients.finalizer().row_log()
    consumer = f"consumer {log.consumer}" if log.consumer else "no consumer yet"
    return (
        f"{log.head_cursor} groups are published, {log.committed_cursor} consumed for good; "
        f"{consumer}"
    ), terminal.DONE


async def _worker(clients: Clients) -> tuple[str, int]:
    engine = await clients.worker().describe()
    return (
        f"{engine.engine} serves {engine.model}, weights {engine.weight_version}, "
        f"{engine.context_token_count} tokens of context"
    ), terminal.DONE


async def _trainer(clients: Clients) -> tuple[str, int]:
    status = await clients.trainer().status()
    if status.phase == trainer_pb.TRAINER_PHASE_FAILED:
        return f"STOPPED at step {status.step}, for good: {status.failure}", terminal.NO
    phase = trainer_pb.TrainerPhase.Name(status.phase).removeprefix("TRAINER_PHASE_").lower()
    return (
        f"{phase}; step {status.step}, weights {status.weight_version}; groups up to"
        f" {status.trained_cursor} are trained on, up to {status.committed_cursor} behind a"
        f" checkpoint; {status.waiting_group_count} wait for a step"
    ), terminal.DONE


_QUESTIONS: Final = {
    "staging": _staging,
    "finalizer": _finalizer,
    "worker": _worker,
    "trainer": _trainer,
}

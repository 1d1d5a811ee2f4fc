"""`callforest export` and `callforest verify FILE`: rows that prove themselves, without a mesh."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from callforest.capture.v1 import group_batch_pb2
from callforest_client.certificates import CertificateError
from callforest_client.row_export import verify_export, write_export
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.chassis.durable_file import replacing_durably

_GROUP_BYTES_MAX: Final = 1 << 40
"""A person asked for this group: memory is the bound."""
_READ_S: Final = 3600.0
"""How long the rows of a group may take to come."""


def export(configuration: MeshConfiguration, group_id: str, path: Path) -> tuple[list[str], int]:
    """Write the rows of a published group with their certificates.

    Returns:
        The lines to print, and the exit status: 1 when the group has no rows.

    Raises:
        CallforestError: a service does not answer, or the group cannot be read.
        OSError: the file cannot be written.
    """
    group = asyncio.run(_read(configuration, group_id))
    try:
        with replacing_durably(path) as file:
            count = write_export(group, file)
    except CertificateError as error:
        return [f"nothing to export: {error}"], 1
    return [f"wrote {count} rows of {group_id} to {path}"], 0


def verify_file(path: Path) -> tuple[list[str], int]:
    """Verify a file of exported rows. No service is asked.

    Returns:
        The lines to print, and the exit status: 1 when a byte is not as it was written.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            verified = verify_export(file)
        except CertificateError as error:
            return [f"broken: {error}"], 1
    trained = sum(sum(row.owned_lengths) for row in verified.rows)
    verdict = (
        f"intact: {len(verified.rows)} rows of {verified.rollout_count} rollouts of group"
        f" {verified.group_id}, {trained} tokens with loss"
    )
    return [verdict], 0


async def _read(configuration: MeshConfiguration, group_id: str) -> group_batch_pb2.GroupBatch:
    async with AsyncExitStack() as closers:
        clients = Clients(configuration, addressed(configuration), closers)
        finalizer = clients.finalizer(group_bytes_max=_GROUP_BYTES_MAX)
        return await finalizer.group(group_id, timeout_s=_READ_S)

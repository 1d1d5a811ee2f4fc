"""The process whose power is cut: a real Staging service on a socket, under load.

It prints each thing that it is asked to do and each that it is about to acknowledge. Its store can
be made forgetful here, and only here, so that the tests can prove that they would notice.

Usage: python -m tests.robustness.staging_victim STORE SOCKET SETTING CALLS
"""

import asyncio
import hashlib
import os
import sys
from pathlib import Path

import grpc.aio

from callforest_client.staging import StagingClient
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.chassis.server import MeshServer
from callforest_mesh.staging.service import StagingOptions, StagingService
from callforest_mesh.staging.store import DATABASES, StagedCalls
from tests.unit.staging.calls import Chain

TENANT = "tenant"
MAP_BYTES = 64 << 20
WRITERS = 6
SETTINGS = {
    "durable": {},
    "forgetful-meta": {"metasync": False},
    "forgetful": {"sync": False, "metasync": False},
}


def options_of(path: Path) -> StagingOptions:
    return StagingOptions(path, map_size_bytes=MAP_BYTES, quota_bytes=MAP_BYTES // 2)


def say(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


class TalkativeCalls(StagedCalls):
    """Says what it is about to acknowledge, before anyone hears of it."""

    async def put(self, tenant, call, staged):
        receipt = await super().put(tenant, call, staged)
        digest = hashlib.sha256(call.SerializeToString()).hexdigest()
        say("staged", call.capture_key, call.call_id, digest)
        return receipt

    async def delete(self, tenant, capture_key, call_ids):
        say("deleting", capture_key, *call_ids)
        count = await super().delete(tenant, capture_key, call_ids)
        say("deleted", capture_key, *call_ids)
        return count

    async def drop(self, tenant, capture_key):
        say("dropping", capture_key)
        count = await super().drop(tenant, capture_key)
        say("dropped", capture_key)
        return count


class VictimService(StagingService):
    """A Staging service whose store has the setting's durability."""

    def __init__(self, options: StagingOptions, drain: Drain, setting: dict[str, bool]) -> None:
        super().__init__(options, drain)
        self._setting = setting
        self._servicer._calls = TalkativeCalls(self._opened)

    def open_store(self, options: StagingOptions) -> LmdbStore:
        setting = self._setting

        class VictimStore(LmdbStore):
            def _durability(self) -> dict[str, bool]:
                return {**super()._durability(), **setting}

        return VictimStore(
            options.path,
            map_size_bytes=options.map_size_bytes,
            databases=DATABASES,
            quota_bytes=options.quota_bytes,
            on_fatal=self._on_fatal,
            name=self.name,
        )


async def load(client: StagingClient, writer: int, calls: int) -> None:
    """Stage a chain, delete some of it on the way; the first writer tears down in the end."""
    chain = Chain(f"rollout-{writer}", seed=writer)
    kept: list[str] = []
    for number in range(calls):
        call = chain.add(tokens=40 + 97 * (number % 5))
        await client.stage(call)
        kept.append(call.call_id)
        if number % 5 == 4:
            await client.delete(call.capture_key, kept[:2])
            del kept[:2]
    if writer == 0:
        await client.drop_partition("rollout-0")


async def run(store: Path, socket: Path, setting: str, calls: int) -> None:
    drain = Drain()
    server = MeshServer(
        VictimService(options_of(store), drain, SETTINGS[setting]), f"unix:{socket}", drain
    )
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        client = StagingClient(channel, tenant=TENANT, timeout_s=120.0)
        await asyncio.gather(*(load(client, writer, calls) for writer in range(WRITERS)))
        await client.close()
        say("done")
    await server.stop()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))

"""A process with a service that stops slowly; the tests of the server end it by signals."""

import asyncio
import sys
from contextlib import AsyncExitStack

from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.log_lines import write_log
from callforest_mesh.chassis.server import run
from callforest_mesh.chassis.service import ServerLike


class SlowService:
    name = "slow"
    full_names: frozenset[str] = frozenset()

    def __init__(self, part: str) -> None:
        self.part = part

    def attach(self, server: ServerLike) -> None:
        pass

    async def start(self) -> None:
        if self.part == "start":
            print("starting", file=sys.stderr, flush=True)
            await asyncio.Event().wait()

    async def stop(self) -> None:
        print("stopping", file=sys.stderr, flush=True)
        if self.part == "stop":
            await asyncio.Event().wait()


def build(_drain: Drain, closers: AsyncExitStack) -> SlowService:
    closers.callback(lambda: print("closed", file=sys.stderr, flush=True))
    return SlowService(sys.argv[1])


if __name__ == "__main__":
    write_log("slow")
    sys.exit(run(build, sys.argv[2]))

"""A mesh's process whose engine has few places: what comes when all are taken waits in its queue.

Real engines do the same: they take every request and run so many at once.

Usage: env PLACES=8 python -m tests.robustness.crowded_worker serve NAME ...
"""

from __future__ import annotations

import asyncio
import os
import sys

from callforest_mesh import cli
from callforest_mesh.gateway.pace import Pace
from callforest_mesh.worker.scripted import ScriptedEngine

PLACES = "PLACES"
TAKES_ALL = "TAKES_ALL"
"""A gateway with this takes every call, however long the queue before it is."""


def crowd(places: int) -> None:
    """Let the engine make so many generations at once, first come, first served."""
    room = asyncio.Semaphore(places)
    generate = ScriptedEngine.generate

    async def queued(self, request):
        async with room:
            return await generate(self, request)

    ScriptedEngine.generate = queued


def takes_all(pace: Pace, in_work: int, allowed_s: float, now: float) -> float | None:
    """Push nobody back."""
    return None


def main() -> int:
    if (places := int(os.environ[PLACES])) > 0:
        crowd(places)
    if os.environ.get(TAKES_ALL):
        Pace.delay_s = takes_all
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

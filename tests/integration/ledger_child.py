"""A ledger in a process of its own, to be killed: `ledger_child.py STORE ADDRESS`."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import run
from callforest_mesh.chassis.service import MeshService
from callforest_mesh.ledger.service import LedgerOptions, LedgerService


def build(drain: Drain, _closers: AsyncExitStack) -> MeshService:
    options = LedgerOptions(Path(sys.argv[1]), map_size_bytes=64 << 20, quota_bytes=32 << 20)
    return LedgerService(options, drain)


if __name__ == "__main__":
    sys.exit(run(build, sys.argv[2]))

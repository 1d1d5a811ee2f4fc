"""What ties a process to the one that started it: a pipe from there as its standard input."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

_LOG = logging.getLogger("callforest")


def end_with_parent(ended: asyncio.Event) -> None:
    """Set `ended` when standard input ends: its other end is the parent's alone.

    So a child ends with its parent, whatever ended that: a killed parent signals nobody.
    """
    loop = asyncio.get_running_loop()
    lifeline = sys.stdin.fileno()

    def on_readable() -> None:
        if not os.read(lifeline, 4096):
            loop.remove_reader(lifeline)
            _LOG.info("the parent is gone: ending")
            ended.set()

    loop.add_reader(lifeline, on_readable)

"""How the interpreter runs a service: its event loop, its collections, the turns of its threads."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
from collections.abc import Callable
from typing import Final

COLLECT_AFTER: Final = 50_000
"""Objects made, beyond those gone, before a collection: as many as some hundred calls make."""
SWITCH_S: Final = 0.0002
"""How long a thread keeps the interpreter when another one waits for it."""


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Give what makes a service's event loop: uvloop where it is installed, else None."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def tune() -> None:
    """Set the interpreter for a service that has started.

    Items die by their counts; what a collection finds is little, and by default one runs every few
    calls and walks every module. A store's writer thread lets go of the interpreter at each call
    of LMDB; by default it would wait 5 ms each time to get it back from a busy event loop.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    sys.setswitchinterval(SWITCH_S)

"""The end of a process whose store can be trusted no more."""

from __future__ import annotations

import logging
import os
from typing import NoReturn


def exit_process(_error: Exception) -> NoReturn:
    """End the process at once, with EX_IOERR, so that its supervisor starts it anew.

    The fault is in the log already. Nothing is flushed: what was acknowledged is durable, and what
    was not must not look as if it were.
    """
    logging.shutdown()
    os._exit(os.EX_IOERR)

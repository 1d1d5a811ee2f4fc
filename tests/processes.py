"""Processes that tests start."""

import os
import select


def gone(pid: int) -> bool:
    """Whether a process has ended; waits up to a minute for it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)

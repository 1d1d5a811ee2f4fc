"""The end of a process that can be trusted no more: its store failed, or it has no memory."""

from __future__ import annotations

import logging
import os
from typing import Final, NoReturn

_LOG = logging.getLogger("callforest")
_NO_THREAD: Final = "can't start new thread"


def exit_process(_error: Exception) -> NoReturn:
    """End the process at once, with EX_IOERR, so that its supervisor starts it anew.

    The fault is in the log already. Nothing is flushed: what was acknowledged is durable, and what
    was not must not look as if it were.
    """
    logging.shutdown()
    os._exit(os.EX_IOERR)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception means that the process has no memory, or no room for a thread."""
    no_thread = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    return no_thread or isinstance(error, MemoryError)


def end_if_without_memory(service: str, error: BaseException | None) -> None:
    """End the process if an exception means that it has no memory."""
    if error is not None and is_out_of_memory(error):
        end_without_memory(service, error)


def end_without_memory(service: str, error: BaseException) -> NoReturn:
    """End the process at once, with EX_OSERR, so that its supervisor starts it anew.

    It would answer healthy callers with faults, which they may not repeat, and what an exception
    left half done anywhere is not known. Its end loses nothing that was acknowledged, and callers
    repeat.
    """
    try:
        _LOG.critical("%s has no memory left; the process must end", service, exc_info=error)
        logging.shutdown()
    finally:
        os._exit(os.EX_OSERR)

"""Directories and the files in them, made to survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make a directory's entries survive a power cut."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_names(path: Path) -> None:
    """Make a directory's entries survive a power cut, and every name that leads to it.

    Not only what this process made: a start that was killed may have made any of them, and its sync
    never came. What may not be read was made by somebody else, as is a file system's root.
    """
    path = path.resolve()
    for each in (path, *path.parents):
        if os.access(each, os.R_OK):
            sync_directory(each)
        if each.is_mount():
            return


def sync_file(path: Path) -> None:
    """Make a written file's content survive a power cut; its name needs `sync_directory`."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

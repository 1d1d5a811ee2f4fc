"""Directories and the files in them, made to survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make a directory's entries survive a power cut."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make a written file's content survive a power cut; its name needs `sync_directory`."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

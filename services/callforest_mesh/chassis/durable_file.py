"""Small files that a power cut leaves whole: the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path

from callforest_mesh.chassis.directory import sync_directory


def replace_durably(path: Path, content: bytes) -> None:
    """Give a file new content: written beside it, synced, renamed, and the directory synced."""
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_directory(path.parent)

"""Small files that a power cut leaves whole: the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from callforest_mesh.chassis.directory import sync_directory


def replace_durably(path: Path, content: bytes) -> None:
    """Give a file new content: written beside it, synced, renamed, and the directory synced."""
    with replacing_durably(path) as file:
        file.write(content)


@contextmanager
def replacing_durably(path: Path) -> Iterator[BinaryIO]:
    """Give a file new content that is written piece by piece; the old one stays if that fails."""
    unfinished = path.with_name(path.name + ".new")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)
    sync_directory(path.parent)

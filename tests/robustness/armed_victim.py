"""A victim whose failpoint is armed by a file, for the one life that finds it.

The environment arms failpoints when the module that has them is first imported, so this one imports
nothing of the project before.

Usage: python -m tests.robustness.armed_victim DIRECTORY serve NAME ...
"""

import os
import sys
from pathlib import Path

VARIABLE = "CALLFOREST_FAILPOINTS"
DIARY_VARIABLE = "CALLFOREST_FAILPOINTS_DIARY"
DIARY = "failpoints.diary"


def next_arming(directory: Path, name: str) -> Path:
    """Name the file that arms the next life of a service."""
    return directory / f"next.{name}"


def arming(directory: Path, name: str, pid: int) -> Path:
    """Name the file that says with what one process of a service was armed."""
    return directory / f"armed.{name}.{pid}"


def take_arming(directory: Path, name: str) -> str:
    """Take what the next life is armed with, and leave it under this process's id."""
    taken = arming(directory, name, os.getpid())
    try:
        next_arming(directory, name).rename(taken)
    except FileNotFoundError:
        return ""
    return taken.read_text()


def main() -> int:
    directory, name = Path(sys.argv[1]), sys.argv[3]
    os.environ[VARIABLE] = take_arming(directory, name)
    os.environ[DIARY_VARIABLE] = str(directory / DIARY)
    from tests.robustness import victim

    return victim.main()


if __name__ == "__main__":
    sys.exit(main())

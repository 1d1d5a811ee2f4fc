"""What commands say, and the exit statuses with which they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from callforest_mesh.chassis.configuration import MeshConfiguration

DONE: Final = 0
NO: Final = 1
"""The answer is no: a check failed, nothing was found, a service was given up."""
WRONG: Final = 2
"""The command line or the configuration is wrong."""
AWAY: Final = 3
"""A service does not answer."""

_Parser: TypeAlias = argparse.ArgumentParser
Subcommands: TypeAlias = "argparse._SubParsersAction[_Parser]"  # noqa: SLF001 - its only name
Runner: TypeAlias = Callable[[argparse.Namespace, "Callable[[MeshConfiguration], int]"], int]
"""Reads the configuration that a command line names, and runs a function with it."""


def say(text: str) -> None:
    """Print a line, or several."""
    sys.stdout.write(f"{text}\n")


def complain(text: str, status: int) -> int:
    """Say what is wrong; give the status back."""
    sys.stderr.write(f"callforest: {text}\n")
    return status

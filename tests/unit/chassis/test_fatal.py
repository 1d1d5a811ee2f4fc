"""A process whose store failed ends at once, and not as if all were well."""

import os
import subprocess
import sys

ENDING = """
import atexit
from callforest_mesh.chassis.fatal import exit_process
atexit.register(print, "flushed")
exit_process(OSError("Input/output error"))
"""


def test_the_process_ends_with_an_error() -> None:
    command = [sys.executable, "-c", ENDING]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (os.EX_IOERR, b"")

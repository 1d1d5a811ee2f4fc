"""A process whose store failed ends at once, and not as if all were well."""

import os
import subprocess
import sys

import grpc
import pytest

from callforest_mesh.chassis.errors import status_of_exception

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


@pytest.mark.parametrize("raised", ["MemoryError()", 'RuntimeError("can\'t start new thread")'])
@pytest.mark.parametrize(
    "mapping",
    [
        "from callforest_mesh.chassis.errors import status_of_exception as f; f({0}, service='x')",
        "from callforest_mesh.gateway.answers import refusal_of as f; f({0}, 'GET /')",
    ],
)
def test_a_process_without_memory_ends_instead_of_answering(raised: str, mapping: str) -> None:
    command = [sys.executable, "-c", mapping.format(raised)]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == os.EX_OSERR
    assert b"has no memory left" in ended.stderr


def test_other_faults_do_not_end_a_process() -> None:
    status = status_of_exception(RuntimeError("a fault"), service="x")
    assert status.code == grpc.StatusCode.INTERNAL.value[0]

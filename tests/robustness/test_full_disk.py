"""A full disk refuses, and kills nothing: what was acknowledged stays, and room heals it.

The disk is real: a file system in memory of 24 MiB, mounted in a namespace of the test's own child,
which needs no rights and leaves nothing.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness.powercut import ROOT

WAIT_S = 120
MOUNT = (
    'mount -t tmpfs -o size=24m tmpfs "$1" && exec "$2" -m tests.robustness.full_disk_victim "$1"'
)


@pytest.mark.requirement("CAP-6", "OPS-3")
def test_the_last_byte_of_a_disk_kills_nothing(tmp_path: Path) -> None:
    private = ["unshare", "--user", "--map-root-user", "--mount"]
    ended = subprocess.run(
        [*private, "sh", "-c", MOUNT, "sh", str(tmp_path), sys.executable],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    sys.stdout.write(f"RESULT {json.dumps(found)}\n")
    assert list(tmp_path.iterdir()) == [], "it was written to its own file system"
    assert found["taken"] > 1 << 20
    assert found["free"] == 0
    full = "ERROR_REASON_STORE_FULL 5000"
    assert (found["new"], found["row"], found["row_after_start"]) == (full, full, full)
    assert found["rows"] > 100, "what ends old work has blocks of its own"
    assert found["deletes"] == ["ok"]
    assert (found["lost"], found["lost_after_start"]) == (0, 0)
    assert (found["row_with_room"], found["new_with_room"]) == ("ok", "ok")

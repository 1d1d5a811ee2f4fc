"""After a failed write or sync nothing is acknowledged, and the process ends."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.powercut import ROOT, expectation
from tests.robustness.syscall_record import Said

WAIT_S = 120


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.requirement("CAP-6", "OPS-3")
@pytest.mark.parametrize(
    ("call", "after"), [("fdatasync", 12), ("fdatasync", 25), ("pwrite64", 30)]
)
def test_a_failing_disk_ends_the_process(directory: Path, call: str, after: int) -> None:
    store = directory / "store"
    inject = f"inject={call}:error=EIO:when={after}+"
    tracer = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={call}", "-e", inject]
    victim = [sys.executable, "-m", "tests.robustness.staging_victim"]
    load = [str(store), str(directory / "socket"), "durable", "40"]
    ended = subprocess.run(
        [*tracer, *victim, *load],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == os.EX_IOERR
    assert "the staging store failed; the process must end" in ended.stderr
    lines = ended.stdout.splitlines()
    assert any(line.startswith("staged ") for line in lines), "it must fail under load"
    assert "done" not in lines
    # What the failed commit left is a whole store, before anything opens it to write.
    verify = "import sys; from callforest_mesh.cli import main; sys.exit(main())"
    verified = subprocess.run(
        [sys.executable, "-c", verify, "verify", "--store", str(store)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert verified.returncode == 0, verified.stdout
    assert "intact" in verified.stdout.splitlines()
    expected = directory / "expected.json"
    expected.write_text(json.dumps(expectation([Said(line) for line in lines])))
    verdict = subprocess.run(
        [sys.executable, "-m", "tests.robustness.image_check"],
        input=f"{store} {expected}\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
        cwd=ROOT,
    )
    assert verdict.stdout == "intact\n"

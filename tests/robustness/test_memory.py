"""Staging runs out of memory under load: nothing acknowledged is lost, and nobody else is harmed.

`DEPTH=n` lets it run out n times.
"""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.memory_cap import GROUP, LIMIT, kinds
from tests.robustness.memory_run import run_short_of_memory

DEPTH = int(os.environ.get("DEPTH", "1"))
SIZES = {GROUP: 160 << 20, LIMIT: 288 << 20}
"""What fits the service, its threads and its usual load, and not the hog's."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.timeout(300 * DEPTH)
@pytest.mark.requirement("CAP-6")
@pytest.mark.parametrize("kind", kinds())
async def test_a_service_without_memory_loses_nothing(directory: Path, kind: str) -> None:
    """P1 durable ack, row 15. Where no control group can be made, the limit alone is tried."""
    made = await run_short_of_memory(directory, kind, SIZES[kind], rounds=DEPTH)
    print("RESULT " + json.dumps(made.result()))
    assert made.run.verdict.all() == []
    assert made.lost == []
    assert made.harmed == []
    assert made.masked == {}
    assert made.acknowledged > 0
    # By the kernel; by itself, or by gRPC's own allocator.
    ends = {GROUP: {-signal.SIGKILL}, LIMIT: {os.EX_OSERR, -signal.SIGABRT}}[kind]
    assert made.deaths.total() == DEPTH
    assert set(made.deaths) <= ends


@pytest.mark.timeout(300)
async def test_a_store_that_acknowledges_too_early_would_be_noticed(directory: Path) -> None:
    kind = kinds()[0]
    made = await run_short_of_memory(
        directory, kind, SIZES[kind], flaw="acknowledges-before-commit"
    )
    assert made.deaths
    assert made.lost or made.run.verdict.faults.lost

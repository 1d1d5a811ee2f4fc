"""A rolling restart of every service under load: harnesses see no error, and nothing is lost.

`DEPTH=n` restarts each service n times.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from callforest_mesh.chassis.configuration import SERVICES
from tests.robustness.rolling_run import GRACE_S, RollingOptions, run_rolling

DEPTH = int(os.environ.get("DEPTH", "1"))


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.engine
@pytest.mark.timeout(400 * DEPTH)
@pytest.mark.requirement("API-6", "CAP-13")
async def test_a_rolling_restart_of_all_services_is_not_seen(directory: Path) -> None:
    """P10 drain, row 26, and row 25 on the way: each process ends in order, within its grace."""
    rolling = await run_rolling(directory, RollingOptions(rounds=DEPTH))
    print("RESULT " + json.dumps(rolling.result()))
    assert rolling.visible_errors == 0
    assert rolling.run.verdict.all() == []
    assert rolling.masked == {}
    assert rolling.run.staged_left == 0
    assert [one.name for one in rolling.restarts] == [*SERVICES] * DEPTH
    assert min(one.in_flight for one in rolling.restarts) >= 1, "each was at work"
    assert {one.exit_status for one in rolling.restarts} == {0}
    assert max(one.exit_s for one in rolling.restarts) <= GRACE_S + 1
    assert rolling.run.load.repeats > 0, "the restarts were felt"
    assert rolling.run.steps == len(rolling.run.load.history.groups) > 0


@pytest.mark.timeout(300)
async def test_a_drain_that_forgets_and_refuses_would_be_noticed(directory: Path) -> None:
    rolling = await run_rolling(directory, RollingOptions(("gateway",) * 2, flaw="ends-badly"))
    assert rolling.visible_errors > 0, "a harness was told that its request was wrong"
    lost = rolling.run.verdict.faults.lost
    assert any(fault.startswith("the record of kill-g") for fault in lost)

"""kill -9 of every service during a run: nothing acknowledged is lost or doubled, and it ends well.

`DEPTH=4 pytest tests/robustness/test_kill.py` kills four times as often during four times as many
rollouts.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from callforest_mesh.chassis.configuration import SERVICES
from tests.robustness.gauge import Work, gauge_file, read_gauge
from tests.robustness.kill_run import RunOptions, run_under_kills, whole_run
from tests.robustness.rollout_load import LoadOptions

DEPTH = int(os.environ.get("DEPTH", "1"))


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.engine
@pytest.mark.timeout(600 * DEPTH)
@pytest.mark.requirement("CAP-6", "LED-5")
async def test_killed_services_lose_nothing_and_the_run_completes(directory: Path) -> None:
    """P1 durable ack, P2 stage before row: with at least 21 kills, 3 of each service's process."""
    options = whole_run(DEPTH)
    run = await run_under_kills(directory, options)
    print("RESULT " + json.dumps(run.result()))
    assert run.faults.all() == []

    proven = [kill for kill in run.kills if kill.proven]
    assert Counter(kill.name for kill in proven) == dict.fromkeys(SERVICES, 3 * DEPTH)
    assert min(kill.in_flight for kill in proven) >= 1
    assert len({kill.pid for kill in run.kills}) == len(run.kills), "each hit a process of its own"

    history, groups = run.load.history, 25 * DEPTH
    assert len(history.receipts) == options.load.group_size * groups == 200 * DEPTH
    assert [one.mask_reason for one in history.receipts.values() if one.masked] == []
    assert len(history.served) >= options.load.calls
    assert len(run.lineage.steps) == run.head_cursor == run.committed_cursor == groups
    assert run.lineage.lives == len(options.trainer_kills) + 1
    assert history.metrics, "someone watched"
    assert run.lineage.undone > 0, "a trainer died with steps that no checkpoint held"
    assert run.staged_left == 0


@pytest.mark.timeout(300)
async def test_a_gateway_that_serves_before_its_record_would_be_noticed(directory: Path) -> None:
    run = await run_under_kills(
        directory,
        RunOptions(
            load=LoadOptions(groups=6),
            kills={"gateway": 3},
            services=tuple(name for name in SERVICES if name != "trainer"),
            flaw="serves-too-early",
        ),
    )
    assert sum(kill.proven for kill in run.kills) == 3
    assert any(fault.startswith("the record of kill-g") for fault in run.faults.lost)


def test_a_gauge_tells_what_a_killed_process_had_in_work(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from tests.robustness.gauge import *\n"
        "gauge = Gauge(gauge_file(Path(sys.argv[1]), 'ledger', os.getpid()))\n"
        "with gauge.call(): pass\n"
        "with gauge.call():\n"
        "    with gauge.call(): print(os.getpid(), flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert read_gauge(tmp_path, "ledger", pid) == Work(in_flight=2, finished=1)
        process.kill()
    assert read_gauge(tmp_path, "ledger", pid) == Work(in_flight=2, finished=1)
    assert read_gauge(tmp_path, "ledger", pid + 1) == Work(in_flight=0, finished=0)
    assert gauge_file(tmp_path, "ledger", pid).exists()

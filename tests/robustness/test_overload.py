"""Twice the calls that the mesh can make: it makes as many as before, and those in time.

`DEPTH=10` lets the overload last a minute.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.overload_run import (
    BREACHES_MOST,
    GOODPUT_LEAST,
    LATENCY_S,
    crowd,
    run_overload,
)

PLACES = 8
DEPTH = int(os.environ.get("DEPTH", "1"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.timeout(300 * DEPTH)
@pytest.mark.requirement("API-6")
async def test_an_overload_costs_no_goodput(folder: Path) -> None:
    """P8 bounded, row 14: what cannot be made in time is pushed back before anything is done."""
    overload = await run_overload(folder, seconds=6.0 * DEPTH, places=PLACES)
    print("RESULT " + json.dumps(overload.result()))
    assert overload.goodput_ratio >= GOODPUT_LEAST
    assert overload.breach_share <= BREACHES_MOST
    assert set(overload.outcomes) <= {"good", "breach", "pushed_back"}, "typed, with a delay"
    assert overload.outcomes["pushed_back"] > overload.outcomes.total() / 10, "it was too much"
    assert overload.lost == 0
    assert overload.failures <= overload.outcomes["breach"], "what is pushed back leaves no trace"


@pytest.mark.timeout(300)
async def test_a_gateway_that_takes_every_call_would_be_noticed(folder: Path) -> None:
    capacity = PLACES / LATENCY_S
    async with crowd(folder, places=PLACES, takes_all=True) as callers:
        phase = await callers.open(2 * capacity, 4.0)
    assert phase.rate < GOODPUT_LEAST * capacity
    assert phase.breach_share > BREACHES_MOST

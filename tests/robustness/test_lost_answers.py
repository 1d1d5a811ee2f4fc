"""Answers that are lost on their way, between real processes: nothing is lost or done twice."""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.fault_proxy import Faults
from tests.robustness.history import (
    Faults as Found,
)
from tests.robustness.history import check_bytes, check_calls, check_groups, check_receipts
from tests.robustness.proxied_mesh import ProxiedMesh, proxied_mesh
from tests.robustness.rollout_load import LoadOptions, RolloutLoad

DEPTH = int(os.environ.get("DEPTH", "1"))
SHARES = (0.05, 0.15, 0.3)
PATIENT = ("gateway.commit_timeout_s=60", "worker.stage_timeout_s=60", "worker.prefix_timeout_s=60")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


async def faults_found(mesh: ProxiedMesh, load: RolloutLoad) -> Found:
    """Look for everything that was acknowledged."""
    history, found = load.history, Found()
    manifests = {key: await load.rows(key) for key in load.attempts}
    found.extend(check_calls(history, manifests))
    found.extend(check_bytes(history))
    found.extend(check_receipts(history, load.rollout_ids(), await load.repeat_receipts()))
    head = (await mesh.clients.finalizer().row_log()).head_cursor
    found.extend(check_groups(history, await load.repeat_groups(), head))
    for key, manifest in manifests.items():
        # Each record of an attempt has its tokens, and an intent that came twice is one call.
        assert len(manifest.entries) <= load.options.turns, key
    return found


async def suffer(mesh: ProxiedMesh, load: RolloutLoad) -> dict[float, int]:
    """Play under each share in turn; say how many answers each cost."""
    total = load.options.groups * load.options.group_size
    playing = asyncio.ensure_future(load.run())
    cost: dict[float, int] = {}
    for number, share in enumerate(SHARES, start=1):
        before = lost_answers(mesh)
        mesh.harm(Faults(lost=share * 0.7, torn=share * 0.3), replayed=0.5)
        while not playing.done() and len(load.history.receipts) < total * number // len(SHARES):
            await asyncio.wait({playing}, timeout=0.05)
        cost[share] = lost_answers(mesh) - before
    await playing
    mesh.calm()
    return cost


def lost_answers(mesh: ProxiedMesh) -> int:
    counts = mesh.faults()
    return counts["answers lost"] + counts["answers torn"]


@pytest.mark.timeout(240 * DEPTH)
@pytest.mark.requirement("LED-1", "LED-5", "CAP-6")
async def test_lost_answers_lose_and_double_nothing(folder: Path) -> None:
    """P1, P5: every link loses or tears a share of its answers, and half the cuts are replayed."""
    options = LoadOptions(groups=9 * DEPTH, group_size=4, turns=3, at_once=8)
    async with proxied_mesh(folder, *PATIENT) as mesh:
        load = mesh.load(options)
        cost = await suffer(mesh, load)
        found = await faults_found(mesh, load)
        staged = (await mesh.clients.staging().stat()).call_count
        counts = mesh.faults()
    looks, receipts = load.history.looks.values(), load.history.receipts.values()
    records = sum(len(look.manifest.records) for look in looks)
    figures = {
        "answers": counts["answers"],
        "answers_lost_by_share": cost,
        "replayed": counts["replayed"],
        "lost": len(found.lost),
        "doubled": len(found.duplicated),
        "changed": len(found.changed),
        "rollouts": len(receipts),
        "attempts": len(load.attempts),
        "masked": sum(one.masked for one in receipts),
        "staged": staged,
        "records": records,
    }
    print("RESULT " + json.dumps(figures))
    assert found.all() == []
    assert figures["rollouts"] == options.groups * options.group_size
    assert min(cost.values()) >= 5, "the links were too idle to suffer"
    assert counts["replayed"] > 0
    assert staged >= records

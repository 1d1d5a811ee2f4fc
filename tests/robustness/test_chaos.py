"""kill -9 at failpoints under load: a part of them here, each of them in `make chaos`.

Which part follows from SEED, by default the day: `SEED=n pytest tests/robustness/test_chaos.py`
repeats one.
"""

import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from callforest.capture.v1 import group_batch_pb2
from callforest_mesh.chassis.failpoint import POINTS
from tests.robustness.armed_victim import DIARY, arming, next_arming, take_arming
from tests.robustness.chaos import early, is_forest
from tests.robustness.chaos_consumer import Consumer
from tests.robustness.chaos_hunt import Hunter
from tests.robustness.chaos_judge import check_parents, check_records, check_samples
from tests.robustness.chaos_points import Target, read_hits, targets
from tests.robustness.chaos_run import HUNTED, STORES, ChaosOptions, run_chaos, some_points
from tests.robustness.forest_load import ForestLoad
from tests.robustness.test_history import CALLS, KEY, manifest, row

SEED = int(os.environ.get("SEED", time.time() // 86400))
POINTS_HERE = 36
"""How many points a run without DEPTH hits; it must not take much more than a minute."""
DEEDS = {
    *("rejected for another seed", "rejected for another message", "rejected for the same"),
    *("deltas", "compacted to middle", "compacted to older", "compacted to summary"),
    *("all_captured", "returned_history", "explicit"),
}


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.timeout(400)
@pytest.mark.requirement("CAP-6", "LED-5")
async def test_services_that_die_at_failpoints_lose_and_double_nothing(directory: Path) -> None:
    """P1 durable ack, P2 stage before row, P3 no silent root, P5 same request, same answer."""
    wanted = some_points(POINTS_HERE, SEED)
    options = ChaosOptions(wanted, random_kills=0, seed=SEED, forest=is_forest(SEED))
    run = await run_chaos(directory, options)
    print("RESULT " + json.dumps(run.result() | {"seed": SEED}))
    assert run.verdict.all() == []
    assert sorted(wanted - run.hits) == []
    assert run.kills >= POINTS_HERE
    assert run.staged_left == 0
    history = run.load.history
    assert len(history.served) > len(run.deaths), "a run that is too idle proves nothing"
    assert len(history.receipts) == len(run.load.rollout_ids())
    if isinstance(run.load, ForestLoad):
        idle = DEEDS - run.load.counts.keys()
        assert not idle, "harnesses of forest mode branch, compact, and send what is new alone"


@pytest.mark.timeout(400)
async def test_a_store_that_acknowledges_before_it_commits_would_be_noticed(
    directory: Path,
) -> None:
    """Another store for another seed; each of them in `make chaos`."""
    options = early(STORES[SEED % len(STORES)])
    run = await run_chaos(directory, options)
    assert run.hits == options.wanted
    assert run.verdict.faults.lost, "what a store said that it had is gone"


def test_every_point_is_some_hunted_service_s_or_the_trainer_s() -> None:
    hunted = {target.point for target in targets((*HUNTED, "trainer"))}
    assert hunted == set(POINTS)
    assert some_points(40, 1) == some_points(40, 1) != some_points(40, 2)


def test_a_life_is_armed_once(tmp_path: Path) -> None:
    next_arming(tmp_path, "ledger").write_text("store.after_put=exit@3")
    assert take_arming(tmp_path, "staging") == ""
    assert take_arming(tmp_path, "ledger") == "store.after_put=exit@3"
    assert take_arming(tmp_path, "ledger") == ""
    assert arming(tmp_path, "ledger", os.getpid()).exists()


def test_the_diary_says_which_service_passed_a_shared_point(tmp_path: Path) -> None:
    arming(tmp_path, "staging", 7).write_text("store.after_put=exit@3")
    lines = "store.after_put 7\nledger.after_seal 8\ntrainer.before_rename 9\n"
    (tmp_path / DIARY).write_text(lines)
    assert read_hits(tmp_path) == {
        7: Target("staging", "store.after_put"),
        8: Target("ledger", "ledger.after_seal"),
        9: Target("trainer", "trainer.before_rename"),
    }


def test_a_hunter_arms_what_is_missing_and_not_what_is_armed(tmp_path: Path) -> None:
    wanted = Counter(
        {Target("ledger", "ledger.after_seal"): 1, Target("ledger", "ledger.after_close"): 1}
    )
    hunter = Hunter(tmp_path, "ledger", wanted, random.Random(1))
    arming(tmp_path, "ledger", 7).write_text("ledger.after_seal=exit@1")
    hunter.arm_next(7)
    assert next_arming(tmp_path, "ledger").read_text().startswith("ledger.after_close=exit@")
    (tmp_path / DIARY).write_text("ledger.after_seal 7\nledger.after_close 8\n")
    assert not hunter.missing()


WHOLE = manifest(*map(row, CALLS))


def continued(*parents: str):
    made = manifest(*map(row, CALLS))
    for record, parent in zip(made.records, parents, strict=True):
        record.coords.ClearField("parent_call_id")
        if parent:
            record.coords.parent_call_id = parent
    return made


def test_calls_that_continue_each_other_are_in_order() -> None:
    assert check_parents({KEY: CALLS}, {KEY: continued("", "c1", "c2")}) == []


@pytest.mark.parametrize(
    ("parents", "wrong"),
    [(("", "c1", ""), "c3"), (("", "c1", "c1"), "c3"), (("c9", "c1", "c2"), "c1")],
)
def test_a_silent_root_and_a_wrong_parent_are_found(parents: tuple[str, ...], wrong: str) -> None:
    [found] = check_parents({KEY: CALLS}, {KEY: continued(*parents)})
    assert f"{KEY}/{wrong} continues" in found


def test_two_records_of_one_request_are_found() -> None:
    twice = continued("", "", "c2")
    assert len(check_records({KEY: twice}).duplicated) == 1
    assert check_records({KEY: continued("", "c1", "c2")}).all() == []


def test_a_sample_behind_its_staging_is_found() -> None:
    honest = ["sampled a 1.0", "sampled a 1.5", "staged a 2.0", "sampled b 3.0"]
    assert check_samples(honest) == []
    assert check_samples([*honest, "staged a 4.0", "sampled a 2.5"]) == ["a"]


def test_a_look_in_vain_excuses_one_sample() -> None:
    raced = ["sampled a 1.0", "missing a 1.5", "staged a 2.0", "sampled a 2.5"]
    assert check_samples(raced) == []
    assert check_samples([*raced, "sampled a 2.6"]) == ["a"]
    assert check_samples(["staged a 2.0", "missing a 2.1", "sampled a 2.5"]) == ["a"], "it lied"
    assert check_samples(["missing a 1.0", "sampled a 1.1", "staged a 2.0", "sampled a 2.5"]) == [
        "a"
    ]


def batch(cursor: int, group_id: str = "g", drop_reason: str = "") -> group_batch_pb2.GroupBatch:
    return group_batch_pb2.GroupBatch(cursor=cursor, group_id=group_id, drop_reason=drop_reason)


def test_a_consumer_sees_what_is_delivered_again_in_order() -> None:
    consumer = Consumer(None, committed=1, _asked=2)
    for cursor, before in ((2, 0), (3, 2), (3, 0)):
        consumer.take(batch(cursor), before)
    assert consumer.faults.all() == []


@pytest.mark.parametrize(
    ("taken", "kind"),
    [
        ([(batch(1), 0)], "lost: the commit of position 1"),
        ([(batch(4), 0)], "lost: the delivery of position 3"),
        ([(batch(2), 0), (batch(4), 2)], "lost: the delivery of position 3"),
        ([(batch(2, drop_reason="gone"), 0)], "lost: the rows of g: gone"),
        ([(batch(2), 0), (batch(2, "other"), 0)], "changed: the group at position 2"),
    ],
)
def test_a_consumer_notices(taken, kind: str) -> None:
    consumer = Consumer(None, committed=1, _asked=2)
    for one, before in taken:
        consumer.take(one, before)
    assert consumer.faults.all() == [kind]

"""The checks of a kill run find what is lost, doubled or changed: each is injected here."""

import json
from collections.abc import Callable

import pytest

from callforest.capture.v1 import attempt_pb2, receipt_pb2, staged_call_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.trainer.v1 import trainer_service_pb2
from callforest_client.ledger import Manifest
from tests.robustness.history import (
    Faults,
    History,
    Look,
    ServedCall,
    check_bytes,
    check_calls,
    check_groups,
    check_metrics,
    check_receipts,
)
from tests.robustness.training_diary import Lineage, read_diary, training_faults
from tests.unit.ledger.calls import KEY, failure, record

CALLS = ("c1", "c2", "c3")
ROLLOUTS = ("r1", "r2")


def row(call_id: str, *, key: str = KEY, answer: str = "A") -> attempt_pb2.ManifestEntry:
    return attempt_pb2.ManifestEntry(record=record(call_id, answer=answer, key=key))


def failed(call_id: str) -> attempt_pb2.ManifestEntry:
    return attempt_pb2.ManifestEntry(failure=failure(call_id))


def manifest(*rows: attempt_pb2.ManifestEntry, key: str = KEY) -> Manifest:
    return Manifest(attempt_pb2.Attempt(capture_key=key), rows)


WHOLE = manifest(*map(row, CALLS))


def served(call_id: str, *, body: bytes = b"body") -> ServedCall:
    return ServedCall(KEY, call_id, f"chatcmpl-{call_id}", body)


def acknowledged() -> History:
    """A history of an attempt with three calls, as it should be."""
    staged = {
        one.coords.call_id: staged_call_pb2.StagedCall(
            call_id=one.coords.call_id, digest=one.coords.digest, served_response=b"body"
        )
        for one in WHOLE.records
    }
    history = History(served=[served(one) for one in CALLS], looks={KEY: Look(WHOLE, staged)})
    for number, rollout_id in enumerate(ROLLOUTS, start=1):
        history.receipts[rollout_id] = receipt_pb2.Receipt(rollout_id=rollout_id, reward=1.0)
        history.groups[f"g{number}"] = pb.FinalizeGroupResponse(cursor=number)
    calls = [
        receipt_pb2.ReceiptCall(call_id=one.coords.call_id, digest=one.coords.digest)
        for one in WHOLE.records
    ]
    history.receipts["r1"].MergeFrom(receipt_pb2.Receipt(capture_key=KEY, calls=calls))
    return history


def calls_faults(now: Manifest, *others: Manifest) -> Faults:
    manifests = {one.attempt.capture_key: one for one in (now, *others)}
    return check_calls(acknowledged(), manifests)


def test_a_history_as_it_should_be_has_no_faults() -> None:
    history = acknowledged()
    faults = calls_faults(WHOLE)
    faults.extend(check_bytes(history))
    faults.extend(check_receipts(history, ROLLOUTS, dict(history.receipts)))
    faults.extend(check_groups(history, dict(history.groups), head_cursor=2))
    assert faults.all() == []


def test_a_lost_record_is_found() -> None:
    faults = calls_faults(manifest(row("c1"), row("c2")))
    assert faults.lost == [f"the record of {KEY}/c3", f"1 rows of {KEY}"]
    assert faults.duplicated == faults.changed == []
    assert f"3 rows of {KEY}" in check_calls(acknowledged(), {}).lost


def test_a_record_that_was_lost_before_anyone_looked_is_found() -> None:
    history = acknowledged()
    history.looks.clear()
    faults = check_calls(history, {KEY: manifest(row("c1"), row("c3"))})
    assert faults.lost == [f"the record of {KEY}/c2"]


def test_a_duplicated_record_is_found() -> None:
    faults = calls_faults(manifest(*map(row, CALLS), row("c2")))
    assert faults.duplicated == ["records of call c2", "records of response chatcmpl-c2"]
    assert faults.lost == faults.changed == []


def test_a_record_in_two_attempts_is_found() -> None:
    faults = calls_faults(WHOLE, manifest(row("c1", key="r1-a1"), key="r1-a1"))
    assert faults.duplicated == ["records of call c1", "records of response chatcmpl-c1"]


def test_a_call_that_was_served_twice_is_found() -> None:
    history = acknowledged()
    history.served.append(served("c2"))
    assert check_calls(history, {KEY: WHOLE}).duplicated == ["call c2 was served twice"]


def test_a_changed_record_is_found() -> None:
    faults = calls_faults(manifest(row("c1"), row("c2", answer="B"), row("c3")))
    assert faults.changed == [f"the rows of {KEY}"]
    assert faults.lost == faults.duplicated == []
    assert calls_faults(manifest(row("c2"), row("c1"), row("c3"))).changed == [f"the rows of {KEY}"]


def test_rows_behind_those_that_were_seen_are_no_fault() -> None:
    assert calls_faults(manifest(*map(row, CALLS), row("c4"), failed("c5"))).all() == []


def test_a_failure_row_stands_for_a_record_and_not_beside_it() -> None:
    history = acknowledged()
    history.looks.clear()
    assert not check_calls(history, {KEY: manifest(row("c1"), row("c2"), failed("c3"))}).all()
    both = check_calls(history, {KEY: manifest(*map(row, CALLS), failed("c3"))})
    assert both.all() == [f"changed: the record of {KEY}/c3"]


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda staged: staged.pop("c2"), f"lost: the tokens of {KEY}/c2"),
        (
            lambda staged: setattr(staged["c2"], "digest", b"x"),
            f"changed: the tokens of {KEY}/c2",
        ),
    ],
)
def test_a_record_without_its_tokens_is_found(
    spoil: Callable[[dict[str, staged_call_pb2.StagedCall]], object], fault: str
) -> None:
    history = acknowledged()
    spoil(history.looks[KEY].staged)
    assert check_calls(history, {KEY: WHOLE}).all() == [fault]


def test_a_response_that_is_not_the_staged_one_is_found() -> None:
    history = acknowledged()
    history.served[1] = served("c2", body=b"another")
    assert check_bytes(history).all() == [f"changed: the response of {KEY}/c2"]


def test_receipts_that_are_lost_or_changed_are_found() -> None:
    history = acknowledged()
    again = dict(history.receipts)
    del again["r1"]
    again["r2"] = receipt_pb2.Receipt(rollout_id="r2", reward=0.5)
    faults = check_receipts(history, (*ROLLOUTS, "r3"), again)
    assert faults.lost == ["the receipt of r1", "the receipt of r3"]
    assert faults.changed == ["the receipt of r2"]
    history.receipts["r1"].calls.pop()
    faults = check_receipts(history, ROLLOUTS, dict(history.receipts))
    assert faults.all() == ["changed: the calls in the receipt of r1"]


def test_groups_that_are_lost_doubled_or_changed_are_found() -> None:
    history = acknowledged()
    again = {"g1": pb.FinalizeGroupResponse(cursor=1, row_ids=["another"])}
    faults = check_groups(history, again, head_cursor=3)
    assert faults.changed == ["group g1"]
    assert faults.lost == ["group g2"]
    assert faults.duplicated == ["3 positions for 2 groups"]
    history.groups["g2"].cursor = 1
    faults = check_groups(history, dict(history.groups), head_cursor=1)
    assert faults.duplicated == ["position 1 of the row log"]
    assert faults.lost == ["1 positions for 2 groups"]


def test_a_weight_version_that_comes_again_is_found() -> None:
    def metrics(step: int, version: int) -> trainer_service_pb2.StepMetrics:
        return trainer_service_pb2.StepMetrics(step=step, weight_version=version)

    first, second = metrics(1, 1), metrics(2, 2)
    issued = range(1, 5)
    assert check_metrics([first, second, first, second, metrics(2, 4)], issued).all() == []
    assert check_metrics([first, second, metrics(3, 2)], issued).duplicated == ["weight version 2"]
    assert check_metrics([second, first], issued).changed == ["weight version 1 came behind 2"]
    assert check_metrics([first, second], [2]).lost == ["the issue of weight version 1"]


def lines(*deeds: tuple[str, object]) -> list[str]:
    keys = {"restored": "step", "issued": "version"}
    return [
        json.dumps({"deed": deed, **(what if deed == "trained" else {keys[deed]: what})})
        if deed != "loaded"
        else json.dumps({"deed": deed})
        for deed, what in deeds
    ]


def step(number: int, *rows: str) -> tuple[str, object]:
    return "trained", {"step": number, "rows": rows}


def test_a_lineage_goes_on_behind_what_was_restored() -> None:
    lineage = read_diary(
        lines(
            ("loaded", None),
            step(1, "a"),
            ("issued", 1),
            ("loaded", None),  # no checkpoint yet: from the beginning
            step(1, "a"),
            step(2, "b"),
            step(3, "c"),
            ("issued", 4),
            ("loaded", None),  # died before it restored
            ("loaded", None),
            ("restored", 2),
            step(3, "c"),
            ("issued", 5),
        )
    )
    assert lineage.steps == [(1, ["a"]), (2, ["b"]), (3, ["c"])]
    assert (lineage.versions, lineage.lives, lineage.undone) == ([1, 4, 5], 4, 2)
    assert training_faults(lineage, ["a", "b", "c"]).all() == []


def test_rows_that_are_not_trained_once_are_found() -> None:
    lineage = Lineage(steps=[(1, ["a"]), (3, ["b", "b", "x"])], versions=[1, 2, 2])
    faults = training_faults(lineage, ["a", "b", "c"])
    assert faults.lost == ["the training of row c"]
    assert faults.duplicated == [
        "the training of row b",
        "the training of row x",
        "weight versions, issued as [1, 2, 2]",
    ]
    assert faults.changed == ["the surviving steps are [1, 3]"]

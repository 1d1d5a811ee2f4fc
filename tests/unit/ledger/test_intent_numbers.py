"""The ledger numbers calls as they are announced, whatever clocks and clients say (SEL-3)."""

from __future__ import annotations

import pytest

from callforest.ledger.v1 import ledger_event_pb2
from callforest_client.codec import call_record_from_proto
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits, core
from callforest_mesh.ledger.attempt import AttemptView
from tests.unit.ledger.calls import (
    CAPTURE_FAILED,
    FIRST,
    KEY,
    SECOND,
    Attempt,
    facts,
    failure,
    numbered,
    record,
    withdrawal,
)


def number_of(view: AttemptView, call_id: str) -> int:
    return core.get_call(view, KEY, call_id).record.intent_number


@pytest.mark.requirement("SEL-3", "LED-1")
def test_calls_are_numbered_as_they_were_announced_not_as_they_finished() -> None:
    attempt = Attempt()
    for call_id in ("a", "b", "c", "d"):
        attempt.admit(call_id, body=call_id)
    attempt.fail(failure("b", CAPTURE_FAILED))
    for call_id in ("d", "a", "c"):
        attempt.commit(record(call_id))
    for view in (attempt.view, attempt.replayed()):
        assert [number_of(view, call_id) for call_id in ("a", "c", "d")] == [1, 3, 4]
    kept = [one.record for one in attempt.log if one.WhichOneof("event") == "record"]
    assert [call_record_from_proto(one).intent_number for one in kept] == [4, 1, 3]
    assert facts(attempt.replayed()) == facts(attempt.view)


@pytest.mark.requirement("SEL-3")
def test_a_withdrawn_call_that_is_announced_again_stands_where_it_was_announced_last() -> None:
    attempt = Attempt()
    attempt.admit("a")
    attempt.withdraw(withdrawal("a"))
    attempt.admit("b", body="b")
    attempt.admit("a")
    attempt.commit(record("a"))
    attempt.commit(record("b"))
    assert [number_of(attempt.replayed(), call_id) for call_id in ("a", "b")] == [3, 2]


@pytest.mark.requirement("SEL-3", "LED-1")
@pytest.mark.parametrize("sent", [0, 1, 2, 77])
def test_what_a_client_says_of_the_number_is_not_looked_at(sent: int) -> None:
    attempt = Attempt()
    attempt.admit("a", body="a")
    attempt.admit("b", body="b")
    asked = numbered(record("b"), sent)
    attempt.commit(asked)
    assert asked.intent_number == sent, "the request is its caller's"
    assert number_of(attempt.view, "b") == 2
    for repeat in (record("b"), asked, core.get_call(attempt.view, KEY, "b").record):
        assert not commits.commit_record(attempt.view, repeat).events
    with pytest.raises(Refusal) as caught:
        commits.commit_record(attempt.view, numbered(record("b", answer="B"), sent))
    assert caught.value.facts["field"] == "fingerprints.continuation"


@pytest.mark.requirement("SEL-3")
def test_a_log_of_an_earlier_release_goes_on() -> None:
    """Its records have no number, and get none; those that follow are numbered behind them."""
    earlier = Attempt()
    earlier.admit("a", FIRST)
    earlier.apply(core.Decision(None, (ledger_event_pb2.LedgerEvent(record=record("a")),)))
    assert call_record_from_proto(record("a")).intent_number is None
    assert not commits.commit_record(earlier.view, record("a")).events
    earlier.admit("b", SECOND, body="b")
    earlier.commit(record("b", SECOND, "B", parent=record("a")))
    assert [number_of(earlier.replayed(), call_id) for call_id in ("a", "b")] == [0, 2]

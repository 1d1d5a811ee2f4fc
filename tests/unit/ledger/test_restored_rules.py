"""Restored attempts: failed calls, other rules of normalization, and the order of what is taken."""

from collections.abc import Callable

import pytest

from tests.unit.ledger.calls import Attempt, failure, user
from tests.unit.ledger.forest_calls import ForestAttempt
from tests.unit.ledger.restored_calls import chain_of_three, forest_of_three, refused, restored

pytestmark = pytest.mark.requirement("TRN-12")

MAKERS = pytest.mark.parametrize("make", [chain_of_three, forest_of_three])
Make = Callable[[], Attempt]


@MAKERS
def test_a_call_that_ended_without_an_answer_keeps_nothing_from_being_restored(make: Make) -> None:
    """As when its harness died: nobody can have its answer, so nobody can name it."""
    attempt = make()
    if isinstance(attempt, ForestAttempt):
        attempt.announce("x", [user("x")])
    else:
        attempt.admit("x", [user("x")])
    attempt.fail(failure("x", "request_finished_without_staged_coordinates"))
    second = restored(attempt, ["b"])
    assert [row.coords.call_id for row in second.view.records()] == ["a", "b"]
    assert second.view.failure_count == 0
    assert refused(attempt, "b", "x").facts["fault"] == "call_not_restorable"


def test_records_of_other_rules_are_not_restored() -> None:
    """No request would continue them: it would be prompted anew, and only a header would say so."""
    attempt = forest_of_three()
    for event in attempt.log:
        if event.WhichOneof("event") == "record":
            event.record.replay.normalization_version -= 1
    attempt.view = attempt.replayed()
    refusal = refused(attempt, "b")
    assert refusal.facts["fault"] == "call_not_restorable"
    assert refusal.facts["call_ids"] == "a,b"
    assert "other rules" in refusal.message


@pytest.mark.requirement("SEL-3")
@pytest.mark.parametrize("unnumbered", ["d", "b"])
def test_records_without_numbers_are_restored_in_the_order_of_their_times(unnumbered: str) -> None:
    """Where one of n has none, n was ordered by times, whichever calls are restored."""
    attempt = chain_of_three()
    for place, event in enumerate(attempt.log):
        if event.WhichOneof("event") == "record":
            event.record.admit_time.seconds = 1_000 - place
            if event.record.coords.call_id == unnumbered:
                event.record.ClearField("intent_number")
    attempt.view = attempt.replayed()
    second = restored(attempt, ["b", "d"])
    numbers = {row.coords.call_id: row.intent_number for row in second.view.records()}
    assert sorted(numbers.values()) == [1, 2, 3]
    assert numbers["d"] < numbers["a"] < numbers["b"], "times, and parents before children"
    assert second.view.are_numbered

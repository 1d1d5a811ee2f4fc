"""Restored attempts: what is taken over, what it is worth there, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callforest.capture.v1 import capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.custody.restore import RESTORED_MAX
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits, core, restoring
from callforest_mesh.ledger.attempt import AttemptView
from tests.unit.ledger.calls import (
    FIRST,
    KEY,
    REQUEST_ID,
    SECOND,
    TENANT,
    THIRD,
    Attempt,
    asking,
    digest,
    facts,
    failure,
    intent,
    record,
    said,
    user,
    withdrawal,
)
from tests.unit.ledger.forest_calls import (
    ENGINE,
    ForestAttempt,
    forest_intent,
    forest_record,
    source_probe,
)
from tests.unit.ledger.restored_calls import (
    RESTORE_ID,
    SECOND_KEY,
    THIRD_KEY,
    chain_of_three,
    forest_of_three,
    point,
    refused,
    restored,
)

pytestmark = pytest.mark.requirement("TRN-12")

MAKERS = pytest.mark.parametrize("make", [chain_of_three, forest_of_three])
Make = Callable[[], Attempt]


def continuation(
    attempt: Attempt, items: list[object], call_id: str = "new"
) -> capture_admission_pb2.Continuation:
    key = attempt.view.opened.capture_key
    if isinstance(attempt, ForestAttempt):
        asked = forest_intent(call_id, items, key=key)
    else:
        asked = intent(call_id, items, key=key)
    verdict = attempt.apply(core.record_intent(attempt.view, asked)).answer
    assert verdict.WhichOneof("verdict") == "continuation"
    return verdict.continuation


@pytest.mark.requirement("SEL-3")
@MAKERS
def test_restored_calls_were_announced_first_and_in_their_old_order(make: Make) -> None:
    attempt = make()
    before = [row.intent_number for row in attempt.view.records(["a", "b"])]
    assert before == sorted(before)
    second = restored(attempt, ["b"])
    assert [row.intent_number for row in second.view.records()] == [1, 2]
    assert second.view.intent_count == 2, "the next call that is announced is the third"


@pytest.mark.requirement("ADM-9")
@MAKERS
def test_the_named_calls_and_what_they_continue_are_taken_over(make: Make) -> None:
    attempt = make()
    second = restored(attempt, ["b", "b"])
    rows = list(second.view.records())
    assert [row.coords.call_id for row in rows] == ["a", "b"]
    assert [row.source_capture_key for row in rows] == [KEY, KEY]
    assert [row.coords.capture_key for row in rows] == [SECOND_KEY, SECOND_KEY]
    assert [row.coords.parent_capture_key for row in rows] == ["", KEY]
    for row, first in zip(rows, (attempt.view.call("a"), attempt.view.call("b")), strict=True):
        assert first is not None
        as_it_was = first.read_record()
        assert as_it_was is not None
        row.ClearField("source_capture_key")
        row.coords.ClearField("parent_capture_key")
        row.coords.capture_key = KEY
        as_it_was.ClearField("intent_number")
        row.ClearField("intent_number")
        assert row == as_it_was
    shown = second.view.attempt(superseded=False)
    assert (shown.restored_from, shown.restored_count, shown.record_count) == (KEY, 2, 2)
    assert shown.mode == attempt.view.mode
    assert shown.pending_call_ids == []
    assert second.view.chain.has_rows()
    assert facts(second.replayed()) == facts(second.view)


@MAKERS
def test_the_order_is_that_of_the_records_whatever_the_points(make: Make) -> None:
    for named in (["d", "b"], ["b", "d"], ["b", "a", "d", "b"]):
        second = restored(make(), named)
        assert [row.coords.call_id for row in second.view.records()] == ["a", "d", "b"]


@pytest.mark.requirement("ADM-9")
@MAKERS
def test_a_restored_call_is_continued_under_its_owner(make: Make) -> None:
    second = restored(make(), ["b"])
    found = continuation(second, THIRD)
    assert (found.parent_call_id, found.parent_capture_key) == ("b", KEY)
    assert found.parent_chain_hash == digest("chain b")
    assert found.prev_token_count == 8


@pytest.mark.requirement("ADM-9")
@MAKERS
def test_a_call_that_is_restored_again_keeps_its_first_owner(make: Make) -> None:
    """The second attempt's own call continues a restored one; the third takes both over."""
    second = restored(make(), ["b"])
    parent = list(second.view.records())[-1]
    is_forest = isinstance(second, ForestAttempt)
    continuation(second, THIRD)
    recording = forest_record if is_forest else record
    made = recording("new", THIRD, "C", parent=parent, key=SECOND_KEY)
    made.coords.parent_capture_key = KEY
    second.commit(made)
    third = restored(second, ["new"], REQUEST_ID)
    rows = list(third.view.records())
    assert [row.coords.call_id for row in rows] == ["a", "b", "new"]
    assert [row.source_capture_key for row in rows] == [KEY, KEY, SECOND_KEY]
    assert [row.coords.parent_capture_key for row in rows] == ["", KEY, KEY]
    assert {row.coords.capture_key for row in rows} == {THIRD_KEY}
    fourth = [*THIRD, said("C"), user("four")]
    assert continuation(third, fourth, "newer").parent_capture_key == SECOND_KEY


@pytest.mark.requirement("ADM-9")
def test_a_call_of_the_attempt_itself_names_no_owner() -> None:
    second = restored(chain_of_three(), ["a"])
    parent = next(second.view.records())
    continuation(second, SECOND)
    made = record("new", SECOND, "N", parent=parent, key=SECOND_KEY)
    made.coords.parent_capture_key = KEY
    second.commit(made)
    items = [*SECOND, said("N"), user("on")]
    verdict = core.find_predecessor(second.view, asking(items, key=SECOND_KEY))
    assert verdict.continuation.parent_call_id == "new"
    assert verdict.continuation.parent_capture_key == ""


@pytest.mark.requirement("ADM-9")
@pytest.mark.parametrize("stated", ["", f"{KEY}-a9"])
def test_coordinates_with_another_owner_leave_a_failure_row(stated: str) -> None:
    second = restored(chain_of_three(), ["b"])
    parent = list(second.view.records())[-1]
    continuation(second, THIRD)
    made = record("new", THIRD, "C", parent=parent, key=SECOND_KEY)
    made.coords.parent_capture_key = stated
    if stated:  # no earlier attempt
        with pytest.raises(Refusal) as caught:
            commits.commit_record(second.view, made)
        assert caught.value.reason == er.ERROR_REASON_INVALID_MESSAGE
        return
    decision = second.apply(commits.commit_record(second.view, made))
    assert decision.refusal is not None
    assert decision.refusal.reason == er.ERROR_REASON_COORDINATES_MISMATCH
    assert decision.refusal.facts["field"] == "parent_capture_key"
    assert second.view.failure_count == 1


def test_history_that_was_not_restored_is_uncaptured_in_chain_mode() -> None:
    second = restored(chain_of_three(), ["a"])
    verdict = second.apply(core.record_intent(second.view, intent("n", THIRD, key=SECOND_KEY)))
    assert verdict.answer.WhichOneof("verdict") == "uncaptured"


def test_history_that_was_not_restored_is_a_root_in_forest_mode() -> None:
    second = restored(forest_of_three(), ["a"])
    asked = forest_intent("n", THIRD, key=SECOND_KEY)
    verdict = second.apply(core.record_intent(second.view, asked)).answer
    assert verdict.root.reason == capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED


def test_a_claim_of_a_restored_call_is_taken_in_forest_mode() -> None:
    second = restored(forest_of_three(), ["b"])
    asked = forest_intent("n", THIRD, key=SECOND_KEY, claim="b")
    verdict = second.apply(core.record_intent(second.view, asked)).answer
    assert verdict.continuation.parent_call_id == "b"


@pytest.mark.requirement("CAP-11")
def test_the_binding_of_the_configuration_goes_on() -> None:
    second = restored(forest_of_three(), ["b"])
    assert second.view.configuration_digest == ENGINE
    other = forest_intent("n", THIRD, key=SECOND_KEY, engine=digest("other"))
    verdict = core.record_intent(second.view, other).answer
    assert verdict.refused.reason == er.ERROR_REASON_CONFIGURATION_CHANGED


def test_restored_calls_count_to_the_calls_of_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "CALLS_MAX", 3)
    second = restored(chain_of_three(), ["b", "d"])
    verdict = core.record_intent(second.view, intent("n", key=SECOND_KEY)).answer
    assert verdict.refused.reason == er.ERROR_REASON_ATTEMPT_CLOSED


@pytest.mark.requirement("ADM-9")
@pytest.mark.parametrize("state", ["OPEN", "CLOSED", "SEALED"])
@pytest.mark.parametrize("write", ["intent", "marked repeat", "record", "failure", "withdrawal"])
def test_a_restored_call_takes_no_write(write: str, state: str) -> None:
    second = restored(chain_of_three(), ["b"])
    if state != "OPEN":
        decide = core.close if state == "CLOSED" else core.seal
        second.apply(decide(second.view, SECOND_KEY))
    again = intent("b", SECOND, key=SECOND_KEY)
    marked = intent("b", SECOND, key=SECOND_KEY)
    marked.is_retry = marked.is_keyed = True
    same = list(second.view.records())[-1]
    same.ClearField("source_capture_key")
    same.coords.parent_capture_key = KEY
    requests: dict[str, Callable[[AttemptView], object]] = {
        "intent": lambda view: core.record_intent(view, again),
        "marked repeat": lambda view: core.record_intent(view, marked),
        "record": lambda view: commits.commit_record(view, same),
        "failure": lambda view: commits.commit_failure(view, failure("b", key=SECOND_KEY)),
        "withdrawal": lambda view: commits.commit_withdrawal(view, withdrawal("b", key=SECOND_KEY)),
    }
    before = facts(second.view)
    with pytest.raises(Refusal) as caught:
        requests[write](second.view)
    assert caught.value.reason == er.ERROR_REASON_CALL_MISMATCH
    assert caught.value.facts["field"] == "source_capture_key"
    assert facts(second.view) == before


def test_a_body_of_an_earlier_attempt_is_repeated_by_no_request() -> None:
    """A marked repeat without a key finds no restored call: it is a call of its own."""
    second = restored(chain_of_three(), ["b"])
    asked = intent("n", FIRST, key=SECOND_KEY)
    asked.is_retry = True
    verdict = core.record_intent(second.view, asked).answer
    assert not verdict.HasField("earlier")


@pytest.mark.requirement("ADM-9")
def test_get_call_shows_a_restored_call_without_a_verdict() -> None:
    second = restored(chain_of_three(), ["b"])
    shown = core.get_call(second.view, SECOND_KEY, "b")
    assert shown.record.source_capture_key == KEY
    assert not shown.HasField("verdict")


@pytest.mark.parametrize("schema", [0, 2, 4])
@pytest.mark.requirement("LED-10")
def test_a_point_of_another_capture_schema_is_refused(schema: int) -> None:
    with pytest.raises(Refusal) as caught:
        restoring.read_point(point("a", schema=schema))
    refusal = caught.value
    assert refusal.facts == {"capture_key": KEY, "fault": "capture_schema"}
    assert "capture schema 3" in refusal.message
    assert (str(schema) if schema else "no capture schema") in refusal.message
    assert "begin anew" in refusal.message


def test_a_failure_row_keeps_an_attempt_from_being_restored() -> None:
    attempt = chain_of_three()
    attempt.admit("x", [user("x")])
    attempt.fail(failure("x"))
    assert refused(attempt, "b").facts["fault"] == "capture_poisoned"


def test_a_failure_row_beside_a_record_does_too() -> None:
    attempt = forest_of_three()
    attempt.fail(failure("d"))
    assert refused(attempt, "b").facts["fault"] == "capture_poisoned"


def test_calls_without_a_record_cannot_be_named() -> None:
    attempt = chain_of_three()
    attempt.admit("p", [user("p")])
    attempt.admit("w", [user("w")])
    attempt.withdraw(withdrawal("w"))
    refusal = refused(attempt, "b", "p", "w", "nowhere")
    assert refusal.facts["fault"] == "call_not_restorable"
    assert refusal.facts["call_ids"] == "nowhere,p,w"
    many = refused(attempt, *(f"n{number:02}" for number in range(40)))
    assert many.facts["call_ids"] == ",".join(f"n{number:02}" for number in range(16))


def test_a_pending_call_does_not_matter() -> None:
    attempt = chain_of_three()
    attempt.admit("p", [user("p")])
    second = restored(attempt, ["b"])
    assert second.view.pending_call_ids() == []
    assert attempt.view.pending_call_ids() == ["p"]


@pytest.mark.parametrize("extra", [0, 1])
def test_at_most_so_many_calls_are_restored(extra: int) -> None:
    attempt = Attempt()
    for number in range(RESTORED_MAX + extra):
        items = [user(f"{number}")]
        attempt.admit(f"c{number}", items)
        attempt.commit(record(f"c{number}", items, f"{number}"))
    names = [f"c{number}" for number in range(RESTORED_MAX + extra)]
    if extra:
        assert refused(attempt, *names).facts["fault"] == "too_many_calls"
    else:
        assert restored(attempt, names).view.record_count == RESTORED_MAX


def test_a_repeat_is_known_until_the_attempt_is_used() -> None:
    second = restored(chain_of_three(), ["b", "d"])
    restoring.check_repeat(second.view, restoring.read_point(point("d", "b", "d")))
    for other in (point("b"), point("b", "d", key="other")):
        with pytest.raises(Refusal) as caught:
            restoring.check_repeat(second.view, restoring.read_point(other))
        assert caught.value.facts["fault"] == "repeat_differs"
    second.apply(core.record_intent(second.view, intent("n", key=SECOND_KEY)))
    with pytest.raises(Refusal) as caught:
        restoring.check_repeat(second.view, restoring.read_point(point("b", "d")))
    assert caught.value.facts == {"capture_key": SECOND_KEY, "fault": "in_use"}


def test_render_options_are_the_restored_calls_own() -> None:
    second = restored(forest_of_three(), ["b"])
    asked = forest_intent("n", THIRD, key=SECOND_KEY)
    asked.source.CopyFrom(source_probe(THIRD))
    asked.source.render_digest = digest("other options")
    verdict = core.record_intent(second.view, asked).answer
    assert verdict.root.reason == capture_admission_pb2.ROOT_REASON_RENDER_OPTIONS_CHANGED


def test_the_tenant_and_the_rollout_stay() -> None:
    opened = restored(chain_of_three(), ["b"]).view.opened
    assert (opened.tenant, opened.rollout_id, opened.attempt_number) == (TENANT, KEY, 1)
    assert (opened.capture_key, opened.request_id) == (SECOND_KEY, RESTORE_ID)

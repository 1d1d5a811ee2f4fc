"""Attempts that are restored, without a store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from callforest.capture.v1 import restore_point_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import core, restoring
from callforest_mesh.ledger.attempt import AttemptView
from tests.unit.ledger.calls import FIRST, KEY, SECOND, Attempt, facts, record
from tests.unit.ledger.forest_calls import ForestAttempt, forest_record

SECOND_KEY = f"{KEY}-a1"
THIRD_KEY = f"{KEY}-a2"
RESTORE_ID = "3f2b8a52-0a3a-4b5e-9a58-0d9f8d2f7b99"


def point(*call_ids: str, key: str = KEY, schema: int = 3) -> restore_point_pb2.RestorePoint:
    return restore_point_pb2.RestorePoint(capture_schema=schema, capture_key=key, call_ids=call_ids)


def restored(attempt: Attempt, call_ids: Sequence[str], request_id: str = RESTORE_ID) -> Attempt:
    """Seal an attempt and give the one that takes calls of it over, as the ledger does it."""
    view = attempt.view
    named = restoring.read_point(point(*call_ids, key=view.opened.capture_key))
    events = restoring.restored_events(view, named, request_id)
    attempt.apply(core.seal(view, view.opened.capture_key))
    made = object.__new__(type(attempt))
    made.log = list(events)
    replayed = AttemptView.replay(events)
    assert replayed is not None
    made.view = replayed
    return made


def refused(attempt: Attempt, *call_ids: str) -> Refusal:
    """Give why calls are not restored; nothing was made of it."""
    before = facts(attempt.view)
    named = restoring.read_point(point(*call_ids))
    with pytest.raises(Refusal) as caught:
        restoring.restored_events(attempt.view, named, RESTORE_ID)
    assert caught.value.reason == er.ERROR_REASON_RESTORE_REFUSED
    assert facts(attempt.view) == before
    return caught.value


def chain_of_three() -> Attempt:
    """Give an attempt in which b continues a, and d begins alone."""
    attempt = Attempt()
    first = record("a")
    attempt.admit("a")
    attempt.commit(first)
    attempt.admit("d", [*FIRST, *FIRST])
    attempt.commit(record("d", [*FIRST, *FIRST], "D"))
    attempt.admit("b", SECOND)
    attempt.commit(record("b", SECOND, "B", parent=first))
    return attempt


def forest_of_three() -> ForestAttempt:
    """Give the same in forest mode."""
    attempt = ForestAttempt()
    first = forest_record("a")
    attempt.announce("a")
    attempt.commit(first)
    attempt.announce("d", [*FIRST, *FIRST])
    attempt.commit(forest_record("d", [*FIRST, *FIRST], "D"))
    attempt.announce("b", SECOND)
    attempt.commit(forest_record("b", SECOND, "B", parent=first))
    return attempt

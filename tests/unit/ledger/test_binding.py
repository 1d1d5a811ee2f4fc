"""To what an attempt is bound: its mode, and the configuration of its engine."""

from __future__ import annotations

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits, core
from tests.unit.ledger.calls import FIRST, KEY, SECOND, Attempt, asking, digest, intent
from tests.unit.ledger.forest_calls import (
    CHAIN,
    ENGINE,
    FOREST,
    ForestAttempt,
    forest_asking,
    forest_intent,
    forest_record,
)


@pytest.fixture
def attempt() -> ForestAttempt:
    """A root `a` that answered A."""
    attempt = ForestAttempt()
    attempt.announce("a")
    attempt.apply(commits.commit_record(attempt.view, forest_record("a")))
    return attempt


def test_the_mode_is_the_attempts() -> None:
    chain, forest = Attempt(), ForestAttempt()
    assert chain.view.attempt(superseded=False).mode == CHAIN
    assert forest.view.attempt(superseded=False).mode == FOREST
    assert chain.log[0].attempt_opened.mode == attempt_pb2.CAPTURE_MODE_UNSPECIFIED, "as ever"
    for view, asked, question in (
        (chain.view, forest_intent("c"), forest_asking(FIRST)),
        (forest.view, intent("c"), asking(FIRST)),
    ):
        decision = core.record_intent(view, asked)
        assert decision.answer.refused.reason == er.ERROR_REASON_MODE_MISMATCH
        assert set(decision.answer.refused.metadata) == {"capture_key", "expected", "actual"}
        assert decision.events == ()
        assert core.find_predecessor(view, question) == decision.answer


def test_a_repeat_in_another_mode_is_refused() -> None:
    opened = ForestAttempt().view.attempt(superseded=False)
    assert core.hold_mode(opened, FOREST) is opened
    with pytest.raises(Refusal) as caught:
        core.hold_mode(opened, CHAIN)
    assert caught.value.reason == er.ERROR_REASON_MODE_MISMATCH
    assert caught.value.facts == {"capture_key": KEY, "expected": "forest", "actual": "chain"}


@pytest.mark.requirement("CAP-11")
@pytest.mark.parametrize("mode", [CHAIN, FOREST])
def test_the_first_configuration_binds_the_attempt(
    mode: attempt_pb2.CaptureMode.ValueType,
) -> None:
    attempt = Attempt(mode)
    make = forest_intent if mode == FOREST else intent

    def asked(call_id: str, engine: bytes) -> attempt_pb2.CallIntent:
        made = make(call_id)
        made.configuration_digest = engine
        return made

    first = ENGINE if mode == FOREST else b""
    attempt.apply(core.record_intent(attempt.view, asked("a", first)))
    attempt.apply(core.record_intent(attempt.view, asked("b", ENGINE)))
    attempt.apply(core.record_intent(attempt.view, asked("c", ENGINE)))
    bound = [one.intent.configuration_digest for one in attempt.log[1:]]
    assert bound == ([ENGINE, b"", b""] if first else [b"", ENGINE, b""]), "kept once"
    for view in (attempt.view, attempt.replayed()):
        refused = core.record_intent(view, asked("d", digest("other")))
        assert refused.answer.refused.reason == er.ERROR_REASON_CONFIGURATION_CHANGED
        assert refused.answer.refused.metadata == {
            "capture_key": KEY,
            "expected": ENGINE.hex(),
            "actual": digest("other").hex(),
        }
        assert refused.events == ()
        assert core.record_intent(view, asked("d", ENGINE)).answer.HasField("root")
    if mode == CHAIN:
        assert core.record_intent(attempt.view, asked("d", b"")).answer.HasField("root")
    question = forest_asking(FIRST, engine=digest("other"))
    if mode == FOREST:
        assert core.find_predecessor(attempt.view, question) == refused.answer


@pytest.mark.requirement("CAP-11")
def test_every_call_of_forest_mode_says_which_engine_serves_it(attempt: ForestAttempt) -> None:
    for asked in (
        lambda: core.record_intent(attempt.view, forest_intent("b", SECOND, engine=b"")),
        lambda: core.find_predecessor(attempt.view, forest_asking(SECOND, engine=b"")),
    ):
        with pytest.raises(Refusal) as caught:
            asked()
        assert caught.value.reason == er.ERROR_REASON_INVALID_MESSAGE
        assert [path for path, _ in caught.value.violations] == ["configuration_digest"]
    assert attempt.view.call("b") is None
